"""weight-swap with two shards from end to end on emulated memory: placing, moving and auditing are real on both dies,
while times and latencies are simulated from where the bytes are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import simulated_steps as simulated
import torch

from dieplace.backends import torch_timing as timing
from dieplace.cli import main as frame
from dieplace.errors import KernelFault, Unsupported, UsageError
from dieplace.experiments import weight_swap_shards as shards
from dieplace.experiments.harness import Plan
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options, get
from dieplace.experiments.run_shape import check_shape
from dieplace.experiments.step_bench import PlacedLayers
from dieplace.experiments.weight_swap_devices import case_of
from dieplace.kernels import exchange
from dieplace.policy import OBJECT_BYTES
from dieplace.run import Run

ARMS = ("local", "swapped")
PLAN = Plan(seed=5, warmups=1, min_blocks=20, max_blocks=20)
LAYERS = 3


class Rig(simulated.SimulatedRig):
    """Two devices that read at the same time at half of what one alone reads from the other's memory."""

    def together(self, kind: str, far: bool, nbytes: int) -> Any:
        return lambda: nbytes / (simulated.FAR / 2 if far else simulated.NEAR)


class OpenGate:
    """Holds nobody."""

    def __init__(self, mailboxes: Any, indices: Sequence[int]) -> None:
        return None

    def require(self) -> None:
        return None


def ends(layers: Sequence[PlacedLayers]) -> list[float]:
    """What a layer takes on both, by where the weights are."""
    moved = [one.reads["weights"] * far_share(one) for one in layers]
    took = [simulated.LOCAL_NS + nbytes * (2 / simulated.FAR - 1 / simulated.NEAR) for nbytes in moved]
    return [ns * simulated._NOISE.lognormvariate(0, 0.0005) for ns in took]


def stage_times(marked: Sequence[Sequence[str]], *, replays: int, gate: Any) -> Any:
    """Each launch takes 10 us on the first device, 20 us on the second."""
    return [
        (1000.0 * us * len(names), tuple(timing.StageTime(name, 1000.0 * us) for name in names))
        for us, names in zip((10, 20), marked, strict=True)
    ]


def far_share(one: PlacedLayers) -> float:
    buffer = one.layers[0].buffers["weights"]
    far = sum(n for domain, n in buffer.locate().bytes_by_domain.items() if domain != one.device.domain)
    return far / buffer.nbytes


def walk(one: PlacedLayers, words: torch.Tensor) -> tuple[float, ...]:
    """Latencies of each 2 MiB window as this shard's die sees them."""
    own = one.machine.domain(str(one.device.domain)).dies
    hbm = one.machine.session.memory.hbm  # type: ignore[union-attr]
    starts = [words.data_ptr() + i * OBJECT_BYTES for i in range(words.numel() * 4 // OBJECT_BYTES)]
    return tuple(700.0 if int(hbm.die_of(torch.tensor([at]).numpy())[0]) in own else 2000.0 for at in starts)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with private_node("DPX/NPS2") as made:
        simulated.install(monkeypatch.setattr, made)
        monkeypatch.setattr(PlacedLayers, "walk", walk)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(shards, "recipe_of", lambda shard, side, slots: simulated.with_flags())
        monkeypatch.setattr(shards, "hash_of", lambda seen: (simulated.CODE, None))
        monkeypatch.setattr(shards, "whole_layer", lambda number, index: torch.ones(1, 4))
        monkeypatch.setattr(shards, "Gate", OpenGate)
        monkeypatch.setattr(shards.timing, "with_marks", lambda stages, index: [name for name, _ in stages])
        monkeypatch.setattr(shards.timing, "times_of", stage_times)
        monkeypatch.setattr(shards.Shards, "_steps", lambda self, graph: None)
        monkeypatch.setattr(exchange, "between", partial(exchange.between, backend="reference"))
        made_shards = shards.Shards.__init__

        def timed(self: Any, *given: Any) -> None:
            made_shards(self, *given)
            monkeypatch.setattr(shards.timing, "time_together", lambda works, gate: ends(self.each))

        monkeypatch.setattr(shards.Shards, "__init__", timed)
        yield made


def taken(machine: Any, arms: Sequence[str] = ARMS) -> Run:
    rig = Rig(machine)
    return shards.ShardRun("weight-swap", machine, rig, Options(arms=tuple(arms)), [case_of(arms)], LAYERS, PLAN).run(
        lambda words: None
    )


def test_both_halves_of_the_weights_move_at_once(machine: Any, tmp_path: Any, capsys: Any) -> None:
    run = taken(machine, (*ARMS, "interleave-4/8"))
    assert run.block == "gpu0-dpx-nps2-shards2" and run.workload["shards"] == 2
    local, swapped, mixed = (run.point(arm) for arm in (*ARMS, "interleave-4/8"))
    windows = local.residency_before["probe"]["windows"]
    assert windows == 2 * LAYERS * 4 and local.residency_before["probe"]["far"] == 0
    assert (
        swapped.residency_before["probe"]["far"] == windows and swapped.residency_before["moved_evidence"] == "probed"
    )
    assert mixed.residency_before["probe"]["far"] == windows // 2
    homes = swapped.residency_before["bytes_by_role_and_domain"]
    assert homes["weights"] == dict.fromkeys(("gpu0/mem0", "gpu0/mem1"), LAYERS * 4 * OBJECT_BYTES)
    assert set(homes["sync_flag"]) == {"gpu0/mem0", "gpu0/mem1"}, "the mailboxes stay with their readers"
    assert swapped.quantities["predicted_over_measured"].value == pytest.approx(1, abs=0.01)
    assert swapped.quantities["penalty"].value > 0
    assert run.facts["prediction"]["far_gb_per_s"] == pytest.approx(simulated.FAR / 2)
    assert run.facts["code_hash_by_gpu"]["swapped"] == run.facts["code_hash_by_gpu"]["local"]
    assert run.facts["executing"] == ["gpu0/p0", "gpu0/p1"]
    assert run.facts["same_result_in_all_arms"] and run.facts["agreement_with_one_shard"]["worst_share_of_largest"] == 0
    assert [stage["us"] for stage in swapped.stages] == [20.0, 20.0], "those of the shard that takes longer"
    path = run.save(tmp_path / "run.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    assert frame.main(["bench", "show", str(path)]) == 0
    assert "swapped is slower by" in capsys.readouterr().out


def test_a_shard_whose_weights_did_not_move_gives_no_penalty(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault on one of the two GPUs alone."""

    def second_stays(one: PlacedLayers, words: torch.Tensor) -> tuple[float, ...]:
        seen = walk(one, words)
        return (700.0,) * len(seen) if one.device.id == "gpu0/p1" else seen

    monkeypatch.setattr(PlacedLayers, "walk", second_stays)
    penalty = taken(machine).point("swapped").quantities["penalty"]
    assert penalty.value is None and f"{LAYERS * 4} of {2 * LAYERS * 4} windows" in str(penalty.why)


def test_a_wait_that_gave_up_ends_the_run_in_a_typed_error(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: during a replay a mailbox of the second shard stays empty."""
    settled = shards.Shards._replay

    def late(self: Any) -> None:
        settled(self)
        side = self.mailboxes.exchange.sides[1]
        side.status.copy_(torch.tensor([2880, 0], dtype=torch.int32))
        side.record.copy_(torch.tensor([2880, 65, 1, 0], dtype=torch.int32))

    monkeypatch.setattr(shards.Shards, "_replay", late)
    with pytest.raises(KernelFault, match=r"gpu0/p1, block 0, waited for mailbox of slot 0 \[2879\] to hold 65"):
        taken(machine)


def test_halves_that_do_not_add_up_to_the_layer_end_the_run(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "whole_layer", lambda number, index: torch.full((1, 4), 1.02))
    with pytest.raises(KernelFault, match="layer 0 of two shards"):
        taken(machine)


def test_forms_that_two_shards_do_not_have_are_refused_before_anything_is_placed() -> None:
    experiment = get("weight-swap")
    with pytest.raises(UsageError, match="two shards on nvidia have the form"):
        next(iter(experiment.run("nvidia", Options(context_tokens=8192), print)))
    with pytest.raises(Unsupported, match="have not been tried on hardware"):
        next(iter(experiment.run("amd", Options(), print)))
