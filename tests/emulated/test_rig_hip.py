"""The AMD rig over the memory group that a real card has: an emulated HIP runtime under it, gfx950 code above it.

Memory is HIP's as the stub of libamdhip64 gives it: plain on the executing half, a virtual range over an object of the
other half for far buffers. Kernels are Triton's for gfx950, run on the interpreter over that memory.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dpx_machine import dpx_machine
from hip_machine import hip_machine
from stub_hip import Stub, build

from dieplace.backends.base import Prepared, Timing
from dieplace.errors import PlacementError
from dieplace.experiments.torch_rig import TorchRig
from dieplace.machine import Device, Machine
from dieplace.workload import Workload

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed, so its kernels cannot be compiled", allow_module_level=True)

from dieplace.emulator.execution import Session
from dieplace.emulator.triton_launch import triton_kernels

pytestmark = pytest.mark.real_binding
KIB, MIB = 1 << 10, 1 << 20


class Running:
    """Runs launches where they are prepared and takes one ns for each: what is tested is what they touch."""

    def prepare(self, workload: Workload, device: Device, *, graph: bool = True) -> Prepared:
        return Prepared(workload, device, workload.launches())

    def launch(self, prepared: Prepared) -> None:
        with Session(two_die=False):
            for launch in prepared.work:
                launch()

    def synchronize(self, device: Device) -> None: ...

    def time(self, *prepared: Prepared, flush: Callable[[], None] | None = None) -> tuple[Timing, ...]:
        for one in prepared:
            self.launch(one)
        return tuple(Timing("measured", (float(len(one.work)),)) for one in prepared)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build(tmp_path_factory.mktemp("hip")))


@pytest.fixture(scope="module")
def base() -> Iterator[Machine]:
    with dpx_machine() as machine:
        yield machine


@pytest.fixture
def machine(base: Machine, stub: Stub, tmp_path: Path) -> Machine:
    return hip_machine(base, stub, tmp_path, total_bytes=256 * MIB, pid=os.getpid())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interpreter can do in a moment."""
    for name, value in {"HOPS": 9, "CALIBRATION_HOPS": 9, "BYTES_A_REPLAY": 16 * KIB, "MIB": KIB}.items():
        monkeypatch.setattr(f"dieplace.experiments.torch_rig.{name}", value)


@pytest.fixture
def rig(machine: Machine) -> Iterator[TorchRig]:
    with triton_kernels(), TorchRig(machine, words_bytes=16 * KIB, execution=Running()) as made:
        yield made


def test_far_buffers_are_objects_of_the_other_half_in_ranges_that_the_reader_may_use(rig: TorchRig, stub: Stub) -> None:
    before = (stub.used(0), stub.used(1))
    stub.clear()
    rig.stream("read", "gpu0/p0", "gpu0/p1", 16 * KIB)()
    assert (stub.used(0) - before[0], stub.used(1) - before[1]) == (2 * MIB, 2 * MIB)  # `a` at home, `b` far
    assert [len(stub.log(call)) for call in ("hipMemCreate", "hipMemMap", "hipMemSetAccess")] == [1, 1, 1]
    told = rig.facts()["buffers"]
    assert told["evidence"] == "accounted" and told["misplaced_bytes"] == 0
    assert {"gpu0/mem0", "gpu0/mem1"} == set(told["bytes_by_domain"])


def test_kernels_read_and_write_that_memory(rig: TorchRig) -> None:
    xor = functools.partial(functools.reduce, operator.xor)
    near = rig.buffers.words("gpu0/p0", "gpu0/p0", "a")
    far = rig.buffers.words("gpu0/p0", "gpu0/p1", "b")
    assert xor(near.tolist()) != xor(far.tolist())
    rig.stream("pull", "gpu0/p0", "gpu0/p1", 16 * KIB)()
    assert (near == far).all()
    near.random_()
    rig.stream("push", "gpu0/p0", "gpu0/p1", 16 * KIB)()
    assert (near == far).all()
    cycles: list[float] = []
    sample = rig.latency("gpu0/p1", "gpu0/p0", 8 * KIB, cycles)
    assert sample() > 0 and cycles[0] > 0


def test_everything_is_given_back(machine: Machine, stub: Stub) -> None:
    with triton_kernels(), TorchRig(machine, words_bytes=16 * KIB, execution=Running()) as rig:
        rig.buffers.words("gpu0/p0", "gpu0/p1", "b")
        rig.buffers.words("gpu0/p1", "gpu0/p1", "a")
    assert stub.empty()


def test_halves_without_peer_access_say_so(base: Machine, stub: Stub, tmp_path: Path) -> None:
    machine = hip_machine(base, stub, tmp_path, total_bytes=256 * MIB, pid=os.getpid())
    stub.set("no_peer", 0, 1)
    with triton_kernels(), TorchRig(machine, words_bytes=16 * KIB, execution=Running()) as rig:
        with pytest.raises(PlacementError, match="no peer access"):
            rig.stream("read", "gpu0/p0", "gpu0/p1", 16 * KIB)
        assert rig.stream("read", "gpu0/p0", "gpu0/p0", 16 * KIB)() > 0
