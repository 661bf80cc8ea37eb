"""Charts of times and rates as SVG text: bars, stacks, a waterfall, figures side by side, and bytes against a ceiling.

No scripts, no fonts from elsewhere, every label escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dieplace.experiments.charts_draw import (
    EM,
    WIDTH,
    Plot,
    colour,
    dot,
    legend,
    margin,
    rect,
    short,
    svg,
    text,
    whisker,
)

RIGHT = 170
MOST_LINEAR = 20.0  # times the least value: beyond it bars of the small ones cannot be told apart


@dataclass(frozen=True)
class Bar:
    """One bar: a value with its range, and single values to mark on it (one a parameter set)."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    marks: tuple[tuple[str, float], ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Stack:
    """One stacked bar: parts by series name, in order."""

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str = ""


def bars(rows: Sequence[Bar], *, unit: str, describe: str) -> str:
    """Horizontal bars from zero with range whiskers and marks; on a log axis, told so, where they differ by over 20."""
    top = max(max(r.value, r.high or 0.0, *(v for _, v in r.marks), 0.0) for r in rows) or 1.0
    least = min(min(r.value, r.value if r.low is None else r.low, *(v for _, v in r.marks), top) for r in rows)
    log = least > 0 and top / least > MOST_LINEAR
    plot = Plot(
        margin([r.label for r in rows]), _right([r.text for r in rows]), 8, 40, len(rows), top,
        below=18 if log else 0, start=least if log else 0.0, log=log,
    )  # fmt: skip
    body = [plot.grid(unit)]
    if log:
        note = "logarithmic axis: equal lengths are equal ratios"
        body.append(text(plot.left + plot.width / 2, plot.height - 6, note, anchor="middle", size=12, ink="faint"))
    for index, row in enumerate(rows):
        y = plot.y(index)
        body.append(text(plot.left - 10, y + 4, short(row.label), anchor="end"))
        body.append(rect(plot.left, y - 11, plot.x(row.value) - plot.left, 22, colour("local")))
        if row.low is not None and row.high is not None:
            body.append(whisker(plot.x(row.low), plot.x(row.high), y))
        for name, x in _apart([(name, plot.x(value)) for name, value in row.marks]):
            body.append(text(x, y - 14, name, anchor="middle", size=10))
        body.append(text(plot.left + plot.width + 10, y + 4, row.text, weight="600"))
    return svg(plot.height, body, describe)


def stacks(rows: Sequence[Stack], *, unit: str, describe: str) -> str:
    """Horizontal stacked bars with a legend below; parts under a pixel are drawn by the legend only."""
    top = max(sum(v for _, v in r.parts) for r in rows) or 1.0
    plot = Plot(margin([r.label for r in rows]), _right([r.text for r in rows]), 8, 34, len(rows), top, below=34)
    body = [plot.grid(unit)]
    series: list[str] = []
    for index, row in enumerate(rows):
        y, at = plot.y(index), 0.0
        body.append(text(plot.left - 10, y + 4, short(row.label), anchor="end"))
        for name, value in row.parts:
            if name not in series:
                series.append(name)
            width = plot.x(at + value) - plot.x(at)
            if width >= 0.5:
                body.append(rect(plot.x(at), y - 10, width, 20, colour(name), title=f"{name} {value:.2f}"))
            at += value
        body.append(text(plot.left + plot.width + 10, y + 4, row.text, weight="600"))
    body.append(legend(series, plot.left, plot.height - 14))
    return svg(plot.height, body, describe)


@dataclass(frozen=True)
class Step:
    """A step of a waterfall: what it adds, negative for less."""

    label: str
    value: float


def waterfall(first: Step, steps: Sequence[Step], last: Step, *, unit: str, describe: str) -> str:
    """From one total to another, step by step: red adds time, green takes it away; a thin line carries the level."""
    levels = [first.value]
    for step in steps:
        levels.append(levels[-1] + step.value)
    top = max(*levels, last.value, 0.0) or 1.0
    labels = [first.label, *(s.label for s in steps), last.label]
    plot = Plot(margin(labels), RIGHT, 8, 26, len(labels), top)
    body = [plot.grid(unit)]

    def row(index: int, label: str, start: float, end: float, series: str, told: str) -> None:
        y, x = plot.y(index), plot.x(min(start, end))
        body.append(text(plot.left - 10, y + 4, short(label), anchor="end"))
        body.append(rect(x, y - 8, max(abs(plot.x(end) - plot.x(start)), 1), 16, colour(series)))
        body.append(text(plot.left + plot.width + 10, y + 4, told, weight="600"))
        if index + 1 < len(labels):
            carry = f"M{plot.x(end):.1f} {y + 8:.1f} v{plot.row - 16:.1f}"
            body.append(f'<path d="{carry}" stroke="{colour("edge")}"/>')

    row(0, first.label, 0.0, first.value, "local", f"{first.value:.1f} {unit}")
    for index, step in enumerate(steps):
        series = "link" if step.value >= 0 else "published"
        row(
            index + 1, step.label, levels[index], levels[index + 1], series, f"{round(step.value, 1) + 0.0:+.1f} {unit}"
        )
    row(len(labels) - 1, last.label, 0.0, last.value, "local", f"{last.value:.1f} {unit}")
    return svg(plot.height, body, describe)


@dataclass(frozen=True)
class Compared:
    """A published interval and a modelled value with its range, in one unit."""

    label: str
    published: tuple[float, float]
    value: float
    low: float
    high: float


def compared(rows: Sequence[Compared], *, unit: str, describe: str) -> str:
    """Published figures as green bars or ticks, modelled values as dots with their range, one line a figure."""
    top = max(max(r.published[1], r.high) for r in rows) or 1.0
    plot = Plot(margin([r.label for r in rows]), 40, 8, 30, len(rows), top, below=34)
    body = [plot.grid(unit)]
    for index, row in enumerate(rows):
        y = plot.y(index)
        body.append(text(plot.left - 10, y + 4, short(row.label), anchor="end"))
        left, right = plot.x(row.published[0]), plot.x(row.published[1])
        body.append(rect(left - 2, y - 11, max(right - left, 0) + 4, 22, colour("published")))
        body.append(whisker(plot.x(row.low), plot.x(row.high), y))
        body.append(dot(plot.x(row.value), y, "red", radius=5))
    y = plot.height - 14
    body += [
        rect(plot.left, y - 10, 4, 14, colour("published")),
        text(plot.left + 12, y + 2, "published", size=12),
        dot(plot.left + 110, y - 3, "red", radius=5),
        text(plot.left + 122, y + 2, "modelled, with range over sets", size=12),
    ]
    return svg(plot.height, body, describe)


@dataclass(frozen=True)
class Share:
    """How near something comes to its ceiling: `share` of it (1 is the ceiling), and the numbers behind it."""

    label: str
    share: float
    text: str
    far: bool = False


def roofline(rows: Sequence[Share], *, describe: str) -> str:
    """A bar a row as a share of its measured ceiling, which is the line at 1; a share above 1 passes the line."""
    plot = Plot(
        margin([r.label for r in rows]), _right([r.text for r in rows]), 8, 30, len(rows),
        max(1.0, *(r.share for r in rows)), below=34,
    )  # fmt: skip
    body = [plot.grid("")]
    for index, row in enumerate(rows):
        y = plot.y(index)
        body.append(text(plot.left - 10, y + 4, short(row.label), anchor="end"))
        body.append(rect(plot.left, y - 9, plot.x(1) - plot.left, 18, colour("unit")))
        body.append(rect(plot.left, y - 9, plot.x(row.share) - plot.left, 18, colour("far" if row.far else "near")))
        body.append(text(plot.left + plot.width + 10, y + 4, row.text, weight="600"))
    x = plot.x(1)
    body.append(f'<path d="M{x:.1f} {plot.top} V{plot.bottom}" stroke="{colour("ink")}" stroke-width="2"/>')
    body.append(legend(["near", "far"], plot.left, plot.height - 14))
    body.append(text(plot.left + 150, plot.height - 14, "the line at 1 is the measured ceiling", size=12, ink="faint"))
    return svg(plot.height, body, describe)


def _right(texts: Sequence[str]) -> int:
    """Room for the longest text behind the bars, at most two fifths of the chart."""
    return int(min(WIDTH * 0.4, max(RIGHT, 20 + EM * 13 * max((len(t) for t in texts), default=0))))


def _apart(marks: Sequence[tuple[str, float]], gap: float = 12.0) -> list[tuple[str, float]]:
    """Marks that would overlap are written as one, between them."""
    groups: list[list[tuple[str, float]]] = []
    for name, x in sorted(marks, key=lambda mark: mark[1]):
        if groups and x - groups[-1][-1][1] < gap:
            groups[-1].append((name, x))
        else:
            groups.append([(name, x)])
    return [(" ".join(n for n, _ in group), sum(x for _, x in group) / len(group)) for group in groups]
