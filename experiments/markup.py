"""Small pieces of HTML: tables with escaped cells. Everything that comes in is text and stays text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Columns = Sequence[tuple[str, str, str | None]]  # key, header, format of numbers or None for text
# `63.5 [63.3, 63.7]`, `1,007 ns`, `6.61 to 7.78`
_NUMBERS = re.compile(r"^[-+~]?[\d,.]+%?( [^\s\[]{1,8}( [\d,.]+)?)? ?(\[[^\]]*\]|\([^)]*\))?$")


def html_table(columns: Columns, found: Iterable[Mapping[str, Any]]) -> str:
    """Rows by key under headers, in a box that scrolls where it is wider than the page; None is shown as `-`.

    A column with a format is numeric; a text that is a number with its interval is never broken.
    """
    headers = "".join(f"<th{_numeric(f)}>{escape(header)}</th>" for _, header, f in columns)
    body = "".join(_row([(row.get(key), form) for key, _, form in columns]) for row in found)
    return f'<div class="wide"><table><tr>{headers}</tr>{body}</table></div>'


def _row(cells: Sequence[tuple[Any, str | None]]) -> str:
    texts = [show(value, form) for value, form in cells]
    kinds = ["n" if form else kind_of(text) for text, (_, form) in zip(texts, cells, strict=True)]
    return row_of_cells(texts, kinds)


def kind_of(text: str) -> str:
    """The class of a text cell: `k` keeps numbers in one line, `w` gives sentences room."""
    if _NUMBERS.match(text):
        return "k"
    return "w" if len(text) > 60 else ""


def _numeric(form: str | None) -> str:
    return " class=n" if form else ""


def show(value: Any, form: str | None) -> str:
    """A cell as text; `-` for None, lists with commas."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return form.format(value) if form else str(value)


def row_of_cells(cells: Sequence[Any], kinds: Sequence[str]) -> str:
    """One row; `kinds` are the cells' classes, empty for none."""
    shown = (
        f"<td{f' class={kind}' if kind else ''}>{escape(str(cell))}</td>"
        for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def show_bytes(nbytes: float) -> str:
    """Bytes in the largest decimal unit that fits, two decimals."""
    scale: Sequence[tuple[float, str]] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((f"{nbytes / unit:.2f} {word}" for unit, word in scale if nbytes >= unit), f"{nbytes:.0f} B")
