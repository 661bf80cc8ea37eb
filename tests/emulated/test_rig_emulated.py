"""The AMD rig end to end without an AMD GPU: its buffers placed on an emulated MI355X, its Triton kernels run there.

The machine is told to be an `amd` one, its session is the emulated node's: readers, buffers, launches and audit are
those of a real card. Times are a stand-in's, made from what the launches moved: what is tested is which bytes each arm
moves, and what the experiment makes of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from dpx_machine import dpx_machine

from dieplace.backends.base import Prepared, Timing
from dieplace.emulator.emulated_execution import EmulatedExecution
from dieplace.errors import PlacementError
from dieplace.experiments import link
from dieplace.experiments.harness import Plan
from dieplace.experiments.link_run import as_run
from dieplace.experiments.registry import Options
from dieplace.experiments.torch_rig import TorchRig
from dieplace.machine import Machine
from dieplace.run import Point, Run

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed, so its kernels cannot be compiled", allow_module_level=True)

from dieplace.emulator.triton_launch import triton_kernels

KIB = 1 << 10
NEAR, FAR = 4.0, 1.0  # bytes a ns of the stand-in
LAUNCH_NS = 1.0


class Counting(EmulatedExecution):
    """Runs launches on the emulated card; a sample is made from the bytes that came from each die."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory)
        self.moved: list[dict[str, int]] = []

    def time(self, *prepared: Prepared, flush: Callable[[], None] | None = None) -> tuple[Timing, ...]:
        return tuple(self._sample(one) for one in prepared)

    def _sample(self, prepared: Prepared) -> Timing:
        self.launch(prepared)
        total = {"near": 0, "far": 0}
        for record in prepared.work.records:
            for buffer in record.kernels[0].traffic.buffers:
                for moved in (buffer.read, buffer.written):
                    total["near"] += moved.distinct_local
                    total["far"] += moved.distinct_peer
        self.moved.append(total)
        return Timing("measured", (LAUNCH_NS + total["near"] / NEAR + total["far"] / FAR,))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with dpx_machine() as switched:
        # Only the first card is visible, as with ROCR_VISIBLE_DEVICES=0,1.
        seen = tuple(replace(d, runtime_index=d.partition if d.card == "gpu0" else None) for d in switched.devices)
        yield replace(switched, backend="amd", devices=seen)


@pytest.fixture
def rig(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchRig]:
    monkeypatch.setattr("dieplace.experiments.torch_rig.HOPS", 9)
    monkeypatch.setattr("dieplace.experiments.torch_rig.CALIBRATION_HOPS", 9)
    monkeypatch.setattr("dieplace.experiments.torch_rig.MIB", 1 * KIB)
    monkeypatch.setattr("dieplace.experiments.torch_rig.GIB", 8 * KIB)
    monkeypatch.setattr("dieplace.experiments.torch_rig.BYTES_A_REPLAY", 16 * KIB)
    execution = Counting(machine.session.memory.hbm)  # type: ignore[union-attr]
    with triton_kernels(), TorchRig(machine, words_bytes=16 * KIB, execution=execution) as rig:
        execution.moved.clear()  # the check of the clock
        yield rig


def moved(rig: TorchRig) -> dict[str, int]:
    assert isinstance(rig.execution, Counting)
    return rig.execution.moved[-1]


def test_readers_are_the_halves_of_the_card(rig: TorchRig) -> None:
    assert rig.readers == ("gpu0/p0", "gpu0/p1") and rig.part == "MI355X"
    assert rig.far_homes("gpu0/p1") == {"same card": "gpu0/p0"}


@pytest.mark.parametrize(("home", "share"), [("gpu0/p0", (1, 0)), ("gpu0/p1", (0, 1))])
def test_a_read_takes_every_byte_from_the_home_it_names(rig: TorchRig, home: str, share: tuple[int, int]) -> None:
    nbytes = 16 * KIB
    rig.stream("read", "gpu0/p0", home, nbytes)()
    found = moved(rig)
    assert (found["near"], found["far"]) == (nbytes * share[0], nbytes * share[1])


def test_copies_cross_the_link_in_the_direction_they_name(rig: TorchRig) -> None:
    nbytes = 16 * KIB
    for kind, home, near, far in (
        ("copy", "gpu0/p0", 2 * nbytes, 0),
        ("pull", "gpu0/p1", nbytes, nbytes),
        ("push", "gpu0/p1", nbytes, nbytes),
    ):
        rig.stream(kind, "gpu0/p0", home, nbytes)()
        assert moved(rig) == {"near": near, "far": far}, kind
    source = rig.buffers.words("gpu0/p0", "gpu0/p0", "a")
    assert (source == rig.buffers.words("gpu0/p0", "gpu0/p1", "b")).all()  # the push came last


def test_a_chase_goes_through_far_memory(rig: TorchRig) -> None:
    cycles: list[float] = []
    before = len(rig.buffers._made)  # type: ignore[attr-defined]
    assert rig.latency("gpu0/p0", "gpu0/p1", 8 * KIB, cycles)() > 0
    assert cycles and cycles[0] > 0 and len(rig.buffers._made) == before + 1  # type: ignore[attr-defined]
    told = rig.facts()["buffers"]
    assert told["misplaced_bytes"] == 0 and told["evidence"] == "accounted"
    assert set(told["bytes_by_domain"]) == {"gpu0/mem0", "gpu0/mem1"}


def test_both_halves_read_each_other_at_once(rig: TorchRig) -> None:
    nbytes = 16 * KIB
    ns = rig.together("read", True, nbytes)()
    assert isinstance(rig.execution, Counting)
    assert [one["far"] for one in rig.execution.moved[-2:]] == [4 * nbytes] * 2  # four passes a sample
    assert ns == pytest.approx(nbytes / FAR, rel=0.01)  # of one pass


def test_link_writes_a_run_of_the_card(rig: TorchRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(link, "LATENCY_SETS", (8 * KIB,))
    monkeypatch.setattr(link, "STREAM_SETS", (16 * KIB,))
    monkeypatch.setattr(rig, "cache_bytes", 4 * KIB)
    plan = Plan(seed=1, warmups=1, min_blocks=5, max_blocks=5)
    points, stopped = link.run_link(rig, plan, lambda text: None)
    run = as_run(rig.machine, rig, Options(), plan, tuple(points), rig.telemetry(), stopped)
    run.save(tmp_path / "run.json")
    again = Run.load(tmp_path / "run.json")
    assert again.block == "gpu0-dpx-nps2" and again.notes == () and again.facts["buffers"]["misplaced_bytes"] == 0
    assert again.conditions["timer"].startswith("HIP events") and "s_memrealtime" in again.conditions["timer"]
    far = one(points, "far", "read")
    assert far.quantities["time_over_near"].value == pytest.approx(NEAR / FAR, rel=0.01)
    assert one(points, "far", "latency").quantities["latency_cycles"].unit == "engine cycles"
    assert again.code_hash is not None and len(again.code_hash) == 16, again.code_hash_why


def one(points: list[Point], arm: str, what: str) -> Point:
    return next(p for p in points if p.arm == arm and p.factors["what"] == what and p.factors["directions"] == "one")


def test_memory_that_cannot_be_reached_leaves_the_near_arm(rig: TorchRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What first light must survive: the runtime offers no peer access between the halves."""
    monkeypatch.setattr(link, "LATENCY_SETS", (8 * KIB,))
    monkeypatch.setattr(link, "STREAM_SETS", (16 * KIB,))
    right = rig.buffers.words

    def refused(reader: str, home: str, name: str) -> Any:
        if reader != home:
            raise PlacementError("device 0 cannot use memory of device 1: the runtime offers no peer access")
        return right(reader, home, name)

    monkeypatch.setattr(rig.buffers, "words", refused)
    points, _ = link.run_link(rig, Plan(seed=1, warmups=1, min_blocks=5, max_blocks=5), lambda text: None)
    near, far = one(points, "near", "read"), one(points, "far", "read")
    assert near.quantities["gb_per_s"].value and far.quantities["gb_per_s"].value is None
    assert "no peer access" in str(far.quantities["gb_per_s"].why)
    assert one(points, "far", "latency").quantities["latency_ns"].value  # chains are other buffers
