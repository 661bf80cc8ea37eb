"""Which cache line an address is in, which die it lives on, and how each die's XCDs may cache it.

Cache types follow the driver: `kfd_svm.c` (9.5.0 cases) and `gmc_v9_0.c`. Local means on the XCD's own die. The type of
a line therefore depends on who reads it: a coarse buffer moved to the peer die changes from RW to NC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dieplace.errors import UsageError

LINE_BYTES = 128  # vector L1 and L2 line of CDNA 3 and 4 (AMD CDNA 4 white paper)
PAGE_BYTES = 4096  # the home of memory is a property of each 4 KiB page (FLEET measurement on MI350)
PAGE_LINES = PAGE_BYTES // LINE_BYTES
NC, RW, CC, UC = 0, 1, 2, 3  # page-table codes on gfx950 (gmc_v9_0.c)
TYPE_NAMES = ("NC", "RW", "CC", "UC")
HOST = -1  # home of memory that is on no die

_TYPES = {  # memory class: (on the local die, on the peer die)
    "coarse": (RW, NC),
    "fine": (RW, NC),  # the kernel ignores COHERENT on this branch
    "uncached": (CC, UC),  # the extended fine-grained pool
    "kfd-uncached": (UC, UC),
    "host": (NC, NC),  # host memory is NC from 9.5.0 on
}


@dataclass(frozen=True)
class MappedBuffer:
    """One buffer that kernels may touch: bytes from `address`, its role, and its HIP memory class."""

    name: str
    address: int
    nbytes: int
    role: str = "activation"
    memory_class: str = "coarse"


@dataclass(frozen=True)
class Place:
    """Where the elements of one access are: line ids of first byte, buffer index of each (or one for all)."""

    lines: np.ndarray  # int64[N]
    buffer: int | np.ndarray
    straddles: bool  # some element reaches into the next line


class LineMap:
    """Lines of all buffers under dense ids, 4 KiB pages kept whole; homes and cache types by page."""

    def __init__(
        self,
        buffers: Sequence[MappedBuffer],
        die_of: Callable[[np.ndarray], np.ndarray] | None,
        *,
        mtype_local: int = RW,
        dies: int = 2,
    ) -> None:
        unknown = [b.memory_class for b in buffers if b.memory_class not in _TYPES]
        if unknown:
            raise UsageError(f"no memory class {unknown[0]!r}", hint=f"one of {', '.join(_TYPES)}")
        self.buffers = tuple(sorted((b for b in buffers if b.nbytes > 0), key=lambda b: b.address))
        self.starts = np.array([b.address for b in self.buffers], np.int64)
        self.ends = np.array([b.address + b.nbytes for b in self.buffers], np.int64)
        pages = np.array(
            [(e - 1) // PAGE_BYTES - s // PAGE_BYTES + 1 for s, e in zip(self.starts, self.ends, strict=True)]
        )
        firsts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)
        self.pages = int(firsts[-1])
        self.first_page = firsts[:-1].tolist()  # of each buffer
        self.count = self.pages * PAGE_LINES
        # line id = (address >> 7) + shift[buffer]
        self.shift = firsts[:-1] * PAGE_LINES - (self.starts // PAGE_BYTES) * PAGE_LINES
        self.buffer_of_page = np.repeat(np.arange(len(self.buffers)), pages).astype(np.int32)
        page_address = (np.arange(self.pages) - firsts[self.buffer_of_page]) * PAGE_BYTES
        page_address += (self.starts // PAGE_BYTES * PAGE_BYTES)[self.buffer_of_page]
        # A block need not start on a page of its own: ask for an address that surely belongs to the buffer.
        asked = np.maximum(page_address, self.starts[self.buffer_of_page])
        home = die_of(asked) if die_of is not None else np.full(self.pages, HOST)
        self.page_home = np.asarray(home, np.int8)
        self._page_address = page_address
        self.page_type = np.stack([self._types(die, mtype_local) for die in range(dies)])
        self.any_uncached = bool((self.page_type == UC).any())

    def _types(self, die: int, mtype_local: int) -> np.ndarray:
        table = np.array([_TYPES[b.memory_class] for b in self.buffers], np.int8).reshape(-1, 2)
        local = np.where(table[:, 0] == RW, mtype_local, table[:, 0])
        index = self.buffer_of_page
        types = np.where(self.page_home == die, local[index], table[index, 1])
        return np.where(self.page_home == HOST, NC, types).astype(np.int8)

    def pages_of(self, buffer: int) -> int:
        """4 KiB pages that a buffer touches."""
        return [*self.first_page, self.pages][buffer + 1] - self.first_page[buffer]

    def homes_of(self, buffer: int) -> np.ndarray:
        """Home die of each of a buffer's pages."""
        return self.page_home[self.first_page[buffer] :][: self.pages_of(buffer)]

    def locate(self, address: np.ndarray, size: int) -> Place | None:
        """Lines and buffers of `address` (int64[N], N > 0); None when an element lies outside every buffer."""
        low, high = int(address.min()), int(address.max()) + size
        at = int(np.searchsorted(self.starts, low, side="right")) - 1
        straddles = bool(((address & (LINE_BYTES - 1)) > LINE_BYTES - size).any())
        if at >= 0 and high <= self.ends[at]:
            return Place((address >> 7) + self.shift[at], at, straddles)
        index = np.searchsorted(self.starts, address, side="right") - 1
        if (index < 0).any() or (address + size > self.ends[index]).any():
            return None
        return Place((address >> 7) + self.shift[index], index, straddles)

    def address_of(self, lines: np.ndarray) -> np.ndarray:
        """First byte of each line, int64."""
        return self._page_address[lines // PAGE_LINES] + (lines % PAGE_LINES) * LINE_BYTES

    def buffer_at(self, line: int) -> MappedBuffer:
        """The buffer that a line belongs to."""
        return self.buffers[int(self.buffer_of_page[line // PAGE_LINES])]

    def type_for(self, die: int, lines: np.ndarray) -> np.ndarray:
        """Cache type of lines as XCDs of `die` see them, int8."""
        return self.page_type[die, lines // PAGE_LINES]
