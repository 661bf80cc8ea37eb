"""A terminal with a bar on its last line: what is written meanwhile comes above it, each on a line of its own."""

from __future__ import annotations

import io
import re

import pytest

from dieplace.cli import main as frame
from dieplace.cli import render


class Terminal(io.StringIO):
    """Keeps what a terminal would show: carriage return, erase of a line, new line."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        lines = [""]
        for part in re.split("(\r\x1b\\[2K|\n)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif part.startswith("\r"):
                lines[-1] = ""
            else:
                lines[-1] += part
        return lines


def test_lines_come_above_the_bar_and_the_bar_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with frame.build().make_context("dieplace", ["list"]) as ctx:
        with render.progress(ctx, "first-light", 4) as step:
            step("looking, roughly 63 s left")
            render.say(ctx, "[   1.6 s]   flags: a block")
            assert terminal.shown()[-2:] == ["[   1.6 s]   flags: a block", "[#####...............] first-light 1/4"
                                             " looking, roughly 63 s left"]  # fmt: skip
            step("x" * 300)
            assert len(terminal.shown()[-1]) < 80  # a longer one would not be wiped
            render.note("last")
        assert terminal.shown() == ["[   1.6 s]   flags: a block", "last", ""]
        render.say(ctx, "after")
    assert terminal.shown()[-2:] == ["after", ""]
