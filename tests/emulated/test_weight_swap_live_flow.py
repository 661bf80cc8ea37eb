"""The live weight-swap from end to end on emulated memory: placing, moving and auditing are real, while times and
latencies are simulated from where the bytes are."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dieplace.backends import torch_timing as timing
from dieplace.cli import main as frame
from dieplace.experiments import layer_speed, live_tables, weight_swap_nvidia, weight_swap_result
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options
from dieplace.experiments.run_shape import check_shape
from dieplace.policy import OBJECT_BYTES
from dieplace.run import Run

NEAR, FAR = 4500.0, 375.0  # bytes a ns of the simulated memory
OPTIONS = Options(shards=1, arms=("local", "swapped", "interleave-4/8"))


class SimulatedRig:
    """Rates and devices of a pair; nothing runs."""

    cache_bytes = 1 << 20

    def __init__(self, machine: Any) -> None:
        self.readers = ("gpu0/p0", "gpu0/p1")
        self.devices = {name: machine.device(name) for name in self.readers}

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Any:
        return lambda: nbytes / (NEAR if reader == home else FAR)

    def telemetry(self) -> dict[str, Any]:
        return {"driver_version": "1.0", "gpus": [], "clock_share": 1.0}


def small_layer(seed: int) -> layer_speed.Layer:
    """Operands with the real names and a few MB of weights."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"qkv_b": 3 << 20, "up_b": 2 << 20, "down_b": 1 << 20, "router": 1 << 19, "k": 4096, "v": 4096, "x": 256}
    whole = ("qkv_s", "o_b", "o_s", "up_s", "down_s")
    sizes |= dict.fromkeys(whole, 1024)
    return layer_speed.Layer(
        {n: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g) for n, size in sizes.items()}
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench over emulated memory whose `stuck` layers ignore moves when the times are made."""
    with private_node("DPX/NPS2") as machine:
        made = _bench(machine, monkeypatch)
        yield made
        for one in getattr(made, "placed", []):
            one.weights.free()
            one.kv.free()


def _bench(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(layer_speed, "make_layer", small_layer)
    monkeypatch.setattr(layer_speed, "workspace", lambda: {"y": torch.ones(1, 4)})
    monkeypatch.setattr(layer_speed, "triton_stages", lambda layer, w: [("qkv", lambda: None)])
    monkeypatch.setattr(weight_swap_nvidia, "hash_of", lambda seen: ("ab12", None))
    monkeypatch.setattr(weight_swap_nvidia.binaries, "watch", contextlib.nullcontext)
    bench = weight_swap_nvidia._Bench(machine, SimulatedRig(machine), OPTIONS, OPTIONS.arms)
    monkeypatch.setattr(timing, "capture", lambda launches, index: SimpleNamespace(graph=SimpleNamespace(replay=int)))
    monkeypatch.setattr(timing, "time_once", lambda graph: _step_ns(bench))
    monkeypatch.setattr(
        timing,
        "stage_times",
        lambda stages, index, replays: (80.0, tuple(timing.StageTime(n, 10.0) for n, _ in stages)),
    )
    monkeypatch.setattr(bench, "_known", lambda home: (700.0, 705.0) if home == "gpu0/p0" else (2000.0, 2010.0))
    monkeypatch.setattr(bench, "_walk", lambda words: _latencies(bench, words))
    return bench


def _far_bytes(buffer: Any) -> int:
    return sum(n for domain, n in buffer.locate().bytes_by_domain.items() if domain != "gpu0/mem0")


def _step_ns(bench: Any) -> float:
    buffer = bench.placed[0].weights
    moved = weight_swap_result.moved_bytes(bench.placed[0].layer) * _far_bytes(buffer) / buffer.nbytes
    return 50_000 + moved * (1 / FAR - 1 / NEAR)


def _latencies(bench: Any, words: torch.Tensor) -> tuple[float, ...]:
    hbm = bench.machine.session.memory.hbm
    import numpy as np

    starts = words.data_ptr() + np.arange(words.numel() * 4 // OBJECT_BYTES, dtype=np.int64) * OBJECT_BYTES
    return tuple(2000.0 if die == 1 else 700.0 for die in hbm.die_of(starts))


def test_moves_every_object_and_tells_a_penalty(bench: Any, tmp_path: Any, capsys: Any) -> None:
    run = bench.run(lambda words: None)
    assert bench.home == "local" and _far_bytes(bench.placed[0].weights) == 0
    swapped, mixed = run.point("swapped"), run.point("interleave-4/8")
    assert swapped.residency_before["moved_evidence"] == "probed"
    assert swapped.residency_before["probe"]["far"] == swapped.residency_before["probe"]["windows"] == 8 * 4
    assert mixed.residency_before["probe"]["far"] == 8 * 2
    assert swapped.residency_before["bytes_by_role_and_domain"]["weights"] == {"gpu0/mem1": 8 * 4 * OBJECT_BYTES}
    assert swapped.residency_before["bytes_by_role_and_domain"]["kv_cache"] == {"gpu0/mem0": 8 * OBJECT_BYTES}
    assert swapped.quantities["predicted_over_measured"].value == pytest.approx(1, abs=0.01)
    assert mixed.quantities["penalty"].value == pytest.approx(swapped.quantities["penalty"].value / 2, rel=0.01)
    assert run.facts["same_result_in_all_arms"] and run.code_hash == "ab12"
    path = run.save(tmp_path / "gpu0.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    assert frame.main(["bench", "show", str(path)]) == 0
    assert "gpu0-gpu0 swapped is slower by" in capsys.readouterr().out
    assert frame.main(["bench", "compare", str(path), str(path)]) == 0


def test_weights_that_did_not_move_give_no_penalty(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the driver says it moved them, and they answer like near memory."""
    monkeypatch.setattr(bench, "_walk", lambda words: (700.0,) * (words.numel() * 4 // OBJECT_BYTES))
    run = bench.run(lambda words: None)
    refused = run.point("swapped").quantities["penalty"]
    assert refused.value is None and "32 of 32 windows" in str(refused.why)
    said = live_tables.sentences([run])
    assert any("no penalty is told for gpu0-gpu0 swapped, because 32 of 32" in line for line in said)
    assert not any("slower" in line for line in said)
