"""One process per device: started together, output prefixed, ended together.

Each child leads a process group of its own, so that what it starts ends with it; signals sent to dieplace are passed
on to every group. The first child that fails ends the rest, and its status is the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from dieplace.binding.bind import carry_out
from dieplace.binding.launch import child_environment, find_program, restore_signals
from dieplace.binding.plan import Binding
from dieplace.errors import DieplaceError

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Job:
    """One child: its label, environment and binding."""

    label: str
    environ: Mapping[str, str]
    binding: Binding


@dataclass
class _Child:
    job: Job
    pid: int
    streams: dict[int, int] = field(default_factory=dict)  # pipe -> 1 or 2
    status: int | None = None


def run_jobs(
    command: Sequence[str],
    jobs: Sequence[Job],
    *,
    strict: bool = False,
    grace_s: float = GRACE_S,
    emit: Callable[[int, bytes], None] | None = None,
) -> tuple[int, dict[str, int]]:
    """Run `command` once per job and return (status, status by label); a signal counts as 128 + its number.

    The status is that of the child that failed first, 0 where none did. `emit(stream, line)` takes one prefixed line.
    """
    path = find_program(command[0], jobs[0].environ.get("PATH"))
    out = emit or _write
    children: list[_Child] = []
    held = {number: signal.signal(number, _passer(children)) for number in PASSED_ON}
    try:
        for job in jobs:
            children.append(_start(path, command, job, strict))
        first = _watch(children, out, grace_s)
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        _kill(children, signal.SIGKILL)
    return first, {child.job.label: child.status if child.status is not None else 137 for child in children}


def _passer(children: list[_Child]) -> Callable[[int, object], None]:
    def pass_on(number: int, _frame: object) -> None:
        _kill(children, signal.Signals(number))

    return pass_on


def _start(path: str, command: Sequence[str], job: Job, strict: bool) -> _Child:
    pipes = {stream: os.pipe() for stream in (1, 2)}
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Between fork and exec a signal would run this process's handler in the child and be lost to the program.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid == 0:
        _become_child(path, command, job, strict, pipes, parent, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both sides do it: whoever comes first
    streams = {}
    for stream, (read, write) in pipes.items():
        os.close(write)
        os.set_blocking(read, False)
        streams[read] = stream
    return _Child(job, pid, streams)


def _become_child(
    path: str,
    command: Sequence[str],
    job: Job,
    strict: bool,
    pipes: Mapping[int, tuple[int, int]],
    parent: int,
    mask: set[int | signal.Signals],
) -> NoReturn:
    code = 125
    try:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should dieplace itself be killed
        if os.getppid() != parent:
            os._exit(code)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a background group must not wait for the terminal
        for stream, (_, write) in pipes.items():
            os.dup2(write, stream)
        for text in carry_out(job.binding, strict=strict).failures:
            os.write(2, f"dieplace: warning: {text}\n".encode())
        restore_signals()
        os.execve(path, list(command), child_environment(job.environ))
    except DieplaceError as error:
        os.write(2, f"dieplace: {error}\n".encode())
        code = error.exit_code
    except OSError as error:
        os.write(2, f"dieplace: {command[0]}: {error.strerror}\n".encode())
        code = 126
    finally:
        os._exit(code)


def _watch(children: list[_Child], out: Callable[[int, bytes], None], grace_s: float) -> int:
    first: int | None = None
    deadline: float | None = None
    buffers: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            for pipe in child.streams:
                selector.register(pipe, selectors.EVENT_READ, child)
        while any(child.status is None for child in children):
            _drain(selector, buffers, out, timeout_s=0.05)
            for status in _reap(children):
                if status != 0 and first is None:
                    first, deadline = status, time.monotonic() + grace_s
                    _kill(children, signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                _kill(children, signal.SIGKILL)
                deadline = None
        for _ in range(20):  # what was still in the pipes; a grandchild may keep them open for ever
            if not selector.get_map() or not _drain(selector, buffers, out, timeout_s=0.0):
                break
        for key in list(selector.get_map().values()):
            _flush_line(key.data, key.fd, buffers, out)
            os.close(key.fd)
    return first or 0


def _drain(
    selector: selectors.BaseSelector, buffers: dict[int, bytes], out: Callable[[int, bytes], None], timeout_s: float
) -> bool:
    found = False
    for key, _ in selector.select(timeout_s):
        found = True
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            continue
        *lines, rest = (buffers.get(key.fd, b"") + data).split(b"\n")
        prefix = f"[{key.data.job.label}] ".encode()
        for line in lines:
            out(key.data.streams[key.fd], prefix + line + b"\n")
        buffers[key.fd] = rest
        if not data:
            selector.unregister(key.fd)
            _flush_line(key.data, key.fd, buffers, out)
            os.close(key.fd)
    return found


def _flush_line(child: _Child, pipe: int, buffers: dict[int, bytes], out: Callable[[int, bytes], None]) -> None:
    if rest := buffers.pop(pipe, b""):
        out(child.streams[pipe], f"[{child.job.label}] ".encode() + rest + b"\n")


def _reap(children: list[_Child]) -> list[int]:
    done = []
    for child in children:
        if child.status is not None:
            continue
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            child.status = code if code >= 0 else 128 - code
            done.append(child.status)
            _kill_group(child.pid, signal.SIGTERM)  # what the program left behind in its group
    return done


def _kill(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        if child.status is None:
            _kill_group(child.pid, number)


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _write(stream: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(stream, view) :]
