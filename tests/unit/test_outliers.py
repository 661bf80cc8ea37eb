"""One card against all: the published rule on known numbers, planted outliers, and noise that must not give any."""

from __future__ import annotations

import statistics as plain

import numpy as np
import pytest

from dieplace.errors import UsageError
from dieplace.experiments import outliers
from dieplace.experiments.outliers import standings

SEEDS = 100


def _noisy(
    cards: int, seed: int, *, noise: float = 0.02, slow: int | None = None, by: float = 1.1
) -> dict[str, object]:
    random = np.random.default_rng(seed)
    return {f"gpu{i}": 100 * (by if i == slow else 1.0) * random.lognormal(0, noise, 30) for i in range(cards)}


def test_the_score_is_the_published_one() -> None:
    """Iglewicz and Hoaglin's formula by hand, with Python's own medians, on single values of ten cards."""
    values = [100.0, 101.5, 98.7, 99.2, 100.9, 102.3, 97.8, 100.4, 99.6, 131.0]
    ratios = [value / plain.median(values) for value in values]
    mad = plain.median([abs(ratio - plain.median(ratios)) for ratio in ratios])
    expected = [0.6745 * (ratio - plain.median(ratios)) / mad for ratio in ratios]
    found = standings({f"gpu{i}": [value] for i, value in enumerate(values)}, seed=1)
    assert [found[f"gpu{i}"].score for i in range(10)] == pytest.approx(expected)
    assert [name for name, standing in found.items() if standing.outlier] == ["gpu9"]


def test_a_planted_card_of_ten_percent_is_named_and_no_other_and_noise_names_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: dict[str, int] = dict.fromkeys(("found alone", "others named", "A/A named", "A/A score alone over 3.5"), 0)
    for seed in range(SEEDS):
        cards = 4 if seed % 2 else 8
        planted = standings(_noisy(cards, seed, slow=seed % cards), seed=seed)  # type: ignore[arg-type]
        named = [name for name, standing in planted.items() if standing.outlier]
        counts["found alone"] += named == [f"gpu{seed % cards}"]
        counts["others named"] += any(name != f"gpu{seed % cards}" for name in named)
        same = standings(_noisy(cards, 10_000 + seed), seed=seed)  # type: ignore[arg-type]
        counts["A/A named"] += any(standing.outlier for standing in same.values())
        counts["A/A score alone over 3.5"] += any(abs(s.score or 0) > outliers.SCORE_LIMIT for s in same.values())
    with capsys.disabled():
        print(f"\noutliers, {SEEDS} seeds, 4 and 8 cards, 30 samples a card, noise 2 %: {counts}")
    assert counts["found alone"] == SEEDS and counts["others named"] == 0 and counts["A/A named"] == 0
    assert counts["A/A score alone over 3.5"] >= 10  # why the score alone is not the rule


def test_intervals_hold_the_planted_truth_about_as_often_as_they_say() -> None:
    """19 of 20 in the long run; the median of 8 cards moves by a fraction of an interval."""
    held = 0
    for seed in range(SEEDS):
        ratio = standings(_noisy(8, seed, slow=3), seed=seed)["gpu3"].over_all  # type: ignore[arg-type]
        assert ratio.low is not None and ratio.high is not None
        held += ratio.low <= 1.1 <= ratio.high
    assert held >= 0.85 * SEEDS


def test_a_slow_rate_is_slower_not_faster() -> None:
    rates = {f"gpu{i}": [4000.0, 4010.0, 3990.0, 4005.0, 3995.0] for i in range(5)}
    rates["gpu2"] = [value / 1.1 for value in rates["gpu2"]]
    found = standings(rates, seed=1, rates=True)
    assert found["gpu2"].over_all.value == pytest.approx(1.1) and found["gpu2"].outlier
    assert found["gpu2"].value == pytest.approx(4000 / 1.1)  # told in its own unit


def test_of_fewer_than_four_cards_none_is_called_odd() -> None:
    found = standings(_noisy(3, 1, slow=0, by=2.0), seed=1)  # type: ignore[arg-type]
    assert all(standing.outlier is None and standing.score is None for standing in found.values())
    assert "needs 4 cards" in str(found["gpu0"].score_why)
    assert found["gpu0"].over_all.value == pytest.approx(2.0, rel=0.05)  # the spread is shown all the same


def test_equal_cards_and_one_that_differs() -> None:
    """Three of four equal: the MAD is 0 and no score exists; 1 % off is not worth a name, 5 % is."""
    near = standings({"a": [1.0], "b": [1.0], "c": [1.0], "d": [1.01]}, seed=1)
    assert near["d"].score is None and near["d"].score_why == outliers.ALL_EQUAL and near["d"].outlier is False
    far = standings({"a": [1.0], "b": [1.0], "c": [1.0], "d": [1.05]}, seed=1)
    assert [name for name, standing in far.items() if standing.outlier] == ["d"]


def test_tied_timer_samples_have_an_interval() -> None:
    """Case 1 of the public reports: BCa of a median gives NaN for these; the percentile interval does not."""
    tied = {f"gpu{i}": [10.0, 11, 11, 11, 12, 11, 10, 11, 12, 11] for i in range(4)}
    ratio = standings(tied, seed=1)["gpu0"].over_all
    assert ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 <= ratio.high


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_what_is_no_time_is_refused(samples: list[float]) -> None:
    with pytest.raises(UsageError, match="gpu1"):
        standings({"gpu0": [1.0], "gpu1": samples}, seed=1)
