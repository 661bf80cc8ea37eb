"""One table of measured runs, and how numbers with an interval are written in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.experiments.charts import Bar
from dieplace.run import Point, Quantity, Run

Row = dict[str, Any]


@dataclass(frozen=True)
class LiveTable:
    """A title, columns of (key, header, format of numbers or None for text), and rows; `bars` have values in `unit`."""

    title: str
    columns: tuple[tuple[str, str, str | None], ...]
    rows: tuple[Row, ...]
    note: str = ""
    bars: tuple[Bar, ...] = ()
    unit: str = "us"


def points_of(runs: Sequence[Run]) -> list[tuple[Run, Point]]:
    """Every point with its run, in order."""
    return [(run, point) for run in runs for point in run.points]


def spread(name: str, quantity: Quantity | None) -> Row:
    """Value, low and high under `name`, `name_low` and `name_high`."""
    if quantity is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: quantity.value, f"{name}_low": quantity.low, f"{name}_high": quantity.high}


def ranged(quantity: Quantity | None, form: str) -> str | None:
    """`2.887 [2.879, 2.900]`; None where there is no value."""
    if quantity is None or quantity.value is None:
        return None
    text = form.format(quantity.value)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} [{form.format(quantity.low)}, {form.format(quantity.high)}]"


def digits(value: float) -> str:
    """A format that shows a number of any size with about four digits."""
    size = abs(value)
    return "{:,.0f}" if size >= 1000 else "{:.1f}" if size >= 100 else "{:.2f}" if size >= 10 else "{:.3f}"


def size_words(nbytes: int) -> str:
    """`1024 MiB` or `256 KiB`."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def arm_words(run: Run, point: Point, runs: Sequence[Run]) -> str:
    """The arm, with its block where there are several, and a number where several runs have one block."""
    if len(runs) == 1:
        return point.arm
    blocks = [one.block for one in runs]
    same = [index for index, one in enumerate(runs) if one.block == run.block]
    number = f" ({same.index(next(i for i, one in enumerate(runs) if one is run)) + 1})" if len(same) > 1 else ""
    return f"{run.block}{number} {point.arm}" if len(set(blocks)) > 1 or number else point.arm
