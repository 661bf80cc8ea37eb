"""The memory group of a device runtime: placed allocations on HIP or CUDA, their lifetime and their whereabouts.

Coarse memory of the executing device's own domain is a plain allocation, which other processes can import. Everything
else, and what is asked as `movable`, is a virtual range over physical objects (VMM), which can change its home under
the same addresses and cannot be exported. Flags are a plain allocation of the uncached class.

Nothing is given back before the devices that may use it have been synchronised, and nothing during a graph capture:
then it waits for the next call outside one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dieplace.backends import vmm
from dieplace.backends.accounting import Accounted, Counters, attribute
from dieplace.backends.base import Allocation, Location, Request
from dieplace.backends.dlpack import CPU, tensor_at
from dieplace.backends.held import Held, grown_bytes, locate
from dieplace.backends.homes import Homes, Piece
from dieplace.backends.ipc import export_handle, import_handle
from dieplace.backends.lifetimes import Lifetimes
from dieplace.backends.pools import Pools, capturing_now, empty_torch_cache
from dieplace.backends.runtime import Runtime, RuntimeOutOfMemory
from dieplace.backends.taking import Order, full, in_capture, take, take_or_spill
from dieplace.errors import DomainFull, PlacementError, UsageError
from dieplace.machine import Device, Domain, Machine

if TYPE_CHECKING:
    import torch

    from dieplace.sharing import Exported

CLASSES = ("coarse", "uncached")


class DeviceMemory:
    """Memory of one machine through one runtime.

    `counters` reads the driver's bytes in use; `capturing` says whether this thread's stream captures a graph;
    `tensor_place` overrides the DLPack (type, index) of tensors, for runtimes whose memory is host memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        machine: Machine,
        *,
        counters: Callable[[Homes], Callable[[], Counters]],
        capturing: Callable[[], bool] = capturing_now,
        tensor_place: tuple[int, int] | None = None,
    ) -> None:
        self.runtime = runtime
        self.machine = machine
        self.homes = Homes(machine, runtime)
        self.counters = counters(self.homes)
        self._capturing = capturing
        self._tensor_place = tensor_place
        self.lifetimes = Lifetimes(runtime, capturing)
        self._reached: set[tuple[tuple[int, int], bool]] = set()
        self._pools = Pools(self)

    # -- the seam --------------------------------------------------------------------------------------------------

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
        retry: bool = True,
    ) -> Allocation:
        """One piece of memory in a domain, or over a repeating pattern of domains; DomainFull with nothing taken.

        Raises PlacementError where the executing device cannot reach the domain, where uncached memory came back from
        the host, and inside a graph capture; UsageError for a class or size that cannot be. `retry=False` does not ask
        torch to give back what it caches.
        """
        pattern = (domain.id,) if isinstance(domain, Domain) else tuple(d.id for d in domain)
        self._check(pattern, nbytes, memory_class)
        wanted = Held.wanted(self.homes, pattern, nbytes, device, role)
        uncached = memory_class == "uncached"
        order = Order(wanted, uncached or (not movable and pattern == (device.domain,)), uncached, name or role)
        spill = self.homes.device_for(spill_to.id, device) if spill_to and not uncached else None
        try:
            take(self, order)
        except DomainFull:
            if retry:  # outside the lock: torch's own lock is taken first where torch calls us
                self._pools.trim()
                empty_torch_cache()
            take_or_spill(self, order, Piece(nbytes, spill, spill_to.id) if spill_to and spill is not None else None)
        return _allocation(wanted)

    def export(self, allocation: Allocation) -> bytes:
        """A handle by which another process can import it; Unsupported for memory that can change its home."""
        return export_handle(self, allocation)

    def import_handle(self, exported: Exported, *, device: Device) -> Allocation:
        """Memory that another process exported; `free` closes it after its last user."""
        return _allocation(import_handle(self, exported, device))

    def adopt(self, address: int, nbytes: int, device: Device, role: str, accounted: Accounted) -> Allocation:
        """A segment that torch made in a pool of ours, as an allocation to audit; torch keeps owning it."""
        pattern = (str(device.domain),)
        held = Held.wanted(self.homes, pattern, nbytes, device, role)
        held.address, held.accounted, held.owner = address, accounted, self.runtime.owner(address)
        return _allocation(held)

    def free(self, allocation: Allocation) -> None:
        """Give it back; tensors over it keep it alive until they are gone."""
        self.free_later(allocation)

    def free_later(self, allocation: Allocation) -> None:
        """`free` for finalizers: never waits for a lock."""
        self.lifetimes.drop(allocation.token)

    def move(self, allocation: Allocation, domain: Domain | Sequence[Domain]) -> Allocation:
        """Another home under the same address, contents kept; needs the bytes a second time while it copies.

        PlacementError for memory that was not allocated as movable, DomainFull with the old home in place.
        """
        held: Held = allocation.token
        pattern = (domain.id,) if isinstance(domain, Domain) else tuple(d.id for d in domain)
        if held.range is None:
            raise PlacementError(
                f"{allocation.memory_class} memory made by a plain allocation cannot change its home",
                hint="allocate it with movable=True, or make it anew where it should be",
            )
        self._check(pattern, held.nbytes, "coarse")
        pieces = self.homes.pieces(pattern, held.nbytes, self.homes.device(held.device))
        with self.lifetimes.locked():
            self.reach(held.executing, pieces, enable=False)
            for one in held.devices:
                self.runtime.synchronize(one)
            before = self.counters()
            try:
                vmm.move(held.range, _sizes(pieces, held.range.nbytes), on_device=held.executing)
            except RuntimeOutOfMemory as error:
                raise full(self, error, pieces, "move") from error
            grown = grown_bytes(held.pieces, pieces)
            held.accounted = attribute(before, self.counters(), grown) if grown else held.accounted
            held.pieces, held.pattern = pieces, pattern
        return _allocation(held)

    def locate(self, allocations: Sequence[Allocation]) -> Location:
        """Bytes per domain, with the weakest evidence among the allocations."""
        found = [self._locate(one) for one in allocations]
        total: dict[str, int] = {}
        for location in found:
            for domain, nbytes in location.bytes_by_domain.items():
                total[domain] = total.get(domain, 0) + nbytes
        weak = any(location.evidence == "declared" for location in found)
        notes = "; ".join(dict.fromkeys(location.note for location in found if location.note))
        return Location(total, "declared" if weak else "accounted", notes)

    def find(self, address: int) -> Allocation | None:
        """The live allocation, or torch segment of one of our pools, that covers an address."""
        held = self.lifetimes.at(address)
        if held is not None:
            return _allocation(held)
        return self._pools.find(address)

    def unplaced(self, address: int, nbytes: int) -> Location | None:
        """Where memory that nobody placed is, by the runtime's books; None where the runtime does not know it."""
        pointer = self.runtime.pointer(address)
        if pointer.kind == "unknown":
            return None
        domain = self.homes.domain_of.get(pointer.device) if pointer.device is not None else None
        note = "managed memory: its pages move" if pointer.kind == "managed" else "not placed"
        return Location({domain or self.homes.host_domain(): nbytes}, "declared", note)

    def request(self, allocation: Allocation) -> Request:
        """What was asked for when it was made, or last moved."""
        held: Held = allocation.token
        return Request(held.role, held.device, held.pattern)

    def tensor(
        self, allocation: Allocation, dtype: torch.dtype, shape: Sequence[int], offset_bytes: int = 0
    ) -> torch.Tensor:
        """A tensor over it on the *executing* device's index, wherever the bytes are; it keeps the memory alive."""
        held: Held = allocation.token
        self.lifetimes.share(held)
        kind, index = self._tensor_place or (self.runtime.tensor_kind, held.executing)
        nbytes = math.prod(shape) * dtype.itemsize
        at = held.address + offset_bytes
        return tensor_at(at, nbytes, dtype, shape, kind, index, lambda: self.lifetimes.drop(held))

    def torch_device(self, device: Device) -> str:
        """torch's name of the device that executes; the host's where a runtime's memory is host memory."""
        index = self.homes.index(device)
        return "cpu" if self._tensor_place is not None and self._tensor_place[0] == CPU else f"cuda:{index}"

    def placing(self, domain: Domain | Sequence[Domain], *, device: Device, role: str) -> AbstractContextManager[None]:
        """Inside, what torch allocates on this thread for `device` lands in the domain."""
        pattern = (domain.id,) if isinstance(domain, Domain) else tuple(d.id for d in domain)
        if role == "sync_flag":
            raise PlacementError(
                "flags are not made by torch: its memory is of the class that may go stale for a poller",
                hint="use device.sync_flags(n)",
            )
        self._check(pattern, 1, "coarse")
        return self._pools.placing(pattern, device, role)

    def _check(self, pattern: tuple[str, ...], nbytes: int, memory_class: str) -> None:
        if nbytes < 1:
            raise UsageError(f"cannot allocate {nbytes} bytes", hint="ask for at least 1")
        if memory_class not in CLASSES:
            raise UsageError(f"no memory class {memory_class!r} here", hint=f"one of {', '.join(CLASSES)}")
        if not pattern:
            raise UsageError("no domain was given")
        for name in dict.fromkeys(pattern):
            if self.homes.domain(name).card is None:
                raise PlacementError(f"{name} is host memory", hint="use --backend cpu for host buffers", domain=name)
        if self._capturing():
            raise in_capture()

    def reach(self, executing: int, pieces: Sequence[Piece], *, enable: bool) -> None:
        """Make sure that kernels on `executing` may use the pieces' devices; asks the runtime once for each pair.

        `enable` is for plain allocations: it opens *all* of that device's plain memory, to every device that may
        reach it, so it is done for the pairs in use only. Ranges grant access by themselves.
        """
        for piece in pieces:
            pair = (executing, piece.device)
            if piece.device == executing or (pair, enable) in self._reached:
                continue
            if not self.runtime.can_access_peer(*pair):
                raise PlacementError(
                    f"device {executing} cannot use memory of device {piece.device} ({piece.domain}):"
                    " the runtime offers no peer access between them",
                    hint="choose devices of one card or one hive, and see: dieplace topo",
                    domain=piece.domain,
                )
            if enable:
                self.runtime.enable_peer_access(*pair)
            self._reached.add((pair, enable))

    def _locate(self, allocation: Allocation) -> Location:
        held: Held = allocation.token
        return locate(held, self.homes, allocation.address - held.address, allocation.nbytes)


def _sizes(pieces: Sequence[Piece], reserved_bytes: int) -> list[tuple[int, int]]:
    """Bytes and device of each piece, the last one filled up to the end of the range."""
    found = [(piece.nbytes, piece.device) for piece in pieces]
    rest = reserved_bytes - sum(nbytes for nbytes, _ in found[:-1])
    return [*found[:-1], (rest, found[-1][1])]


def _allocation(held: Held) -> Allocation:
    names = "+".join(dict.fromkeys(piece.domain for piece in held.pieces))
    return Allocation(held.address, held.nbytes, names, held.memory_class, held)
