"""modprobe and systemctl as real child processes: clean environment, no shell, nothing killed, the lock passed on."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dieplace.backends.amd.reload import ModprobeReloader, process_state, program
from dieplace.errors import UsageError
from dieplace.partition.control import check_unit


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_success_busy_and_failure_are_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    good = ModprobeReloader(script(tmp_path / "m", f'echo "$@" >> {log}'))
    assert good.unload(5, ()).ok and good.load(5, ()).ok
    assert log.read_text() == "-r amdgpu\namdgpu\n"
    busy = ModprobeReloader(script(tmp_path / "b", 'echo "modprobe: FATAL: Module amdgpu is in use." >&2; exit 1'))
    assert busy.unload(5, ()).meaning == "busy"
    other = ModprobeReloader(script(tmp_path / "o", 'echo "modprobe: FATAL: Module amdgpu not found" >&2; exit 1'))
    answer = other.load(5, ())
    assert answer.meaning == "unknown" and "not found" in str(answer)
    assert ModprobeReloader(str(tmp_path / "none")).unload(5, ()).meaning == "unknown"


def test_a_modprobe_that_does_not_end_is_reported_and_not_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    reloader = ModprobeReloader(script(tmp_path / "m", f"echo $$ > {mark}; exec /bin/sleep 30"))
    answer = reloader.unload(0.5, ())
    pid = int(mark.read_text())
    try:
        assert answer.meaning == "hung" and f"pid {pid}" in answer.detail and "state S" in answer.detail
        assert process_state(pid) == "S"
    finally:
        os.kill(pid, 9)  # this test's own process
    assert process_state(0) == "?"


def test_the_environment_is_ours_and_the_lock_passes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD_X", "ROCM_PATH", "PYTHONPATH", "MODPROBE_OPTIONS", "BASH_ENV"):
        monkeypatch.setenv(name, "/evil")
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    ModprobeReloader(script(tmp_path / "m", f"env > {out}; ls -l /proc/self/fd >> {out}")).load(5, (lock,))
    text = out.read_text()
    assert "/evil" not in text and "MODPROBE_OPTIONS" not in text
    assert f"{lock} -> {tmp_path / 'lock'}" in text
    os.close(lock)


def test_a_killed_parent_leaves_the_lock_with_its_modprobe(tmp_path: Path) -> None:
    """kill -9 of the switch during the unload: the next switch must find the lock held until modprobe ends."""
    import sys

    slow = script(tmp_path / "m", f"echo $$ > {tmp_path / 'pid'}; exec /bin/sleep 30")
    code = (
        "from pathlib import Path; from dieplace.partition.store import Store;"
        "from dieplace.partition.control import SystemClock;"
        "from dieplace.backends.amd.reload import ModprobeReloader\n"
        f"with Store(Path({str(tmp_path / 's')!r})).lock(0, SystemClock()) as lock:\n"
        f"    ModprobeReloader({slow!r}).unload(60, (lock,))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    from partition_support import FakeClock

    from dieplace.errors import Busy
    from dieplace.partition.store import Store

    with pytest.raises(Busy), Store(tmp_path / "s").lock(0, FakeClock()):
        pass
    os.kill(int((tmp_path / "pid").read_text()), 9)  # this test's own process
    time.sleep(0.2)
    with Store(tmp_path / "s").lock(0, FakeClock()):
        pass


def test_units_are_named_and_nothing_else_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    control = script(tmp_path / "s", f'echo "$@" >> {log}; [ "$1" != is-active ]')
    reloader = ModprobeReloader("/bin/true", control)
    assert reloader.unit_active("gpuagent.service") is False
    assert reloader.stop_unit("gpuagent").ok and reloader.start_unit("gpuagent.service").ok
    assert log.read_text().splitlines() == [
        "is-active --quiet -- gpuagent.service",
        "stop -- gpuagent.service",
        "start -- gpuagent.service",
    ]
    for bad in ("", "-H", "--root=/", "../x.service", "a b.service", "x.mount", "x.service;reboot", "a/b.service"):
        with pytest.raises(UsageError):
            check_unit(bad)


def test_programs_are_looked_for_in_roots_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "modprobe", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = program("modprobe")
    assert found is None or not found.startswith(str(tmp_path))
    assert program("modprobe", (str(tmp_path),)) == str(tmp_path / "modprobe")
