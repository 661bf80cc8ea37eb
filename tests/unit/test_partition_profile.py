"""TOML profiles: every unknown word is an error, cards are named once, and export is what apply reads."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_support import FakeClock, control_for, small_node

from dieplace.errors import DieplaceError, NoSuchDevice, UsageError
from dieplace.modes import Mode
from dieplace.partition.facts import CardFacts, NodeFacts
from dieplace.partition.profile import export, parse_profile, read_profile, resolve

NODE = NodeFacts(
    "b",
    "1",
    True,
    tuple(CardFacts(f"gpu{i}", f"0000:{i + 5:02x}:00.0", "MI355X", 1, "h", 1, "SPX", "NPS1") for i in range(3)),
)


def test_named_modes_and_selectors() -> None:
    profile = parse_profile(
        'version = 1\n[modes.a]\nall = "dpx+nps2"\n[modes.b]\ngpu0 = "CPX/NPS1"\n"0000:06:00.0" = "SPX/NPS1"'
    )
    assert resolve(NODE, profile.named("a")) == dict.fromkeys(("gpu0", "gpu1", "gpu2"), Mode("DPX", "NPS2"))
    assert resolve(NODE, profile.named("b")) == {"gpu0": Mode("CPX", "NPS1"), "gpu1": Mode("SPX", "NPS1")}
    with pytest.raises(UsageError, match="a, b"):
        profile.named(None)
    with pytest.raises(UsageError, match="there is no mode 'c'"):
        profile.named("c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 2\n[modes.a]\nall='SPX/NPS1'",
        "version = true\n[modes.a]\nall='SPX/NPS1'",
        "version = 1",
        "version = 1\nmodes = 3",
        "version = 1\n[modes.a]",
        "version = 1\n[modes.a]\nall = 7",
        "version = 1\n[modes.a]\nall = 'SPX'",
        "version = 1\n[modes.a]\nall = 'default'",
        "version = 1\nreload = false\n[modes.a]\nall = 'SPX/NPS1'",
        "version = 1\n[modes.a]\nall = 'SPX/NPS1'\nall = 'SPX/NPS1'",
        "not toml",
        "version = 1\n[modes.a.b]\nall = 'SPX/NPS1'",
    ],
)
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_profile(text)


@pytest.mark.parametrize("entries", [{"all": 1, "gpu0": 1}, {"gpu0": 1, "0": 1}, {"gpu1": 1, "0000:06:00.0": 1}])
def test_a_card_named_twice_is_refused_even_with_one_mode(entries: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="selected twice"):
        resolve(NODE, dict.fromkeys(entries, Mode("SPX", "NPS1")))


def test_an_unknown_card_is_named_with_what_there_is() -> None:
    with pytest.raises(NoSuchDevice, match="gpu2"):
        resolve(NODE, {"gpu7": Mode("SPX", "NPS1")})


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_profile(text)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 5000, b"x" * (2 << 20)])
def test_broken_files_are_usage_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"p\.toml"):
        read_profile(path)
    with pytest.raises(UsageError):
        read_profile(tmp_path)


def test_export_is_what_apply_reads(memory_path: Path) -> None:
    clock = FakeClock()
    node = small_node(memory_path / "node", clock, mode="SPX/NPS1")
    node.write_compute(node.bdfs()[1], "CPX")
    facts = control_for(node, clock, memory_path / "s").read()
    assert resolve(facts, parse_profile(export(facts)).named(None)) == {
        "gpu0": Mode("SPX", "NPS1"),
        "gpu1": Mode("CPX", "NPS1"),
    }
    node.begin_reset(node.bdfs()[0])
    with pytest.raises(DieplaceError, match="not readable"):
        export(control_for(node, clock, memory_path / "s").read())
