"""`dieplace exec` becomes the program: status, signals, descriptors and environment are those of running it bare."""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

CPU = str(min(os.sched_getaffinity(0)))
EXEC = [sys.executable, "-m", "dieplace.cli", "exec", "--cpus", CPU, "--"]
BOTH = ("bare", "exec")


def _status(command: list[str], how: str, **words: object) -> int:
    full = command if how == "bare" else EXEC + command
    done = subprocess.run(full, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, **words)  # type: ignore[call-overload]
    return int(done.returncode)


def _case(chance: random.Random) -> tuple[list[str], signal.Signals | None]:
    """A program and a signal to send it from outside, or None."""
    kind = chance.randrange(5)
    if kind == 0:
        return ["sh", "-c", f"exit {chance.randrange(256)}"], None
    number = chance.choice([1, 2, 3, 6, 9, 10, 12, 13, 14, 15, 24, 25, 34, 64])
    if kind == 1:
        return ["sh", "-c", f"kill -{number} $$"], None
    if kind == 2:
        return [
            "sh",
            "-c",
            f"trap 'exit {chance.randrange(256)}' {number} 2>/dev/null; kill -{number} $$; exit 3",
        ], None
    sent = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL, signal.SIGPIPE])
    if kind == 3:
        return ["sh", "-c", "echo up; while :; do sleep 0.05; done"], sent
    return [
        "sh",
        "-c",
        f"trap 'exit {chance.randrange(256)}' TERM INT HUP USR1; echo up; while :; do sleep 0.05; done",
    ], sent


def _run_case(command: list[str], sent: signal.Signals | None, how: str) -> int:
    full = command if how == "bare" else EXEC + command
    if sent is None:
        return _status(command, how)
    with subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(sent)
        return process.wait(timeout=30)


def _compare(cases: int, seed: int) -> dict[str, int]:
    chance, counts = random.Random(seed), {"exit": 0, "signal": 0}
    for number in range(cases):
        command, sent = _case(chance)
        bare, ours = (_run_case(command, sent, how) for how in BOTH)
        assert ours == bare, (number, command, sent)
        counts["signal" if bare < 0 else "exit"] += 1
    return counts


def test_a_few_random_endings_are_those_of_the_bare_program() -> None:
    assert sum(_compare(12, seed=1).values()) == 12


@pytest.mark.slow
def test_200_random_endings_are_those_of_the_bare_program() -> None:
    counts = _compare(200, seed=2)
    print(counts)
    assert counts["exit"] > 40 and counts["signal"] > 40


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["nosuchprogram"], 127),
        (["./nosuchprogram"], 127),
        (["/etc/passwd/x"], 127),
        (["/"], 126),
        (["/etc/passwd"], 126),
        (["{}/noexec"], 126),
        (["{}/badinterpreter"], 126),
        (["{}/noformat"], 7),
        (["{}/garbage"], 126),
    ],
)
def test_programs_that_cannot_be_run(tmp_path: Path, command: list[str], code: int) -> None:
    files = {
        "noexec": ("#!/bin/sh\n", 0o644),
        "badinterpreter": ("#!/nosuch/interpreter\n", 0o755),
        "noformat": ("exit 7\n", 0o755),
    }
    for name, (text, mode) in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "garbage").write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 57)
    (tmp_path / "garbage").chmod(0o755)
    done = subprocess.run([*EXEC, command[0].format(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_the_shell_agrees_on_missing_programs(tmp_path: Path) -> None:
    (tmp_path / "noexec").write_text("#!/bin/sh\n")
    for program in ("nosuchprogram", str(tmp_path / "noexec"), "/"):
        bare = subprocess.run(["bash", "-c", '"$0"', program], capture_output=True, timeout=60).returncode
        assert _status([program], "exec") == bare


def test_environment_and_descriptors_are_untouched(tmp_path: Path) -> None:
    """Python adds LC_CTYPE in the C locale and ignores SIGPIPE; neither may reach the program."""
    environ = {"PATH": os.environ["PATH"], "ODD": "a\nb", "EMPTY": ""}
    seen = {}
    for how in BOTH:
        read, write = os.pipe()
        os.write(write, b"through a pipe")
        os.close(write)
        script = f"env -0; grep -E 'SigIgn|SigBlk' /proc/self/status; ls /proc/self/fd; cat /proc/self/fd/{read}; cat"
        command = ["sh", "-c", script] if how == "bare" else [*EXEC, "sh", "-c", script]
        with (tmp_path / "in").open("w+") as standard_input:
            standard_input.write("standard input")
            standard_input.seek(0)
            done = subprocess.run(
                command,
                env=environ,
                stdin=standard_input,
                capture_output=True,
                pass_fds=[read],
                cwd=tmp_path,
                timeout=60,
            )
        os.close(read)
        seen[how] = done.stdout, done.stderr
    assert seen["exec"] == seen["bare"]
    assert b"through a pipe" in seen["exec"][0] and b"standard input" in seen["exec"][0]


def test_a_closed_pipe_kills_the_program_as_usual() -> None:
    for how in BOTH:
        command = ["yes"] if how == "bare" else [*EXEC, "yes"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(timeout=30) == -signal.SIGPIPE and process.stderr.read() == b""


def test_the_process_is_the_same_one_and_nothing_is_left_behind() -> None:
    with subprocess.Popen(
        [*EXEC, "sh", "-c", "echo $$ $PPID; exec sleep 30"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, parent = map(int, process.stdout.readline().split())
        assert (pid, parent) == (process.pid, os.getpid())
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""
        process.kill()


def test_bound_before_the_program_starts() -> None:
    """TensorRT-LLM PR 18117: every thread that the program starts has the list from its first instruction."""
    code = """
import threading, time
from pathlib import Path
for _ in range(4): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
lists = [line for text in texts for line in text.splitlines() if "Cpus_allowed_list" in line]
print(len(lists), *set(lists))
"""
    done = subprocess.run([*EXEC, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["5", "Cpus_allowed_list:", CPU]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["--", "true"], 2),
        (["--cpus", CPU], 2),
        (["--cpus", "x", "--", "true"], 2),
        (["--cpus", CPU, "--cpunodebind", "0", "--", "true"], 2),
        (["--membind", "0", "--interleave", "0", "--", "true"], 2),
        (["--per-device", "--by-rank", "--", "true"], 2),
        (["--device", "", "--", "true"], 2),
        (["--device", "gpu0,,gpu1", "--", "true"], 2),
        (["--cpus", "4095", "--", "true"], 3),
        (["--membind", "900", "--", "true"], 3),
        (["--backend", "cpu", "--device", "gpu0", "--", "true"], 3),
        (["--nonsense"], 2),
    ],
)
def test_requests_that_cannot_be(arguments: list[str], code: int) -> None:
    done = subprocess.run([*EXEC[:4], *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stderr.strip() and "Traceback" not in done.stderr


@pytest.mark.slow
def test_exec_adds_less_than_150_ms() -> None:
    """Median of alternated runs; where the machine is busy the CPU time, which waiting does not lengthen, must hold."""
    wall: dict[str, list[float]] = {how: [] for how in BOTH}
    used: dict[str, list[float]] = {how: [] for how in BOTH}
    for _ in range(15):
        for how in BOTH:
            before, started = os.times(), time.perf_counter()
            assert _status(["true"], how) == 0
            after = os.times()
            wall[how].append(time.perf_counter() - started)
            used[how].append(
                after.children_user + after.children_system - before.children_user - before.children_system
            )
    added = {
        name: statistics.median(t["exec"]) - statistics.median(t["bare"]) for name, t in (("wall", wall), ("cpu", used))
    }
    print({name: f"{1000 * value:.0f} ms" for name, value in added.items()})
    assert min(added.values()) < 0.150


def test_print_runs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*EXEC[:-1], "--print", "--", "touch", str(tmp_path / "file")], capture_output=True, text=True
    )
    assert done.returncode == 0 and f"CPUs: {CPU}" in done.stdout and not (tmp_path / "file").exists()
