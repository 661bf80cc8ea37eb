"""The parts of a report and their two spellings: HTML with charts, Markdown with the numbers behind them.

A section gives parts; the page is their HTML, `--md` their Markdown. All text is escaped in both: a name in a run can
make no element, table cell or heading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dieplace.experiments.markup import Columns, html_table, show


@dataclass(frozen=True)
class Heading:
    """A title; `level` 1 is the page's own, 2 an experiment's or a section's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Said:
    """A line of text; `kind` is `plain`, `verdict` (what was found) or `quiet` (how to read it)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Listed:
    """Lines as a list under a bold one; `framed` for what must be read first."""

    head: str
    lines: tuple[str, ...]
    framed: bool = False


@dataclass(frozen=True)
class Tabled:
    """Rows by key under columns of (key, header, format of numbers or None for text)."""

    columns: Columns
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Drawn:
    """A chart as SVG with a caption on how to read it.

    `instead` stands in Markdown, which cannot hold the chart (empty where a table follows anyway); its caption goes
    with it.
    """

    svg: str
    instead: tuple[Part, ...] = ()
    caption: str = ""


@dataclass(frozen=True)
class Folded:
    """Parts that are closed until asked for; a summary that speaks of the page (`of_page`) is not in Markdown."""

    summary: str
    parts: tuple[Part, ...] = field(default=())
    of_page: bool = False


Part = Heading | Said | Listed | Tabled | Drawn | Folded
MOST_LEVELS = 6  # of headings in HTML and Markdown
_CLASSES = {"plain": "", "verdict": ' class="said"', "quiet": ' class="quiet"'}


def to_html(parts: Sequence[Part]) -> str:
    """The parts as the inside of a page's body."""
    return "".join(_html(part) for part in parts)


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h{part.level}>{escape(part.text)}</h{part.level}>"
    if isinstance(part, Said):
        return f"<p{_CLASSES[part.kind]}>{escape(part.text)}</p>"
    if isinstance(part, Listed):
        items = "".join(f"<li>{escape(one)}</li>" for one in part.lines)
        head = f"<b>{escape(part.head)}</b>" if part.head else ""
        return (
            f'<div class="banner">{head}<ul>{items}</ul></div>'
            if part.framed
            else f'{head}<ul class="plain">{items}</ul>'
        )
    if isinstance(part, Tabled):
        return html_table(part.columns, part.rows)
    if isinstance(part, Drawn):
        caption = f'<p class="quiet">{escape(part.caption)}</p>' if part.caption else ""
        return f'<div class="wide chart">{part.svg}</div>{caption}'
    return f"<details><summary>{escape(part.summary)}</summary>{to_html(part.parts)}</details>"


def to_markdown(parts: Sequence[Part]) -> str:
    """The parts as Markdown blocks with an empty line between them."""
    return "\n\n".join(block for part in _with_something_under(parts) for block in _markdown(part))


def _with_something_under(parts: Sequence[Part]) -> list[Part]:
    """The parts less every heading that stands above nothing, as one above a chart alone does in Markdown."""
    kept: list[Part] = []
    under = 0  # headings down to this level have what was kept last, read from the end, under them
    for part in reversed(parts):
        if not isinstance(part, Heading):
            if _markdown(part):
                kept.append(part)
                under = MOST_LEVELS
        elif part.level <= under or part.level == 1:
            kept.append(part)
            under = part.level - 1
    return kept[::-1]


def _markdown(part: Part) -> list[str]:
    if isinstance(part, Heading):
        return [f"{'#' * part.level} {md_text(part.text)}"]
    if isinstance(part, Said):
        return [f"**{md_text(part.text)}**" if part.kind == "verdict" else md_text(part.text)]
    if isinstance(part, Listed):
        return [
            *([f"**{md_text(part.head)}**"] if part.head else []),
            "\n".join(f"- {md_text(one)}" for one in part.lines),
        ]
    if isinstance(part, Tabled):
        return [_md_table(part)] if part.rows else []
    if isinstance(part, Drawn):
        return [block for one in part.instead for block in _markdown(one)]
    inside = [block for one in _with_something_under(part.parts) for block in _markdown(one)]
    return [f"*{md_text(part.summary)}*", *inside] if inside and not part.of_page else inside


def _md_table(part: Tabled) -> str:
    lines = [
        [header for _, header, _ in part.columns],
        ["---:" if form else "---" for _, _, form in part.columns],
        *([show(row.get(key), form) for key, _, form in part.columns] for row in part.rows),
    ]
    return "\n".join(
        f"| {' | '.join(_cell(cell, raw=number == 1) for cell in row)} |" for number, row in enumerate(lines)
    )


def _cell(text: str, *, raw: bool) -> str:
    return text if raw else md_text(text)


def md_text(text: str) -> str:
    """Text that stays text in Markdown: one line, with HTML and Markdown signs escaped."""
    plain = " ".join(text.split())
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    plain = re.sub(r"([\\`*|])", r"\\\1", plain)
    plain = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", plain)
    if re.search(r"\]\s*[(\[:]", plain):  # brackets alone are an interval, before these they would make a link
        plain = re.sub(r"([\[\]])", r"\\\1", plain)
    return re.sub(r"^(#+|[+=-]|\d+[.)])(?=\s|$)", _escaped_start, plain)


def _escaped_start(found: re.Match[str]) -> str:
    """A sign that would begin a heading, a list or a rule, escaped: `\\#`, `1\\.`."""
    return f"{found.group(1)[:-1]}\\{found.group(1)[-1]}"
