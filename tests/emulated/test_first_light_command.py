"""`dieplace bench run first-light`, its bundle shown and reported, and a kill in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from first_light_hosts import NO_EXPERIMENTS
from partition_support import KILLER, FakeClock, small_node, truth

from dieplace.cli import main as frame
from dieplace.emulator.node import Node, open_node
from dieplace.experiments import first_light_bundle as bundles
from dieplace.experiments.first_light_catalogue import QUESTIONS

SKIP = [word for name in NO_EXPERIMENTS for word in ("--skip", name)]
GO = ("--allow-mode-changes", "-y", "--out", "b")
DEVICES = [word for q in QUESTIONS if q.place == "devices" for word in ("--skip", q.id)]


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    monkeypatch.chdir(memory_path)
    small_node(memory_path / "node", FakeClock())
    return open_node(memory_path / "node")


def words(node: Node, *more: str) -> list[str]:
    return ["--backend", "emulated", "--node", str(node.directory), *more]


def run(node: Node, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dieplace.cli", *words(node, *more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_command_in_real_processes(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it: a child asks the devices, stdout is one JSON value, progress tells the time left."""
    rest = ["--skip", "poll-reliability", "--skip", "mem-alloc-mode"]
    done = run(node, "bench", "run", "first-light", "--allow-mode-changes", "-y", *SKIP, *rest, "--out", "b", "--json")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    value = json.loads(done.stdout)
    assert value["schema"] == "dieplace/bench-run/1" and value["source"] == "emulated" and value["ok"] is True
    answers = {one["question"]: one["word"] for one in value["answers"]}
    assert answers["peer-access"] == "yes" and answers["remote-store"] == "arrives"
    assert "left" in done.stderr and "First light goes through SPX/NPS1 -> DPX/NPS2" in done.stderr
    assert truth(node).is_in("SPX/NPS1")

    shown = run(node, "bench", "show", "b")
    assert shown.returncode == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    lines = shown.stdout.splitlines()
    assert any(line.startswith("Answers, emulated") for line in lines) and "says nothing" in shown.stdout
    assert frame.main(["bench", "report", "b", "--out", "page.html"]) == 0
    assert "First light" in Path("page.html").read_text()
    assert frame.main(["bench", "report", "b", "--md", "--out", "page.md"]) == 0
    rows = [line for line in Path("page.md").read_text().splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row.count(" | ") == 4]) == len(QUESTIONS) + 2  # with its head and rule
    capsys.readouterr()
    assert frame.main(["--backend", "replayed", "--node", "b", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["source"] == "replayed" and len(listed["devices"]) == 2


def command(*more: str) -> list[str]:
    return ["bench", "run", "first-light", *SKIP, *DEVICES, *more]


def test_without_a_yes_nothing_changes(node: Node) -> None:
    revision = node.state.revision
    done = run(node, *command("--allow-mode-changes", "--out", "b"))
    assert done.returncode == 7 and "nothing was changed" in done.stderr and "2. unload the driver" in done.stderr
    node.refresh()
    assert node.state.revision == revision and not Path("b/bundle.json").exists()


def test_the_plan_is_shown_even_quietly(node: Node) -> None:
    done = run(node, "-q", *command("--allow-mode-changes", "--out", "b"))
    assert done.returncode == 7 and "Reloads the driver" in done.stderr


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (["weight-swap", "--allow-mode-changes"], 2, "only first-light takes --allow-mode-changes"),
        (["first-light", "--skip", "lnik"], 2, "no part 'lnik'"),
        (["first-light", "--arms", "local"], 2, "asks for no model, arms or label"),
        (["first-light", "--resume", "x"], 2, "cannot be resumed"),
        (["first-light", "--wait", "nan"], 2, "not a number of seconds"),
    ],
)
def test_mistakes_are_told_before_anything(
    node: Node, capsys: pytest.CaptureFixture[str], more: list[str], code: int, text: str
) -> None:
    assert frame.main([*words(node), "bench", "run", *more]) == code
    assert text in capsys.readouterr().err


def test_other_backends_are_refused(capsys: pytest.CaptureFixture[str], node: Node) -> None:
    assert frame.main(["--backend", "cpu", "bench", "run", "first-light", "--out", "b"]) == 2
    assert "no questions for the cpu backend" in capsys.readouterr().err
    assert frame.main(["--backend", "amd", "bench", "run", "first-light", "--out", "b"]) == 3
    assert "the amd backend cannot be used here" in capsys.readouterr().err


def test_a_bundle_stands_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        bundles.Bundle(Path(name), "emulated", "emulated", "2026-11-30T00:00:00Z").save()
    assert frame.main(["bench", "show", "a", "b"]) == 2
    assert "name it alone" in capsys.readouterr().err
    assert frame.main(["bench", "show", "a"]) == 0
    shown = capsys.readouterr().out
    assert "missing" in shown and "report:" not in shown
    assert frame.main([*words(node), *command("--out", "a")]) == 2
    assert "holds a first-light bundle already" in capsys.readouterr().err


# A tour's mutating calls: memory, unload, load, two of the DRM question, and one compute call a card and visit.
POINTS = [("after", 2), ("after", 7)]


@pytest.mark.parametrize(("when", "at"), POINTS, ids=[f"{when}-call-{at}" for when, at in POINTS])
def test_killed_anywhere_restore_leads_to_the_first_state(
    node: Node, when: str, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9, also between two switches, when the last one has ended well: the journal names the first state."""
    killed = subprocess.run(
        [sys.executable, "-P", "-c", KILLER, when, str(at), *words(node, *command(*GO))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    bundle = bundles.load("b")
    assert bundle.state == "running" and bundle.missing and bundle.restored is None
    assert frame.main([*words(node), *command("--allow-mode-changes", "-y", "--out", "c")]) == 3
    assert "partition restore" in capsys.readouterr().err
    node.refresh()
    for process in node.state.processes:  # a real one ends with whoever started it: its input closes
        node.end_process(process.pid)
    assert frame.main([*words(node), "partition", "restore", "-y"]) == 0
    assert truth(node).is_in("SPX/NPS1")


@pytest.mark.slow
def test_an_ssh_session_that_goes_away_leads_back_and_leaves_a_bundle(node: Node) -> None:
    node.inject("load", seconds=0.7)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dieplace.cli", *words(node, *command(*GO))],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in iter(process.stderr.readline, ""):
        if "load the driver" in line and "[" in line[:2]:
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    rest = process.stderr.read()
    assert process.wait(60) == 130 and "Traceback" not in rest, rest
    assert truth(node).is_in("SPX/NPS1")
    bundle = bundles.load("b")
    assert bundle.state == "interrupted" and bundle.restored is True and "node-order" in bundle.missing


@pytest.mark.slow
def test_ctrl_c_while_a_child_asks_ends_both_and_leads_back(node: Node) -> None:
    """The terminal sends it to the whole group."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dieplace.cli", *words(node, "bench", "run", "first-light", *SKIP, *GO)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in iter(process.stderr.readline, ""):
        if "asking poll-reliability" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130 and "Missing: " in rest and "is back in the mode it was found in" in rest, rest
    assert truth(node).is_in("SPX/NPS1") and not _alive(process.pid)
    bundle = bundles.load("b")
    assert bundle.state == "interrupted" and bundle.answers["peer-access"].word == "yes"


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["bench", "list", "--json"]) == 0
    rows: dict[str, Any] = {r["experiment"]: r for r in json.loads(capsys.readouterr().out)["experiments"]}
    assert set(rows["first-light"]["backends"]) == {"amd", "nvidia", "emulated"}
