"""One process per device: prefixes, statuses, first failure, signals passed on, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dieplace.binding.group import Job, run_jobs
from dieplace.binding.plan import Binding


def _jobs(count: int, **words: str) -> list[Job]:
    return [Job(f"gpu0/p{i}", {**os.environ, "LOCAL_RANK": str(i), **words}, Binding()) for i in range(count)]


def _run(script: str, count: int = 2, **words: object) -> tuple[int, dict[str, int], list[tuple[int, bytes]]]:
    lines: list[tuple[int, bytes]] = []
    code, statuses = run_jobs(
        ["sh", "-c", script],
        _jobs(count),
        emit=lambda stream, line: lines.append((stream, line)),
        **words,  # type: ignore[arg-type]
    )
    return code, statuses, lines


def test_lines_are_prefixed_and_streams_kept_apart() -> None:
    code, statuses, lines = _run("echo out $LOCAL_RANK; echo err $LOCAL_RANK >&2; printf 'no end'")
    assert code == 0 and statuses == {"gpu0/p0": 0, "gpu0/p1": 0}
    assert sorted(lines) == sorted(
        item
        for rank in (0, 1)
        for item in (
            (1, f"[gpu0/p{rank}] out {rank}\n".encode()),
            (1, f"[gpu0/p{rank}] no end\n".encode()),
            (2, f"[gpu0/p{rank}] err {rank}\n".encode()),
        )
    )


def test_much_output_is_neither_lost_nor_mixed() -> None:
    _, _, lines = _run("seq 1 50000", count=3)
    for rank in range(3):
        prefix = f"[gpu0/p{rank}] ".encode()
        mine = [line for _, line in lines if line.startswith(prefix)]
        assert mine == [prefix + str(number).encode() + b"\n" for number in range(1, 50001)]


def test_the_first_failure_ends_the_rest_and_is_the_answer() -> None:
    started = time.monotonic()
    code, statuses, _ = _run('[ "$LOCAL_RANK" = 1 ] && exit 86; exec sleep 60', count=4)
    assert time.monotonic() - started < 20
    assert code == 86
    assert statuses == {"gpu0/p0": 143, "gpu0/p1": 86, "gpu0/p2": 143, "gpu0/p3": 143}


def test_a_signal_between_fork_and_exec_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last child is still on its way to exec when the first has failed."""
    fork, default, forks = os.fork, signal.signal, []

    def counted() -> int:
        forks.append(1)
        return fork()

    def late(number: int, handler: Any) -> Any:
        if handler is signal.SIG_DFL and len(forks) == 2:
            time.sleep(0.2)
        return default(number, handler)

    monkeypatch.setattr(os, "fork", counted)
    monkeypatch.setattr(signal, "signal", late)
    started = time.monotonic()
    code, statuses, _ = _run('[ "$LOCAL_RANK" = 0 ] && exit 86; exec sleep 60', count=2)
    assert (code, statuses) == (86, {"gpu0/p0": 86, "gpu0/p1": 143}) and time.monotonic() - started < 8


def test_a_signal_is_128_and_its_number() -> None:
    assert _run("kill -9 $$")[0] == 137


def test_one_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    code, statuses, _ = _run(
        '[ "$LOCAL_RANK" = 0 ] && { sleep 0.3; exit 4; }; trap "" TERM; while :; do sleep 0.1; done', grace_s=0.5
    )
    assert code == 4 and statuses["gpu0/p1"] == 137


def test_what_a_program_left_in_its_group_ends_with_it(tmp_path: Path) -> None:
    _run(f"sleep 300 & echo $! >> {tmp_path}/pids; exit 0")
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        deadline = time.monotonic() + 10
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _supervisor(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    code = f"""
        import os
        from dieplace.binding.group import Job, run_jobs
        from dieplace.binding.plan import Binding
        jobs = [Job(f"gpu0/p{{i}}", {{**os.environ, "LOCAL_RANK": str(i)}}, Binding()) for i in range(2)]
        raise SystemExit(run_jobs(["sh", "-c", {script!r}], jobs)[0])
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


def test_sigterm_is_passed_on() -> None:
    script = "trap 'echo got TERM; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    with _supervisor(Path(), script) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith("up\n")
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(timeout=30) == 5 and rest.count("got TERM") == 2


def test_a_killed_supervisor_takes_its_children_along() -> None:
    with _supervisor(Path(), "echo $$; exec sleep 300") as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.kill()
        process.wait(timeout=30)
        deadline = time.monotonic() + 10
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(_alive, pids))


def test_standard_input_is_not_shared() -> None:
    assert _run("cat; echo done")[2].count((1, b"[gpu0/p0] done\n")) == 1


def test_each_child_has_its_own_cpus() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    jobs = [Job(f"d{i}", dict(os.environ), Binding((cpu,))) for i, cpu in enumerate(cpus)]
    lines: list[bytes] = []
    run_jobs(["grep", "Cpus_allowed_list", "/proc/self/status"], jobs, emit=lambda _, line: lines.append(line))
    assert sorted(lines) == sorted(f"[d{i}] Cpus_allowed_list:\t{cpu}\n".encode() for i, cpu in enumerate(cpus))
