"""The scheduler: which group of waves runs next, over all launches of a run.

Waves of one launch at the same block form a cohort. Unseeded, the cohort with the lowest (turn, block) runs, which
brings diverged waves together again; sleeping and long spinning end a turn, so nobody starves. With a seed, cohorts
are chosen and split at random and may be interrupted at every memory instruction whose order can matter.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from dieplace.emulator.isa.dispatch import Dispatch
from dieplace.emulator.isa.execute import execute
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.memory import MemoryPort
from dieplace.emulator.isa.program import Block
from dieplace.emulator.isa.stall import deadlock, explained, livelock
from dieplace.emulator.isa.state import Clock, Launch
from dieplace.emulator.isa.waits import require_waits

STEP_LIMIT = 50_000_000
TURN_BUDGET, POLL_COST = 64, 16
SPLIT_CHANCE = 0.8  # seeded only: how often a chosen cohort leaves some of its waves behind
QUIET_BLOCKS = 20_000  # blocks without a store, an atomic or an end after which the port is asked about the stall


@dataclass(frozen=True)
class LaunchStats:
    """Wave instructions of one launch: in all, by kind and by mnemonic."""

    kernel: str
    wave_instructions: int
    by_kind: dict[str, int]
    by_opcode: dict[str, int]


@dataclass(frozen=True)
class RunStats:
    """What a run did; `launches` in the order given, `seconds` of host time, `turns` of the scheduler."""

    launches: tuple[LaunchStats, ...]
    turns: int
    seconds: float

    @property
    def wave_instructions(self) -> int:
        """Wave instructions of all launches."""
        return sum(launch.wave_instructions for launch in self.launches)

    @property
    def by_kind(self) -> dict[str, int]:
        """Wave instructions by kind: valu, salu, mfma, lds, vmem_load, vmem_store, atomic, smem, branch, ..."""
        return dict(sum((Counter(launch.by_kind) for launch in self.launches), Counter()))

    @property
    def by_opcode(self) -> dict[str, int]:
        """Wave instructions by mnemonic."""
        return dict(sum((Counter(launch.by_opcode) for launch in self.launches), Counter()))


@dataclass
class Cohort:
    """Waves of one launch that are about to run the same block."""

    dispatch: Dispatch
    block: int
    waves: np.ndarray
    turn: int = 0
    spent: int = 0


@dataclass
class Machine:
    """A set of launches that share memory, run to their end by `run`."""

    launches: Sequence[Launch]
    memory: MemoryPort
    seed: int | None = None
    step_limit: int = STEP_LIMIT
    check_waits: bool = True
    count: int = 0
    quiet: int = 0
    turns: int = 0
    clock: Clock = field(default_factory=Clock)
    pool: dict[tuple[int, int], Cohort] = field(default_factory=dict)
    dispatches: dict[int, Dispatch] = field(default_factory=dict)
    totals: list[Counter[int]] = field(default_factory=list)

    def run(self) -> RunStats:
        """Run every launch to its end; faults name the instruction."""
        started = time.perf_counter()
        if self.check_waits:
            for launch in self.launches:
                require_waits(launch.program)
        self.choose = random.Random(self.seed) if self.seed is not None else None
        self.waiting = _streams(self.launches)
        self.totals = [Counter() for _ in self.launches]
        with np.errstate(all="ignore"), _disable_current_modes():
            for stream in list(self.waiting):
                self._begin_next(stream)
            while self.pool:
                self.turns += 1
                if self.memory.wants_turns:
                    self.memory.turn(self.clock.now)
                self._run(self._pick())
        if self.dispatches:
            raise deadlock(self.dispatches.values())
        return self._stats(time.perf_counter() - started)

    def _begin_next(self, stream: tuple[str, int]) -> None:
        """Start the next launch of a stream; a grid of no workgroups is over at once."""
        queue = self.waiting[stream]
        while queue:
            index = queue.pop(0)
            launch = self.launches[index]
            if launch.workgroups == 0:
                continue
            sharing = sum(name == launch.device.name for name, _ in self.waiting)
            dispatch = Dispatch(launch, index, self.memory, 1.0 / sharing)
            dispatch.st.clock, dispatch.st.choose = self.clock, self.choose
            self.memory.started(dispatch.st)
            self.dispatches[index] = dispatch
            self._enqueue(Cohort(dispatch, 0, dispatch.fill(np.arange(dispatch.st.slots)), self._now()))
            return

    def _now(self) -> int:
        return min((cohort.turn for cohort in self.pool.values()), default=0)

    def _enqueue(self, cohort: Cohort) -> None:
        """Put a cohort into the pool, together with waves that already wait at the same block."""
        key = (cohort.dispatch.st.index, cohort.block)
        other = self.pool.get(key)
        if other is None:
            self.pool[key] = cohort
            return
        other.waves = np.sort(np.concatenate((other.waves, cohort.waves)))
        other.turn, other.spent = min(other.turn, cohort.turn), max(other.spent, cohort.spent)

    def _pick(self) -> Cohort:
        if self.choose is None:
            key = min(self.pool, key=lambda k: (self.pool[k].turn, k[1], k[0]))
            return self.pool.pop(key)
        cohort = self.pool.pop(self.choose.choice(list(self.pool)))
        if len(cohort.waves) > 1 and self.choose.random() < SPLIT_CHANCE:
            share = self.choose.random()
            mine = np.array([self.choose.random() < share for _ in cohort.waves])
            if mine.any() and not mine.all():
                rest = Cohort(cohort.dispatch, cohort.block, cohort.waves[~mine], cohort.turn, cohort.spent)
                self._enqueue(rest)
                cohort.waves = cohort.waves[mine]
        return cohort

    def _run(self, cohort: Cohort) -> None:
        """Run a cohort until it diverges, waits, ends, or another should run."""
        dispatch = cohort.dispatch
        st = dispatch.st
        blocks, total = st.program.blocks, self.totals[st.index]
        g = dispatch.groups.group(cohort.waves)
        while True:
            block = blocks[cohort.block]
            execute(block, g)
            g.flush(block.rows, block.pairs)
            steps = len(block.steps)
            total[cohort.block] += g.n
            self.count += g.n * steps
            self.clock.now += 4 * steps
            if self.count > self.step_limit:
                self._enqueue(cohort)
                raise livelock(self.pool.values(), self.dispatches.values(), self.memory, self.step_limit)
            self.quiet = 0 if block.progresses else self.quiet + 1
            if self.quiet > QUIET_BLOCKS:
                self._ask_about_stall(cohort)
            if not self._advance(cohort, block, g):
                return

    def _ask_about_stall(self, cohort: Cohort) -> None:
        """Nothing was stored for long: the port may know why the waves that poll will never see their flag."""
        self.quiet = 0
        fault = explained([cohort, *self.pool.values()], self.memory)
        if fault is not None:
            raise fault

    def _advance(self, cohort: Cohort, block: Block, g: Group) -> bool:
        """Move a cohort past its block; False when it has gone back to the pool or is over."""
        ends = block.ends
        if ends == "":
            cohort.block += 1
            cohort.spent += POLL_COST if block.last.preemptible else 0
            return self._stays(cohort, block.yields)
        if ends == "branch":
            return self._branch(cohort, block, g)
        dispatch = cohort.dispatch
        if ends == "sleep":
            self._enqueue(Cohort(dispatch, cohort.block + 1, cohort.waves, cohort.turn + 1))
        elif ends == "barrier":
            for place, waves in dispatch.arrive(cohort.waves, cohort.block + 1):
                self._enqueue(Cohort(dispatch, place, waves, cohort.turn))
        else:
            self._end(cohort)
        return False

    def _branch(self, cohort: Cohort, block: Block, g: Group) -> bool:
        condition = block.last.taken
        if condition is not None:
            taken = np.asarray(condition(g))
            if not taken.all():
                if taken.any():
                    self._enqueue(Cohort(cohort.dispatch, block.target, cohort.waves[taken], *self._cost(cohort)))
                    self._enqueue(Cohort(cohort.dispatch, cohort.block + 1, cohort.waves[~taken], *self._cost(cohort)))
                    return False
                cohort.block += 1
                return self._stays(cohort, False)
        if block.target <= cohort.block:
            cohort.turn, cohort.spent = self._cost(cohort)
        cohort.block = block.target
        return self._stays(cohort, True)

    def _cost(self, cohort: Cohort) -> tuple[int, int]:
        spent = cohort.spent + 1
        return (cohort.turn + 1, 0) if spent > TURN_BUDGET else (cohort.turn, spent)

    def _stays(self, cohort: Cohort, may_stop: bool) -> bool:
        """Go on with the same cohort unless somebody waits at its block, is due first, or chance interrupts."""
        if not self.pool and (self.choose is None or len(cohort.waves) == 1):
            return True
        if self.choose is not None:
            stop = may_stop and self.choose.random() < 0.5
        else:
            ahead = (cohort.turn, cohort.block)
            stop = any((other.turn, other.block) < ahead for other in self.pool.values())
        if stop or (cohort.dispatch.st.index, cohort.block) in self.pool:
            self._enqueue(cohort)
            return False
        return True

    def _end(self, cohort: Cohort) -> None:
        dispatch = cohort.dispatch
        begun, released = dispatch.end(cohort.waves)
        if len(begun):
            self._enqueue(Cohort(dispatch, 0, begun, cohort.turn))
        for block, waves in released:
            self._enqueue(Cohort(dispatch, block, waves, cohort.turn))
        if dispatch.finished:
            launch = dispatch.launch
            self.memory.finished(dispatch.st)
            del self.dispatches[dispatch.st.index]
            self._begin_next((launch.device.name, launch.stream))

    def _stats(self, seconds: float) -> RunStats:
        found = tuple(_launch_stats(launch, total) for launch, total in zip(self.launches, self.totals, strict=True))
        return RunStats(found, self.turns, seconds)


def _launch_stats(launch: Launch, total: Counter[int]) -> LaunchStats:
    """Counts of one launch from how many waves ran each block."""
    kinds: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    for index, waves in total.items():
        for step in launch.program.blocks[index].steps:
            kinds[step.kind] += waves
            opcodes[step.inst.opcode] += waves
    return LaunchStats(launch.program.name, kinds.total(), dict(kinds), dict(opcodes))


def _streams(launches: Sequence[Launch]) -> dict[tuple[str, int], list[int]]:
    streams: dict[tuple[str, int], list[int]] = {}
    for index, launch in enumerate(launches):
        streams.setdefault((launch.device.name, launch.stream), []).append(index)
    return streams


def run(
    launches: Sequence[Launch],
    memory: MemoryPort,
    *,
    seed: int | None = None,
    step_limit: int = STEP_LIMIT,
    check_waits: bool = True,
) -> RunStats:
    """Run launches that share `memory` to their end; `seed` varies the interleaving and reproduces it.

    Launches of one (device, stream) run in order, others together. `step_limit` is in wave instructions; beyond it the
    run is a Livelock. Faults are subclasses of KernelFault and name instruction, line, buffer and wave. A program that
    uses a register before its load was waited for is refused (MissingWait) unless `check_waits` is off.
    """
    return Machine(launches, memory, seed, step_limit, check_waits).run()
