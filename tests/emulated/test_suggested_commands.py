"""Every command that an output suggests can be pasted: it parses, and it is of the node that the command was given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dieplace.cli import main as frame
from dieplace.cli.suggested import named
from dieplace.emulator.node import create

COMMAND = re.compile(r"`(dieplace [^`\n]+)`|'(dieplace [^'\n]+)'|: (dieplace [^\n;,]+)$", re.MULTILINE)
HOLES = {"MODE": "DPX/NPS2", "SECONDS": "1"}  # what a text leaves to the reader


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "state"))
    monkeypatch.chdir(memory_path)
    return create(memory_path / "a node", cards=2, cpu_nodes=1, cores_per_node=1, threads_per_core=1).directory


def suggested(text: str) -> list[list[str]]:
    return [shlex.split(next(filter(None, found)))[1:] for found in COMMAND.findall(text)]


def check(words: list[str], node: Path) -> None:
    """Names this node, and is taken by the command line: it is run, dry where it would change something."""
    assert words[:4] == ["--backend", "emulated", "--node", str(node)], words
    filled = [HOLES.get(word, word) for word in words]
    dry = ["--dry-run"] if {"set", "restore"} & set(words) else []
    assert frame.main([*filled, *dry]) == 0, words


CASES = (
    (("partition", "plan", "DPX/NPS2"), 0, 1),
    (("partition", "restore"), 3, 1),
    (("partition", "set", "DPX/NPS1"), 3, 0),
)


@pytest.mark.parametrize(("words", "code", "least"), CASES)
def test_commands_in_outputs_can_be_pasted(
    words: tuple[str, ...], code: int, least: int, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--backend", "emulated", "--node", str(node)]
    assert frame.main([*on, *words]) == code
    told = capsys.readouterr()
    found = suggested(told.out + told.err)
    assert len(found) >= least
    if words[1] == "plan":  # its undo has something to undo once the plan was carried out
        assert frame.main(["-q", *on, "partition", "set", "DPX/NPS2", "-y"]) == 0
    for one in found:
        check(one, node)


@pytest.mark.parametrize("cards", [(), ("--card", "gpu1")])
def test_the_undo_of_a_restore_leads_to_what_was(
    cards: tuple[str, ...], node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mode, the cards where they are not all, and leave for a mode that AMD does not list."""
    mode = "DPX/NPS1"
    on = ["--backend", "emulated", "--node", str(node)]
    assert frame.main(["-q", *on, "partition", "set", mode, *cards, "-y", "--allow-unvalidated"]) == 0
    capsys.readouterr()
    assert frame.main([*on, "partition", "restore", "--dry-run"]) == 0
    (undo,) = suggested(capsys.readouterr().out)
    assert frame.main(["-q", *on, "partition", "restore", "-y"]) == 0
    assert frame.main(["-q", *undo, "-y"]) == 0
    assert frame.main([*on, "partition", "assert", mode, *cards]) == 0
    if cards:
        assert frame.main([*on, "partition", "assert", "SPX/NPS1", "--card", "gpu0"]) == 0


def test_only_commands_of_a_node_are_named_and_each_once() -> None:
    with frame.build().make_context("dieplace", ["--backend", "emulated", "--node", "a b", "list"]) as ctx:
        given = 'dieplace --backend emulated --node "a b"'
        assert named(ctx, "see: dieplace doctor") == f"see: {given} doctor"
        assert named(ctx, named(ctx, "`dieplace partition restore`")) == f"`{given} partition restore`"
        for text in ("dieplace: a list", "only dieplace lists it", "see: dieplace emulate -h", "dieplace bench show x"):
            assert named(ctx, text) == text
        assert named(ctx, "see: dieplace topo", {"DIEPLACE_BACKEND": "emulated", "DIEPLACE_NODE": "a b"}) == (
            "see: dieplace topo"
        )
