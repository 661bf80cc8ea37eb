"""Where `bench run` writes: nothing stays of what did not run, nothing is overwritten, Ctrl-C keeps files."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dieplace.cli import main as frame
from dieplace.experiments import registry
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Run

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "emulated-mi355x"
BENCH = ("--backend", "emulated", "bench", "run")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cut_after(monkeypatch: pytest.MonkeyPatch, name: str, blocks: int) -> None:
    """The experiment gives so many of its blocks, and then Ctrl-C comes, as a signal."""
    found = registry.get(name)

    def run(backend: str, options: Any, progress: Any) -> Iterator[Run]:
        for block in found.blocks[:blocks]:
            yield Run.load(RESULTS / name / f"{block}.json")
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("Ctrl-C was not heard")

    cut = replace(found, run=run, steps_asked=None)
    monkeypatch.setattr(registry, "get", lambda asked: cut if asked == name else found)


@pytest.mark.parametrize("name", ["weight-swap", "verify", "flags", "placement", "context", "mode", "cache-type"])
def test_ctrl_c_before_the_first_block_says_so_and_leaves_nothing(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_after(monkeypatch, name, 0)
    assert frame.main([*BENCH, name, "--out", "deep/out"]) == 130
    assert "nothing was kept" in capsys.readouterr().err and not list(here.iterdir())


@pytest.mark.parametrize("name", ["weight-swap", "verify", "mode"])
def test_ctrl_c_keeps_whole_blocks_and_their_report(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_after(monkeypatch, name, 1)
    assert frame.main([*BENCH, name, "--out", "out"]) == 130
    first, *rest = registry.get(name).blocks
    assert sorted(path.name for path in (here / "out").iterdir()) == sorted([f"{first}.json", "report.html"])
    check_shape(Run.load(here / "out" / f"{first}.json"), first)
    told = capsys.readouterr().err
    assert f"{first}.json in out is whole and kept" in told and f"not done: {', '.join(rest)}" in told


def test_a_folder_that_was_there_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "out").mkdir()
    cut_after(monkeypatch, "verify", 0)
    assert frame.main([*BENCH, "verify", "--out", "out"]) == 130 and (here / "out").is_dir()


REFUSED = (
    (("weight-swap", "--model", "nosuch"), 2),
    (("weight-swap", "--shards", "1"), 2),
    (("weight-swap", "--arms", "nosuch"), 2),
    (("link",), 3),
    (("flags", "--bytes", "counted"), 2),
    (("first-light", "--allow-mode-changes"), 7),
    (("first-light", "--skip", "nosuch"), 2),
)


@pytest.mark.parametrize("out", [(), ("--out", "deep/out")])
@pytest.mark.parametrize(("words", "code"), REFUSED, ids=lambda value: " ".join(value) if value is tuple else None)
def test_what_is_refused_or_declined_leaves_no_folder(
    words: tuple[str, ...], code: int, out: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    assert frame.main([*BENCH, *words, *out]) == code
    assert [path.name for path in here.iterdir() if path.name != "state"] == []


@pytest.mark.parametrize("name", ["weight-swap", "placement", "first-light"])
def test_finished_runs_are_not_overwritten_or_mixed(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (RESULTS / "weight-swap" / "dpx-nps2.json").read_text()
    (here / "out").mkdir()
    (here / "out" / "dpx-nps2.json").write_text(kept)
    assert frame.main([*BENCH, name, "--out", "out", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "dpx-nps2.json" in error["message"] and "--out" in error["hint"]
    assert (here / "out" / "dpx-nps2.json").read_text() == kept and len(list((here / "out").iterdir())) == 1


def test_other_files_are_no_runs(here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "notes.txt").write_text("mine")
    assert frame.main(["-q", *BENCH, "cache-type", "--model", "qwen3-0.6b", "--out", "out"]) == 0
    assert (here / "out" / "notes.txt").exists() and (here / "out" / "report.html").exists()


@pytest.mark.parametrize("words", [("mode",), ("mode", "--allow-unvalidated"), ("cache-type",)])
def test_progress_ends_at_its_own_total(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """`mode` leaves out what AMD does not list: its total is of the blocks that run."""
    assert frame.main([*BENCH, *words, "--model", "qwen3-0.6b", "--out", "out"]) == 0
    steps = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith(f"{words[0]} ")]
    done, total = map(int, steps[-1].split("/"))
    assert done == total == len(steps)
