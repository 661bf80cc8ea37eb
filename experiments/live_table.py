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
    """A title, columns of (key, header, format of numbers or None for text), and rows.

    `bars` have values in `unit`, and `caption` says how to read them. `values` are the keys of columns that the table
    is about, where a row without any of them is not worth showing: `note` then tells of it.
    """

    title: str
    columns: tuple[tuple[str, str, str | None], ...]
    rows: tuple[Row, ...]
    note: str = ""
    bars: tuple[Bar, ...] = ()
    unit: str = "us"
    caption: str = ""
    values: tuple[str, ...] = ()

    @property
    def shown_rows(self) -> tuple[Row, ...]:
        """The rows to print: those with a value, all where none has one; JSON keeps every row."""
        found = tuple(row for row in self.rows if any(row.get(key) is not None for key in self.values))
        return found or self.rows


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
    return f"{run_words(run, runs)} {point.arm}".strip()


def run_words(run: Run, runs: Sequence[Run]) -> str:
    """The block, with a number where several runs have it; empty where there is one run."""
    if len(runs) == 1:
        return ""
    same = [one for one in runs if one.block == run.block]
    place = next(index for index, one in enumerate(same) if one is run)
    return f"{run.block} ({place + 1})" if len(same) > 1 else run.block
