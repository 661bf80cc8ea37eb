"""Talking to the process that opens devices: it may die, fall silent, print anything, and never outlives its parent."""

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

from dieplace.experiments import first_light_child as child
from dieplace.experiments.first_light_child import Lost, converse
from dieplace.experiments.first_light_questions import Answer


def saying(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The child is this code, with `say` and `request`."""
    head = (
        "import json, os, sys, time\nrequest = json.loads(sys.argv[1])\n"
        "def say(**value): print(json.dumps(value), flush=True)\n"
    )
    monkeypatch.setattr(child, "command_of", lambda request: [sys.executable, "-c", head + code, json.dumps(request)])


def test_what_it_says_comes_as_it_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, "say(asking=request['x']); print('noise', file=sys.stderr); say(end=True)")
    assert list(converse({"x": "peer-access"}, 10)) == [{"asking": "peer-access"}, {"end": True}]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("say(asking='a'); os.kill(os.getpid(), 11)", "died with signal 11"),
        ("say(asking='a'); os._exit(3)", "ended with status 3"),
        ("say(asking='a')", "ended with status 0"),
        ("say(asking='a'); time.sleep(60)", "silent"),
    ],
)
def test_a_child_that_does_not_say_all_is_lost(monkeypatch: pytest.MonkeyPatch, code: str, why: str) -> None:
    saying(monkeypatch, code)
    heard: list[Any] = []
    begun = time.monotonic()
    with pytest.raises(Lost) as caught:
        for said in converse({}, 1.0):
            heard.append(said)
    assert caught.value.facts["why"] == why and heard == [{"asking": "a"}]
    assert time.monotonic() - begun < 20


def test_a_reader_that_stops_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, "say(pid=os.getpid()); time.sleep(60)")
    talk = converse({}, 10)
    pid = next(talk)["pid"]
    talk.close()  # type: ignore[attr-defined]
    assert not os.path.exists(f"/proc/{pid}")


def test_the_real_child_asks_and_tells_errors(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dieplace.emulator.node import create

    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    create(memory_path / "n", cards=1, cpu_nodes=1, cores_per_node=1, threads_per_core=1)
    node = str(memory_path / "n")
    request = {"do": "ask", "backend": "emulated", "node": node, "questions": ["peer-access", "launch-cost"]}
    said = list(converse(request, 60))
    assert [one.get("asking") for one in said] == ["peer-access", None, "launch-cost", None, None]
    found = [Answer.from_json(one["answer"]) for one in said if "answer" in one]
    assert [one.status for one in found] == ["not-asked", "not-asked"] and "no single peer" in found[0].said
    (error, end) = converse({**request, "backend": "amd", "node": None}, 60)
    assert "the amd backend cannot be used here" in error["text"] and end == {"end": True}
    (cannot, _) = converse({"do": "run", "experiment": "link", "backend": "emulated", "options": {}}, 60)
    assert "its own inputs" in cannot["cannot"]


def test_who_holds_memory_ends_with_its_starter(memory_path: Path) -> None:
    """kill -9 of the process that started a holder: its input closes, and the card is free again."""
    from dieplace.emulator.node import create

    create(memory_path / "n", cards=1, cpu_nodes=1, cores_per_node=1, threads_per_core=1)
    request = {"do": "hold", "backend": "emulated", "node": str(memory_path / "n"), "nbytes": 1 << 20}
    code = (
        "import sys, time\nfrom dieplace.experiments.first_light_host import _held\n"
        "from dieplace.experiments.first_light_child import command_of\n"
        f"with _held(command_of({request!r})) as process:\n    print(process.pid, flush=True)\n    time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    holder = int(starter.stdout.readline())
    assert os.path.exists(f"/proc/{holder}")
    starter.send_signal(signal.SIGKILL)
    starter.wait(10)
    deadline = time.monotonic() + 20
    while _runs(holder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(holder)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
