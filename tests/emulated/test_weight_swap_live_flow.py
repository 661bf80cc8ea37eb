"""Live step experiments from end to end on emulated memory: placing, moving and auditing are real, while times and
latencies are simulated from where the bytes are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import simulated_steps as simulated

from dieplace.cli import main as frame
from dieplace.experiments import context, live_tables, placement, report, step_bench, verify
from dieplace.experiments.harness import Plan
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options
from dieplace.experiments.run_shape import check_shape
from dieplace.experiments.step_bench import PlacedLayers
from dieplace.experiments.step_cases import Case
from dieplace.experiments.step_run import StepRun
from dieplace.experiments.weight_swap_devices import case_of
from dieplace.policy import OBJECT_BYTES
from dieplace.probing import Levels
from dieplace.run import Run

OPTIONS = Options(shards=1, arms=("local", "swapped", "interleave-4/8"))
PLAN = Plan(seed=5, warmups=1, min_blocks=20, max_blocks=20)


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with private_node("DPX/NPS2") as made:
        yield made


@pytest.fixture
def machine(node: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The node with simulated devices; each run gives its memory back."""
    simulated.install(monkeypatch.setattr, node)
    return node


def taken(machine: Any, experiment: str, cases: list[Case], options: Options = OPTIONS, layers: int = 8) -> Run:
    rig = simulated.SimulatedRig(machine)
    return StepRun(experiment, machine, rig, options, cases, layers, PLAN).run(lambda words: None)


def test_moves_every_object_and_tells_a_penalty(machine: Any, tmp_path: Any, capsys: Any) -> None:
    run = taken(machine, "weight-swap", [case_of(OPTIONS.arms)])
    swapped, mixed = run.point("swapped"), run.point("interleave-4/8")
    assert swapped.residency_before["moved_evidence"] == "probed"
    assert swapped.residency_before["probe"]["far"] == swapped.residency_before["probe"]["windows"] == 8 * 4
    assert mixed.residency_before["probe"]["far"] == 8 * 2
    assert swapped.residency_before["bytes_by_role_and_domain"]["weights"] == {"gpu0/mem1": 8 * 4 * OBJECT_BYTES}
    assert swapped.residency_before["bytes_by_role_and_domain"]["kv_cache"] == {"gpu0/mem0": 8 * 2 * OBJECT_BYTES}
    assert swapped.quantities["predicted_over_measured"].value == pytest.approx(1, abs=0.01)
    assert mixed.quantities["penalty"].value == pytest.approx(swapped.quantities["penalty"].value / 2, rel=0.01)
    assert run.facts["same_result_in_all_arms"] and run.code_hash == "ab12"
    assert run.facts["stopped"] == "every interval is within 0.5 %" and run.facts["prediction"]["misses"] == {}
    path = run.save(tmp_path / "gpu0.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    assert frame.main(["bench", "show", str(path)]) == 0
    assert "gpu0-dpx-nps2 swapped is slower by" in capsys.readouterr().out
    assert frame.main(["bench", "compare", str(path), str(path)]) == 0


def test_spread_weights_have_both_predictions(machine: Any) -> None:
    """The second one by hand: half near and half far at the same time take as long as the far half."""
    run = taken(machine, "weight-swap", [case_of(OPTIONS.arms)])
    mixed, local = run.point("interleave-4/8").quantities, run.point("local").quantities["layer_us"].value
    moved = run.point("interleave-4/8").factors["moved_bytes_per_layer"]
    by_hand = local - 2 * moved / simulated.NEAR / 1000 + moved / simulated.FAR / 1000
    assert mixed["predicted_together_us"].value == pytest.approx(by_hand, rel=1e-9)
    assert mixed["predicted_together_us"].value < mixed["predicted_us"].value
    assert "predicted_together_us" not in run.point("swapped").quantities


def test_weights_that_did_not_move_give_no_penalty(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the driver says it moved them, and they answer like near memory."""
    near = lambda self, words: (700.0,) * (words.numel() * 4 // OBJECT_BYTES)  # noqa: E731
    monkeypatch.setattr(PlacedLayers, "walk", near)
    run = taken(machine, "weight-swap", [case_of(OPTIONS.arms)])
    refused = run.point("swapped").quantities["penalty"]
    assert refused.value is None and "32 of 32 windows" in str(refused.why)
    said = live_tables.sentences([run])
    assert any("no penalty is told for gpu0-dpx-nps2 swapped, because 32 of 32" in line for line in said)
    assert not any("slower" in line for line in said)


def test_other_results_or_other_code_afterwards_give_no_penalty(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults: far memory was read wrongly; code was compiled anew while the arms were measured."""
    look = PlacedLayers.look

    def wrong_result(layers: PlacedLayers, *args: Any, **words: Any) -> step_bench.Look:
        found = look(layers, *args, **words)
        return replace(found, result=found.result + (layers.homes["weights"] != step_bench.LOCAL))

    def other_code(layers: PlacedLayers, *args: Any, **words: Any) -> step_bench.Look:
        found = look(layers, *args, **words)
        return found if words.get("stages", True) else replace(found, code_hash="cd34")

    for fault, why in ((wrong_result, "did not give the same result"), (other_code, "did not run the same machine")):
        monkeypatch.setattr(PlacedLayers, "look", fault)
        run = taken(machine, "weight-swap", [case_of(OPTIONS.arms)])
        refused = run.point("swapped").quantities["penalty"]
        assert refused.value is None and why in str(refused.why)


def test_four_blocks_tell_no_penalty_and_no_verdict(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C may leave them: ratios without a conclusion."""
    monkeypatch.setitem(globals(), "PLAN", replace(PLAN, min_blocks=4, max_blocks=4))
    run = taken(machine, "weight-swap", [case_of(OPTIONS.arms)])
    refused = run.point("swapped").quantities["penalty"]
    assert refused.value is None and refused.why == "there are only 4 samples"
    points = tuple(replace(p, quantities={k: q for k, q in p.quantities.items() if k != "penalty"}) for p in run.points)
    said = live_tables.sentences([replace(run, points=points)])
    assert len(said) == 2 and all("too noisy to say, because there are only 4 samples" in line for line in said)


def test_one_role_that_did_not_move_costs_its_arms_their_penalty(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault in one role only: flags stay near, and every arm that moves them says so."""

    def walk(layers: PlacedLayers, words: Any) -> tuple[float, ...]:
        flags = {one.buffers["sync_flag"].address for one in layers.layers}
        return (700.0,) if words.data_ptr() in flags else simulated.walk(layers, words)

    monkeypatch.setattr(PlacedLayers, "walk", walk)
    run = taken(machine, "placement", [placement.live_case()], Options(shards=1), layers=2)
    for point in run.points[1:]:
        penalty = point.quantities["penalty"]
        assert (penalty.value is None) == ("flags" in point.arm)
        if penalty.value is None:
            assert "2 of 2 windows of the flags" in str(penalty.why)


def test_placement_moves_each_role_alone_and_together(machine: Any) -> None:
    run = taken(machine, "placement", [placement.live_case()], Options(shards=1), layers=2)
    assert [point.arm for point in run.points] == [spec.arm for spec in placement.specs()]
    penalty = {p.arm: p.quantities["penalty"].value for p in run.points if "penalty" in p.quantities}
    assert len(penalty) == 7 and all(value is not None for value in penalty.values())
    for one, two in itertools.combinations(("weights", "kv", "flags"), 2):  # the simulated times add
        assert penalty[f"{one}+{two} far"] == pytest.approx(penalty[f"{one} far"] + penalty[f"{two} far"], abs=0.005)
    for point in run.points:
        homes = point.residency_before["bytes_by_role_and_domain"]
        for role, short in (("weights", "weights"), ("kv_cache", "kv"), ("sync_flag", "flags")):
            assert list(homes[role]) == ["gpu0/mem1" if short in point.arm else "gpu0/mem0"]
            assert point.residency_before["probe_by_role"][role]["agrees"]
        assert (
            point.residency_before["moved_evidence"] == "probed" and point.residency_before["evidence"] == "accounted"
        )


def test_arms_that_cannot_be_are_null_and_say_why(machine: Any, tmp_path: Any) -> None:
    """On AMD flags are uncached memory, which stays where it is: four arms, and no number for any of them."""
    case = placement.live_case("amd")
    run = taken(machine, "placement", [case], Options(shards=1), layers=2)
    assert [p.arm for p in run.points[:4]] == ["local", "kv far", "weights far", "weights+kv far"]
    for point in run.points[4:]:
        assert "flags" in point.arm and all(q.value is None for q in point.quantities.values())
        assert "cannot change its home" in str(point.quantities["layer_us"].why)
    path = run.save(tmp_path / "gpu0.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    assert frame.main(["bench", "show", str(path)]) == 0 and "cannot change its home" in report.page([run])


def test_on_amd_the_memory_side_cache_is_swept_before_each_probe(machine: Any) -> None:
    """Near and far once before every walk of a layer; on NVIDIA nothing is swept, as its cache lies with the memory."""
    swept: list[str] = []
    rig = SimpleNamespace(
        machine=SimpleNamespace(backend="amd"), stream=lambda kind, reader, home, n: lambda: swept.append(home)
    )
    sweep = step_bench.sweeper(rig, "gpu0/p0", "gpu0/p1")  # type: ignore[arg-type]
    layers = PlacedLayers(machine, machine.device("gpu0/p0"), 2, simulated.with_flags(), sweep)
    levels = Levels((700.0, 705.0), (2000.0, 2010.0))
    look = layers.look(levels, ("weights", "kv_cache"))
    layers.free()
    assert all(probed.agrees for probed in look.probed.values())
    assert swept == ["gpu0/p0", "gpu0/p1"] * 2 * 2
    rig.machine.backend = "nvidia"
    step_bench.sweeper(rig, "gpu0/p0", "gpu0/p1")()  # type: ignore[arg-type]
    assert len(swept) == 8


@pytest.mark.slow
def test_context_and_verify_have_a_control_in_every_case(machine: Any, capsys: Any, tmp_path: Any) -> None:
    runs = [
        taken(machine, "context", context.live_cases(), Options(shards=1), layers=2),
        taken(machine, "verify", verify.live_cases(), Options(shards=1), layers=2),
    ]
    assert [p.factors["context_tokens"] for p in runs[0].points] == [1024] * 3 + [8192] * 3 + [32768] * 3
    assert [p.factors["experts_read_per_layer"] for p in runs[1].points] == [4, 4, 7, 7, 13, 13, 25, 25]
    far = [runs[0].point(f"{size} kv far").quantities["penalty"].value for size in ("1K", "8K", "32K")]
    assert far[0] < far[1] < far[2]
    for run in runs:
        cases = {p.factors["case"] for p in run.points}
        controls = [p for p in run.points if p.quantities["time_over_local"].method.startswith("A/A")]
        assert len(controls) == len(cases) and all("local" in p.arm for p in controls)
        path = run.save(tmp_path / run.experiment / "gpu0-dpx-nps2.json")
        assert check_shape(Run.load(path), "x").to_json() == run.to_json()
        assert frame.main(["bench", "show", str(path)]) == 0
        assert f"gpu0-dpx-nps2 {run.points[-1].arm} is slower by" in capsys.readouterr().out
        assert run.points[-1].arm in report.page([run])


def test_a_verdict_is_judged_by_its_own_case(machine: Any) -> None:
    """The fault: the second case's A/A control is off; only its verdicts may be withdrawn."""
    run = taken(machine, "verify", verify.live_cases()[:2], Options(shards=1), layers=2)
    quantities = run.point("2 tokens local").quantities
    off = quantities["time_over_local"]
    object.__setattr__(off, "value", 1.05)
    object.__setattr__(off, "low", 1.04)
    object.__setattr__(off, "high", 1.06)
    said = live_tables.sentences([run])
    assert "1 token swapped is slower" in said[0] and "2 tokens swapped is too noisy" in said[1]
