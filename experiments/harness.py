"""The one measuring loop: arms in shuffled blocks, paired, with an A/A control, until narrow enough or out of budget.

It knows nothing of devices: an arm is a function that gives one sample, a clock is injected. Every sample is kept, in
order of taking. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dieplace.errors import UsageError
from dieplace.experiments.statistics import MIN_PAIRS, Estimate, enough, ratio

CONTROL = "A/A control"  # the first arm, measured a second time in every block


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
    """All samples by arm, one a block and in block order, so that equal indices are pairs; `order` is what ran when."""

    seed: int
    samples: Mapping[str, tuple[float, ...]]
    warmups: Mapping[str, tuple[float, ...]]
    order: tuple[tuple[str, ...], ...]
    stopped: str
    notes: tuple[str, ...] = field(default=())

    def against_first(self, arm: str) -> Estimate:
        """How much longer `arm` takes than the first arm, pair by pair."""
        first = next(iter(self.samples))
        return ratio(self.samples[first], self.samples[arm], seed=self.seed)

    @property
    def control(self) -> Estimate:
        """The A/A ratio."""
        return self.against_first(CONTROL)


def measure(
    arms: Mapping[str, Callable[[], float]],
    plan: Plan,
    *,
    now: Callable[[], float] = time.monotonic,
    progress: Callable[[int, float], None] = lambda blocks, left_s: None,
) -> Measured:
    """Measure `arms` (name to a function that gives one sample in any one unit) against the first of them.

    Each block takes every arm once, and the first twice, in an order shuffled from the plan's seed; a block that was
    cut short is dropped whole, as it has no pairs. Raises UsageError for fewer than two arms or a taken name.
    """
    if len(arms) < 2 or CONTROL in arms:
        raise UsageError("a measurement needs two arms or more", hint=f"none of them called {CONTROL!r}")
    first = next(iter(arms))
    takers = {**arms, CONTROL: arms[first]}
    shuffle = random.Random(plan.seed)
    warmups = {name: tuple(arms[name]() for _ in range(plan.warmups)) for name in arms}
    samples: dict[str, list[float]] = {name: [] for name in takers}
    order: list[tuple[str, ...]] = []
    start = now()
    stopped = f"{plan.max_blocks} blocks, the most allowed"
    try:
        while len(order) < plan.max_blocks:
            names = list(takers)
            shuffle.shuffle(names)
            taken = {name: takers[name]() for name in names}
            for name, sample in taken.items():
                samples[name].append(sample)
            order.append(tuple(names))
            spent = now() - start
            progress(len(order), max(0.0, plan.budget_s - spent))
            if len(order) >= plan.min_blocks and _narrow(samples, first, plan):
                stopped = f"every interval is within {plan.half_width:.1%}"
                break
            if spent > plan.budget_s and len(order) >= MIN_PAIRS:
                stopped = f"the budget of {plan.budget_s:g} s is spent"
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    kept = {name: tuple(values) for name, values in samples.items()}
    return Measured(plan.seed, kept, warmups, tuple(order), stopped)


def _narrow(samples: Mapping[str, list[float]], first: str, plan: Plan) -> bool:
    # A look at every tenth block is enough: an interval costs more than a sample.
    if len(samples[first]) % 10:
        return False
    return all(
        enough(ratio(samples[first], values, seed=plan.seed), half_width=plan.half_width)
        for name, values in samples.items()
        if name != first
    )
