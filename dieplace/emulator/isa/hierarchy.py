"""The memory of a two-die card: a home die for every address, an L1 a CU and an L2 an XCD that can hold old lines.

Implements the interpreter's memory port by the rules of LLVM's AMDGPUUsage, "Memory Model GFX942" (gfx950 has no
section of its own). Where the rules leave room the worst legal behaviour is taken: a copy that may be used is used, a
store that may stay in its L2 stays there, until something in the program forbids it.

| access | vector L1 of the CU | L2 of the XCD |
| --- | --- | --- |
| load, no bits or sc0 | an old copy may be used | RW, CC: coherent with memory; NC: an old copy may be used; UC: none |
| load sc1 (agent) | loaded again | as above, but not older than stores of the same logical device |
| load sc0 sc1 (system) | loaded again | NC is loaded again |
| store, no bits, sc0, nt | written through, other CUs' copies get old | RW, NC: stays dirty; CC, UC: written through |
| store sc1 or sc0 sc1 | as above | written through; a write that reaches memory drops the line from L2s local to it |
| read-modify-write | dropped | done at memory |
| buffer_inv sc0 / sc1 | drops the CU's L1 | sc1: drops lines that are not local (NC) |
| buffer_wbl2 | | starts writing back what is dirty; done at the wave's `s_waitcnt vmcnt(0)`, not before |

A kernel starts with its device's L1s and non-local L2 lines dropped and ends with its dirty lines written back, as the
command processor does. With `delay_turns` every store takes up to that many scheduler turns to reach memory, unless the
wave waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.isa.atomics import apply_atomic
from dieplace.emulator.isa.faults import IsaFault
from dieplace.emulator.isa.hierarchy_caches import AGENT, Access, Caches, WriterOf
from dieplace.emulator.isa.hierarchy_lines import Lines, Writer
from dieplace.emulator.isa.hierarchy_map import RW, LineMap, MappedBuffer
from dieplace.emulator.isa.hierarchy_pending import Pending, PendingWork
from dieplace.emulator.isa.hierarchy_reads import careful_load, saw_flags
from dieplace.emulator.isa.hierarchy_watch import OldLoads, Watch
from dieplace.emulator.isa.memory import Buffer, BufferTable
from dieplace.emulator.isa.traffic import TrafficCounter

if TYPE_CHECKING:
    from dieplace.emulator.isa.memory import Loaded, Poll
    from dieplace.emulator.isa.request import Request

PATIENCE = 2000  # equal old answers to one polling wave before it is called stuck


class TwoDieMemory:
    """One run's memory; call `flush` after the run.

    `die_of` maps int64 addresses to dies (-1: none), as `EmulatedHBM.die_of` does; XCD x is on die x // `xcds_per_die`.
    `mtype_local` is the driver's parameter (RW, NC or CC) for the third arm, local but cached as if remote.
    """

    def __init__(
        self,
        buffers: Sequence[MappedBuffer],
        die_of: Callable[[np.ndarray], np.ndarray] | None = None,
        *,
        xcds: int = 8,
        xcds_per_die: int = 4,
        mtype_local: int = RW,
        delay_turns: int = 0,
        seed: int | None = None,
        patience: int = PATIENCE,
    ) -> None:
        self.map = LineMap(buffers, die_of, mtype_local=mtype_local, dies=-(-xcds // xcds_per_die))
        self.caches = Caches(self.map, xcds, xcds_per_die)
        self.watch = Watch(patience)
        self.traffic = TrafficCounter(self.map, xcds_per_die)
        self.pending = PendingWork(delay_turns, np.random.default_rng(seed))
        self.delay_turns = delay_turns
        self.wants_turns = delay_turns > 0
        self.table = BufferTable([Buffer(b.name, b.address, b.nbytes) for b in self.map.buffers])
        self._time = 0

    @property
    def wants_waits(self) -> bool:
        """Whether any store or write-back is outstanding, so that `s_waitcnt` matters."""
        return bool(self.pending)

    def poison(self, name: str) -> None:
        """Mark a buffer never-written: what is read of it before a store is tainted."""
        self.caches.poison.poison(self.table.named(name))

    # -- loads, stores, read-modify-writes -------------------------------------------------------------------------

    def load(self, request: Request) -> Loaded:
        """Data uint32[N, words] and never-written bits (None: all written)."""
        access = self._access(request)
        if access is None:
            return np.zeros((0, max(1, request.size // 4)), np.uint32), None
        caches = self.caches
        data = caches.host.read(request.address, request.size)
        taint = caches.poison.read(request.address, request.size) if caches.poison.maps else None
        self.traffic.count(access, written=False)
        if caches.lines.special and (access.place.straddles or caches.lines.marks[access.lines].any()):
            data, taint = careful_load(access, caches, self.watch, self.pending, data, taint)
        caches.hold(access, access.lines)
        if access.place.straddles:
            caches.hold(access, np.minimum(access.lines + 1, self.map.count - 1))
        return data, taint

    def store(self, request: Request, data: np.ndarray) -> None:
        """Store uint32[N, words]; below 4 bytes the low bytes of word 0."""
        access = self._access(request)
        if access is None:
            return
        caches, writer = self.caches, self._writer_of(request, access.scope)
        self.traffic.count(access, written=True)
        through = np.full(len(access.lines), access.scope >= AGENT)
        if access.scope < AGENT:  # CC and UC are written through whatever the scope
            through |= self.map.page_type[caches.die[access.xcd], access.lines // 32] > RW
        now = through & (self.delay_turns == 0)
        touched = [access.lines] + ([access.lines + 1] if access.place.straddles else [])
        for lines in (np.minimum(part, self.map.count - 1) for part in touched):
            caches.keep_others(access, lines, now, writer)
            caches.hide(lines[~now], request.launch.device.xcds)
        caches.host.write(request.address, request.size, data)
        if caches.poison.maps:
            caches.poison.written(request.address, request.size)
        if caches.lines.special:
            caches.own(access, ~now, _as_bytes(data, request.size), writer)
        if self.delay_turns:
            self.pending.store(access, through)
        if access.scope >= AGENT:
            caches.flag(access, writer, self.watch)

    def atomic(self, request: Request, operation: str, data: np.ndarray, returns: bool) -> Loaded:
        """Each element in turn, at memory; the old values, uint32[N, words]."""
        self.table.check(request, alignment=request.size)
        access = self._access(request)
        if access is None:
            return np.zeros((0, request.size // 4), np.uint32), None
        caches, writer = self.caches, self._writer_of(request, 2 + int(bool(request.inst.sc1)))
        self.traffic.count(access, written=False)
        self.traffic.count(access, written=True)
        for work in self.pending.own(request):
            self._perform(work)
        taint = caches.poison.read(request.address, request.size) if caches.poison.maps else None
        everywhere = np.ones(len(access.lines), bool)
        caches.keep_others(access, access.lines, everywhere, writer)
        old = apply_atomic(caches.host, operation, request.address, request.size, data)
        if caches.lines.special:
            caches.own(access, ~everywhere, _as_bytes(old, request.size), writer)
        for xcd, cu, line in {*zip(access.xcd.tolist(), access.cu.tolist(), access.lines.tolist(), strict=True)}:
            caches.lines.drop_l1(xcd, cu, line)
            caches.lines.drop_l2(xcd, line)
        saw_flags(access, caches, self.watch, np.zeros(len(old), bool))
        caches.flag(access, writer, self.watch)
        if caches.poison.maps:
            caches.poison.written(request.address, request.size)
        return old, taint

    # -- cache control, waits, time --------------------------------------------------------------------------------

    def writeback(self, request: Request) -> None:
        """`buffer_wbl2`: starts; it is done when the wave waits, or later by itself."""
        if request.inst.sc1 or request.inst.sc0:
            for wave in np.asarray(request.waves).tolist():
                self.pending.writeback(request, wave, int(request.launch.xcd[wave]))

    def invalidate(self, request: Request) -> None:
        """`buffer_inv`: sc0 or sc1 the L1 of each wave's CU; with sc1 also the non-local lines of its XCD's L2."""
        if not (request.inst.sc0 or request.inst.sc1):
            return
        waves = np.asarray(request.waves)
        xcd, cu = request.launch.xcd[waves], request.launch.cu[waves]
        for x, c in {*zip(xcd.tolist(), cu.tolist(), strict=True)}:
            self.caches.lines.forget_l1(x, c)
        for x in set(xcd.tolist()) if request.inst.sc1 else ():
            self.caches.drop_non_local(x)

    def wait(self, request: Request, vmcnt: int | None, lgkmcnt: int | None) -> None:
        """`s_waitcnt`: stores and write-backs that it waits for reach memory."""
        if vmcnt is not None and self.pending:
            for work in self.pending.waited(request, vmcnt):
                self._perform(work)

    def turn(self, clock: int) -> None:
        """One scheduler turn: delayed stores whose time has come reach memory."""
        for work in self.pending.turn():
            self._perform(work)

    def started(self, launch: Any) -> None:
        """A kernel starts: its device's L1s and non-local L2 lines are dropped; earlier stores have arrived."""
        for work in self.pending.of(launch.device.xcds):
            self._perform(work)
        for xcd in launch.device.xcds:
            self.caches.lines.forget_l1(xcd)
            self.caches.drop_non_local(xcd)

    def finished(self, launch: Any) -> None:
        """A kernel ended: everything dirty in its device's L2s is written back, with delays over the next turns."""
        xcds = tuple(launch.device.xcds)
        if self.delay_turns:
            for xcd in xcds:
                self.pending.kernel_end(launch, xcd)
            return
        self.pending.of(xcds)
        self.caches.reach_memory(self.caches.lines.rows_of(xcds), xcds, xcds)

    def flush(self) -> None:
        """After the run: memory already holds every newest byte, so all caches are simply emptied."""
        self.caches.lines = Lines(self.map, self.caches.lines.xcds)
        self.pending.clear()

    def stalled(self, polls: Sequence[Poll]) -> IsaFault | None:
        """A better reason than a step limit, when a polling instruction keeps loading old bytes."""
        for poll in polls:
            fault = self.watch.stalled(poll.request.launch.index, poll.line)
            if fault is not None:
                return fault
        return None

    @property
    def old_loads(self) -> tuple[OldLoads, ...]:
        """Every instruction that loaded old bytes, and why."""
        return self.watch.summary

    # -- inside ----------------------------------------------------------------------------------------------------

    def _access(self, r: Request) -> Access | None:
        if not len(r.address):
            return None
        self._time += 1
        self.pending.younger(r)
        place = self.map.locate(r.address, r.size)
        if place is None or int(np.bitwise_or.reduce(r.address)) & (min(r.size, 4) - 1):
            self.table.check(r)
            raise AssertionError("an access outside every buffer passed the bounds check")
        return Access.of(r, place)

    def _writer_of(self, r: Request, scope: int) -> WriterOf:
        launch, inst, time = r.launch, r.inst, self._time

        def writer(wave: int) -> Writer:
            workgroup = int(launch.workgroup[wave])
            return Writer(launch.index, workgroup, inst.line, inst.text, scope, bool(inst.nt), time)

        return writer

    def _perform(self, work: Pending) -> None:
        if work.lines is None:
            self.caches.reach_memory(self.caches.lines.rows_of((work.xcd,)), (work.xcd,), work.agent)
            return
        rows = self.caches.lines.slot[work.lines].astype(np.int64)
        mask = None if work.mask is None else work.mask[rows != 0]
        self.caches.reach_memory(rows[rows != 0], (work.xcd,), work.agent, mask)


def _as_bytes(data: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)[:, :size]
