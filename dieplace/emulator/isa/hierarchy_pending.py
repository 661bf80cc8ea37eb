"""Memory operations that were issued and have not reached memory: write-backs, and stores when delays are asked for.

`s_waitcnt vmcnt(n)` lets the newest n vector memory operations of the wave be outstanding; older ones must be done. A
write-back counts in vmcnt like a store (LLVM pull request 178316 is about a wait for it that was optimised away).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.isa.hierarchy_map import LINE_BYTES

if TYPE_CHECKING:
    from dieplace.emulator.isa.hierarchy_caches import Access
    from dieplace.emulator.isa.request import Request

Key = tuple[int, int]  # launch, wave slot
NO_WAVE = -1


@dataclass(eq=False)
class Pending:
    """One outstanding operation of an XCD: bytes of `lines` by `mask`, or everything dirty in its L2 (`lines` None)."""

    xcd: int
    agent: tuple[int, ...]
    wave: Key
    lines: np.ndarray | None = None
    mask: np.ndarray | None = None
    due: int | None = None  # the turn at which it is done by itself
    younger: int = 0  # vector memory operations the wave has issued since
    waits: bool = True  # counted by vmcnt; a plain store is accepted by the L2 at once and stays dirty there
    done: bool = field(default=False)


class PendingWork:
    """All outstanding operations; true while there are any."""

    def __init__(self, delay_turns: int, rng: np.random.Generator) -> None:
        self._delay, self._rng = delay_turns, rng
        self._now = 0
        self._by_wave: defaultdict[Key, list[Pending]] = defaultdict(list)
        self._by_due: list[tuple[int, int, Pending]] = []
        self._number = count()

    def __bool__(self) -> bool:
        return bool(self._by_wave)

    def store(self, a: Access, through: np.ndarray) -> None:
        """Stores that reach memory later, one entry a wave; plain ones (not `through`) are not waited for."""
        line, offset = a.bytes()
        waves = a.request.waves
        for wave in np.unique(waves):
            mine = waves == wave
            lines, index = np.unique(line[mine], return_inverse=True)
            mask = np.zeros((len(lines), LINE_BYTES), bool)
            mask[index.reshape(-1), offset[mine].reshape(-1)] = True
            run = int(np.flatnonzero(a.waves == wave)[0])
            due = self._now + int(self._rng.integers(0, self._delay + 1))
            key, agent = (a.request.launch.index, int(wave)), a.request.launch.device.xcds
            self._add(Pending(int(a.xcd[run]), agent, key, lines, mask, due, waits=bool(through[run])))

    def writeback(self, r: Request, wave: int, xcd: int) -> None:
        """A write-back of the XCD's L2 that the wave started."""
        self.younger_wave((r.launch.index, wave))
        due = self._now + int(self._rng.integers(0, self._delay + 1)) if self._delay else None
        self._add(Pending(xcd, r.launch.device.xcds, (r.launch.index, wave), due=due))

    def _add(self, work: Pending) -> None:
        self._by_wave[work.wave].append(work)
        if work.due is not None:
            heapq.heappush(self._by_due, (work.due, next(self._number), work))

    def younger(self, r: Request) -> None:
        """The request's waves issued one more operation."""
        if self._by_wave:
            for wave in np.unique(np.asarray(r.waves)).tolist():
                self.younger_wave((r.launch.index, wave))

    def younger_wave(self, key: Key) -> None:
        """One wave issued one more operation."""
        for work in self._by_wave.get(key, ()):
            work.younger += 1

    def waited(self, r: Request, vmcnt: int) -> list[Pending]:
        """Take what `s_waitcnt vmcnt(n)` says is done for the request's waves."""
        taken: list[Pending] = []
        for wave in np.asarray(r.waves).tolist():
            key = (r.launch.index, wave)
            if key in self._by_wave:
                taken += self._take(key, lambda work: work.waits and work.younger >= vmcnt)
        return taken

    def own(self, r: Request) -> list[Pending]:
        """Take the stores of the request's waves: a read-modify-write at memory follows them."""
        taken: list[Pending] = []
        for wave in np.unique(np.asarray(r.waves)).tolist():
            if (r.launch.index, wave) in self._by_wave:
                taken += self._take((r.launch.index, wave), lambda work: work.waits and work.lines is not None)
        return taken

    def turn(self) -> list[Pending]:
        """One scheduler turn passed: take what is due."""
        self._now += 1
        taken = []
        while self._by_due and self._by_due[0][0] <= self._now:
            work = heapq.heappop(self._by_due)[2]
            if not work.done:
                taken += self._take(work.wave, lambda other, work=work: other is work)
        return taken

    def kernel_end(self, launch: Any, xcd: int) -> None:
        """The end-of-kernel write-back of one XCD, which takes its time like any other."""
        due = self._now + int(self._rng.integers(0, self._delay + 1))
        self._add(Pending(xcd, launch.device.xcds, (launch.index, NO_WAVE), due=due, waits=False))

    def of(self, xcds: tuple[int, ...]) -> list[Pending]:
        """Take everything outstanding of a device."""
        taken: list[Pending] = []
        for key in list(self._by_wave):
            taken += self._take(key, lambda work: work.xcd in xcds)
        return taken

    def clear(self) -> None:
        """Forget everything."""
        self._by_wave.clear()
        self._by_due.clear()

    def unfinished(self, xcd: int) -> bool:
        """Whether a wave of this XCD started a write-back that is not done."""
        return any(w.lines is None and w.waits and w.xcd == xcd for works in self._by_wave.values() for w in works)

    def will_arrive(self, line: int) -> bool:
        """Whether bytes of `line` reach memory by time alone."""
        return any(
            w.due is not None and (w.lines is None or line in w.lines)
            for works in self._by_wave.values()
            for w in works
        )

    def _take(self, key: Key, which: Any) -> list[Pending]:
        works = self._by_wave[key]
        taken = [work for work in works if which(work)]
        for work in taken:
            work.done = True
        left = [work for work in works if not work.done]
        if left:
            self._by_wave[key] = left
        else:
            del self._by_wave[key]
        return taken
