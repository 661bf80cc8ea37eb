"""What caches do to each other: copies that get old, lines that stay dirty, bytes that reach memory.

The rules are those of the table in `hierarchy.py`; this is their mechanism over `Lines`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dieplace.emulator.isa.flatbytes import host_bytes
from dieplace.emulator.isa.hierarchy_lines import FLAG, OLD_L1, OLD_L2, Lines, OldCopy, Writer, owned_by
from dieplace.emulator.isa.hierarchy_map import LINE_BYTES, NC, PAGE_LINES, UC, LineMap, Place
from dieplace.emulator.isa.memory import PoisonMap
from dieplace.emulator.isa.state import LANES

if TYPE_CHECKING:
    from dieplace.emulator.isa.hierarchy_watch import Watch
    from dieplace.emulator.isa.request import Request

DIRTY_ROWS = 8 * 32768  # dirty lines of eight 4 MB L2s; more are written back, oldest first
AGENT, SYSTEM = 2, 3
SMALL = 64  # bytes of a store that is remembered dword by dword: flags and packed words
_BYTES = np.arange(LINE_BYTES)


WriterOf = Callable[[int], Writer]  # wave slot -> who stores


@dataclass(frozen=True)
class Access:
    """One load or store as runs of equal line and wave: a coalesced 16-byte load has one run for eight lanes."""

    request: Request
    place: Place
    first: np.ndarray  # where each run begins, [runs]
    lines: np.ndarray  # line of each run
    waves: np.ndarray  # wave slot of each run
    xcd: np.ndarray
    cu: np.ndarray
    scope: int  # 0 wave, 1 workgroup, 2 agent, 3 system

    @classmethod
    def of(cls, r: Request, place: Place) -> Access:
        """The runs of a request."""
        lines = place.lines
        begins = np.empty(len(lines), bool)
        begins[0] = True
        np.not_equal(lines[1:], lines[:-1], out=begins[1:])
        if r.every_lane:  # 64 elements a wave: its waves need not be spelled out
            begins[::LANES] = True
            first = np.flatnonzero(begins)
            at = r.group.waves[first // LANES]
        else:
            waves = r.waves
            begins[1:] |= waves[1:] != waves[:-1]
            first = np.flatnonzero(begins)
            at = waves[first]
        # Read-modify-writes use sc0 for "return the old value", and scalar loads have no scope.
        scope = 0 if r.scalar else int(bool(r.inst.sc0)) + 2 * int(bool(r.inst.sc1))
        return cls(r, place, first, lines[first], at, r.launch.xcd[at], r.launch.cu[at], scope)

    @property
    def counts(self) -> np.ndarray:
        """Elements in each run."""
        return np.diff(np.append(self.first, len(self.request.address)))

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Line and offset of every byte of every element, both [N, size]."""
        offset = (self.request.address % LINE_BYTES)[:, None] + np.arange(self.request.size)
        return self.place.lines[:, None] + offset // LINE_BYTES, offset % LINE_BYTES

    def spans(self, runs: np.ndarray) -> list[tuple[int, slice]]:
        """Run number and its elements, for chosen runs."""
        ends = np.append(self.first[1:], len(self.request.address))
        return [(int(i), slice(int(self.first[i]), int(ends[i]))) for i in runs]


class Caches:
    """The caches of one run over memory that always holds the newest bytes."""

    def __init__(self, line_map: LineMap, xcds: int, xcds_per_die: int) -> None:
        self.map = line_map
        self.lines = Lines(line_map, xcds)
        self.host = host_bytes()
        self.poison = PoisonMap()
        self.die = np.arange(xcds) // xcds_per_die
        self._non_local: dict[int, np.ndarray] = {}

    def hold(self, a: Access, lines: np.ndarray) -> None:
        """A load leaves copies: in the CU's L1 unless it has agent or system scope, in the XCD's L2 unless UC."""
        flat = a.xcd * self.map.count + lines
        bit = np.left_shift(np.uint32(1), a.cu.astype(np.uint32))
        l1 = self.lines.held_l1.reshape(-1)
        if a.scope < AGENT:
            l1[flat] |= bit
            if not (l1[flat] & bit).all():  # several CUs of one XCD loaded one line: only the last bit was kept
                np.bitwise_or.at(l1, flat, bit)
        else:
            np.bitwise_and.at(l1, flat, ~bit)
        if self.map.any_uncached:
            flat = flat[self.map.page_type[self.die[a.xcd], lines // PAGE_LINES] != UC]
        self.lines.held_l2.reshape(-1)[flat] = 1

    def copy_for(self, scope: int, xcd: int, cu: int, line: int) -> tuple[str, OldCopy | None]:
        """The old copy that a load may use, and where it is; copies that its scope forbids are dropped."""
        if scope >= AGENT:
            self.lines.drop_l1(xcd, cu, line)
        elif (copy := self.lines.old_l1.get((xcd, cu, line))) is not None:
            return "L1", copy
        copy = self.lines.old_l2.get((xcd, line))
        if copy is not None and (scope == SYSTEM or (scope == AGENT and copy.same_agent)):
            self.lines.drop_l2(xcd, line)
            return "", None
        return "L2", copy

    # -- stores ----------------------------------------------------------------------------------------------------

    def keep_others(self, a: Access, lines: np.ndarray, visible: np.ndarray, writer: WriterOf) -> None:
        """Before a store changes `lines` (by run; `visible`: memory changes too): what others hold gets old."""
        bit = np.left_shift(np.uint32(1), a.cu.astype(np.uint32))
        held = (self.lines.held_l1[a.xcd, lines] & ~bit) != 0
        if visible.any():
            for other in range(self.lines.xcds):
                copies = (self.lines.held_l1[other, lines] != 0) | (self.lines.held_l2[other, lines] != 0)
                held |= copies & visible & (a.xcd != other)
        agent = a.request.launch.device.xcds
        for i in np.flatnonzero(held):
            who = writer(int(a.waves[i]))
            self._keep_cus(int(lines[i]), int(a.xcd[i]), who, but=int(a.cu[i]))
            if visible[i]:
                self._keep_xcds(int(lines[i]), int(a.xcd[i]), who, agent)

    def _keep_xcds(self, line: int, xcd: int, writer: Writer, agent: tuple[int, ...]) -> None:
        """Memory is about to change under `line`: NC copies get old, others are dropped by the write's probe."""
        for other in range(self.lines.xcds):
            if other == xcd or not (self.lines.held_l2[other, line] or self.lines.held_l1[other, line]):
                continue
            if self.map.page_type[self.die[other], line // PAGE_LINES] != NC:
                self._keep_cus(line, other, writer, but=None)  # L1s are not probed
                self.lines.held_l2[other, line] = 0
            elif (other, line) not in self.lines.old_l2:
                data, unwritten = self.view(other, line)
                self.lines.keep_l2(other, line, OldCopy(data, unwritten, writer, same_agent=other in agent))
            elif other in agent:
                self.lines.old_l2[other, line].same_agent = True

    def _keep_cus(self, line: int, xcd: int, writer: Writer, but: int | None) -> None:
        holders = int(self.lines.held_l1[xcd, line])
        if but is not None:
            holders &= ~(1 << but)
        if not holders:
            return
        data, unwritten = self.view(xcd, line)
        for cu in range(32):
            if holders >> cu & 1 and (xcd, cu, line) not in self.lines.old_l1:
                self.lines.keep_l1(xcd, cu, line, OldCopy(data.copy(), unwritten, writer))

    def view(self, xcd: int, line: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What the L2 of `xcd` gives for a line now: bytes uint8[128] and never-written marks."""
        copy = self.lines.old_l2.get((xcd, line))
        if copy is not None:
            return copy.data.copy(), copy.unwritten
        index = np.array([line])
        data, unwritten = self.whole_lines(index)[0], self.unwritten_lines(index)
        taint = None if unwritten is None else unwritten[0]
        row = int(self.lines.slot[line])
        if row:
            owner = self.lines.owner[row]
            hidden = (owner != 0) & (owner != xcd + 1)
            data[hidden] = self.lines.old[row][hidden]
            if self.lines.old_unwritten is not None:
                taint = np.zeros(LINE_BYTES, bool) if taint is None else taint
                taint[hidden] = self.lines.old_unwritten[row][hidden]
        return data, taint

    def hide(self, lines: np.ndarray, agent: tuple[int, ...]) -> None:
        """Before stores that stay dirty: others go on seeing what these lines hold now."""
        stay = np.unique(lines)
        stay = stay[self.lines.slot[stay] == 0]
        if not len(stay):
            return
        if self.lines.hidden_rows + len(stay) > DIRTY_ROWS:
            everyone = tuple(range(self.lines.xcds))
            rows = self.lines.rows_of(everyone)
            self.reach_memory(rows[: len(rows) // 2], everyone, agent)
        self.lines.hide(stay, self.whole_lines(stay), self.unwritten_lines(stay))

    def own(self, a: Access, stays: np.ndarray, raw: np.ndarray, writer: WriterOf) -> None:
        """After a store: whose its bytes are, and the storing CU's and XCD's own old copies get them."""
        line, offset = a.bytes()
        line = np.minimum(line, self.map.count - 1)
        rows = self.lines.slot[line]
        used = rows != 0
        if line.size <= SMALL:
            for e in range(len(line)):
                dwords = np.unique(line[e] * (LINE_BYTES // 4) + offset[e] // 4).tolist()
                self.lines.sign(dwords, writer(int(a.request.waves[e])))
        if used.any():
            owner = np.repeat(np.where(stays, a.xcd + 1, 0), a.counts).astype(np.uint8)
            self.lines.owner[rows[used], offset[used]] = np.broadcast_to(owner[:, None], rows.shape)[used]
            ends = (rows[:, 0], rows[:, -1]) if a.place.straddles else (rows[:, 0],)
            for side in ends:
                for row, e in zip(*(x.tolist() for x in np.unique(side, return_index=True)), strict=True):
                    if row and (line.size > SMALL or self.lines.writer_of[row] is None):
                        self.lines.writer_of[row] = writer(int(a.request.waves[e]))
        marked = np.flatnonzero(self.lines.marks[a.lines] & (OLD_L1 | OLD_L2))
        for i, span in a.spans(marked):
            at = (a.request.address[span] % LINE_BYTES)[:, None] + np.arange(a.request.size)
            inside = at < LINE_BYTES
            xcd, cu, first = int(a.xcd[i]), int(a.cu[i]), int(a.lines[i])
            for copy in (self.lines.old_l1.get((xcd, cu, first)), self.lines.old_l2.get((xcd, first))):
                if copy is not None:
                    copy.data[at[inside]] = raw[span][inside]
                    if copy.unwritten is not None:
                        copy.unwritten[at[inside]] = False

    def flag(self, a: Access, writer: WriterOf, watch: Watch) -> None:
        """A scoped store may be a flag: who sees its value has been promised the storing workgroup's earlier stores."""
        for line, wave in zip(a.lines[:1024].tolist(), a.waves[:1024].tolist(), strict=True):
            if line not in self.lines.flags:
                self.lines.mark(np.array([line]), FLAG)
            self.lines.flags[line] = writer(wave)
            watch.stored_flag(self.lines.flags[line], line)

    # -- bytes reach memory, caches are emptied --------------------------------------------------------------------

    def reach_memory(
        self, rows: np.ndarray, xcds: tuple[int, ...], agent: tuple[int, ...], mask: np.ndarray | None = None
    ) -> None:
        """Bytes of `rows` (and `mask`) that are dirty in `xcds` are written back."""
        if not len(rows):
            return
        lines = self.lines.line_of[rows]
        held = ((self.lines.held_l1[:, lines] != 0) | (self.lines.held_l2[:, lines] != 0)).any(axis=0)
        for i in np.flatnonzero(held):
            writer = self.lines.writer_of[int(rows[i])]
            assert writer is not None, "a dirty line has a writer"
            for xcd in (int(x) - 1 for x in np.unique(self.lines.owner[rows[i]]) if x and int(x) - 1 in xcds):
                self._keep_xcds(int(lines[i]), xcd, writer, agent)
        owner = self.lines.owner[rows]
        done = owned_by(xcds)[owner]
        owner[done if mask is None else done & mask] = 0
        self.lines.owner[rows] = owner
        self.lines.release(rows[~owner.any(axis=1)])

    def drop_non_local(self, xcd: int) -> None:
        """Invalidate the XCD's L2 lines that are not local to it."""
        die = int(self.die[xcd])
        if die not in self._non_local:
            self._non_local[die] = np.repeat(self.map.page_type[die] == NC, PAGE_LINES)
        self.lines.forget_l2(xcd, self._non_local[die])

    def whole_lines(self, lines: np.ndarray) -> np.ndarray:
        """Newest bytes of lines, uint8[N, 128]; a line never crosses a page, so its bytes are all mapped."""
        return self.host.read(self.map.address_of(lines), LINE_BYTES).view(np.uint8).reshape(len(lines), LINE_BYTES)

    def unwritten_lines(self, lines: np.ndarray) -> np.ndarray | None:
        """Never-written marks of lines, bool[N, 128], or None when nothing is poisoned."""
        if not self.poison.maps:
            return None
        each = (self.map.address_of(lines)[:, None] + _BYTES).reshape(-1)
        bits = self.poison.read(each, 1)
        return np.zeros((len(lines), LINE_BYTES), bool) if bits is None else (bits != 0).reshape(-1, LINE_BYTES)
