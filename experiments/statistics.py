"""From samples to words: median ratios with bootstrap intervals, drift, false alarms, and a verdict.

Intervals are percentile bootstrap intervals of a median. BCa is not used: event timers give tied samples, and BCa of a
median of tied samples is NaN (ten samples `10,11,11,11,12,11,10,11,12,11`; tried with scipy 1.17). No sample is ever
dropped: what outliers do is shown by a second estimate without the slowest, beside the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dieplace.errors import UsageError

LEVEL = 0.95
RESAMPLES = 2000
MIN_PAIRS = 5
# The widest interval around 1 that still says "no difference": beyond it, noise hides effects that matter here.
RESOLUTION = 0.05
CONTROL_LIMIT = 0.01
CLOCK_FLOOR = 0.9
TOO_NOISY = "too noisy to say, because "
METHOD = f"percentile bootstrap of the median, {LEVEL:.0%}, {RESAMPLES} resamples"

Samples = Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """A median or ratio with its interval; `low` and `high` are None, with `why`, where there is none."""

    value: float
    low: float | None
    high: float | None
    count: int
    method: str = METHOD
    why: str | None = None

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width, as a share of the value."""
        if self.low is None or self.high is None or not self.value:
            return None
        return (self.high - self.low) / 2 / abs(self.value)


def median(samples: Samples, *, seed: int) -> Estimate:
    """Median of samples with its interval."""
    return _bootstrap(_checked(samples), seed)


def ratio(base: Samples, other: Samples, *, seed: int, paired: bool = True) -> Estimate:
    """How much longer `other` takes than `base`: the median of other / base, pair by pair; 1.28 is 28 % longer.

    Paired samples stand side by side in order. Unpaired ones give the ratio of the medians, both resampled.
    """
    first, second = _checked(base), _checked(other)
    if (first <= 0).any():
        raise UsageError("a base sample is zero or negative", hint="times must be positive")
    if not paired:
        return _bootstrap_unpaired(first, second, seed)
    if len(first) != len(second):
        raise UsageError(f"{len(first)} samples do not pair with {len(second)}", hint="give pairs, or paired=False")
    return _bootstrap(second / first, seed)


@dataclass(frozen=True)
class Drift:
    """Whether samples move with their order, and whether the first block differs from the rest; told in `words`."""

    found: bool
    p_value: float
    over_run: float  # share of the median by which the fitted line moves from first to last sample
    first_block: float  # median of the first block over the median of the rest
    first_block_found: bool
    words: str


def drift(samples: Samples, *, block: int = 5, alpha: float = 0.01) -> Drift:
    """Rank correlation of samples with their order (Kendall), and the first `block` against the rest (Mann-Whitney)."""
    values = _checked(samples)
    if len(values) < 2 * block or np.ptp(values) == 0:
        return Drift(False, 1.0, 0.0, 1.0, False, "no drift: too few or equal samples")
    if not np.median(values) or not np.median(values[block:]):
        return Drift(False, 1.0, 0.0, 1.0, False, "no drift can be told: the median is zero")
    from scipy import stats  # half a second of imports, which what only reads runs has no use for

    order = np.arange(len(values))
    p_value = float(stats.kendalltau(order, values).pvalue)
    line = stats.theilslopes(values, order)
    over_run = float(line.slope) * (len(values) - 1) / float(np.median(values))
    first = float(np.median(values[:block]) / np.median(values[block:]))
    first_p = float(stats.mannwhitneyu(values[:block], values[block:]).pvalue)
    found, first_found = p_value < alpha, first_p < alpha
    said = []
    if found:
        said.append(f"samples drift by {over_run * 100:+.1f} % over the run")
    if first_found:
        said.append(f"the first {block} samples are {(first - 1) * 100:+.1f} % off the rest")
    return Drift(found, p_value, over_run, first, first_found, "; ".join(said) or "no drift")


def without_slowest(samples: Samples, share: float = 0.01) -> list[float]:
    """The samples but the slowest `share` (at least one of 20 or more), in order: a second look, never the first."""
    values = [float(s) for s in _checked(samples)]
    drop = max(1, int(len(values) * share)) if len(values) >= 20 else 0
    slowest = set(sorted(range(len(values)), key=lambda i: values[i])[len(values) - drop :])
    return [value for index, value in enumerate(values) if index not in slowest]


@dataclass(frozen=True)
class Verdict:
    """`kind` is `slower`, `faster`, `no difference` or `too noisy`; `words` is the sentence that is printed."""

    kind: str
    words: str
    estimate: Estimate


def verdict(
    found: Estimate,
    *,
    control: Estimate | None = None,
    clock_share: float | None = None,
    resolution: float = RESOLUTION,
) -> Verdict:
    """Put a ratio into words.

    `control` is the A/A ratio of the same run: what its interval lies off 1 is no effect of an arm. Where that is more
    than 1 %, or clocks ran at less than 90 % of the most right after the work (`clock_share`), nothing is concluded;
    all samples stay in the run.
    """
    why = _too_noisy(found, control, clock_share)
    if why is not None:
        return Verdict("too noisy", TOO_NOISY + why, found)
    low, high = float(found.low or 0.0), float(found.high or 0.0)
    off = max(0.0, _off(control))
    if low > 1.0 + off:
        return Verdict("slower", f"slower by {_percent(found.value - 1, low - 1, high - 1)}", found)
    if high < 1.0 - off:
        return Verdict("faster", f"faster by {_percent(1 - found.value, 1 - high, 1 - low)}", found)
    if low > 1.0 or high < 1.0:
        return Verdict("too noisy", f"{TOO_NOISY}{_twice(control)}, which is as much", found)
    most = max(1 - low, high - 1)
    if most > resolution:
        words = f"{TOO_NOISY}the interval reaches {most * 100:.1f} % from 1, more than {resolution * 100:.0f} %"
        return Verdict("too noisy", words, found)
    return Verdict("no difference", f"no difference larger than {most * 100:.1f} %", found)


def false_alarm_rate(base: Samples, again: Samples, *, seed: int, rounds: int = 200) -> float:
    """Share of random exchanges within A/A pairs that a verdict calls slower or faster: what noise alone gives."""
    first, second = _checked(base), _checked(again)
    if len(first) != len(second):
        raise UsageError(f"{len(first)} samples do not pair with {len(second)}")
    random = np.random.default_rng(seed)
    alarms = 0
    for number in range(rounds):
        swap = random.random(len(first)) < 0.5
        left, right = np.where(swap, second, first), np.where(swap, first, second)
        alarms += verdict(_bootstrap(right / left, seed + number, resamples=500)).kind in ("slower", "faster")
    return alarms / rounds


def enough(found: Estimate, *, half_width: float = 0.005) -> bool:
    """The stop rule: the interval is narrow enough."""
    return found.half_width is not None and found.half_width <= half_width


def _too_noisy(found: Estimate, control: Estimate | None, clock_share: float | None) -> str | None:
    if clock_share is not None and clock_share < CLOCK_FLOOR:
        return f"clocks at {clock_share * 100:.0f} %"
    if found.count < MIN_PAIRS:
        return f"there are only {found.count} samples"
    if found.low is None or found.high is None:
        return found.why or "there is no interval"
    return _twice(control) if _off(control) > CONTROL_LIMIT else None


def _off(control: Estimate | None) -> float:
    """How far from 1 the whole interval of an A/A ratio lies; not positive where it holds 1."""
    if control is None or control.low is None or control.high is None:
        return 0.0
    return max(control.low - 1, 1 - control.high)


def _twice(control: Estimate | None) -> str:
    return f"the same arm measured twice differs by {(control.value - 1 if control else 0.0) * 100:+.1f} %"


def _percent(value: float, low: float, high: float) -> str:
    return f"{value * 100:.1f} % [{low * 100:.1f}, {high * 100:.1f}]"


def _checked(samples: Samples) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise UsageError("there are no samples")
    if not np.isfinite(values).all():
        raise UsageError("a sample is not a finite number")
    return values


def _bootstrap(values: npt.NDArray[np.float64], seed: int, resamples: int = RESAMPLES) -> Estimate:
    middle = float(np.median(values))
    if len(values) < 2:
        return Estimate(middle, None, None, len(values), why="one sample has no interval")
    from scipy import stats

    found = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=resamples,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return _estimate(middle, float(found.low), float(found.high), len(values))


def _bootstrap_unpaired(base: npt.NDArray[np.float64], other: npt.NDArray[np.float64], seed: int) -> Estimate:
    middle = float(np.median(other) / np.median(base))
    count = min(len(base), len(other))
    if count < 2:
        return Estimate(middle, None, None, count, why="one sample has no interval")
    random = np.random.default_rng(seed)
    tops = np.median(random.choice(other, (RESAMPLES, len(other))), axis=1)
    bottoms = np.median(random.choice(base, (RESAMPLES, len(base))), axis=1)
    low, high = np.quantile(tops / bottoms, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return _estimate(middle, float(low), float(high), count)


def _estimate(value: float, low: float, high: float, count: int) -> Estimate:
    if math.isnan(low) or math.isnan(high):
        return Estimate(value, None, None, count, why="the interval is undefined")
    return Estimate(value, low, high, count)
