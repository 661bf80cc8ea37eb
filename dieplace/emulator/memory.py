"""The memory group of the emulated backend: placed allocations in emulated HBM, and factories that land there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dieplace.backends.base import Allocation, Location, Request
from dieplace.emulator.hbm import OBJECT_BYTES, Block, EmulatedHBM
from dieplace.errors import DomainFull, UsageError
from dieplace.machine import Device, Domain, Machine

if TYPE_CHECKING:
    import torch

# torch's caching allocator slices requests below 1 MiB out of 2 MiB segments, at 512 bytes (CUDACachingAllocator.h).
_SMALL_BYTES = 1 << 20
_SLICE_BYTES = 512


class EmulatedMemory:
    """Memory of one emulated node, for the life of the process; `hbm` is what emulated kernels look homes up in."""

    def __init__(self, machine: Machine) -> None:
        domains = [d for d in machine.domains if d.card is not None]
        limits = {d.id: d.memory_limit_bytes for d in machine.devices if d.memory_limit_bytes is not None}
        self.hbm = EmulatedHBM(domains, device_limits=limits)
        self._requested: dict[int, tuple[str, ...]] = {}  # block id -> the pattern that was asked

    def allocate(
        self,
        domain: Domain | Sequence[Domain],
        nbytes: int,
        memory_class: str,
        *,
        device: Device,
        role: str = "activation",
        name: str = "",
        spill_to: Domain | None = None,
        movable: bool = False,
    ) -> Allocation:
        """One piece of memory in a domain, or over a repeating pattern of domains; DomainFull with nothing taken.

        With `spill_to`, objects that no longer fit the domain go there; the audit calls those misplaced. All of it can
        be moved, `movable` or not.
        """
        pattern = _ids(domain)
        options: dict[str, Any] = {"role": role, "name": name, "memory_class": memory_class, "device": device.id}
        try:
            block = self.hbm.allocate(pattern, nbytes, **options)
        except DomainFull as full:
            if spill_to is None or len(pattern) != 1 or full.facts["domain"] != pattern[0]:
                raise
            block = self.hbm.allocate(self._split(pattern[0], spill_to.id, nbytes), nbytes, **options)
        self._requested[block.id] = pattern
        return _allocation(block)

    def free(self, allocation: Allocation) -> None:
        """Give it back; tensors over it keep it alive until they are gone."""
        self.hbm.free(allocation.token)

    def free_later(self, allocation: Allocation) -> None:
        """`free` for finalizers."""
        self.hbm.free_later(allocation.token)

    def move(self, allocation: Allocation, domain: Domain | Sequence[Domain]) -> Allocation:
        """Another home under the same address, as a VMM remap gives; tensors over it stay valid."""
        block = self.hbm.move(allocation.token, _ids(domain))
        self._requested[block.id] = _ids(domain)
        return _allocation(block)

    def locate(self, allocations: Sequence[Allocation]) -> Location:
        """Bytes per domain by the emulator's own page table."""
        total: dict[str, int] = {}
        for allocation in allocations:
            offset = allocation.address - allocation.token.address
            for domain, nbytes in self.hbm.bytes_by_domain(allocation.token, offset, allocation.nbytes).items():
                total[domain] = total.get(domain, 0) + nbytes
        return Location(total, "accounted", "page table of the emulated HBM")

    def bytes_by_die(self, allocation: Allocation) -> dict[int, int]:
        """Bytes on each die of the card, page by page; the only view that looks inside an NPS1 domain."""
        return self.hbm.bytes_by_die(allocation.token)

    def find(self, address: int) -> Allocation | None:
        """The live allocation that covers an address, or None: then it is host memory."""
        block = self.hbm.block_at(address)
        return _allocation(block) if block else None

    def request(self, allocation: Allocation) -> Request:
        """What was asked for when it was made, or last moved."""
        block: Block = allocation.token
        return Request(block.role, block.device, self._requested.get(block.id, block.homes))

    def tensor(
        self, allocation: Allocation, dtype: torch.dtype, shape: Sequence[int], offset_bytes: int = 0
    ) -> torch.Tensor:
        """A CPU tensor over the allocation's memory."""
        return self.hbm.tensor(allocation.token, dtype, shape, offset_bytes)

    def torch_device(self, device: Device) -> str:
        """Tensors of emulated devices are CPU tensors."""
        return "cpu"

    @contextmanager
    def placing(self, domain: Domain | Sequence[Domain], *, device: Device, role: str) -> Iterator[None]:
        """Inside, every fresh storage that torch makes on this thread is relocated into the domain, by copy."""
        from dieplace.emulator.relocate import Relocating

        pool = _Pool(self, domain, device, role)
        try:
            with Relocating(pool.storage, lambda address: self.find(address) is not None):
                yield
        finally:
            pool.close()

    def _split(self, first: str, second: str, nbytes: int) -> tuple[str, ...]:
        objects = -(-nbytes // OBJECT_BYTES)
        fits = self.hbm.free_bytes(first) // OBJECT_BYTES
        return (first,) * min(fits, objects) + (second,) * max(0, objects - fits)


class _Pool:
    """Storages of one (device, role, domain): small ones share whole 2 MiB objects, large ones have their own."""

    def __init__(self, memory: EmulatedMemory, domain: Domain | Sequence[Domain], device: Device, role: str) -> None:
        self._memory = memory
        self._pattern = [domain] if isinstance(domain, Domain) else list(domain)
        self._device = device
        self._role = role
        self._objects = 0  # taken so far: a pattern goes on from object to object, over all storages of the pool
        self._segment: Allocation | None = None
        self._used = 0

    def storage(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of `nbytes` in the pool's domain; the memory lives as long as tensors over it do."""
        import torch

        if nbytes >= _SMALL_BYTES:
            own = self._new(nbytes)
            tensor = self._memory.tensor(own, torch.uint8, (nbytes,))
            self._memory.free(own)
            return tensor
        if self._segment is None or self._used + nbytes > OBJECT_BYTES:
            self.close()
            self._segment = self._new(OBJECT_BYTES)
        tensor = self._memory.tensor(self._segment, torch.uint8, (nbytes,), self._used)
        self._used += -(-nbytes // _SLICE_BYTES) * _SLICE_BYTES
        return tensor

    def close(self) -> None:
        """Give up the current segment; it goes when the last tensor in it is gone."""
        if self._segment is not None:
            self._memory.free(self._segment)
        self._segment, self._used = None, 0

    def _new(self, nbytes: int) -> Allocation:
        start = self._objects % len(self._pattern)
        pattern = self._pattern[start:] + self._pattern[:start]
        made = self._memory.allocate(pattern, nbytes, "coarse", device=self._device, role=self._role)
        self._objects += -(-nbytes // OBJECT_BYTES)
        return made


def _ids(domain: Domain | Sequence[Domain]) -> tuple[str, ...]:
    found = (domain.id,) if isinstance(domain, Domain) else tuple(d.id for d in domain)
    if not found:
        raise UsageError("no domain was given")
    return found


def _allocation(block: Block) -> Allocation:
    return Allocation(
        address=block.address,
        nbytes=block.nbytes,
        domain="+".join(dict.fromkeys(block.homes)),
        memory_class=block.memory_class,
        token=block,
    )
