"""kill -9 of a real process at each step, two switches at once, Ctrl-C: the next command knows and leads back."""

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
from partition_support import KILLER, FakeClock, small_node, truth

from dieplace.emulator.node import Node, open_node

QUICK = {"cpu_nodes": 1, "cores_per_node": 1, "threads_per_core": 1}


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    clock = FakeClock()
    small_node(memory_path / "node", clock)
    return open_node(memory_path / "node")


def words(node: Node, *more: str) -> list[str]:
    return ["--backend", "emulated", "--node", str(node.directory), "partition", *more]


def run(node: Node, *more: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "dieplace.cli", *words(node, *more), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


# SPX/NPS1 -> QPX/NPS2 makes five mutating calls: memory, unload, load, and compute on two cards.
POINTS = [(when, at) for at in range(1, 6) for when in ("before", "after")]


@pytest.mark.parametrize(("when", "at"), POINTS, ids=[f"{when}-call-{at}" for when, at in POINTS])
def test_killed_at_any_step_the_next_command_tells_and_restore_works(node: Node, when: str, at: int) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLER, when, str(at), *words(node, "set", "QPX/NPS2", "-y")],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    code, shown = run(node, "show")
    assert code == 0 and any("did not finish" in text and "restore" in text for text in shown["standing"]), shown
    assert shown["driver"]["loaded"] is truth(node).loaded
    code, _ = run(node, "restore", "--dry-run")
    assert code == 0
    code, answer = run(node, "restore", "-y")
    assert code == 0, answer
    assert truth(node).is_in("SPX/NPS1")
    assert run(node, "show")[1]["standing"] == []


def test_a_restore_that_is_killed_still_leads_to_the_old_state(node: Node) -> None:
    assert run(node, "set", "DPX/NPS2", "-y")[0] == 0
    subprocess.run(
        [sys.executable, "-c", KILLER, "after", "2", *words(node, "restore", "-y")],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert not truth(node).loaded
    assert run(node, "restore", "-y")[0] == 0 and truth(node).is_in("SPX/NPS1")


def test_a_new_switch_after_an_interrupted_one_keeps_the_first_state_to_restore(node: Node) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLER, "after", "4", *words(node, "set", "QPX/NPS2", "-y")],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert truth(node).compute == ("QPX", "DPX")
    assert run(node, "set", "CPX/NPS2", "-y")[0] == 0
    assert run(node, "restore", "-y")[0] == 0 and truth(node).is_in("SPX/NPS1")


def test_two_switches_at_once_one_waits_or_exits_5(node: Node, memory_path: Path) -> None:
    stay = "while not os.path.exists(sys.argv[3] + 'go'): time.sleep(0.05)"
    wait = f"(open(sys.argv[3], 'w'), exec({stay!r}, {{**globals(), 'time': __import__('time')}}))"
    code = KILLER.replace("os.kill(os.getpid(), signal.SIGKILL)", wait, 1)
    code = code.replace("main(sys.argv[3:])", "main(sys.argv[4:])")
    mark = memory_path / "mark"
    first = subprocess.Popen(
        [sys.executable, "-c", code, "before", "1", str(mark), *words(node, "set", "DPX/NPS2", "-y", "-q")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    code_now, answer = run(node, "set", "CPX/NPS2", "-y")
    assert (
        code_now == 5
        and answer["error"]["pid"] == str(first.pid)
        and "another partition switch" in answer["error"]["message"]
    )
    assert truth(node).is_in("SPX/NPS1")
    # One that waits finds, when its turn comes, a node other than it planned for, and plans again.
    later = subprocess.Popen(
        [sys.executable, "-m", "dieplace.cli", *words(node, "set", "CPX/NPS2", "-y", "--wait", "60", "--json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert later.stderr is not None
    shown = iter(later.stderr.readline, "")
    assert next(line for line in shown if "Undo:" in line)  # it has planned, and asks for the lock next
    time.sleep(0.5)
    Path(f"{mark}go").touch()
    out, _ = later.communicate(timeout=120)
    answer = json.loads(out)
    assert first.wait(60) == 0
    assert later.returncode == 0 and answer["outcome"] == "done" and truth(node).is_in("CPX/NPS2")
    assert run(node, "restore", "-y")[0] == 0 and truth(node).is_in("DPX/NPS2")


def test_ctrl_c_in_the_middle_exits_130_and_the_next_command_knows(node: Node) -> None:
    code = KILLER.replace("signal.SIGKILL", "signal.SIGINT")
    done = subprocess.run(
        [sys.executable, "-c", code, "after", "2", *words(node, "set", "DPX/NPS2", "-y")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "interrupted:" in done.stderr and "did not finish" in done.stderr and "partition restore" in done.stderr
    assert any("did not finish" in text for text in run(node, "show")[1]["standing"])
    assert run(node, "restore", "-y")[0] == 0 and truth(node).is_in("SPX/NPS1")


def test_a_full_disk_before_the_first_step_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from partition_support import control_for, switch

    from dieplace.errors import Unsupported
    from dieplace.partition.store import Store

    def full(self: Store, name: str, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "_write", full)
    control = control_for(node, FakeClock(), node.directory.parent / "state")
    with pytest.raises(Unsupported) as caught:
        switch(control, "DPX/NPS2")
    assert "No space left" in str(caught.value) and truth(node).is_in("SPX/NPS1")
    assert os.listdir(node.directory.parent / "state") == ["lock"]
