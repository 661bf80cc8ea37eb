"""The one measuring loop: arms in shuffled blocks, paired, with an A/A control, until narrow enough or out of budget.

It knows nothing of devices: an arm is a function that gives one sample, a clock is injected. Every sample is kept, in
order of taking. Ctrl-C ends it after the sample in hand and keeps every whole block; what was measured before in
another process is gone on with, in the order that one process would have taken.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments.statistics import MIN_PAIRS, Estimate, enough, ratio

CONTROL = "A/A control"  # the first arm, measured a second time in every block
INTERRUPTED = "interrupted"
SAME_PRESS_S = 1.0

Arms = Mapping[str, Callable[[], float]]


@dataclass(frozen=True)
class Plan:
    """How to measure: `warmups` samples an arm are taken first and kept apart; blocks until an interval is narrow."""

    seed: int
    warmups: int = 3
    min_blocks: int = 20
    max_blocks: int = 400
    half_width: float = 0.005
    budget_s: float = 60.0


@dataclass(frozen=True)
class Measured:
    """All samples by arm, one a block and in block order, so that equal indices are pairs; `order` is what ran when.

    `sittings` are the numbers of blocks that were there when each process began; `spent_s` is theirs together.
    """

    seed: int
    samples: Mapping[str, tuple[float, ...]]
    warmups: Mapping[str, tuple[float, ...]]
    order: tuple[tuple[str, ...], ...]
    stopped: str
    notes: tuple[str, ...] = field(default=())
    sittings: tuple[int, ...] = (0,)
    spent_s: float = 0.0

    def against_first(self, arm: str) -> Estimate:
        """How much longer `arm` takes than the first arm, pair by pair."""
        first = next(iter(self.samples))
        return ratio(self.samples[first], self.samples[arm], seed=self.seed)

    @property
    def control(self) -> Estimate:
        """The A/A ratio."""
        return self.against_first(CONTROL)

    @property
    def finished(self) -> bool:
        """Whether it ended by its own rules, so that going on would add nothing."""
        return self.stopped not in (INTERRUPTED, UNDER_WAY)


UNDER_WAY = "under way"


def measure(
    arms: Arms,
    plan: Plan,
    *,
    now: Callable[[], float] = time.monotonic,
    progress: Callable[[int, float], None] = lambda blocks, left_s: None,
    earlier: Measured | None = None,
    keep: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Measure `arms` (name to a function that gives one sample in any one unit) against the first of them.

    Each block takes every arm once, and the first twice, in an order shuffled from the plan's seed; a block that was
    cut short is dropped whole, as it has no pairs. `earlier` is what another process measured of the same arms by the
    same plan: its blocks count, and its seconds. `keep` gets everything after each block. Raises UsageError for fewer
    than two arms, a taken name, or earlier blocks of other arms.
    """
    takers = _takers(arms)
    if earlier is not None:
        _require_same(earlier, takers, plan)
        if earlier.finished:
            return earlier
    found = _begin(arms, takers, plan, earlier)
    shuffle = random.Random(plan.seed)
    for _ in found.order:
        _shuffled(takers, shuffle)
    start = now() - found.spent_s
    try:
        with ctrl_c_held() as asked:
            while (why := _why_stop(found, plan, asked())) is None:
                names = _shuffled(takers, shuffle)
                taken = _block(names, takers, asked)
                if taken is None:
                    continue
                found = _with_block(found, names, taken, now() - start)
                keep(found)
                progress(len(found.order), max(0.0, plan.budget_s - found.spent_s))
    except KeyboardInterrupt:
        why = INTERRUPTED
    found = replace(found, stopped=why)
    if found.order:
        keep(found)
    return found


@contextmanager
def ctrl_c_held() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function True; one that comes a second later raises as usual.

    A sample moves memory to other homes: it is never cut in two. One press may arrive twice, from the terminal and from
    a parent that passes it on (torchrun, timeout). Python allows handlers in the main thread only; elsewhere Ctrl-C
    raises there and nothing is held here. Where one is inside another, both hear of it.
    """
    asked_at: float | None = None

    def hear(number: int, frame: Any) -> None:
        nonlocal asked_at
        if asked_at is not None and time.monotonic() - asked_at >= SAME_PRESS_S:
            raise KeyboardInterrupt
        asked_at = time.monotonic() if asked_at is None else asked_at
        if getattr(before, "is_ours", False):
            before(number, frame)  # type: ignore[operator, misc]

    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked_at is not None
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored from outside (a background job of a shell): it stays so
        yield lambda: asked_at is not None
        return
    hear.is_ours = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: asked_at is not None
    finally:
        signal.signal(signal.SIGINT, before)


def _takers(arms: Arms) -> dict[str, Callable[[], float]]:
    if len(arms) < 2 or CONTROL in arms:
        raise UsageError("a measurement needs two arms or more", hint=f"none of them called {CONTROL!r}")
    return {**arms, CONTROL: arms[next(iter(arms))]}


def require_whole(found: Measured) -> Measured:
    """The same, once its parts are those of one measurement; ValueError says which are not."""
    arms, times = set(found.samples), [*found.samples.values(), *found.warmups.values()]
    if not all(math.isfinite(value) and value > 0 for values in times for value in values):
        raise ValueError("a sample is no positive number")
    if any(len(values) != len(found.order) for values in found.samples.values()):
        raise ValueError("an arm has more or fewer samples than there are blocks")
    if any(len(block) != len(arms) or set(block) != arms for block in found.order):
        raise ValueError("a block does not have every arm once")
    if set(found.warmups) != arms - {CONTROL}:
        raise ValueError("warm-ups are not of the arms that were measured")
    if not all(0 <= number <= len(found.order) for number in found.sittings) or not 0 <= found.spent_s < math.inf:
        raise ValueError("sittings or the time spent are none of these blocks")
    if found.finished and not found.order:
        raise ValueError("it is done and has no block")
    return found


def _require_same(earlier: Measured, takers: Arms, plan: Plan) -> None:
    if list(earlier.samples) != list(takers) or earlier.seed != plan.seed:
        raise UsageError(
            f"the blocks measured earlier are of {', '.join(earlier.samples)} with seed {earlier.seed}, asked are"
            f" {', '.join(takers)} with seed {plan.seed}",
            hint="measure into another folder",
        )


def _begin(arms: Arms, takers: Arms, plan: Plan, earlier: Measured | None) -> Measured:
    """Warm-ups of this process, on top of what was measured earlier."""
    fresh = {name: tuple(taker() for _ in range(plan.warmups)) for name, taker in arms.items()}
    if earlier is None:
        return Measured(plan.seed, {name: () for name in takers}, fresh, (), UNDER_WAY)
    warmups = {name: (*earlier.warmups.get(name, ()), *fresh[name]) for name in arms}
    sittings = (*earlier.sittings, len(earlier.order))
    return replace(earlier, warmups=warmups, stopped=UNDER_WAY, sittings=sittings)


def _shuffled(takers: Arms, shuffle: random.Random) -> tuple[str, ...]:
    names = list(takers)
    shuffle.shuffle(names)
    return tuple(names)


def _block(names: Sequence[str], takers: Arms, asked: Callable[[], bool]) -> dict[str, float] | None:
    taken = {}
    for name in names:
        if asked():
            return None
        taken[name] = takers[name]()
    return taken


def _with_block(found: Measured, names: tuple[str, ...], taken: Mapping[str, float], spent_s: float) -> Measured:
    samples = {name: (*values, taken[name]) for name, values in found.samples.items()}
    return replace(found, samples=samples, order=(*found.order, names), spent_s=spent_s)


def _why_stop(found: Measured, plan: Plan, asked: bool) -> str | None:
    """None while more blocks are wanted, else why not."""
    blocks = len(found.order)
    if asked:
        return INTERRUPTED
    if blocks >= plan.min_blocks and _narrow(found, plan):
        return f"every interval is within {plan.half_width * 100:.1f} %"
    if found.spent_s > plan.budget_s and blocks >= MIN_PAIRS:
        return f"the budget of {plan.budget_s:g} s is spent"
    return f"{plan.max_blocks} blocks, the most allowed" if blocks >= plan.max_blocks else None


def _narrow(found: Measured, plan: Plan) -> bool:
    # A look at every tenth block is enough: an interval costs more than a sample.
    if len(found.order) % 10:
        return False
    first = next(iter(found.samples))
    return all(
        enough(ratio(found.samples[first], values, seed=plan.seed), half_width=plan.half_width)
        for name, values in found.samples.items()
        if name != first
    )
