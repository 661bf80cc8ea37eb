"""A few charts as SVG text: no scripts, no fonts from elsewhere, every label escaped. Sizes in CSS pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
LONGEST_LABEL = 52
PALETTE = {
    "local": "#4c6a92",
    "stream": "#4c6a92",
    "hand-off": "#9db4d3",
    "distance": "#e0a030",
    "link": "#c8553d",
    "cache type": "#7b5ea7",
    "wait": "#8a8f98",
    "range": "#30343b",
    "published": "#2f8f6b",
    "gpu0/p0": "#4c6a92",
    "gpu0/p1": "#d08a2e",
}
_GREY = "#8a8f98"


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
    """Horizontal bars from zero with range whiskers and marks."""
    top = max(max(r.value, r.high or 0.0, *(v for _, v in r.marks), 0.0) for r in rows) or 1.0
    plot = _Plot(left=_margin([r.label for r in rows]), right=170, top=8, row=40, rows=len(rows), limit=top)
    body = [plot.grid(unit)]
    for index, row in enumerate(rows):
        y = plot.y(index)
        body.append(_text(plot.left - 10, y + 4, _short(row.label), anchor="end"))
        body.append(_rect(plot.left, y - 11, plot.x(row.value) - plot.left, 22, PALETTE["local"]))
        if row.low is not None and row.high is not None:
            body.append(_whisker(plot.x(row.low), plot.x(row.high), y))
        for name, x in _apart([(name, plot.x(value)) for name, value in row.marks]):
            body.append(_text(x, y - 14, name, anchor="middle", size=10, colour="#30343b"))
        body.append(_text(plot.left + plot.width + 10, y + 4, row.text, weight="600"))
    return _svg(plot.height, body, describe)


def stacks(rows: Sequence[Stack], *, unit: str, describe: str) -> str:
    """Horizontal stacked bars with a legend below; parts under a pixel are drawn by the legend only."""
    top = max(sum(v for _, v in r.parts) for r in rows) or 1.0
    plot = _Plot(left=_margin([r.label for r in rows]), right=170, top=8, row=34, rows=len(rows), limit=top, below=34)
    body = [plot.grid(unit)]
    series: list[str] = []
    for index, row in enumerate(rows):
        y, at = plot.y(index), 0.0
        body.append(_text(plot.left - 10, y + 4, _short(row.label), anchor="end"))
        for name, value in row.parts:
            if name not in series:
                series.append(name)
            width = plot.x(at + value) - plot.x(at)
            if width >= 0.5:
                body.append(_rect(plot.x(at), y - 10, width, 20, PALETTE.get(name, _GREY), title=f"{name} {value:.2f}"))
            at += value
        body.append(_text(plot.left + plot.width + 10, y + 4, row.text, weight="600"))
    body.append(_legend(series, plot.left, plot.height - 14))
    return _svg(plot.height, body, describe)


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
    plot = _Plot(left=_margin([r.label for r in rows]), right=40, top=8, row=30, rows=len(rows), limit=top, below=34)
    body = [plot.grid(unit)]
    for index, row in enumerate(rows):
        y = plot.y(index)
        body.append(_text(plot.left - 10, y + 4, _short(row.label), anchor="end"))
        left, right = plot.x(row.published[0]), plot.x(row.published[1])
        body.append(_rect(left - 2, y - 11, max(right - left, 0) + 4, 22, PALETTE["published"]))
        body.append(_whisker(plot.x(row.low), plot.x(row.high), y))
        body.append(f'<circle cx="{plot.x(row.value):.1f}" cy="{y:.1f}" r="5" fill="{PALETTE["link"]}"/>')
    y = plot.height - 14
    body += [
        _rect(plot.left, y - 10, 4, 14, PALETTE["published"]),
        _text(plot.left + 12, y + 2, "published", size=12),
        f'<circle cx="{plot.left + 110}" cy="{y - 3}" r="5" fill="{PALETTE["link"]}"/>',
        _text(plot.left + 122, y + 2, "modelled, with range over sets", size=12),
    ]
    return _svg(plot.height, body, describe)


@dataclass(frozen=True)
class Held:
    """Bytes of one role that one device placed on a die."""

    role: str
    device: str
    text: str


def card(dies: Sequence[Sequence[Held]], *, readers: Sequence[str], crossing: str, describe: str) -> str:
    """The package: a box a die with the device that computes on it, what lies in its HBM, and the link between."""
    width, lines = 330, max(len(held) for held in dies)
    height = 96 + 24 * max(lines, 1) + 20
    body = []
    for index, held in enumerate(dies):
        x = 20 + index * (WIDTH - 40 - width)
        body.append(_rect(x, 8, width, height - 16, "#f4f6fa", stroke="#b9c2d0"))
        body.append(_text(x + 14, 30, f"die {index}", weight="600"))
        body.append(_text(x + width - 14, 30, readers[index], anchor="end", size=12, colour="#555b66"))
        for number in range(4):
            body.append(_rect(x + 14 + number * 77, 40, 70, 24, "#dfe5ef", stroke="#b9c2d0"))
            body.append(_text(x + 49 + number * 77, 56, f"XCD {index * 4 + number}", anchor="middle", size=11))
        body.append(_text(x + 14, 86, "in this die's HBM:", size=12, colour="#555b66"))
        for number, item in enumerate(held):
            y = 108 + 24 * number
            body.append(_rect(x + 14, y - 11, 12, 12, PALETTE.get(item.device, _GREY)))
            body.append(_text(x + 34, y, f"{item.role}, {item.device}", size=13))
            body.append(_text(x + width - 14, y, item.text, anchor="end", size=13, weight="600"))
    left, right, level = 20 + width, WIDTH - 20 - width, height / 2
    body.append(f'<path d="M{left + 6} {level} H{right - 6}" stroke="{PALETTE["link"]}" stroke-width="3"/>')
    middle = (left + right) / 2
    for number, line in enumerate(crossing.split("\n")):
        body.append(
            _text(middle, level - 40 + 16 * number if number < 2 else level + 20, line, anchor="middle", size=12)
        )
    return _svg(height, body, describe)


@dataclass(frozen=True)
class _Plot:
    left: int
    right: int
    top: int
    row: int
    rows: int
    limit: float
    below: int = 0

    @property
    def width(self) -> int:
        return WIDTH - self.left - self.right

    @property
    def bottom(self) -> int:
        return self.top + self.row * self.rows

    @property
    def height(self) -> int:
        return self.bottom + 30 + self.below

    def x(self, value: float) -> float:
        return self.left + self.width * value / self.ticks()[-1]

    def y(self, index: int) -> float:
        return self.top + self.row * (index + 0.5)

    def ticks(self) -> list[float]:
        rough = self.limit / 5
        power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
        return [step * i for i in range(math.ceil(self.limit / step - 1e-9) + 1)]

    def grid(self, unit: str) -> str:
        parts = []
        ticks = self.ticks()
        for tick in ticks:
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {self.top} V{self.bottom}" stroke="#e3e6eb"/>')
            label = f"{tick:g} {unit}" if tick == ticks[-1] else f"{tick:g}"
            parts.append(_text(x, self.bottom + 18, label, anchor="middle", size=12, colour="#555b66"))
        return "".join(parts)


def _margin(labels: Sequence[str]) -> int:
    """Room for the longest label: at most 0.6 em a character, the widest of the usual fallback fonts."""
    return max(100, 14 + math.ceil(0.6 * 13 * max(len(_short(label)) for label in labels)))


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..."


def _apart(marks: Sequence[tuple[str, float]], gap: float = 12.0) -> list[tuple[str, float]]:
    """Marks that would overlap are written as one, between them."""
    groups: list[list[tuple[str, float]]] = []
    for name, x in sorted(marks, key=lambda mark: mark[1]):
        if groups and x - groups[-1][-1][1] < gap:
            groups[-1].append((name, x))
        else:
            groups.append([(name, x)])
    return [(" ".join(n for n, _ in group), sum(x for _, x in group) / len(group)) for group in groups]


def _legend(names: Sequence[str], left: float, y: float) -> str:
    parts = []
    x = max(10.0, min(left, WIDTH - sum(18 + 8 * len(name) + 24 for name in names)))
    for name in names:
        parts.append(_rect(x, y - 10, 12, 12, PALETTE.get(name, _GREY)))
        parts.append(_text(x + 18, y, name, size=12))
        x += 18 + 8 * len(name) + 24
    return "".join(parts)


def _whisker(left: float, right: float, y: float) -> str:
    colour = PALETTE["range"]
    return (
        f'<path d="M{left:.1f} {y:.1f} H{right:.1f} M{left:.1f} {y - 6:.1f} v12 M{right:.1f} {y - 6:.1f} v12"'
        f' stroke="{colour}" stroke-width="1.5" fill="none"/>'
    )


def _rect(
    x: float, y: float, width: float, height: float, colour: str, *, stroke: str | None = None, title: str = ""
) -> str:
    edge = f' stroke="{stroke}"' if stroke else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{colour}"{edge}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 13,
    weight: str = "400",
    colour: str = "#22262d",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
        f' fill="{colour}">{escape(text)}</text>'
    )


def _svg(height: float, body: Sequence[str], describe: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img"'
        f' aria-label="{escape(describe, quote=True)}" xmlns="http://www.w3.org/2000/svg"'
        f' font-family="system-ui, sans-serif">{"".join(body)}</svg>'
    )
