"""The NVIDIA memory group over an emulated CUDA driver of two GPUs: homes, moves, contents, refusals."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stub_cuda
import torch

from dieplace.backends.accounting import card_counters
from dieplace.backends.device_memory import DeviceMemory
from dieplace.backends.dlpack import CPU
from dieplace.backends.nvidia import cuda
from dieplace.backends.nvidia.nvml import Gpu, Seen
from dieplace.backends.nvidia.topology import _card, _device, _domain
from dieplace.backends.runtime import RuntimeFailed, RuntimeOutOfMemory
from dieplace.errors import DomainFull, Unsupported
from dieplace.machine import Machine
from dieplace.policy import Policy
from dieplace.residency import audit

MIB = 1 << 20


class Session:
    """A backend session with the memory group only."""

    name = "nvidia"
    groups = frozenset({"memory"})

    def __init__(self, library: Path) -> None:
        self.runtime = cuda.Cuda(str(library))
        self.probe = ctypes.CDLL(str(library))
        self.probe.stub_used.restype = ctypes.c_size_t
        self.memory: Any = None

    def stamp(self) -> tuple[None, None]:
        return (None, None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_cuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(library: Path) -> Iterator[Machine]:
    session = Session(library)
    gpus = [Gpu(i, f"0000:{0x1A + i:02x}:00.0", "NVIDIA H200", None, 0x2335, stub_cuda.GPU_BYTES, 18, 26562)
            for i in range(2)]  # fmt: skip
    seen = Seen({gpu.bdf: gpu.index for gpu in gpus}, {})
    made = Machine(
        source="live",
        backend="nvidia",
        cards=tuple(_card(g.index, g, seen, None) for g in gpus),
        devices=tuple(_device(g.index, g, seen, None) for g in gpus),
        domains=tuple(_domain(g.index, g, None) for g in gpus),
        links=(),
        stamp=(None, None),
        session=session,
    )
    counters = lambda homes: card_counters(session.runtime, (0, 1))  # noqa: E731
    session.memory = DeviceMemory(
        session.runtime, made, counters=counters, capturing=lambda: False, tensor_place=(CPU, 0)
    )
    yield made
    gc.collect()
    assert session.probe.stub_depth() == 0  # every pushed context was popped
    assert [session.probe.stub_used(i) for i in (0, 1)] == [0, 0] and session.probe.stub_ranges() == 0


def used(machine: Machine) -> list[int]:
    return [machine.session.probe.stub_used(i) // MIB for i in (0, 1)]


def test_a_swap_keeps_address_contents_and_tensors(machine: Machine) -> None:
    buffer = machine.allocate(6 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights", name="w", movable=True)
    tensor = buffer.tensor
    filled = torch.randint(0, 256, (6 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    tensor.copy_(filled)
    address = buffer.address
    for policy, homes in ((Policy.peer(), [0, 6]), (Policy.peer_share(4), [2, 4]), (Policy.local(), [6, 0])):
        buffer.move(policy)
        assert used(machine) == homes and buffer.address == address == tensor.data_ptr()
        assert torch.equal(tensor, filled)
        found = audit(buffer).require_placed()
        assert found.evidence == "accounted"
        assert [found.bytes_by_domain().get(f"gpu{i}/mem0", 0) // MIB for i in (0, 1)] == homes
    del tensor
    buffer.free()


def test_a_full_gpu_refuses_and_takes_nothing(machine: Machine) -> None:
    held = machine.allocate(40 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights", movable=True)
    with pytest.raises(DomainFull, match="gpu0/mem0 has"):
        machine.allocate(40 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights", movable=True)
    blocker = machine.allocate(40 * MIB, device="gpu1/p0", policy=Policy.local(), role="weights")
    with pytest.raises(DomainFull, match="gpu1/mem0"):
        held.move(Policy.peer())
    assert used(machine) == [40, 40] and held.locate().bytes_by_domain == {"gpu0/mem0": 40 * MIB}
    held.free()
    blocker.free()


def test_the_driver_is_asked_in_its_own_numbers(library: Path) -> None:
    runtime = cuda.Cuda(str(library))
    assert runtime.device_count() == 2 and runtime.bus_id(1) == "0000:1b:00.0"
    assert runtime.memory_info(1) == (64 * MIB, 64 * MIB)
    runtime.enable_peer_access(0, 1)
    runtime.enable_peer_access(0, 1)  # enabled already: success
    assert runtime.can_access_peer(0, 1) and runtime.owner(1) is None
    address = runtime.malloc(1, MIB)
    pointer = runtime.pointer(address)
    assert (pointer.kind, pointer.device) == ("device", 1)
    assert runtime.ipc_open(0, runtime.ipc_export(1, address)) == address
    runtime.free(1, address)
    assert runtime.pointer(address).kind == "unknown"
    with pytest.raises(RuntimeOutOfMemory, match=r"cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        runtime.malloc(0, 65 * MIB)
    with pytest.raises(RuntimeFailed, match="cuMemRelease"):
        runtime.release(200)


def test_layouts_are_those_of_cuda_h() -> None:
    """CUmemAllocationProp is 32 bytes with the location at 8, CUmemAccessDesc 12 with the flags at 8."""
    assert ctypes.sizeof(cuda.AllocationProperties) == 32 and cuda.AllocationProperties.location.offset == 8
    assert ctypes.sizeof(cuda.AccessDescription) == 12 and cuda.AccessDescription.flags.offset == 8


def test_a_host_without_the_driver_says_so() -> None:
    with pytest.raises(Unsupported, match="CUDA driver cannot be used"):
        cuda.Cuda("libno_such_cuda.so.1")
