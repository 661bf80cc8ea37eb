"""Every sample of every arm: in order of taking, so that drift is seen, and as a distribution, with the A/A beside it.

Nothing is trimmed: the axes hold the slowest sample too. Each row has its own scale, in percent of the arm's median,
as arms differ by more than their noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dieplace.experiments.charts_draw import WIDTH, colour, dot, legend, line, nice_ticks, short, svg, text

ROW, GAP, TOP = 108, 26, 26
_LEFT, _TIME, _BETWEEN, _SPREAD = 64, 500, 66, 260
_LABEL = 20


@dataclass(frozen=True)
class Sampled:
    """The samples of one arm in order of taking, and of its control where it has one; `text` is its median in words."""

    label: str
    samples: tuple[float, ...]
    control: tuple[float, ...] = ()
    text: str = ""
    rate: bool = False  # the slowest samples of a rate are the lowest


def samples(rows: Sequence[Sampled], *, describe: str) -> str:
    """Two panels a row: percent off the arm's median by order of taking, and the share of samples below (ECDF)."""
    body = [
        text(_LEFT, 14, "% off the arm's median, in order of taking", size=12, ink="faint"),
        text(_LEFT + _TIME + _BETWEEN, 14, "share of samples at or below", size=12, ink="faint"),
    ]
    for index, row in enumerate(rows):
        body += _row(row, TOP + index * (ROW + _LABEL + GAP))
    height = TOP + len(rows) * (ROW + _LABEL + GAP) + 26
    names = ["local", *(["A/A"] if any(row.control for row in rows) else [])]
    shown = legend(["samples" if name == "local" else name for name in names], _LEFT, height - 10)
    body.append(shown.replace(colour("samples"), colour("local")))
    return svg(height, body, describe)


def _row(row: Sampled, top: float) -> list[str]:
    middle = median(row.samples)
    off = [100 * (value / middle - 1) for value in row.samples]
    again = [100 * (value / middle - 1) for value in row.control]
    ticks = nice_ticks(min(*off, *again, -0.05), max(*off, *again, 0.05), about=4)
    upper = top + _LABEL

    def y(value: float) -> float:
        return upper + ROW * (ticks[-1] - value) / (ticks[-1] - ticks[0])

    def x(value: float) -> float:
        return _LEFT + _TIME + _BETWEEN + _SPREAD * (value - ticks[0]) / (ticks[-1] - ticks[0])

    body = [text(_LEFT, top + 13, short(row.label, 70), weight="600")]
    body.append(text(WIDTH - 12, top + 13, row.text, anchor="end"))
    right = _LEFT + _TIME + _BETWEEN
    for tick in ticks:
        body.append(f'<path d="M{_LEFT} {y(tick):.1f} h{_TIME}" stroke="{colour("grid")}"/>')
        body.append(text(_LEFT - 8, y(tick) + 4, f"{tick:+.3g}", anchor="end", size=11, ink="faint"))
        body.append(f'<path d="M{x(tick):.1f} {upper} v{ROW}" stroke="{colour("grid")}"/>')
    for tick in (ticks[0], ticks[-1]):
        body.append(text(x(tick), upper + ROW + 13, f"{tick:+.3g} %", anchor="middle", size=11, ink="faint"))
    for share in (0, 0.5, 1):
        level = upper + ROW * (1 - share)
        body.append(f'<path d="M{right} {level:.1f} h{_SPREAD}" stroke="{colour("grid")}"/>')
        body.append(text(right - 8, level + 4, f"{share:g}", anchor="end", size=11, ink="faint"))
    most = max(len(off), len(again))
    for values, ink, hollow in ((again, "A/A", True), (off, "local", False)):
        body += [dot(_LEFT + _TIME * (i + 0.5) / most, y(v), ink, hollow=hollow) for i, v in enumerate(values)]
        body.append(line(_steps(values, x, upper), ink, width=1.2 if hollow else 1.8, dash="4 2" if hollow else ""))
    return body


def _steps(values: Sequence[float], x: object, upper: float) -> list[tuple[float, float]]:
    """The empirical distribution as a staircase: each sample lifts it by one n-th."""
    assert callable(x)
    points: list[tuple[float, float]] = []
    for number, value in enumerate(sorted(values)):
        before, after = (upper + ROW * (1 - share / len(values)) for share in (number, number + 1))
        points += [(x(value), before), (x(value), after)]
    return points
