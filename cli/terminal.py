"""Standard error: lines, and at most one bar below them that every line is written above."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from dieplace.cli.table import plain

_WIPED = "\r\x1b[2K"
_drawn: list[str] = []  # the bar, while one stands on the terminal's last line


def line(text: str) -> None:
    """A line, above the bar where there is one."""
    raw(f"{_WIPED}{text}\n{_drawn[0]}" if _drawn else f"{text}\n")


def draw(bar: str) -> None:
    """Put the bar on the last line, cut to it: one that ran over could not be wiped."""
    _drawn[:] = [bar[: _columns() - 1]]
    raw(_WIPED + _drawn[0])


def wipe() -> None:
    """Take the bar away."""
    if _drawn:
        _drawn.clear()
        raw(_WIPED)


def raw(text: str) -> None:
    """The text as it is. Nobody who reads no progress stops the work: a closed stream is left alone from then on."""
    try:
        write(sys.stderr, text)
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = io.StringIO()


def write(stream: TextIO, text: str) -> None:
    """The text in the stream's own characters, in plain ones where it cannot encode more."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeError, LookupError):
        text = plain(text)
    stream.write(text)


def _columns() -> int:
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80
