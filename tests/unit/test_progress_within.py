"""Progress of a step under way: a bar with the time left on a terminal, else a line now and then, never a failure."""

from __future__ import annotations

import io
from typing import Any

import click
import pytest

from dieplace.cli import render


class Terminal(io.StringIO):
    """Standard error as a terminal that keeps what it is sent."""

    def isatty(self) -> bool:
        return True


def told(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool = False, seconds: float = 1.0) -> str:
    clock = iter(number * seconds for number in range(100))
    monkeypatch.setattr(render.sys, "stderr", stream)
    monkeypatch.setattr(render.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv("TERM", "xterm")
    ctx: Any = click.Context(click.Command("x"))
    render.settings(ctx).quiet = quiet
    with render.progress(ctx, "verify", 4) as step:
        step("placed")
        for block in range(1, 4):
            step.within(f"block {block}, at most {30 - block} s left")
        step("measured")
    return stream.getvalue()


def test_a_terminal_gets_each_block_on_the_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = told(monkeypatch, Terminal()).split("\r\x1b[2K")
    assert lines[2] == "[#####...............] verify 1/4 block 1, at most 29 s left"
    assert lines[4].endswith("block 3, at most 27 s left") and lines[5].startswith("[##########")
    assert lines[-1] == ""  # the bar is taken away


def test_a_file_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = told(monkeypatch, io.StringIO(), seconds=4.0).splitlines()
    assert slow[0] == "verify 1/4 placed" and slow[-1] == "verify 2/4 measured"
    assert 1 <= len(slow) - 2 < 3 and all("s left" in line for line in slow[1:-1])
    assert len(told(monkeypatch, io.StringIO(), seconds=0.1).splitlines()) == 2


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, Terminal(), quiet=True) == ""
