"""The state of every cache line: who may hold a copy, which bytes are still in one L2 only, which copies are old.

Memory itself always holds the newest bytes; what an XCD or CU must *not* see yet, or any more, is kept apart:

- `held_l1`, `held_l2`: which CUs and XCDs have loaded a line, so may go on using their copy;
- hidden bytes: stored by one XCD and still dirty in its L2. Everybody else sees the bytes from before (`old`);
- an old copy: the line as one CU's L1 or one XCD's L2 (type NC) loaded it, made at the moment when it became old.

Data that nobody stores to costs two bit sets a load, which is why weights stream at nearly the plain speed. Caches are
as large as the hardware's: 32768 dirty lines an XCD (4 MB), 256 lines a CU (32 KB); beyond that the oldest go.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from dieplace.emulator.isa.hierarchy_map import LINE_BYTES, LineMap

HIDDEN, OLD_L2, OLD_L1, FLAG = 1, 2, 4, 8  # bits of `marks`
L2_LINES = 4 * 1024 * 1024 // LINE_BYTES
SIGNED = 1 << 16
L1_LINES = 32 * 1024 // LINE_BYTES


@dataclass(frozen=True)
class Writer:
    """Who stored: launch and workgroup, the instruction, and a running number of the memory operation."""

    launch: int
    workgroup: int
    line: int
    text: str
    scope: int
    nt: bool
    time: int

    @property
    def who(self) -> tuple[int, int]:
        """The workgroup over all launches of a run."""
        return self.launch, self.workgroup


@dataclass
class OldCopy:
    """One line as a cache loaded it: bytes uint8[128], never-written marks, and whose store made it old."""

    data: np.ndarray
    unwritten: np.ndarray | None
    writer: Writer
    same_agent: bool = False  # an agent-scope load of this logical device must load it again


class Lines:
    """All line state of one run. XCDs are physical ids 0 to `xcds` - 1; CUs are ids within their XCD."""

    def __init__(self, line_map: LineMap, xcds: int) -> None:
        self.map, self.xcds = line_map, xcds
        count = line_map.count
        self.held_l1 = np.zeros((xcds, count), np.uint32)
        self.held_l2 = np.zeros((xcds, count), np.uint8)
        self.marks = np.zeros(count, np.uint8)
        self.special = 0  # lines with any mark
        self.old_l2: dict[tuple[int, int], OldCopy] = {}  # (xcd, line)
        self.old_l1: dict[tuple[int, int, int], OldCopy] = {}  # (xcd, cu, line)
        self._copies_l1: Counter[int] = Counter()  # old copies of each line, over all CUs
        self._copies_l2: Counter[int] = Counter()
        self.flags: dict[int, Writer] = {}  # line -> last scoped store to it
        self.writers: dict[int, Writer] = {}  # line * 32 + dword -> last store there, of small stores (for messages)
        self.slot = np.zeros(count, np.int32)  # row of the hidden bytes; row 0 is none
        self.owner = np.zeros((1, LINE_BYTES), np.uint8)  # per byte: xcd + 1 that has it dirty, or 0
        self.old = np.zeros((1, LINE_BYTES), np.uint8)
        self.old_unwritten: np.ndarray | None = None
        self.line_of = np.zeros(1, np.int64)
        self.writer_of: list[Writer | None] = [None]
        self._free: list[int] = []

    # -- hidden bytes ----------------------------------------------------------------------------------------------

    def hide(self, lines: np.ndarray, bytes_now: np.ndarray, unwritten_now: np.ndarray | None) -> None:
        """Give rows to `lines` (distinct, without one), holding the bytes that others go on seeing."""
        if len(lines) > len(self._free):
            self._grow(len(lines) - len(self._free))
        rows = np.array([self._free.pop() for _ in range(len(lines))], np.int64)
        self.slot[lines] = rows
        self.old[rows] = bytes_now
        if unwritten_now is not None:
            if self.old_unwritten is None:
                self.old_unwritten = np.zeros(self.owner.shape, bool)
            self.old_unwritten[rows] = unwritten_now
        self.owner[rows] = 0
        self.line_of[rows] = lines
        for row in rows.tolist():
            self.writer_of[row] = None
        self.mark(lines, HIDDEN)

    def _grow(self, missing: int) -> None:
        have = len(self.owner)
        more = max(missing, have)
        self.owner = np.concatenate([self.owner, np.zeros((more, LINE_BYTES), np.uint8)])
        self.old = np.concatenate([self.old, np.zeros((more, LINE_BYTES), np.uint8)])
        if self.old_unwritten is not None:
            self.old_unwritten = np.concatenate([self.old_unwritten, np.zeros((more, LINE_BYTES), bool)])
        self.line_of = np.concatenate([self.line_of, np.zeros(more, np.int64)])
        self.writer_of += [None] * more
        self._free += range(have + more - 1, have - 1, -1)

    def release(self, rows: np.ndarray) -> None:
        """Give back rows that hide nothing any more."""
        lines = self.line_of[rows]
        self.slot[lines] = 0
        self._free += rows.tolist()
        self.unmark(lines, HIDDEN)

    def rows_of(self, xcds: tuple[int, ...]) -> np.ndarray:
        """Rows with a byte that is dirty in one of `xcds`, oldest line first."""
        if not self.hidden_rows:
            return np.empty(0, np.int64)
        return np.flatnonzero(owned_by(xcds)[self.owner].any(axis=1))

    @property
    def hidden_rows(self) -> int:
        """Rows in use."""
        return len(self.owner) - 1 - len(self._free)

    def sign(self, dwords: list[int], writer: Writer) -> None:
        """Remember who stored single dwords, so that a message names the store that is missed and not its neighbour."""
        if len(self.writers) > SIGNED:
            self.writers.clear()
        self.writers.update(dict.fromkeys(dwords, writer))

    # -- marks and old copies --------------------------------------------------------------------------------------

    def mark(self, lines: np.ndarray, bit: int) -> None:
        """Set a mark on distinct lines; accesses to marked lines take the careful road."""
        before = self.marks[lines]
        self.special += int(np.count_nonzero(before == 0))
        self.marks[lines] = before | bit

    def unmark(self, lines: np.ndarray, bit: int) -> None:
        """Clear a mark on distinct lines."""
        before = self.marks[lines]
        after = before & np.uint8(255 - bit)
        self.special -= int(np.count_nonzero((before != 0) & (after == 0)))
        self.marks[lines] = after

    def keep_l1(self, xcd: int, cu: int, line: int, copy: OldCopy) -> None:
        """A CU's L1 goes on holding this old copy."""
        self.old_l1[xcd, cu, line] = copy
        self._copies_l1[line] += 1
        self.mark(np.array([line]), OLD_L1)
        if len(self.old_l1) > L1_LINES * self.xcds * 32:
            self.drop_l1(*next(iter(self.old_l1)))

    def keep_l2(self, xcd: int, line: int, copy: OldCopy) -> None:
        """An XCD's L2 goes on holding this old copy."""
        self.old_l2[xcd, line] = copy
        self._copies_l2[line] += 1
        self.mark(np.array([line]), OLD_L2)
        if len(self.old_l2) > L2_LINES * self.xcds:
            self.drop_l2(*next(iter(self.old_l2)))

    def drop_l1(self, xcd: int, cu: int, line: int) -> None:
        """The CU loads the line again next time."""
        if self.old_l1.pop((xcd, cu, line), None) is not None and _one_less(self._copies_l1, line):
            self.unmark(np.array([line]), OLD_L1)
        self.held_l1[xcd, line] &= np.uint32(0xFFFFFFFF ^ (1 << cu))

    def drop_l2(self, xcd: int, line: int) -> None:
        """The XCD loads the line again next time."""
        if self.old_l2.pop((xcd, line), None) is not None and _one_less(self._copies_l2, line):
            self.unmark(np.array([line]), OLD_L2)
        self.held_l2[xcd, line] = 0

    def forget_l1(self, xcd: int, cu: int | None = None) -> None:
        """Invalidate one CU's L1, or those of every CU of the XCD."""
        for key in [k for k in self.old_l1 if k[0] == xcd and cu in (None, k[1])]:
            self.drop_l1(*key)
        self.held_l1[xcd] &= np.uint32(0 if cu is None else 0xFFFFFFFF ^ (1 << cu))

    def forget_l2(self, xcd: int, non_local: np.ndarray) -> None:
        """Invalidate the XCD's L2 lines for which `non_local` (bool by line) is set."""
        for key in [k for k in self.old_l2 if k[0] == xcd and non_local[k[1]]]:
            self.drop_l2(*key)
        self.held_l2[xcd][non_local] = 0


def owned_by(xcds: tuple[int, ...]) -> np.ndarray:
    """bool[256]: whether an owner byte names one of `xcds`."""
    table = np.zeros(256, bool)
    table[[x + 1 for x in xcds]] = True
    return table


def _one_less(copies: Counter[int], line: int) -> bool:
    copies[line] -= 1
    if copies[line] > 0:
        return False
    del copies[line]
    return True
