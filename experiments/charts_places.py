"""Where bytes lie, as a picture: the card with its dies, or the GPUs, what each computes and holds, and the link."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from dieplace.experiments.charts_draw import EM, WIDTH, colour, rect, short, svg, text

_BOX = 330
_NEAR_RATIO, _FAR_RATIO = 1.0, 3.0


@dataclass(frozen=True)
class Held:
    """Bytes of one role; `user` is the device that placed or reads them, where it is known."""

    role: str
    user: str
    text: str


@dataclass(frozen=True)
class Place:
    """One die, GPU or host node: its name, who computes on it, its parts (XCDs) and what lies in its memory."""

    name: str
    reader: str
    held: tuple[Held, ...]
    parts: tuple[str, ...] = ()
    memory: str = "its HBM"


def places(found: Sequence[Place], *, link: str, describe: str) -> str:
    """Boxes in pairs, with a line between two that are alone; `link` is said of it, a line of text each."""
    body: list[str] = []
    rows = [found[start : start + 2] for start in range(0, len(found), 2)]
    top = 8.0
    for pair in rows:
        height = max(_height(place) for place in pair)
        for index, place in enumerate(pair):
            body += _box(place, 20 + index * (WIDTH - 40 - _BOX), top, height)
        if len(found) == 2:
            body += _line(link.split("\n"), top + height / 2)
        top += height + 16
    return svg(top, body, describe)


def _height(place: Place) -> float:
    return (70 if place.parts else 40) + 24 + 24 * max(len(place.held), 1) + 18 * len(_reader_below(place))


def _reader_below(place: Place) -> list[str]:
    """Who computes, in lines of its own where it does not fit beside the name."""
    if EM * (13 * len(short(place.name, 40)) + 12 * len(place.reader)) + 28 + 12 <= _BOX:
        return []
    return textwrap.wrap(place.reader, int((_BOX - 28) / (EM * 12)))


def _box(place: Place, x: float, top: float, height: float) -> list[str]:
    body = [rect(x, top, _BOX, height, colour("box"), stroke=colour("edge"))]
    body.append(text(x + 14, top + 22, short(place.name, 40), weight="600"))
    below = _reader_below(place)
    if not below:
        body.append(text(x + _BOX - 14, top + 22, place.reader, anchor="end", size=12, ink="faint"))
    for words in below:
        top += 18
        body.append(text(x + 14, top + 22, words, size=12, ink="faint"))
    step = (_BOX - 28 + 7) / max(len(place.parts), 1)
    for number, part in enumerate(place.parts):
        left = x + 14 + number * step
        body.append(rect(left, top + 32, step - 7, 24, colour("unit"), stroke=colour("edge")))
        body.append(text(left + (step - 7) / 2, top + 48, part, anchor="middle", size=11))
    level = top + (78 if place.parts else 48)
    told = f"in {place.memory}:" if place.held else f"nothing in {place.memory}"
    body.append(text(x + 14, level, told, size=12, ink="faint"))
    for number, item in enumerate(place.held):
        y = level + 22 + 24 * number
        label = f"{item.role}, {item.user}" if item.user else item.role
        room = int((_BOX - 62 - EM * 13 * len(item.text)) / (EM * 13))
        body.append(rect(x + 14, y - 11, 12, 12, colour(item.user or item.role)))
        body.append(text(x + 34, y, short(label, max(room, 8)), size=13))
        body.append(text(x + _BOX - 14, y, item.text, anchor="end", size=13, weight="600"))
    return body


def _line(said: Sequence[str], level: float) -> list[str]:
    left, right = 20 + _BOX + 6, WIDTH - 20 - _BOX - 6
    middle = (left + right) / 2
    body = [f'<path d="M{left} {level:.1f} H{right}" stroke="{colour("link")}" stroke-width="3"/>']
    for number, words in enumerate(said):
        y = level - 40 + 16 * number if number < 2 else level + 20 + 16 * (number - 2)
        body.append(text(middle, y, short(words, 30), anchor="middle", size=12))
    return body


@dataclass(frozen=True)
class MatrixCell:
    """What a row reads from a column: the value in words, and how many times the row's best it is."""

    text: str
    under: str
    ratio: float | None


def matrix(
    title: str,
    readers: Sequence[str],
    homes: Sequence[str],
    cells: Sequence[Sequence[MatrixCell | None]],
    *,
    describe: str,
) -> str:
    """A matrix of near and far: the darker, the farther (time) or the slower (rate) against the row's best."""
    left, width, height = 130, min(190, (WIDTH - 150) // max(len(homes), 1)), 56
    body = [text(8, 18, title, weight="600")]
    for column, home in enumerate(homes):
        body.append(text(left + width * (column + 0.5), 44, short(home, 20), anchor="middle", size=12))
    for row, reader in enumerate(readers):
        y = 54 + height * row
        body.append(text(left - 12, y + height / 2 + 4, short(reader, 14), anchor="end", size=12))
        for column, cell in enumerate(cells[row]):
            body += _cell(cell, left + width * column, y, width, height)
    foot = 54 + height * len(readers) + 18
    body.append(text(left, foot, "row reads from column", size=12, ink="faint"))
    return svg(foot + 10, body, describe, width=min(WIDTH, left + width * len(homes) + 10))


def _cell(cell: MatrixCell | None, x: float, y: float, width: float, height: float) -> list[str]:
    if cell is None:
        return [
            rect(x + 2, y + 2, width - 4, height - 4, colour("box"), stroke=colour("edge")),
            text(x + width / 2, y + height / 2 + 4, "-", anchor="middle", ink="faint"),
        ]
    ratio = cell.ratio if cell.ratio is not None else 1.0
    depth = min(1.0, max(0.0, (ratio - _NEAR_RATIO) / (_FAR_RATIO - _NEAR_RATIO)))
    tint = f'<rect x="{x + 2:.1f}" y="{y + 2:.1f}" width="{width - 4:.1f}" height="{height - 4:.1f}"'
    ink, opacity = ("near", 0.18) if depth == 0 else ("far", 0.12 + 0.3 * depth)
    return [
        rect(x + 2, y + 2, width - 4, height - 4, colour("box"), stroke=colour("edge")),
        f'{tint} fill="{colour(ink)}" fill-opacity="{opacity:.2f}"/>',
        text(x + width / 2, y + height / 2 - 3, cell.text, anchor="middle", size=14, weight="600"),
        text(x + width / 2, y + height / 2 + 15, cell.under, anchor="middle", size=11, ink="faint"),
    ]
