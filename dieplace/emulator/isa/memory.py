"""The memory port protocol, and plain coherent memory: host bytes, bounds-checked, with never-written tracking."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dieplace.emulator.isa.atomics import apply_atomic
from dieplace.emulator.isa.faults import IsaFault, Misaligned, OutOfBounds
from dieplace.emulator.isa.flatbytes import host_bytes
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.state import I64, U8, U32
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.emulator.isa.state import LaunchState

Loaded = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Buffer:
    """A named range of host memory that kernels may touch."""

    name: str
    base: int
    nbytes: int


@dataclass(frozen=True)
class Poll:
    """What one group of waves last loaded before the step limit: for diagnosing a stall."""

    request: Request
    data: np.ndarray
    instruction: str
    line: int


class MemoryPort(Protocol):
    """What the interpreter asks of memory; one call for each memory instruction of each wave group.

    Element arrays hold active lanes only, ordered by (wave, lane). Sub-dword loads are zero-extended; sub-dword stores
    use the low bytes of their word. A taint array holds never-written bits (None: everything was written).
    """

    wants_waits: bool
    wants_turns: bool

    def load(self, request: Request) -> Loaded:
        """uint32 [N, words] and its never-written bits."""

    def store(self, request: Request, data: np.ndarray) -> None:
        """Store uint32 [N, words]."""

    def atomic(self, request: Request, operation: str, data: np.ndarray, returns: bool) -> Loaded:
        """Apply an atomic in element order; the old values, uint32 [N, words] (zeros when not `returns`)."""

    def writeback(self, request: Request) -> None:
        """buffer_wbl2 with the cache bits of `request.inst`."""

    def invalidate(self, request: Request) -> None:
        """buffer_inv with the cache bits of `request.inst`."""

    def wait(self, request: Request, vmcnt: int | None, lgkmcnt: int | None) -> None:
        """s_waitcnt; called only when `wants_waits`."""

    def turn(self, clock: int) -> None:
        """Before each scheduler turn; called only when `wants_turns`."""

    def stalled(self, polls: Sequence[Poll]) -> IsaFault | None:
        """A better fault for waves that poll in vain, or None; asked now and then, and at the step limit."""

    def started(self, launch: LaunchState) -> None:
        """Before the first instruction of a launch: the command processor's acquire."""

    def finished(self, launch: LaunchState) -> None:
        """After the last wave of a launch: the command processor's release."""


class BufferTable:
    """Registered buffers, sorted by address, and the check that every access lies inside one of them."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.buffers = sorted((b for b in buffers if b.nbytes > 0), key=lambda b: b.base)
        self.starts = [b.base for b in self.buffers]
        self.ends = [b.base + b.nbytes for b in self.buffers]
        for left, right in zip(self.buffers, self.buffers[1:], strict=False):
            if left.base + left.nbytes > right.base and left.base != right.base:
                raise UsageError(f"buffers {left.name!r} and {right.name!r} overlap")
        self._starts, self._ends = np.array(self.starts, I64), np.array(self.ends, I64)

    def at(self, address: int) -> Buffer | None:
        """The buffer that holds an address."""
        place = bisect_right(self.starts, address) - 1
        return self.buffers[place] if place >= 0 and address < self.ends[place] else None

    def named(self, name: str) -> Buffer:
        """The buffer called `name`."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise UsageError(f"no buffer {name!r}; there are {', '.join(b.name for b in self.buffers) or 'none'}")

    def check(self, request: Request, alignment: int | None = None) -> None:
        """Raise OutOfBounds or Misaligned, naming buffer, address and lane, unless every element is inside a buffer."""
        address, size = request.address, request.size
        if not len(address):
            return
        need = alignment or min(size, 4)
        if need > 1 and int(np.bitwise_or.reduce(address)) & (need - 1):
            self._misaligned(request, need)
        low, high = int(address.min()), int(address.max())
        place = bisect_right(self.starts, low) - 1
        if place >= 0 and high + size <= self.ends[place]:
            return
        if not self.starts:
            self._outside(request, 0)
        places = np.searchsorted(self._starts, address, "right") - 1
        bad = (places < 0) | (address + size > self._ends[np.maximum(places, 0)])
        if bad.any():
            self._outside(request, int(np.argmax(bad)))

    def _misaligned(self, request: Request, need: int) -> None:
        element = int(np.argmax((request.address & (need - 1)) != 0))
        address = int(request.address[element])
        raise Misaligned(
            f"address {address:#x} ({self.describe(address)}) is not a multiple of {need} bytes",
            hint=f"align the pointer to {need} bytes",
            address=address, alignment_bytes=need, **request.place(element),
        )  # fmt: skip

    def _outside(self, request: Request, element: int) -> None:
        address = int(request.address[element])
        nearest = self.nearest(address)
        raise OutOfBounds(
            f"address {address:#x}, {request.size} bytes, is {self.describe(address)}",
            hint="bound the index, or pass a buffer that is large enough",
            address=address, size_bytes=request.size, buffer=nearest.name if nearest else None,
            **request.place(element), )  # fmt: skip

    def nearest(self, address: int) -> Buffer | None:
        """The buffer that an address lies in or closest to."""
        return min(
            self.buffers,
            key=lambda b: 0 if b.base <= address < b.base + b.nbytes else min(
                abs(address - b.base), abs(address - b.base - b.nbytes) + 1),
            default=None,
        )  # fmt: skip

    def describe(self, address: int) -> str:
        """Where an address is, in words: inside a buffer, or how far from the nearest."""
        buffer = self.nearest(address)
        if buffer is None:
            return "outside every buffer: none is registered"
        past = address - buffer.base
        if 0 <= past < buffer.nbytes:
            return f"at byte {past} of buffer {buffer.name!r} ({buffer.nbytes} bytes)"
        where = f"{past - buffer.nbytes} bytes past the end" if past > 0 else f"{-past} bytes before the start"
        return f"outside every buffer, {where} of {buffer.name!r} ({buffer.nbytes} bytes)"


class PoisonMap:
    """Never-written bytes of chosen buffers: a byte map for each, dropped once everything in it was written."""

    def __init__(self) -> None:
        self.maps: dict[Buffer, np.ndarray] = {}

    def poison(self, buffer: Buffer) -> None:
        """Mark every byte of a buffer never-written."""
        self.maps[buffer] = np.full(buffer.nbytes, 0xFF, U8)

    def read(self, address: np.ndarray, size: int) -> np.ndarray | None:
        """Never-written bits, uint32 [N, words], or None."""
        result: np.ndarray | None = None
        for buffer, poisoned in self.maps.items():
            inside = (address >= buffer.base) & (address < buffer.base + buffer.nbytes)
            if not inside.any():
                continue
            if result is None:
                result = np.zeros((len(address), max(size, 4)), U8)
            index = (address[inside] - buffer.base)[:, None] + np.arange(size)
            part = np.zeros((len(index), max(size, 4)), U8)
            part[:, :size] = poisoned[np.minimum(index, buffer.nbytes - 1)]
            result[inside] = part
        return None if result is None or not result.any() else result.view(U32)

    def written(self, address: np.ndarray, size: int) -> None:
        """Clear the marks of bytes that are stored to."""
        for buffer in list(self.maps):
            inside = (address >= buffer.base) & (address < buffer.base + buffer.nbytes)
            if inside.any():
                index = (address[inside] - buffer.base)[:, None] + np.arange(size)
                poisoned = self.maps[buffer]
                poisoned[np.minimum(index, buffer.nbytes - 1)] = 0
                if not poisoned.any():
                    del self.maps[buffer]


class PlainMemory:
    """Coherent memory: every access acts on host bytes at once; cache bits and cache control change nothing."""

    wants_waits = False
    wants_turns = False

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.table = BufferTable(buffers)
        self.host = host_bytes()
        self.poisoned = PoisonMap()

    def poison(self, name: str) -> None:
        """Mark a buffer never-written: reading it before a store taints what is read."""
        self.poisoned.poison(self.table.named(name))

    def load(self, request: Request) -> Loaded:
        """Bytes at the addresses, after the bounds check."""
        self.table.check(request)
        address, size = request.address, request.size
        taint = self.poisoned.read(address, size) if self.poisoned.maps else None
        return self.host.read(address, size), taint

    def store(self, request: Request, data: np.ndarray) -> None:
        """Bytes to the addresses, after the bounds check."""
        self.table.check(request)
        if len(request.address):
            self.host.write(request.address, request.size, data)
            if self.poisoned.maps:
                self.poisoned.written(request.address, request.size)

    def atomic(self, request: Request, operation: str, data: np.ndarray, returns: bool) -> Loaded:
        """Read, modify, write, one element after another."""
        self.table.check(request, alignment=request.size)
        address, size = request.address, request.size
        taint = self.poisoned.read(address, size) if self.poisoned.maps else None
        old = apply_atomic(self.host, operation, address, size, data)
        if self.poisoned.maps:
            self.poisoned.written(address, size)
        return old, taint

    def writeback(self, request: Request) -> None:
        """Nothing is held back."""

    def invalidate(self, request: Request) -> None:
        """Nothing is cached."""

    def wait(self, request: Request, vmcnt: int | None, lgkmcnt: int | None) -> None:
        """Nothing is outstanding."""

    def turn(self, clock: int) -> None:
        """Nothing happens between turns."""

    def stalled(self, polls: Sequence[Poll]) -> IsaFault | None:
        """Coherent memory has no explanation of its own."""
        return None

    def started(self, launch: LaunchState) -> None:
        """Nothing is cached."""

    def finished(self, launch: LaunchState) -> None:
        """Nothing is held back."""
