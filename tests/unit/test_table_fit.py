"""Tables in eighty columns: numbers, intervals and sizes stay whole while there is any room, headers give way first."""

from __future__ import annotations

import pytest

from dieplace.cli.table import Column, Prose, Table, layout, wrapped

COLUMNS = (
    Column("arm", "arm"),
    Column("mb", "moved MB", right=True),
    Column("time", "layer us [95 %]"),
    Column("ratio", "x local [95 %]"),
    Column("told", "predicted us", right=True),
    Column("of", "of measured", right=True),
)
ROWS = [
    {"arm": "interleave-4/8", "mb": "33.9", "time": "136.6 [135.9, 137.1]", "ratio": "2.165 [2.153, 2.169]",
     "told": "146.1", "of": "1.069"},
    {"arm": "weights+kv far", "mb": "69.9", "time": "255.2 [254.6, 256.0]", "ratio": "3.449 [3.414, 3.469]",
     "told": "245.2", "of": "0.961"},
]  # fmt: skip


def test_intervals_and_words_are_not_broken_in_eighty_columns() -> None:
    text = layout(Table(COLUMNS, ROWS), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for row in ROWS:
        for cell in row.values():
            for part in cell.replace(" [", "\n[").splitlines():
                assert part in text, part
    assert "predicted us" not in text and "predicted" in text  # the header of a number gave way


@pytest.mark.parametrize("width", [120, 60, 44, 30])
def test_every_width_keeps_every_sign(width: int) -> None:
    """What has no room is broken, never lost."""
    text = layout(Table(COLUMNS, ROWS), width=width)
    assert max(map(len, text.splitlines())) <= width or width < 34  # six columns of four and the gaps between them
    body = "".join(text.split())
    for row in ROWS:
        for sign in "".join(row.values()).replace(" ", ""):
            assert sign in body
    assert sum(map(body.count, "0123456789")) >= sum(c.isdigit() for row in ROWS for v in row.values() for c in v)


def test_sizes_stay_with_their_units() -> None:
    rows = [
        {"set": "1024 MiB, cold", "what": "a long sentence of several words that can be broken anywhere between them"}
    ]
    text = layout(Table((Column("set", "set"), Column("what", "what")), rows), width=40)
    assert "1024 MiB," in text and max(map(len, text.splitlines())) <= 40


def test_prose_is_broken_between_words_and_indented() -> None:
    line = (
        f"  1. {'word ' * 30}/a/very/long/path/that/is/never/broken/whatever/the/width/of/the/page/may/be/here/at/all"
    )
    lines = wrapped(line, 60).splitlines()
    assert lines[0].startswith("  1. word") and all(one.startswith("    ") for one in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())
    assert isinstance(Prose("x"), str)
