"""Becoming another program: exec in place, with everything Python changed about this process put back first.

After `become` there is no dieplace process left, so signals, status and job control are the program's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dieplace.errors import CannotRun, NotFound

_SHELL = "/bin/sh"


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `command`; NotFound (127) or CannotRun (126) where that is not possible."""
    path = find_program(command[0], environ.get("PATH"))
    sys.stdout.flush()
    sys.stderr.flush()
    restore_signals()
    words = child_environment(environ)
    try:
        os.execve(path, list(command), words)
    except OSError as error:
        if error.errno == errno.ENOEXEC and not _is_binary(path):  # execvp(3) gives such a script to the shell
            with contextlib.suppress(OSError):
                os.execve(_SHELL, [_SHELL, path, *command[1:]], words)
        raise cannot_run(command[0], path, error) from error


def find_program(name: str, search_path: str | None) -> str:
    """The file that a shell would run for `name`; NotFound or CannotRun otherwise."""
    if "/" in name:
        return _checked(name, name)
    blocked: str | None = None
    for folder in (search_path if search_path is not None else os.defpath).split(os.pathsep):
        path = os.path.join(folder or ".", name)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            blocked = blocked or path
    if blocked is not None:
        raise CannotRun(
            f"{name}: {blocked} is not executable", hint="chmod +x it, or name its interpreter", path=blocked
        )
    raise NotFound(f"{name}: no such program in PATH", hint="give its path, or correct PATH", asked=name)


def _checked(name: str, path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        kind = NotFound if error.errno in (errno.ENOENT, errno.ENOTDIR) else CannotRun
        raise kind(f"{name}: {error.strerror}", hint="is the path right?", path=path) from error
    if stat.S_ISDIR(mode):
        raise CannotRun(f"{name} is a folder", hint="name a program", path=path)
    if not os.access(path, os.X_OK):
        raise CannotRun(f"{name} is not executable", hint="chmod +x it, or name its interpreter", path=path)
    return path


def cannot_run(name: str, path: str, error: OSError) -> CannotRun:
    """What went wrong with a program that is there."""
    why = error.strerror or "cannot be run"
    if error.errno == errno.ENOENT:
        why = f"its interpreter is missing ({_first_line(path) or 'see: file ' + path})"
    return CannotRun(f"{name}: {why}", path=path, errno=error.errno)


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(80)  # as bash tells a script from a program of another machine


def _first_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            line = file.readline(200).decode("utf-8", "replace").rstrip()
    except OSError:
        return ""
    return line if line.startswith("#!") else ""


def restore_signals() -> None:
    """Undo what Python does at its start: it ignores SIGPIPE and SIGXFSZ, and ignored signals survive exec."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the LC_CTYPE that Python itself adds in the C locale (PEP 538)."""
    words = dict(environ)
    if "LC_CTYPE" in words and "LC_CTYPE" not in _first_environment():
        del words["LC_CTYPE"]
    return words


def _first_environment() -> dict[str, str]:
    try:
        text = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {"LC_CTYPE": ""}  # cannot be told: leave it
    pairs = (item.partition(b"=") for item in text.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
