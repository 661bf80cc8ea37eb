"""The axis of bars: linear from zero, logarithmic and told so where values are far apart."""

from __future__ import annotations

import itertools
import re

import pytest

from dieplace.experiments.charts import Bar, bars
from dieplace.experiments.charts_draw import decades


def lengths(svg: str) -> list[float]:
    """Widths of the bars as drawn, in order."""
    return [float(w) for w in re.findall(r'<rect [^>]*width="([0-9.]+)" height="22', svg)]


def test_values_far_apart_can_be_told_apart_and_equal_ratios_are_equal_lengths() -> None:
    """700, 1,400 and 75,000 ns, as flags on two GPUs: on a linear axis the first two differ by 1 % of the width."""
    svg = bars([Bar(str(v), v, v, v) for v in (700.0, 1400.0, 2800.0, 75_000.0)], unit="ns", describe="x")
    assert "logarithmic axis" in svg
    first, second, third, last = lengths(svg)
    assert second - first == pytest.approx(third - second, abs=0.2) and second - first > 0.05 * last


def test_values_near_one_another_stay_on_an_axis_from_zero() -> None:
    svg = bars([Bar("a", 100.0), Bar("b", 1900.0)], unit="ns", describe="x")
    assert "logarithmic" not in svg
    first, second = lengths(svg)
    assert second / first == pytest.approx(19.0, rel=0.01)


def test_a_zero_stays_on_an_axis_from_zero() -> None:
    assert "logarithmic" not in bars([Bar("a", 0.0), Bar("b", 1900.0)], unit="ns", describe="x")


@pytest.mark.parametrize(("start", "end"), [(700.0, 75_000.0), (1.0, 21.0), (0.03, 0.9), (999.0, 1e6), (10.0, 1001.0)])
def test_ticks_hold_every_value_and_rise(start: float, end: float) -> None:
    ticks = decades(start, end)
    assert ticks[0] <= start and ticks[-1] >= end and len(ticks) >= 2
    assert all(b >= 2 * a * 0.999 for a, b in itertools.pairwise(ticks))
