"""Plain text tables that fit a width, and plain spellings of the few other characters that dieplace prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULE = "─"
_JOINT = "\ue000"  # stands for a space that a line is not broken at; no white space to Python
_QUOTED = re.compile(r"`dieplace [^`\n]*`|'dieplace [^'\n]*'")
PLAIN = str.maketrans(
    {
        "─": "-",
        "│": "|",
        "├": "|",
        "└": "`",
        "┌": "+",
        "┐": "+",
        "┘": "+",
        "┬": "+",
        "┴": "+",
        "┼": "+",
        "→": "->",
        "←": "<-",
        "↔": "<->",
        "×": "x",
        "µ": "u",
        "·": ".",
        "…": "...",
        "–": "-",
        "—": "-",
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "✓": "yes",
        "✗": "no",
        "█": "#",
    }
)


@dataclass(frozen=True)
class Column:
    """One column: `key` into the rows (also the CSV header), a header with its unit, alignment, a formatter."""

    key: str
    header: str
    right: bool = False
    show: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Table:
    """Rows of raw values by key; None is shown as `-`; `notes` are printed under the table."""

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    title: str | None = None
    notes: Sequence[str] = ()


class Document(str):
    """A file's text, printed to the letter: what it suggests is for where the file will lie."""

    __slots__ = ()


class Prose(str):
    """A line of an answer that may be broken at the width of the page: a sentence, never a path or a command."""


def wrapped(text: str, width: int = 80) -> str:
    """A sentence over lines of at most `width`, its own indent kept and the following lines indented by two more.

    A command in quotes or backticks stays on one line, also a longer one: it is there to be pasted.
    """
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        _unbroken(text),
        width,
        initial_indent="",
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(lines).replace(_JOINT, " ")


def _unbroken(text: str) -> str:
    """The text with each quoted command as one word."""
    return _QUOTED.sub(lambda found: found.group().replace(" ", _JOINT), text)


def layout(table: Table, *, width: int = 80, bold: bool = False) -> str:
    """The table as lines of at most `width` characters; long text columns are wrapped, numbers never are."""
    cells = [[_text(column, row.get(column.key)) for column in table.columns] for row in table.rows]
    headers = [column.header for column in table.columns]
    widths = _fit(headers, cells, table.columns, width)
    lines = [*textwrap.wrap(table.title, width)] if table.title else []
    head = _lines(headers, widths, table.columns)
    lines += [f"\x1b[1m{line}\x1b[0m" if bold else line for line in head]
    lines.append("  ".join(RULE * w for w in widths))
    for row in cells:
        lines += _lines(row, widths, table.columns)
    for remark in table.notes:
        parts = textwrap.wrap(_unbroken(remark), width, subsequent_indent="  ", break_on_hyphens=False)
        lines += [part.replace(_JOINT, " ") for part in parts] or [""]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """The text with box characters, arrows and signs spelled in ASCII; others are left for the stream to replace."""
    return text.translate(PLAIN)


def _text(column: Column, value: Any) -> str:
    if value is None:
        return "-"
    if column.show is not None:
        return column.show(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value)
    return " ".join(str(value).split())


def _fit(headers: list[str], cells: list[list[str]], columns: Sequence[Column], width: int) -> list[int]:
    """Natural widths; what is too wide gives way in turn: texts between words, headers of numbers, then words too."""
    widths = [max([len(head), *(len(row[i]) for row in cells)]) for i, head in enumerate(headers)]
    whole = [
        max([4, _longest(head), *(_least(row[i], column) for row in cells)])
        for i, (head, column) in enumerate(zip(headers, columns, strict=True))
    ]
    least = [max(4, max((len(word) for word in head.split()), default=4)) for head in headers]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        loose = [i for i, column in enumerate(columns) if not column.right and widths[i] > whole[i]]
        loose = loose or [i for i in range(len(widths)) if widths[i] > whole[i]]
        loose = loose or [i for i, column in enumerate(columns) if not column.right and widths[i] > least[i]]
        loose = loose or [i for i in range(len(widths)) if widths[i] > 4]
        if not loose:
            break
        widths[max(loose, key=lambda i: widths[i])] -= 1
    return widths


def _least(cell: str, column: Column) -> int:
    """Below this width a cell would be broken within a number or a word."""
    return len(cell) if column.right else _longest(cell)


def _longest(text: str) -> int:
    return max((len(word) for word in _bound(text).split()), default=0)


def _bound(text: str) -> str:
    """An interval or a size as one word: `[63.3, 63.7]` and `16 MiB` are never broken while there is room for them."""
    return re.sub(r"\[[^\[\]]*\]|\d [KMG]i?B\b", lambda found: found.group().replace(" ", _JOINT), text)


def _broken(cell: str, width: int) -> list[str]:
    bound = _bound(cell) if _longest(cell) <= width else cell  # where there is no room it may as well break at a comma
    return [part.replace(_JOINT, " ") for part in textwrap.wrap(bound, width, break_on_hyphens=False)]


def _lines(cells: list[str], widths: list[int], columns: Sequence[Column]) -> list[str]:
    stacks = [_broken(cell, w) or [""] for cell, w in zip(cells, widths, strict=True)]
    lines = []
    for depth in range(max(len(stack) for stack in stacks)):
        parts = [stack[depth] if depth < len(stack) else "" for stack in stacks]
        padded = [
            part.rjust(w) if column.right else part.ljust(w)
            for part, w, column in zip(parts, widths, columns, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
