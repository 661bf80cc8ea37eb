"""Drawing for the report's charts: SVG text with escaped labels, scales, and colours that follow the page's theme.

Sizes are CSS pixels. Colours are CSS variables with the light theme's value behind them, so that a chart is readable
in a dark page and in an SVG file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
LONGEST_LABEL = 52
SMALLEST = 0.75  # of its size: 13 pixel text at 10
EM = 0.6  # of the font size: the widest mean character of the usual fallback fonts (DejaVu Sans)

# name -> (light, dark); the names are the CSS variables of the page
THEME = {
    "ink": ("#22262d", "#e6e9ee"),
    "faint": ("#5a616d", "#a3abb8"),
    "grid": ("#e3e6eb", "#333a45"),
    "edge": ("#b9c2d0", "#4a5362"),
    "paper": ("#ffffff", "#14171c"),
    "box": ("#f4f6fa", "#1d222a"),
    "unit": ("#dfe5ef", "#2b323d"),
    "blue": ("#4c6a92", "#7ea3d6"),
    "pale": ("#9db4d3", "#4f6d96"),
    "amber": ("#e0a030", "#e5b153"),
    "red": ("#c8553d", "#e5806b"),
    "violet": ("#7b5ea7", "#a98cd6"),
    "grey": ("#8a8f98", "#8b93a0"),
    "green": ("#2f8f6b", "#57b893"),
    "orange": ("#d08a2e", "#e0a355"),
}
SERIES = {
    "local": "blue",
    "stream": "blue",
    "hand-off": "pale",
    "distance": "amber",
    "link": "red",
    "cache type": "violet",
    "wait": "grey",
    "published": "green",
    "gpu0/p0": "blue",
    "gpu0/p1": "orange",
    "gpu1/p0": "orange",
    "near": "blue",
    "far": "red",
    "A/A": "orange",
    "weights": "blue",
    "KV cache": "green",
    "sync flags": "violet",
    "activations": "amber",
}


def colour(name: str) -> str:
    """The theme's colour of a name or series, `grey` for one that has none."""
    key = name if name in THEME else SERIES.get(name, "grey")
    return f"var(--{key},{THEME[key][0]})"


@dataclass(frozen=True)
class Plot:
    """A frame with rows from the top and a value axis from `start` to the last tick; `log`: from a power of ten."""

    left: float
    right: float
    top: float
    row: float
    rows: int
    limit: float
    below: float = 0
    start: float = 0.0
    log: bool = False

    @property
    def width(self) -> float:
        return WIDTH - self.left - self.right

    @property
    def bottom(self) -> float:
        return self.top + self.row * self.rows

    @property
    def height(self) -> float:
        return self.bottom + 30 + self.below

    def x(self, value: float) -> float:
        first, last = self.ticks()[0], self.ticks()[-1]
        if self.log:
            return self.left + self.width * math.log(max(value, first) / first) / math.log(last / first)
        return self.left + self.width * (value - first) / (last - first)

    def y(self, index: int) -> float:
        return self.top + self.row * (index + 0.5)

    def ticks(self) -> list[float]:
        return decades(self.start, self.limit) if self.log else nice_ticks(self.start, self.limit)

    def grid(self, unit: str) -> str:
        parts = []
        ticks = self.ticks()
        for tick in ticks:
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {self.top} V{self.bottom}" stroke="{colour("grid")}"/>')
            label = f"{tick:,.10g} {unit}" if tick == ticks[-1] else f"{tick:,.10g}"
            parts.append(text(x, self.bottom + 18, label, anchor="middle", size=12, ink="faint"))
        return "".join(parts)


def decades(start: float, end: float) -> list[float]:
    """Powers of ten below `start`, up to `end`, and `end` rounded up to 1, 2 or 5 of one as the last."""
    first, last = math.floor(math.log10(start)), math.floor(math.log10(end))
    power = 10.0**last
    top = next(m * power for m in (1, 2, 5, 10) if m * power >= end * (1 - 1e-9))
    found = [10.0**n for n in range(first, last + 1)]
    if top == 2 * power and len(found) > 2:
        found.pop()  # the two labels would touch
    return found if top == found[-1] and len(found) > 1 else [*found, top]


def nice_ticks(start: float, end: float, about: int = 5) -> list[float]:
    """Round numbers that cover [start, end], about `about` steps; two at least."""
    rough = (end - start) / about
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first = math.floor(start / step + 1e-9)
    last = max(math.ceil(end / step - 1e-9), first + 1)
    return [step * i for i in range(first, last + 1)]


def margin(labels: Sequence[str]) -> int:
    """Room for the longest label."""
    return max(100, 14 + math.ceil(EM * 13 * max((len(short(label)) for label in labels), default=0)))


def short(label: str, most: int = LONGEST_LABEL) -> str:
    """The label, cut where it is longer than any chart has room for."""
    return label if len(label) <= most else f"{label[: most - 3]}..."


def legend(names: Sequence[str], left: float, y: float) -> str:
    """Squares with the names of series, in a row that stays inside the frame."""
    parts = []
    x = max(10.0, min(left, WIDTH - sum(18 + 8 * len(name) + 24 for name in names)))
    for name in names:
        parts.append(rect(x, y - 10, 12, 12, colour(name)))
        parts.append(text(x + 18, y, name, size=12))
        x += 18 + 8 * len(name) + 24
    return "".join(parts)


def whisker(left: float, right: float, y: float) -> str:
    """A range: a line with two ends."""
    return (
        f'<path d="M{left:.1f} {y:.1f} H{right:.1f} M{left:.1f} {y - 6:.1f} v12 M{right:.1f} {y - 6:.1f} v12"'
        f' stroke="{colour("ink")}" stroke-width="1.5" fill="none"/>'
    )


def line(points: Sequence[tuple[float, float]], ink: str, *, width: float = 1.5, dash: str = "") -> str:
    """A polyline through the points."""
    if not points:
        return ""
    path = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{path}" stroke="{colour(ink)}" stroke-width="{width:g}" fill="none"{dashed}/>'


def dot(x: float, y: float, ink: str, *, radius: float = 2.5, hollow: bool = False) -> str:
    """One sample."""
    fill = f'fill="none" stroke="{colour(ink)}"' if hollow else f'fill="{colour(ink)}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {fill}/>'


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, stroke: str | None = None, title: str = ""
) -> str:
    """A box; `fill` and `stroke` are colours as `colour` gives them, `title` its tool tip."""
    edge = f' stroke="{stroke}"' if stroke else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{fill}"{edge}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "400", ink: str = "ink"
) -> str:
    """Words at a place, escaped."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
        f' fill="{colour(ink)}">{escape(words)}</text>'
    )


def svg(height: float, body: Sequence[str], describe: str, *, width: float = WIDTH) -> str:
    """The whole drawing; `describe` is what a reader hears who does not see it.

    In a narrow window it shrinks to what can still be read, then its frame scrolls.
    """
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img"'
        f' style="min-width:{width * SMALLEST:.0f}px"'
        f' aria-label="{escape(describe, quote=True)}" xmlns="http://www.w3.org/2000/svg"'
        f' font-family="system-ui, sans-serif">{"".join(body)}</svg>'
    )
