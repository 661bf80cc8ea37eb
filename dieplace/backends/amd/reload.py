"""Unloading and loading the driver with modprobe, and stopping and starting the units that the user named.

Programs are called by absolute path, with a clean environment and no shell. A modprobe that does not end is reported,
never killed: killing it in the middle of an unload can hang the host (legacy-rocm-build issue 4469).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dieplace.backends.amd.smi import clean_environment
from dieplace.partition.control import TICK_S, Answer, Tick, check_unit, silent

_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
_UNIT_TIMEOUT_S = 120.0
Wait = Callable[["subprocess.Popen[bytes]", float], "bytes | None"]  # see `wait_for`


class Reloader(Protocol):
    """What can unload and load the driver of a node, and its units."""

    def unload(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer: ...
    def load(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer: ...
    def unit_active(self, unit: str) -> bool | None: ...
    def stop_unit(self, unit: str) -> Answer: ...
    def start_unit(self, unit: str) -> Answer: ...


def program(name: str, folders: tuple[str, ...] = _FOLDERS) -> str | None:
    """The absolute path of a system program in root's own folders, or None; never looked up in the caller's PATH."""
    for folder in folders:
        path = Path(folder) / name
        if os.access(path, os.X_OK):
            return str(path)
    return None


class ModprobeReloader:
    """The live node's modprobe and systemctl."""

    def __init__(self, modprobe: str | None = None, systemctl: str | None = None, *, wait: Wait | None = None) -> None:
        self.modprobe = modprobe or program("modprobe")
        self.wait = wait or wait_for
        self.systemctl = systemctl or program("systemctl")

    def unload(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        """`modprobe -r amdgpu`; "in use" is `busy`, no end within the limit is `hung`."""
        return self._modprobe(("-r", "amdgpu"), timeout_s, keep_open, tick)

    def load(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        """`modprobe amdgpu`; works also where a boot parameter blocks the automatic load."""
        return self._modprobe(("amdgpu",), timeout_s, keep_open, tick)

    def _modprobe(self, arguments: tuple[str, ...], timeout_s: float, keep_open: tuple[int, ...], tick: Tick) -> Answer:
        if self.modprobe is None:
            return Answer("unknown", "modprobe", f"there is no modprobe in {', '.join(_FOLDERS)}")
        return run_program((self.modprobe, *arguments), timeout_s, keep_open, kill=False, tick=tick, wait=self.wait)

    def unit_active(self, unit: str) -> bool | None:
        """Whether a unit runs; None where there is no systemd to ask."""
        if self.systemctl is None:
            return None
        answer = run_program((self.systemctl, "is-active", "--quiet", "--", check_unit(unit)), _UNIT_TIMEOUT_S)
        return answer.ok

    def stop_unit(self, unit: str) -> Answer:
        """Stop a unit and wait for it."""
        return self._systemctl("stop", unit)

    def start_unit(self, unit: str) -> Answer:
        """Start a unit and wait for it."""
        return self._systemctl("start", unit)

    def _systemctl(self, verb: str, unit: str) -> Answer:
        if self.systemctl is None:
            return Answer("unknown", "systemctl", "there is no systemctl here")
        return run_program((self.systemctl, verb, "--", check_unit(unit)), _UNIT_TIMEOUT_S)


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """What the program said on stderr when it ended, or None where it has not within `seconds`."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        return None


def run_program(
    command: tuple[str, ...],
    timeout_s: float,
    keep_open: tuple[int, ...] = (),
    *,
    kill: bool = True,
    tick: Tick = silent,
    wait: Wait = wait_for,
) -> Answer:
    """Run one program to its end. With `kill=False` one that outlives the limit is left alone and reported `hung`.

    `tick` hears every TICK_S seconds that it still runs, and in which state: D sleeps in the kernel.
    """
    via = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            cwd="/",
            pass_fds=keep_open,
            start_new_session=True,
        )
    except OSError as error:
        return Answer("unknown", via, f"cannot start {command[0]}: {error.strerror}", error.errno)
    waited = 0.0
    while (err := wait(process, part := min(TICK_S, timeout_s - waited))) is None:
        waited += part
        where = f"pid {process.pid}, state {process_state(process.pid)}"
        if waited >= timeout_s:
            if kill:
                process.kill()
            return Answer("hung", via, f"{' '.join(command)} ({where}) still runs")
        tick(waited, f"{via}, {where}")
    said = err.decode("utf-8", "replace").strip()[-400:]
    if process.returncode == 0:
        return Answer("ok", via, said)
    busy = "in use" in said.lower()
    return Answer("busy" if busy else "unknown", via, said or "no message", process.returncode)


def process_state(pid: int) -> str:
    """The kernel's letter for a process: `D` sleeps in the driver and cannot be ended; `?` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "?"
