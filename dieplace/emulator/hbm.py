"""Emulated HBM: sparse host memory in which every 4 KiB page has a home die.

Memory is handed out in whole 2 MiB objects of one domain, as the driver's VMM granularity suggests. Each block is a
private no-reserve mapping, so hundreds of gigabytes cost address space and no RAM until they are written. Addresses
are real host addresses: a tensor's `data_ptr()` is the address that emulated kernels and `die_of` see.

Where a page lives follows memory-locality measurements on MI350 (FLEET, `benchmark/aid_remote_hbm`): a domain over
both dies (NPS1) hashes 4 KiB physical pages about 50/50, stable across launches; a domain of one die (NPS2) keeps
every page there. Physical object numbers are handed out lowest first, so equal allocation orders give equal homes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dieplace.emulator.pages import (
    NOT_HBM,
    OBJECT_BYTES,
    PAGE_BYTES,
    FreeObjects,
    Lease,
    PageTable,
    Range,
    domain_full,
    sparse_memory,
)
from dieplace.errors import NoSuchDevice, PlacementError, UsageError
from dieplace.machine import Domain

if TYPE_CHECKING:
    import torch

__all__ = ["LIVE", "MEMORY_CLASSES", "NOT_HBM", "OBJECT_BYTES", "PAGE_BYTES", "Block", "EmulatedHBM"]

MEMORY_CLASSES = ("coarse", "fine", "uncached")


@dataclass(frozen=True)
class Block:
    """One allocation: `nbytes` asked, `reserved_bytes` taken in 2 MiB objects.

    `homes` is the pattern of domain ids that repeats over the block's objects: one id, or eight for interleave-k/8.
    """

    id: int
    address: int
    nbytes: int
    reserved_bytes: int
    role: str
    name: str
    memory_class: str
    homes: tuple[str, ...]
    device: str | None = None


@dataclass
class _Live:
    """A block's backing: the mapping, and for each 2 MiB object its domain index and physical object number."""

    block: Block
    bytes_view: npt.NDArray[np.uint8]
    domain_of_object: npt.NDArray[np.int16]
    physical: npt.NDArray[np.int64]
    views: int = 0
    owned: bool = True
    by_die: dict[int, int] | None = None  # pages counted by home; forgotten when the block moves


LIVE: weakref.WeakSet[EmulatedHBM] = weakref.WeakSet()  # every instance of this process: launches look tensors up


class EmulatedHBM:
    """The HBM domains of an emulated node: allocate, free, move, and ask where any address lives.

    `device_limits` caps what one logical device may allocate in all, as KFD charges each partition (amdgpu_amdkfd.c,
    `amdgpu_amdkfd_reserve_mem_limit`); an allocation that names no device is charged to none.
    """

    def __init__(self, domains: Sequence[Domain], *, device_limits: Mapping[str, int] | None = None) -> None:
        unknown = [d.id for d in domains if d.total_bytes is None]
        if unknown:
            raise UsageError(f"cannot emulate HBM of unknown size: {', '.join(unknown)}", hint="give total_bytes")
        self.domains = tuple(domains)
        LIVE.add(self)
        self._index = {name: i for i, d in enumerate(self.domains) for name in (d.id, *d.aliases)}
        self._objects = FreeObjects(self.domains)
        self._limits = dict(device_limits or {})
        self._charged: dict[str, int] = {}
        self._live: dict[int, _Live] = {}
        self._next_id = 1
        self._lock = threading.Lock()
        # Finalizers may run inside any of our own methods (garbage collection), so they only note what is to be done.
        self._dropped: deque[tuple[int, str]] = deque()
        self._table: PageTable | None = None
        self._diversions: deque[tuple[int, int]] = deque()  # injected faults: objects, domain index

    # -- accounting ------------------------------------------------------------------------------------------------

    def total_bytes(self, domain: str) -> int:
        """Bytes of the domain in whole 2 MiB objects."""
        return self._objects.total(self._domain(domain)) * OBJECT_BYTES

    def free_bytes(self, domain: str) -> int:
        """Bytes of the domain that no live block holds."""
        index = self._domain(domain)
        with self._lock:
            self._drain()
            return self._objects.count(index) * OBJECT_BYTES

    def used_bytes(self, domain: str) -> int:
        """Bytes of the domain held by live blocks, in whole 2 MiB objects."""
        return self.total_bytes(domain) - self.free_bytes(domain)

    def charged_bytes(self, device: str) -> int:
        """Bytes charged to one logical device."""
        with self._lock:
            self._drain()
            return self._charged.get(device, 0)

    def blocks(self) -> tuple[Block, ...]:
        """All live blocks in order of allocation."""
        with self._lock:
            self._drain()
            return tuple(self._live[key].block for key in sorted(self._live))

    # -- allocate, free, move --------------------------------------------------------------------------------------

    def allocate(
        self,
        domain: str | Sequence[str],
        nbytes: int,
        *,
        role: str,
        name: str = "",
        memory_class: str = "coarse",
        device: str | None = None,
    ) -> Block:
        """Allocate `nbytes` (rounded up to 2 MiB objects) in a domain, or over a repeating pattern of domains.

        Raises DomainFull (asked_bytes, free_bytes, total_bytes, domain) with nothing taken, NoSuchDevice for an
        unknown domain, UsageError for a size below 1 or an unknown memory class.
        """
        if nbytes < 1:
            raise UsageError(f"cannot allocate {nbytes} bytes", hint="ask for at least 1")
        if memory_class not in MEMORY_CLASSES:
            raise UsageError(f"no memory class {memory_class!r}", hint=f"one of {', '.join(MEMORY_CLASSES)}")
        homes, wanted = self._wanted(domain, -(-nbytes // OBJECT_BYTES))
        if self._diversions:
            objects, elsewhere = self._diversions.popleft()
            wanted[len(wanted) - min(objects, len(wanted)) :] = elsewhere
        reserved = len(wanted) * OBJECT_BYTES
        with self._lock:
            self._drain()
            self._check_limit(device, reserved)
            self._objects.check_room(wanted)
            view = sparse_memory(reserved)
            physical = self._objects.take(wanted)
            block = Block(
                id=self._next_id,
                address=view.ctypes.data,
                nbytes=nbytes,
                reserved_bytes=reserved,
                role=role,
                name=name,
                memory_class=memory_class,
                homes=homes,
                device=device,
            )
            self._next_id += 1
            self._live[block.id] = _Live(block, view, wanted, physical)
            if device is not None:
                self._charged[device] = self._charged.get(device, 0) + reserved
            self._table = None
            return block

    def divert_next(self, nbytes: int, domain: str) -> None:
        """Fault: the last `nbytes` of the next allocation land in `domain`, while the call succeeds all the same.

        As seen on MI300A under pressure, where 40 of 93 GiB came from the neighbour (ROCm/amdgpu issue 186).
        """
        self._diversions.append((-(-nbytes // OBJECT_BYTES), self._domain(domain)))

    def free(self, block: Block) -> None:
        """Give the block back; while tensors view it the bytes stay taken, and return with the last of them."""
        with self._lock:
            self._drain()
            live = self._live.get(block.id)
            if live is None or not live.owned:
                raise UsageError(f"block {block.id} ({block.name or block.role}) is already free", hint="free it once")
            live.owned = False
            self._release_if_unused(block.id)

    def free_later(self, block: Block) -> None:
        """`free` for finalizers: takes no lock, acts before the next call; a block already free is left alone."""
        self._dropped.append((block.id, "owner"))

    def move(self, block: Block, domain: str | Sequence[str]) -> Block:
        """Give the block another home under the same address (a VMM remap); contents and views stay valid.

        The new backing is taken before the old is given back, as a remap on a device needs, so a move between full
        domains raises DomainFull and changes nothing.
        """
        homes, wanted = self._wanted(domain, block.reserved_bytes // OBJECT_BYTES)
        with self._lock:
            self._drain()
            live = self._live_of(block)
            self._objects.check_room(wanted)
            physical = self._objects.take(wanted)
            self._objects.give(live.domain_of_object, live.physical)
            live.domain_of_object, live.physical, live.by_die = wanted, physical, None
            live.block = replace(live.block, homes=homes)
            self._table = None
            return live.block

    # -- views -----------------------------------------------------------------------------------------------------

    def array(self, block: Block, offset_bytes: int = 0, nbytes: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of the block as a numpy view, default all, which pins the block while it lives."""
        size = block.nbytes - offset_bytes if nbytes is None else nbytes
        if offset_bytes < 0 or size < 0 or offset_bytes + size > block.nbytes:
            raise UsageError(
                f"a view of {size} bytes at offset {offset_bytes} does not fit a block of {block.nbytes} bytes"
            )
        with self._lock:
            self._drain()
            live = self._live_of(block)
            live.views += 1
            lease = Lease(live.bytes_view[offset_bytes : offset_bytes + size])
        weakref.finalize(lease, self._dropped.append, (block.id, "view")).atexit = False
        return np.asarray(lease)

    def tensor(
        self, block: Block, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None, offset_bytes: int = 0
    ) -> torch.Tensor:
        """A CPU tensor over the block's memory from `offset_bytes` on; default uint8 of shape (nbytes,).

        Its storage is exactly the bytes that it covers, so two tensors of one block do not share a storage.
        """
        import torch

        wanted = dtype or torch.uint8
        need = None if shape is None else int(np.prod(shape, dtype=np.int64)) * wanted.itemsize
        flat = torch.from_numpy(self.array(block, offset_bytes, need))
        typed = flat if wanted == torch.uint8 else flat.view(wanted)
        return typed if shape is None else typed.view(tuple(shape))

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, domain: str | Sequence[str], *, role: str, **options: Any
    ) -> torch.Tensor:
        """A tensor that owns its block: the block is freed when the last tensor over its storage is gone."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        block = self.allocate(domain, nbytes, role=role, **options)
        try:
            return self.tensor(block, dtype, shape)
        finally:
            self.free(block)  # the view keeps it alive

    # -- where is it -----------------------------------------------------------------------------------------------

    def die_of(self, addresses: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Home die of each address, as an index on its card; NOT_HBM for anything that is no live block."""
        return self._pages().die_of(addresses)

    def domain_of(self, addresses: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
        """Index into `domains` of each address's home; NOT_HBM where there is none."""
        return self._pages().domain_of(addresses)

    def block_at(self, address: int) -> Block | None:
        """The live block that covers an address, or None."""
        found = self._pages().block_at(address)
        live = self._live.get(found) if found is not None else None
        return live.block if live else None

    def bytes_by_domain(self, block: Block, offset_bytes: int = 0, nbytes: int | None = None) -> dict[str, int]:
        """Bytes of the block (as asked, not as reserved), or of a range of it, in each domain."""
        with self._lock:
            self._drain()
            homes = self._live_of(block).domain_of_object
        end = block.nbytes if nbytes is None else offset_bytes + nbytes
        edges = np.arange(len(homes) + 1, dtype=np.int64) * OBJECT_BYTES
        sizes = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], offset_bytes), 0, None)
        homes, sizes = homes[sizes > 0], sizes[sizes > 0]
        return {self.domains[i].id: int(sizes[homes == i].sum()) for i in np.unique(homes)}

    def bytes_by_die(self, block: Block) -> dict[int, int]:
        """Bytes of the block on each die of its card; in a domain over several dies counted page by page."""
        with self._lock:
            self._drain()
            live = self._live_of(block)
        if live.by_die is None:
            dies = {self._index[d.id]: d.dies for d in self.domains}
            parts = self.bytes_by_domain(block)
            if all(len(dies[self._index[name]]) == 1 for name in parts):
                live.by_die = _summed((dies[self._index[name]][0], nbytes) for name, nbytes in parts.items())
            else:
                live.by_die = self._count_pages(block)
        return dict(live.by_die)

    def _count_pages(self, block: Block) -> dict[int, int]:
        counts: dict[int, int] = {}
        pages = -(-block.nbytes // PAGE_BYTES)
        for first in range(0, pages, 1 << 20):
            index = np.arange(first, min(pages, first + (1 << 20)), dtype=np.uint64)
            dies, number = np.unique(self.die_of(np.uint64(block.address) + index * PAGE_BYTES), return_counts=True)
            for die, n in zip(dies.tolist(), number.tolist(), strict=True):
                counts[die] = counts.get(die, 0) + n * PAGE_BYTES
        # The last page counts in part.
        last = int(self.die_of(np.array([block.address + block.nbytes - 1], dtype=np.uint64))[0])
        counts[last] -= pages * PAGE_BYTES - block.nbytes
        return dict(sorted(counts.items()))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _domain(self, name: str) -> int:
        if name not in self._index:
            known = [d.id for d in self.domains]
            raise NoSuchDevice(f"no domain {name!r} here", hint=f"there is {', '.join(known)}", asked=name, known=known)
        return self._index[name]

    def _wanted(self, domain: str | Sequence[str], objects: int) -> tuple[tuple[str, ...], npt.NDArray[np.int16]]:
        names = (domain,) if isinstance(domain, str) else tuple(domain)
        if not names:
            raise UsageError("an interleave pattern needs at least one domain")
        pattern = np.array([self._domain(n) for n in names], dtype=np.int16)
        homes = tuple(self.domains[i].id for i in pattern)
        self._require_sane(homes[0], objects)
        return homes, np.resize(pattern, objects)

    def _require_sane(self, domain: str, objects: int) -> None:
        """DomainFull for more than all domains together have: before a list of so many objects is made."""
        there = sum(self._objects.total(index) for index in range(len(self.domains)))
        if objects > there:
            index = self._index[domain]
            free, total = (count(index) * OBJECT_BYTES for count in (self._objects.count, self._objects.total))
            raise domain_full(domain, objects * OBJECT_BYTES, free, total, domain)

    def _check_limit(self, device: str | None, reserved: int) -> None:
        if device is None or device not in self._limits:
            return
        free = self._limits[device] - self._charged.get(device, 0)
        if reserved > free:
            total = self._limits[device]
            raise domain_full(f"the memory limit of {device}", reserved, free, total, device)

    def _live_of(self, block: Block) -> _Live:
        live = self._live.get(block.id)
        if live is None:
            raise PlacementError(f"block {block.id} ({block.name or block.role}) is free", hint="allocate it again")
        return live

    def _release_if_unused(self, block_id: int) -> None:
        live = self._live[block_id]
        if live.owned or live.views:
            return
        self._objects.give(live.domain_of_object, live.physical)
        if live.block.device is not None:
            self._charged[live.block.device] -= live.block.reserved_bytes
        del self._live[block_id]
        self._table = None

    def _drain(self) -> None:
        while self._dropped:
            block_id, what = self._dropped.popleft()
            live = self._live.get(block_id)
            if live is None:
                continue
            if what == "view":
                live.views -= 1
            else:
                live.owned = False
            self._release_if_unused(block_id)

    def _pages(self) -> PageTable:
        with self._lock:
            self._drain()
            if self._table is None:
                ranges = [
                    Range(x.block.id, x.block.address, x.block.nbytes, x.domain_of_object, x.physical)
                    for x in self._live.values()
                ]
                self._table = PageTable(ranges, self.domains)
            return self._table


def _summed(parts: Iterable[tuple[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for key, nbytes in parts:
        total[key] = total.get(key, 0) + nbytes
    return dict(sorted(total.items()))
