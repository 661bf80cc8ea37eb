"""Misuse, by accident or on purpose: damaged records, strange words, full and read-only disks, races, clocks that jump.

Whatever is thrown at it, a command answers in a sentence with a code of its own, never with a traceback, and never says
that something was done which the emulated driver's own state does not show.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from partition_support import FAST, FakeClock, control_for, plan_for, small_node, switch, truth

from dieplace.cli.main import main
from dieplace.emulator.node import Node, open_node
from dieplace.errors import DieplaceError, NotVerified
from dieplace.partition.entry import carry_out, plan_restore
from dieplace.partition.journal import Record, Wish
from dieplace.partition.store import Store, emulated_directory

Run = Callable[..., tuple[int, str, str]]
JUNK = [None, -1, 10**30, 1.5, True, "x", "", [], {}, [None], {"a": 1}, "DPX/NPS2", "gpu0", "\x00", "../../etc/passwd"]
RAW = [b"", b"null", b"[]", b"{}", b"[" * 5000, b'{"a":' * 3000, bytes(range(256)), b"1e999", b"1" * 6000,
       b'{"reload_seconds": NaN}', b'{"wishes": [{}]}', b'{"reload_seconds": 1}']  # fmt: skip


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    small_node(memory_path / "node", FakeClock())
    return open_node(memory_path / "node")


@pytest.fixture
def run(node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dieplace.partition.control.SystemClock.sleep", lambda self, seconds: None)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["--backend", "emulated", "--node", str(node.directory), "partition", *words])
        out, err = capsys.readouterr()
        assert code in range(8) and "Traceback" not in err, (words, code, err)
        return code, out, err

    return call


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    yield here
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*here, key))


def damaged(text: str, dice: random.Random) -> bytes:
    """A record cut short, with bits flipped, replaced, or with a value of another kind somewhere inside."""
    kind = dice.random()
    if kind < 0.15:
        return text[: dice.randrange(len(text))].encode()
    if kind < 0.3:
        data = bytearray(text.encode())
        for _ in range(3):
            data[dice.randrange(len(data))] = dice.randrange(256)
        return bytes(data)
    if kind < 0.4:
        return dice.choice(RAW)
    value = json.loads(text)
    place = dice.choice([place for place in places(value) if place])
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    if dice.random() < 0.3:
        del inner[place[-1]]
    else:
        inner[place[-1]] = dice.choice(JUNK)
    return json.dumps(value).encode()


def test_damaged_records_are_told_and_never_believed(node: Node, run: Run) -> None:
    dice = random.Random(20261130)
    assert run("set", "DPX/NPS2", "-y")[0] == 0
    state = emulated_directory(node.directory)
    wish = {"scope": "hive 1", "memory": "NPS2", "was": "NPS1", "boot_id": node.boot_id, "certain": True, "bdf": "x"}
    good = {name: (state / name).read_text() for name in ("journal.json", "history.json")}
    good["pending.json"] = json.dumps({"schema": "x", "wishes": [wish]})
    commands = [
        ("show",),
        ("plan", "SPX/NPS1"),
        ("restore", "--dry-run"),
        ("assert", "DPX/NPS2"),
        ("set", "DPX/NPS2", "-y"),
    ]
    codes = set()
    for _ in range(150):
        for name, text in good.items():
            (state / name).write_text(text)
        name = dice.choice([*good])
        (state / name).write_bytes(damaged(good[name], dice))
        words = dice.choice(commands)
        code, out, _ = run(*words)
        codes.add((words[0], code))
        assert words[0] != "show" or (code == 0 and "DPX/NPS2" in out), "a damaged record hides no node"
        assert truth(node).is_in("DPX/NPS2")
    assert {("plan", 3), ("restore", 3), ("plan", 0)} <= codes


def test_show_tells_a_damaged_record_with_its_path_and_switches_refuse(node: Node, run: Run) -> None:
    assert run("set", "DPX/NPS2", "-y")[0] == 0
    record = emulated_directory(node.directory) / "journal.json"
    record.write_text(record.read_text().replace('"DPX/NPS2"', '"DPX/NPS9"'))
    code, out, _ = run("show")
    assert code == 0 and str(record) in out and "not known" in out
    for words in (("set", "SPX/NPS1", "-y"), ("restore", "-y")):
        code, _, err = run(*words)
        assert code == 3 and str(record) in err and "move that file away" in err
    assert truth(node).is_in("DPX/NPS2")
    record.unlink()
    assert run("set", "SPX/NPS1", "-y")[0] == 0 and truth(node).is_in("SPX/NPS1")


def test_a_damaged_history_is_no_reason_to_refuse_the_way_back(node: Node, run: Run) -> None:
    assert run("set", "DPX/NPS2", "-y")[0] == 0
    (emulated_directory(node.directory) / "history.json").write_bytes(b"\xff[")
    code, out, _ = run("plan", "SPX/NPS1")
    assert code == 0 and "is not known yet" in out
    assert run("restore", "-y")[0] == 0 and truth(node).is_in("SPX/NPS1")


def test_a_wish_of_a_hive_that_no_card_belongs_to_any_more_is_reloaded_away(node: Node, memory_path: Path) -> None:
    control = control_for(node, FakeClock(), memory_path / "state")
    assert switch(control, "DPX/NPS2").word == "done"
    Record(control.store).put_wish(Wish("hive gone", "NPS1", "NPS2", node.boot_id, True))
    outcome = carry_out(plan_restore(control), control, limits=FAST)
    assert outcome.word == "done" and truth(node).is_in("SPX/NPS1") and Record(control.store).wishes() == ()


CARDS = ["", "gpu", "gpu-1", "gpu00", "٣", "gpu٠", "00", "+0", "0x0", "*", "gpu0,gpu1", "gpu0/p0", "0000:05:00.1",
         "GPU-", "\udcff", "a" * 100000, "-", "gpu0\n", "../x", "%s", "{0}", "\u202egpu0", "ｇｐｕ0", "²"]  # fmt: skip
MODES = ["", "/", "DPX/", "/NPS2", "DPX//NPS2", "DPX/NPS２", "١/NPS2", "1000/NPS2", "-1/NPS2", "1.0/NPS2", "0x1/NPS2",
         "1/", "/1", "\udcff/NPS2", "A" * 100000, "9" * 100000 + "/NPS2", "DPX/NPS2 --yes", "ſPX/NPS1",
         "DPX/NPS2/NPS2"]  # fmt: skip


@pytest.mark.parametrize("option", ["--card", "mode"])
def test_strange_words_are_refused_and_change_nothing(node: Node, run: Run, option: str) -> None:
    for word in CARDS if option == "--card" else MODES:
        words = ("--card", word, "--", "DPX/NPS1") if option == "--card" else ("--", word)
        code, _, err = run("set", "-y", "--allow-unvalidated", *words)
        assert code in (2, 3) and err, (word[:40], code)
    assert truth(node).is_in("SPX/NPS1") and not emulated_directory(node.directory).exists()


HEAD = b"version=1\n[modes.a]\n"
PROFILES = [b"", b"\x00", b"\xff\xfe", bytes(range(256)), b"a" * (1 << 21), b"a=" + b"[" * 100000, b"x = {a=" * 3000,
            b"a." * 50000 + b"a=1", b"version=" + b"9" * 900, b"version=1.0\n[modes.a]\nall='DPX/NPS2'",
            b"version=" + b"9" * 6000, HEAD + b"all=1979-05-27", HEAD + b"all=['DPX/NPS2']",
            HEAD + b'"\\u0000"="DPX/NPS1"', HEAD + b"gpu0='DPX/NPS1'\n0='DPX/NPS1'", HEAD + b"all='DPX/NPS2\x1b[31m'",
            HEAD + b"".join(b"x%d='DPX/NPS2'\n" % i for i in range(10000))]  # fmt: skip


def test_huge_binary_and_twisted_profiles_are_refused_quickly(node: Node, run: Run, memory_path: Path) -> None:
    path = memory_path / "p.toml"
    for text in PROFILES:
        path.write_bytes(text)
        started = time.process_time()
        code, _, err = run("apply", "-f", str(path), "-y", "--profile", "a")
        assert code in (2, 3) and err, text[:40]
        assert time.process_time() - started < 5, text[:40]
    for name in ("/dev/null", "/dev/zero", "/", "/nonexistent", "a" * 5000, "/proc/self/mem"):
        assert run("apply", "-f", name, "-y")[0] == 2
    assert truth(node).is_in("SPX/NPS1")


def command(node: Node, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "dieplace.cli",
        "--backend",
        "emulated",
        "--node",
        str(node.directory),
        "partition",
        *words,
    ]


def test_three_switches_at_once_leave_one_of_their_targets_and_true_words(node: Node) -> None:
    targets = ("DPX/NPS2", "QPX/NPS2", "CPX/NPS2")
    started = [
        subprocess.Popen(command(node, "set", target, "-y", "--wait", "60", "--json"), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for target in targets
    ]  # fmt: skip
    ended = [(*process.communicate(timeout=180), process.returncode) for process in started]
    assert not [err for _, err, _ in ended if "Traceback" in err]
    answers = [json.loads(out) for out, _, _ in ended]
    # A node that changes twice while one waits is planned for once more only; then the switch says so, and did nothing.
    assert {code for _, _, code in ended} <= {0, 6} and [code for _, _, code in ended].count(0) >= 2
    assert all(a["error"]["outcome"] == "stale" for a, (_, _, code) in zip(answers, ended, strict=True) if code == 6)
    assert [target for target in targets if truth(node).is_in(target)]
    assert (
        json.loads(subprocess.run(command(node, "show", "--json"), capture_output=True, check=True).stdout)["standing"]
        == []
    )


def test_a_node_in_a_folder_whose_name_is_no_text(memory_path: Path, node: Node) -> None:
    folder = os.fsencode(memory_path) + b"/n\xff"
    shutil.copytree(os.fsencode(node.directory), folder, symlinks=True)
    words = [os.fsencode(word) for word in command(node, "set", "DPX/NPS2", "-y")]
    words[words.index(os.fsencode(node.directory))] = folder
    done = subprocess.run(words, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


def test_a_switch_asked_for_in_the_middle_of_another_waits_or_exits_5(node: Node, run: Run) -> None:
    """Between unload and load the node looks as if it had no driver: that is the other switch, not the node."""
    store = Store(emulated_directory(node.directory))
    with store.lock(0, FakeClock()):
        node.unload()
        for words in (("plan", "DPX/NPS2"), ("set", "DPX/NPS2", "-y"), ("set", "1/NPS2", "-y", "--wait", "0")):
            code, _, err = run(*words)
            assert code == 5 and "another partition switch is running" in err and "--wait" in err, words
        assert truth(node).wishes == (None,)
        node.load()
    assert run("set", "DPX/NPS2", "-y")[0] == 0 and truth(node).is_in("DPX/NPS2")


def unshare_works() -> bool:
    return shutil.which("unshare") is not None and os.geteuid() == 0 and (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )  # fmt: skip


@pytest.mark.skipif(
    not unshare_works(), reason="a small or read-only disk for one test needs a private mount namespace"
)
@pytest.mark.parametrize("kind", ["full", "read-only", "fills up"])
def test_no_room_for_the_record_no_switch(node: Node, kind: str) -> None:
    """A real disk of 64 kB that is full, becomes full after the journal was begun, or cannot be written."""
    xdg = os.environ["XDG_STATE_HOME"]
    Path(xdg).mkdir()
    fill = f"dd if=/dev/zero of={xdg}/filler bs=4096 2>/dev/null"
    prepare = {
        "full": fill,
        "read-only": f"mkdir -p {xdg}/dieplace/partition; mount -o remount,ro {xdg}",
        # Room for the lock and the journal's first two versions, not for more.
        "fills up": f"{fill}; truncate -s -$((4096*6)) {xdg}/filler",
    }[kind]
    script = (
        f'mount -t tmpfs -o size=64k,mode=700 none {xdg}; {prepare}; "$@"; code=$?; {{ {show(node)}; }} >&2; exit $code'
    )
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "bash", "-c", script, "sh",
         *command(node, "set", "DPX/NPS2", "-y")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 0:
        assert kind == "fills up" and truth(node).is_in("DPX/NPS2")
    else:
        assert done.returncode in (3, 6), done.stderr
        assert kind == "fills up" or (truth(node).is_in("SPX/NPS1") and "record of switches" in done.stderr), (
            done.stderr
        )
    assert set(truth(node).wishes) == {None} or "pending" in done.stderr


def show(node: Node) -> str:
    return " ".join(command(node, "show", "-q"))


def test_the_record_cannot_be_written_from_any_step_on_and_what_is_said_stays_true(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up at the n-th write of the record: at every n the words and the node agree."""
    real = Store._write
    for last in range(12):
        home = memory_path / str(last)
        clock = FakeClock()
        node = small_node(home / "node", clock)
        control = control_for(node, clock, home / "state")
        plan, writes = plan_for(control, "DPX/NPS2"), 0

        def write(self: Store, name: str, value: dict[str, Any], last: int = last) -> None:
            nonlocal writes
            writes += 1
            if writes > last:
                raise OSError(28, "No space left on device")
            real(self, name, value)

        monkeypatch.setattr(Store, "_write", write)
        try:
            word = carry_out(plan, control, limits=FAST).word
        except DieplaceError as error:
            word = str(error.facts.get("outcome") or "refused")
        monkeypatch.setattr(Store, "_write", real)
        now = truth(node)
        assert now.is_in(
            {"done": "DPX/NPS2", "refused": "SPX/NPS1", "unchanged": "SPX/NPS1"}.get(word, "SPX/NPS1")
        ) or (word in ("pending", "unknown", "not-verified")), (last, word, now)
        assert set(now.wishes) == {None} or word in ("pending", "unknown"), (last, word, now)
        shutil.rmtree(home)


@pytest.mark.parametrize("jump", [-500.0, -3.0, 10_000.0])
def test_a_clock_that_jumps_neither_hangs_nor_lies(node: Node, memory_path: Path, jump: float) -> None:
    clock = FakeClock()
    slow = small_node(memory_path / "slow", clock, slow_start_s=20.0)
    control = control_for(slow, clock, memory_path / "state")
    plan = plan_for(control, "DPX/NPS2")

    def leap() -> None:
        clock.time += jump

    clock.at(5, leap)
    steps = 0
    real = clock.sleep

    def sleep(seconds: float) -> None:
        nonlocal steps
        steps += 1
        assert steps < 1000, "waits for ever"
        real(seconds)

    clock.sleep = sleep  # type: ignore[method-assign]
    try:
        assert carry_out(plan, control, limits=FAST).word == "done" and truth(slow).is_in("DPX/NPS2")
    except NotVerified as error:
        assert jump > 0 and error.facts["outcome"] in ("not-verified", "unknown")
    slow.refresh()
    clock.time += 2000
    if truth(slow).loaded:
        assert carry_out(plan_restore(control), control, limits=FAST).word in ("done", "already")
    seconds = Record(control.store).reloads().seconds
    assert all(0 <= value <= 86400 for value in seconds)
