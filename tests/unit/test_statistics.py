"""Statistics against simulated samples whose truth is known; the noise is drawn here, not by the code under test."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dieplace.errors import UsageError
from dieplace.experiments.statistics import (
    Estimate,
    drift,
    enough,
    false_alarm_rate,
    median,
    ratio,
    verdict,
    without_slowest,
)

TIED = [10, 11, 11, 11, 12, 11, 10, 11, 12, 11]


def noisy(random: np.random.Generator, scale: float, count: int = 40, noise: float = 0.02) -> np.ndarray:
    """Times about 10 us with log-normal noise, on a timer of 10 ns steps."""
    return np.round(10_000 * scale * np.exp(random.normal(0, noise, count)) / 10) * 10


def test_tied_samples_have_an_interval_where_bca_has_none() -> None:
    import warnings

    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bca = stats.bootstrap((TIED,), np.median, method="BCa", vectorized=True, rng=np.random.default_rng(0))
    assert math.isnan(bca.confidence_interval.low)  # the fault that the method must survive
    found = median(TIED, seed=0)
    assert (found.value, found.low, found.high) == (11.0, 10.5, 11.5)
    assert "percentile" in found.method
    equal = median([5.0] * 30, seed=0)
    assert (equal.low, equal.high) == (5.0, 5.0)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(11)
    covered = 0
    for number in range(200):
        found = ratio(noisy(random, 1.0), noisy(random, 1.1), seed=number)
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.1 <= found.high
    assert covered >= 180  # 95 % of 200 is 190; the 1 in 1,000 lower bound of a binomial is 181


def test_same_build_against_itself_is_no_difference() -> None:
    """Case h9: 200 A/A comparisons with 2 % log-normal noise and 10 ns steps: at most 20 other verdicts."""
    random = np.random.default_rng(5)
    kinds = [verdict(ratio(noisy(random, 1.0), noisy(random, 1.0), seed=n)).kind for n in range(200)]
    assert sum(kind != "no difference" for kind in kinds) <= 20


def test_three_percent_is_found_with_an_interval() -> None:
    """Case h9: a true +3 %, 200 times: at least 180 found."""
    random = np.random.default_rng(6)
    found = [verdict(ratio(noisy(random, 1.0), noisy(random, 1.03), seed=n)) for n in range(200)]
    assert sum(v.kind == "slower" for v in found) >= 180
    assert all("[" in v.words for v in found if v.kind == "slower")


def test_words() -> None:
    assert verdict(Estimate(1.28, 1.26, 1.3, 40)).words == "slower by 28.0 % [26.0, 30.0]"
    assert verdict(Estimate(0.9, 0.88, 0.93, 40)).words == "faster by 10.0 % [7.0, 12.0]"
    assert verdict(Estimate(1.001, 0.99, 1.012, 40)).words == "no difference larger than 1.2 %"
    assert verdict(Estimate(1.0, 0.8, 1.3, 40)).kind == "too noisy"
    assert "only 3 samples" in verdict(Estimate(1.3, 1.2, 1.4, 3)).words
    assert verdict(ratio([1.0], [2.0], seed=0)).kind == "too noisy"


def test_low_clocks_keep_every_sample_and_conclude_nothing() -> None:
    """Case h7: clocks at 59 % throughout."""
    said = verdict(Estimate(1.28, 1.26, 1.3, 40), clock_share=0.59)
    assert said.words == "too noisy to say, because clocks at 59 %" and said.estimate.count == 40


def test_a_control_that_differs_forbids_a_conclusion() -> None:
    found, good, bad = Estimate(1.1, 1.08, 1.12, 40), Estimate(1.0, 0.995, 1.005, 40), Estimate(1.05, 1.04, 1.06, 40)
    assert verdict(found, control=good).kind == "slower"
    assert "measured twice differs by +5.0 %" in verdict(found, control=bad).words


def test_an_effect_is_more_than_what_the_same_arm_shows_twice() -> None:
    """The control's interval leaves 1 by 0.4 %: a difference of 0.3 % is none of the arm's, one of 0.6 % is."""
    off = {1: Estimate(1.006, 1.004, 1.008, 40), -1: Estimate(0.994, 0.992, 0.996, 40)}
    for control in off.values():
        for sign, kind in ((1, "slower"), (-1, "faster")):
            near, far = (
                Estimate(1 + sign * by, 1 + sign * by - 0.001, 1 + sign * by + 0.001, 40) for by in (0.004, 0.006)
            )
            assert verdict(near).kind == kind and verdict(far, control=control).kind == kind
            said = verdict(near, control=control)
            assert said.kind == "too noisy" and "measured twice differs by" in said.words


def test_drift_and_a_slow_first_block_are_named() -> None:
    random = np.random.default_rng(7)
    steady = noisy(random, 1.0, 100, 0.01)
    assert not drift(steady).found and not drift(steady).first_block_found
    rising = steady * np.linspace(1.0, 1.06, 100)
    assert drift(rising).found and drift(rising).over_run == pytest.approx(0.06, abs=0.015)
    cold = steady.copy()
    cold[:5] *= 1.3
    assert drift(cold).first_block_found and "first 5 samples" in drift(cold).words
    assert drift([5.0] * 50).words.startswith("no drift")
    alarms = sum(drift(noisy(random, 1.0, 60)).found for _ in range(200))
    assert alarms <= 8  # alpha 1 % of 200 is 2


def test_outliers_are_looked_at_beside_and_never_dropped() -> None:
    """Case h15: medians and intervals with and without the slowest 1 %."""
    samples = [100.0] * 99 + [2000.0]
    assert without_slowest(samples) == [100.0] * 99
    assert len(samples) == 100
    assert without_slowest([1.0, 2.0]) == [1.0, 2.0]
    assert without_slowest([3.0] * 150) == [3.0] * 149


def test_pairs_remove_what_both_arms_share() -> None:
    random = np.random.default_rng(8)
    wander = np.exp(np.cumsum(random.normal(0, 0.05, 60)))
    base, other = noisy(random, 1.0, 60, 0.002) * wander, noisy(random, 1.03, 60, 0.002) * wander
    paired, apart = ratio(base, other, seed=0), ratio(base, other, seed=0, paired=False)
    assert paired.half_width is not None and apart.half_width is not None
    assert verdict(paired).kind == "slower" and paired.half_width < apart.half_width / 10


def test_false_alarm_rate_of_noise_is_about_what_the_level_says() -> None:
    """95 % intervals: near 5 %, and not nothing, which would be intervals that are never left."""
    random = np.random.default_rng(9)
    rates = [false_alarm_rate(noisy(random, 1.0), noisy(random, 1.0), seed=n, rounds=100) for n in range(4)]
    assert 0.005 <= sum(rates) / len(rates) <= 0.12


def test_stop_rule_and_refusals() -> None:
    assert enough(Estimate(1.0, 0.996, 1.004, 40)) and not enough(Estimate(1.0, 0.98, 1.02, 40))
    assert not enough(Estimate(1.0, None, None, 1, why="x"))
    for wrong in ([], [math.nan], [1.0, math.inf]):
        with pytest.raises(UsageError):
            median(wrong, seed=0)
    with pytest.raises(UsageError, match="do not pair"):
        ratio([1.0, 2.0], [1.0], seed=0)
    with pytest.raises(UsageError, match="zero or negative"):
        ratio([0.0, 1.0], [1.0, 1.0], seed=0)


def test_no_drift_is_told_of_samples_around_zero() -> None:
    """A timer too coarse for its work reads 0 most of the time: a share of nothing is no number."""
    assert drift([0.0] * 12 + [5.0, 5.0]).words == "no drift can be told: the median is zero"
    assert drift([9.0] * 5 + [0.0] * 4 + [9.0] + [0.0] * 3).words == "no drift can be told: the median is zero"
