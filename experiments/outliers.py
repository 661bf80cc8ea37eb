"""One card among many: its median against the median of all cards, with an interval, and whether it is an outlier.

The rule has two parts. The modified z-score of B. Iglewicz and D. C. Hoaglin, *How to Detect and Handle Outliers*
(ASQC, 1993), 0.6745 x (value - median) / MAD over 3.5, says that a card stands off the others' own spread; the median
and the MAD stay good with up to half of the cards bad. With few cards the MAD is often small by chance, so that the
score alone names a card in a fifth of noise-only runs of four (counted in `tests/unit/test_outliers.py`): a card
must also be off by its whole interval and by MIN_SHARE, which is our choice of what is worth a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dieplace.errors import UsageError
from dieplace.experiments.statistics import LEVEL, RESAMPLES, Estimate, Samples

MIN_CARDS = 4
SCORE_LIMIT = 3.5
MIN_SHARE = 0.02
NORMAL = 0.6745  # the MAD of a standard normal distribution: the score is in its standard deviations
METHOD = f"percentile bootstrap of the medians of all cards together, {LEVEL:.0%}, {RESAMPLES} resamples"
RULE = (
    f"modified z-score (Iglewicz and Hoaglin 1993) over {SCORE_LIMIT:g}, and the whole {LEVEL:.0%} interval"
    f" {MIN_SHARE:.0%} or more from the median of all cards"
)
ALL_EQUAL = "more than half of the cards are equal: their MAD is 0"


@dataclass(frozen=True)
class Standing:
    """One card: the median of its samples, and its time over the median of all cards' times (over 1 is slower).

    `score` is None, with `score_why`, where no score can be had; `outlier` is None where fewer than MIN_CARDS cards
    were measured: of two or three none can be called the odd one.
    """

    value: float
    over_all: Estimate
    score: float | None
    score_why: str | None
    outlier: bool | None


def standings(samples: Mapping[str, Samples], *, seed: int, rates: bool = False) -> dict[str, Standing]:
    """Where each card stands by its samples, in one unit: times, or `rates` of which more is better.

    A card may have one sample (a modelled value): then there is no interval, and the value itself is judged.
    """
    taken = {card: _positive(card, values) for card, values in samples.items()}
    times = {card: 1 / values if rates else values for card, values in taken.items()}
    ratios = _over_all(times, seed)
    scores, why = _scores([ratio.value for ratio in ratios.values()])
    return {
        card: Standing(
            float(np.median(taken[card])),
            ratio,
            score,
            why,
            None if len(taken) < MIN_CARDS else _is_outlier(ratio, score, why),
        )
        for (card, ratio), score in zip(ratios.items(), scores, strict=True)
    }


def _is_outlier(ratio: Estimate, score: float | None, why: str | None) -> bool:
    far_off = why == ALL_EQUAL if score is None else abs(score) > SCORE_LIMIT
    low = ratio.value if ratio.low is None else ratio.low
    high = ratio.value if ratio.high is None else ratio.high
    return far_off and (low >= 1 + MIN_SHARE or high <= 1 - MIN_SHARE)


def _scores(ratios: list[float]) -> tuple[list[float | None], str | None]:
    if len(ratios) < MIN_CARDS:
        return [None] * len(ratios), f"an outlier needs {MIN_CARDS} cards or more, there are {len(ratios)}"
    off = np.asarray(ratios) - np.median(ratios)
    mad = float(np.median(np.abs(off)))
    if mad < 1e-12:  # equal but for rounding
        return [None] * len(ratios), ALL_EQUAL
    return [float(value) for value in NORMAL * off / mad], None


def _over_all(times: Mapping[str, npt.NDArray[np.float64]], seed: int) -> dict[str, Estimate]:
    """Each card's median over the median of them; all cards are resampled together, each from its own samples."""
    medians = np.array([np.median(values) for values in times.values()])
    ratios = medians / np.median(medians)
    counts = [len(values) for values in times.values()]
    if min(counts) < 2:
        why = "a single value has no interval"
        return {
            card: Estimate(float(ratio), None, None, count, METHOD, why)
            for card, ratio, count in zip(times, ratios, counts, strict=True)
        }
    random = np.random.default_rng(seed)
    drawn = np.stack([np.median(random.choice(values, (RESAMPLES, len(values))), axis=1) for values in times.values()])
    low, high = np.quantile(drawn / np.median(drawn, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return {
        card: Estimate(float(ratios[i]), float(low[i]), float(high[i]), counts[i], METHOD)
        for i, card in enumerate(times)
    }


def _positive(card: str, samples: Samples) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or (values <= 0).any():
        raise UsageError(f"{card} has no samples, or one that is not a positive number", hint="times are positive")
    return values
