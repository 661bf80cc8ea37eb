"""Small pieces of HTML: tables with escaped cells. Everything that comes in is text and stays text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def html_table(columns: Sequence[tuple[str, str, str | None]], found: Iterable[Mapping[str, Any]]) -> str:
    """Rows by key under headers; a column with a format is numeric, None is shown as `-`."""
    headers = "".join(f"<th{_numeric(f)}>{escape(header)}</th>" for _, header, f in columns)
    body = "".join(
        row_of_cells([_show(row.get(key), f) for key, _, f in columns], ["n" if f else "" for _, _, f in columns])
        for row in found
    )
    return f"<table><tr>{headers}</tr>{body}</table>"


def head_row(headers: Sequence[str], *, numeric: Sequence[str]) -> str:
    """The header row; those named in `numeric` stand right."""
    cells = (f"<th{' class=n' if header in numeric else ''}>{escape(header)}</th>" for header in headers)
    return f"<tr>{''.join(cells)}</tr>"


def _numeric(form: str | None) -> str:
    return " class=n" if form else ""


def _show(value: Any, form: str | None) -> str:
    if value is None:
        return "-"
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
