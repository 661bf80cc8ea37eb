"""weight-swap on devices: arms, the prediction on hand-made figures, and the rule for telling a penalty."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dieplace.errors import UsageError
from dieplace.experiments import weight_swap_live as live
from dieplace.experiments.harness import Plan, measure
from dieplace.experiments.statistics import Estimate
from dieplace.probing import Levels

GOOD = Levels(near=(690.0, 700.0, 720.0), far=(1990.0, 2000.0, 2050.0))
ONE_HASH = {"local": "ab12", "swapped": "ab12"}


def probed(cycles: list[float], asked_far: list[bool], calibration: Levels = GOOD) -> live.Probed:
    return live.judge(cycles, asked_far, calibration)


def test_arms_and_their_shares() -> None:
    assert [live.share_of(live.policy_of(a)) for a in ("local", "swapped", "interleave-3/8")] == [0.0, 1.0, 0.375]
    for word in ("swapped-kv_cache", "interleave-8/8", "interleave-9/8", ""):
        with pytest.raises(UsageError, match="no arm"):
            live.policy_of(word)


def test_the_prediction_by_hand() -> None:
    """67.5 MB at 375 GB/s take 180 us, at 4,500 GB/s 15 us: 165 us on top of 60."""
    assert live.predicted_us(60.0, 67.5e6, 4500.0, 375.0) == pytest.approx(225.0)


def test_the_second_prediction_by_hand() -> None:
    """Of 67.5 MB, 15 us near, a quarter far takes 45 us at 375 GB/s; the near rest of 11.25 us goes on meanwhile."""
    assert live.predicted_together_us(60.0, 67.5e6, 16.875e6, 4500.0, 375.0) == pytest.approx(60 - 15 + 45)
    whole, none = (live.predicted_together_us(60.0, 67.5e6, moved, 4500.0, 375.0) for moved in (67.5e6, 0.0))
    assert whole == pytest.approx(live.predicted_us(60.0, 67.5e6, 4500.0, 375.0)) and none == pytest.approx(60.0)
    # Little enough far that the near part is the longer one: 14.85 us of it, in place of 15.
    assert live.predicted_together_us(60.0, 67.5e6, 0.675e6, 4500.0, 375.0) == pytest.approx(59.85)


def test_a_miss_says_which_way_and_what_the_times_tell() -> None:
    """Of 225 us predicted: 240 is near enough; 300 means 67.5 MB in 255 us, 265 GB/s; at 180, 45 us were hidden."""
    given = (67.5e6, 4500.0, 375.0)
    assert live.why_missed(60.0, 240.0, *given) is None
    slow, hidden = live.why_missed(60.0, 300.0, *given), live.why_missed(60.0, 180.0, *given)
    assert "0.75 of measured" in str(slow) and "at 265 GB/s" in str(slow) and "gets 375" in str(slow)
    assert "1.25 of measured" in str(hidden) and "45.0 us of the far reads took no time" in str(hidden)


def test_a_window_in_the_wrong_place_is_found() -> None:
    assert probed([700, 705, 698], [False] * 3).agrees
    swapped = probed([2010, 2000, 1985], [True] * 3)
    assert swapped.agrees and swapped.far == 3 and swapped.far_cycles == 2000
    stayed = probed([2010, 702, 1985], [True] * 3)  # one object was not moved
    assert not stayed.agrees and stayed.wrong == 1
    mixed = probed([700, 2000, 700, 2000], [False, True, False, True])
    assert mixed.agrees and mixed.far == 2


def test_levels_that_touch_tell_nothing() -> None:
    noisy = Levels(near=(690.0, 2100.0), far=(1990.0, 2000.0))
    assert "cannot be told apart" in str(noisy.why_not)
    assert not probed([2000], [True], noisy).agrees
    assert "no clock" in str(Levels((0.0,), (0.0,)).why_not)


def test_a_penalty_needs_probed_weights_accounted_rest_cold_data_one_code_and_a_quiet_control() -> None:
    right = probed([2000.0], [True])
    good: dict[str, Any] = {
        "probed": right, "rest_evidence": "accounted", "cold": True, "hashes": ONE_HASH,
        "ratio": Estimate(1.28, 1.27, 1.29, 20), "control": Estimate(1.002, 0.999, 1.004, 20), "clock_share": 1.0,
    }  # fmt: skip
    assert live.no_penalty_because(**good) is None
    for change, words in (
        ({"probed": probed([700.0], [True])}, "1 of 1 windows"),
        ({"rest_evidence": "declared"}, "declared only"),
        ({"cold": False}, "warm"),
        ({"hashes": {"local": "ab12", "swapped": "cd34"}}, "same machine code"),
        ({"hashes": {"local": None, "swapped": None}}, "same machine code"),
        ({"control": Estimate(1.02, 1.015, 1.025, 20)}, "measured twice"),
        ({"control": None}, "measured twice"),
        ({"clock_share": 0.8}, "clocks at 80 %"),
        ({"ratio": Estimate(1.28, 1.27, 1.29, 4)}, "only 4 samples"),
        ({"ratio": Estimate(1.004, 1.001, 1.007, 20), "control": Estimate(1.006, 1.003, 1.009, 20)}, "as much"),
        ({"ratio": Estimate(1.0, 0.93, 1.08, 20)}, "from 1"),
    ):
        assert words in str(live.no_penalty_because(**{**good, **change})), change


@pytest.mark.parametrize("value", [0.9, 0.995, 1.0, 1.004, 1.012, 1.3])
@pytest.mark.parametrize("off", [0.0, 0.004, 0.012, -0.012])
@pytest.mark.parametrize("half", [0.001, 0.02, 0.09])
@pytest.mark.parametrize("share", [None, 0.85, 1.0])
def test_a_penalty_is_told_exactly_where_the_verdict_is_not_too_noisy(
    value: float, off: float, half: float, share: float | None
) -> None:
    """A median of A/A off by more than 1 % whose interval holds 1 is no reason by itself: the verdict's own rule."""
    ratio = Estimate(value, value - half, value + half, 20)
    control = Estimate(1 + off, 1 + off - 0.003, 1 + off + 0.003, 20)
    why = live.no_penalty_because(
        probed([2000.0], [True]), "accounted", True, ONE_HASH, ratio, control=control, clock_share=share
    )
    # The reference: the rules as statistics.verdict's own text tells them, written out here.
    lies_off = max(0.0, abs(off) - 0.003)
    clear = ratio.low > 1 + lies_off or ratio.high < 1 - lies_off  # type: ignore[operator]
    flat = ratio.low <= 1 <= ratio.high and max(1 - ratio.low, ratio.high - 1) <= 0.05  # type: ignore[operator]
    told = (share is None or share >= 0.9) and lies_off <= 0.01 and (clear or flat)
    assert (why is None) == told, why


def test_quantities_hold_the_ratio_the_prediction_and_the_refusal() -> None:
    draw = random.Random(4)
    arms = {
        "local": lambda: 60_000 * draw.lognormvariate(0, 0.003),
        "swapped": lambda: 225_000 * draw.lognormvariate(0, 0.003),
    }
    found = measure(arms, Plan(seed=1, min_blocks=20, max_blocks=20))
    kept = live.quantities("swapped", found, moved_bytes=67.5e6, rates=(4500.0, 375.0), refused=None)
    assert kept["penalty"].value == pytest.approx(2.75, rel=0.02) and kept["penalty"].low is not None
    assert kept["predicted_over_measured"].value == pytest.approx(1, abs=0.02)
    assert {name: q.origin for name, q in kept.items() if name.startswith("predicted")} == {
        "predicted_us": "modelled", "predicted_over_measured": "modelled"
    }  # fmt: skip
    assert kept["layer_us"].value == pytest.approx(225, rel=0.01) and len(kept["layer_us"].samples) == 20
    refused = live.quantities("swapped", found, moved_bytes=67.5e6, rates=(4500.0, 375.0), refused="warm")
    assert refused["penalty"].value is None and refused["penalty"].why == "warm"
    assert live.quantities("local", found, moved_bytes=0, rates=(1, 1), refused=None)["time_over_local"].value == (
        pytest.approx(1, abs=0.01)
    )
