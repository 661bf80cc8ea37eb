"""mode: one node led through its modes by the partition code; refusals, failures in the middle, and the way back.

`truth` reads the emulated driver's own state, independently of what the experiment and the partition code say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from partition_support import FakeClock, small_node, truth

from dieplace.backends.emulated import EmulatedBackend
from dieplace.cli import main as frame
from dieplace.emulator.node import Node
from dieplace.errors import (
    ApplyFailed,
    BackendError,
    Busy,
    Declined,
    NotAllowed,
    RolledBack,
    Unsupported,
    UsageError,
)
from dieplace.experiments import mode, registry, report, summary
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options, taking
from dieplace.machine import Machine
from dieplace.partition.control import SystemClock
from dieplace.run import Point, Quantity, Run

SMALL = Options(model="qwen3-0.6b", precision="mxfp4")
ALL = replace(SMALL, allow_unvalidated=True)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """One MI355X under a clock of the test's own, in the place of the experiment's private node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(SystemClock, "sleep", lambda self, seconds: None)  # an emulated driver is ready at once
    made = small_node(tmp_path / "node", FakeClock(), cards=1)

    @contextmanager
    def own(first: str, **_: object) -> Iterator[Machine]:
        assert truth(made).is_in(first)
        yield machine_of(made)

    monkeypatch.setattr(mode, "private_node", own)
    return made


def machine_of(node: Node) -> Machine:
    return EmulatedBackend(node).snapshot()


def a_run(block: str) -> Run:
    token = Quantity("us", "measured", 1.0, samples=(1.0,))
    return Run("mode", block, "measured", "live", (Point("local", {"layer_us": token}),), {}, {"name": "x"}, {}, "now")


def each(
    node: Node, options: Options = ALL, seen: list[str] | None = None, **changes: Callable[[], Any]
) -> Iterator[Run]:
    """The runs of one node with a stand-in for the measuring: it looks at the driver's state, and may do something."""

    def take(machine: Machine, block: str, wanted: str) -> Run:
        assert truth(node).is_in(wanted) and {str(card.mode) for card in machine.cards} == {wanted}
        if seen is not None:
            seen.append(block)
        if block in changes:
            changes[block]()
        return a_run(block)

    return mode.each_mode(machine_of(node), options, lambda text: None, take)


def test_the_three_blocks_are_one_node_switched_and_switched_back(node: Node) -> None:
    told: list[str] = []
    runs = list(registry.get("mode").run("emulated", ALL, told.append))
    assert [run.block for run in runs] == ["spx-nps1", "dpx-nps1", "dpx-nps2"] == list(registry.get("mode").blocks)
    assert len(told) == registry.get("mode").steps
    assert truth(node).is_in("SPX/NPS1") and truth(node).wishes == (None,)
    assert [len(run.machine["devices"]) for run in runs] == [1, 2, 2]
    assert [run.conditions["modes"] for run in runs] == [["SPX/NPS1"], ["DPX/NPS1"], ["DPX/NPS2"]]
    steps = [" ".join(run.facts["switch"]["steps"]) for run in runs]
    # compute modes change without a reload of the driver, memory modes do not
    assert steps[0] == "" and "unload" not in steps[1] and "unload" in steps[2] and "read back" in steps[2]
    assert len({run.machine["stamp"][0] for run in runs}) == 1  # one boot: never three nodes
    assert "AMD does not list DPX/NPS1 as supported on this part" in runs[1].notes


def test_times_are_those_of_the_published_pair() -> None:
    """GPT-OSS-120B: the reference prints 679.3 us with all memory local and 731.4 us in SPX/NPS1 as check values."""
    found = {run.block: run.points[0].quantities for run in registry.get("mode").run("emulated", Options(), print)}
    assert found["dpx-nps2"]["token_us"].value == pytest.approx(679.3, abs=0.05)
    assert found["spx-nps1"]["token_us"].value == pytest.approx(731.4, abs=0.05)
    assert found["spx-nps1"]["penalty"].value == pytest.approx(731.4 / 679.3 - 1, abs=2e-4)


def test_an_unlisted_mode_is_left_out_with_the_reason(node: Node) -> None:
    runs = list(registry.get("mode").run("emulated", SMALL, lambda text: None))
    assert [run.block for run in runs] == ["spx-nps1", "dpx-nps2"] and truth(node).is_in("SPX/NPS1")
    for run in runs:
        assert list(run.facts["left_out"]) == ["dpx-nps1"]
        assert "AMD does not list it for MI355X" in run.facts["left_out"]["dpx-nps1"]
        assert "--allow-unvalidated" in run.facts["left_out"]["dpx-nps1"]
    assert summary.left_out(runs) == runs[0].facts["left_out"]
    assert "AMD does not list it for MI355X" in report.page(runs)


def test_a_part_without_a_mode_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MI325X: AMD's support table lists SPX/NPS1 alone, and its memory mode cannot be written at all."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    other = small_node(tmp_path / "node", FakeClock(), cards=1, part="MI325X")
    found = mode.blocks_of(machine_of(other), SMALL)
    assert list(found.modes) == ["spx-nps1"] and list(found.left_out) == ["dpx-nps1", "dpx-nps2"]
    assert "AMD does not list it for MI325X" in found.left_out["dpx-nps1"]
    assert "the driver's file is read-only" in found.left_out["dpx-nps2"]
    assert truth(other).is_in("SPX/NPS1")


def test_the_first_mode_is_restored_whatever_it_was(node: Node) -> None:
    """A node found in DPX/NPS2 is left in DPX/NPS2."""
    from dieplace.partition import apply, plan

    apply(plan(machine_of(node), "DPX/NPS2"))
    seen: list[str] = []
    assert len(list(each(node, seen=seen))) == 3 and seen == ["spx-nps1", "dpx-nps1", "dpx-nps2"]
    assert truth(node).is_in("DPX/NPS2")


@pytest.mark.parametrize(
    ("step", "error", "times", "taken"),
    [
        ("write_compute", "EIO", None, 1),
        ("write_memory", "EIO", None, 2),
        ("unload", "EBUSY", 1, 2),
        ("load", "EIO", 1, 2),  # no driver is left: the record of that switch leads out first
        ("nps_switch", None, None, 2),
        ("kfd_init", None, 1, 1),
    ],
)
def test_a_refused_switch_leads_back_and_ends_as_partition_set_does(
    node: Node, step: str, error: str | None, times: int | None, taken: int
) -> None:
    """Each kind of failure at the second or third switch: runs so far stand, the first mode is back, exit code 6."""
    node.inject(step, error, times=times)
    runs: list[Run] = []
    with pytest.raises(ApplyFailed) as caught:
        runs.extend(_one_by_one(each(node), runs))
    assert caught.value.exit_code == 6 and caught.value.facts["outcome"] in (
        "rolled-back", "unknown", "pending", "not-verified",
    )  # fmt: skip
    assert [run.block for run in runs] == ["spx-nps1", "dpx-nps1"][:taken]
    assert truth(node).is_in("SPX/NPS1")


def _one_by_one(taken: Iterator[Run], into: list[Run]) -> list[Run]:
    for run in taken:
        into.append(run)
    return []


def test_a_way_back_that_fails_is_never_told_as_done(node: Node) -> None:
    told: list[str] = []
    node.inject("unload", "EBUSY", times=None)
    with pytest.raises(ApplyFailed) as caught:
        list(mode.each_mode(machine_of(node), ALL, told.append, lambda machine, block, wanted: a_run(block)))
    assert caught.value.facts["outcome"] == "pending" and caught.value.exit_code == 6
    assert not truth(node).is_in("SPX/NPS1") and not any("again" in line for line in told)


@pytest.mark.parametrize("error", [ValueError("a kernel"), KeyboardInterrupt()], ids=["failure", "Ctrl-C"])
def test_a_block_that_fails_leads_back(node: Node, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        list(each(node, **{"dpx-nps2": fail}))
    assert truth(node).is_in("SPX/NPS1")


def test_a_reader_that_stops_leads_back_at_once(node: Node) -> None:
    """What the command does on Ctrl-C between two blocks: the experiment is closed, not left to the garbage."""
    experiment = replace(registry.get("mode"), run=lambda backend, options, progress: each(node))
    with pytest.raises(KeyboardInterrupt), taking(experiment, "emulated", ALL, print) as runs:
        kept = [next(runs), next(runs)]
        assert truth(node).is_in("DPX/NPS1")
        raise KeyboardInterrupt
    assert len(kept) == 2 and truth(node).is_in("SPX/NPS1")


def test_nothing_begins_where_a_later_switch_cannot(node: Node) -> None:
    """Somebody holds the card, or the user may not switch: told before the first block, nothing is changed."""
    seen: list[str] = []
    pid = node.start_process("trainer")
    with pytest.raises(Busy) as busy:
        list(each(node, seen=seen))
    assert "trainer" in str(busy.value) and busy.value.exit_code == 5
    node.end_process(pid)
    node.become(1000)
    with pytest.raises(NotAllowed):
        list(each(node, seen=seen))
    assert seen == [] and truth(node).is_in("SPX/NPS1")


@pytest.mark.parametrize(
    ("backend", "why"), [("nvidia", "MIG is left alone"), ("cpu", "host memory has no partition modes")]
)
def test_backends_without_modes_say_so(backend: str, why: str) -> None:
    assert why in str(registry.get("mode").cannot(backend))
    with pytest.raises(Unsupported, match=why):
        next(registry.get("mode").run(backend, SMALL, print))
    assert registry.get("mode").switches is not None and registry.get("mode").switches(backend, SMALL) == ()


def test_arms_and_shards_that_it_does_not_have_are_refused() -> None:
    for options in (replace(SMALL, arms=("local",)), replace(SMALL, shards=1)):
        with pytest.raises(UsageError):
            next(registry.get("mode").run("emulated", options, print))


@pytest.fixture
def real(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The amd backend's road, with the emulated node as the live one and a stand-in for the child that measures."""
    from dieplace.experiments import mode_child

    def take(machine: Machine, block: str, wanted: str) -> Run:
        assert truth(node).is_in(wanted)
        return a_run(block)

    monkeypatch.setattr(import_module("dieplace.discover"), "discover", lambda backend=None, **_: machine_of(node))
    monkeypatch.setattr(mode_child, "cannot_here", lambda backend: None)
    monkeypatch.setattr(mode_child, "refuse_other_forms", lambda options: None)
    monkeypatch.setattr(mode_child, "take_in_child", lambda options, progress: take)
    return node


def test_real_cards_are_switched_only_after_a_yes(
    real: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Declined):
        next(registry.get("mode").run("amd", ALL, print))
    words = ["--backend", "amd", "bench", "run", "mode", "--out", str(tmp_path / "out"), "--json"]
    assert frame.main(words) == 7
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["word"] == "declined" and "block dpx-nps2:" in err and "left out: dpx-nps1" in err
    assert truth(real).is_in("SPX/NPS1") and not list((tmp_path / "out").glob("*.json"))

    assert frame.main([*words, "-y"]) == 0
    out, err = capsys.readouterr()
    assert [Path(name).stem for name in json.loads(out)["runs"]] == ["spx-nps1", "dpx-nps2"]
    assert "then back to the modes of now" in err and truth(real).is_in("SPX/NPS1")


def test_a_failure_on_real_cards_keeps_runs_and_partitions_exit_code(
    real: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real.inject("write_compute", "EIO", times=None)
    words = ["--backend", "amd", "bench", "run", "mode", "--out", str(tmp_path), "-y", "--allow-unvalidated"]
    assert frame.main(words) == RolledBack.exit_code == 6
    assert "read back and verified" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.json")] == ["spx-nps1.json"] and truth(real).is_in("SPX/NPS1")


@pytest.mark.parametrize(("block", "wanted"), mode.BLOCKS.items())
def test_a_measured_block_places_one_device_and_keeps_its_control(
    block: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the child process does, on emulated memory with simulated times: homes, A/A samples, conditions, tables."""
    import simulated_steps as simulated

    from dieplace.experiments import live_tables, step_recipe
    from dieplace.experiments.harness import Plan
    from dieplace.experiments.mode_child import measure_block
    from dieplace.experiments.run_shape import check_shape

    with private_node(wanted) as machine:
        simulated.install(monkeypatch.setattr, machine)
        monkeypatch.setattr(step_recipe, "gpt_oss", simulated.with_flags)
        rig = simulated.SimulatedRig.__new__(simulated.SimulatedRig)
        rig.machine, rig.readers = machine, tuple(device.id for device in machine.devices)
        options = Options(label="night")
        plan = Plan(seed=3, warmups=1, min_blocks=20, max_blocks=20)
        run = check_shape(measure_block(machine, rig, block, wanted, options, plan), "run.json")
    (point,) = run.points
    homes = {home for held in point.residency_before["bytes_by_role_and_domain"].values() for home in held}
    assert homes == {"gpu0/mem0"} and point.residency_before == point.residency_after
    time, again = point.quantities["layer_us"], point.quantities["control_layer_us"]
    assert len(time.samples) == len(again.samples) == 20
    assert time.value == pytest.approx(simulated.LOCAL_NS / 1000, rel=0.01)
    assert run.facts["executing"] == ["gpu0/p0"] and run.facts["xcds"] == (8 if block == "spx-nps1" else 4)
    assert (point.factors["bytes_read_far"] is None) == wanted.endswith("NPS1")  # nobody knows which half was far
    assert (run.block, run.label, run.code_hash) == (block, "night", simulated.CODE)
    assert live_tables.tables([run])[0].title == "Time of one layer, measured"
    page = report.page([run])
    assert "computes: gpu0/p0" in page and page.count("<circle") == 40


def test_a_child_that_fails_says_its_last_line() -> None:
    """The real child, on this host without an AMD card."""
    from dieplace.experiments.mode_child import take_in_child

    with private_node("SPX/NPS1") as machine, pytest.raises(BackendError) as caught:
        take_in_child(Options(), lambda text: None)(machine, "spx-nps1", "SPX/NPS1")
    assert "measuring in SPX/NPS1 ended with exit code 3" in str(caught.value)
    assert "the amd backend cannot be used here" in str(caught.value)


def test_the_measured_form_is_refused_before_anything_is_switched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from dieplace.experiments import mode_child, step_cases

    monkeypatch.setattr(mode_child, "cannot_here", lambda backend: None)
    monkeypatch.setattr(step_cases, "live_why_not", lambda backend: None)
    with pytest.raises(UsageError, match="mode on amd has the form"):
        next(registry.get("mode").run("amd", replace(ALL, consent=True), print))
    assert truth(node).is_in("SPX/NPS1")
