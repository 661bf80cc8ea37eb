"""The half of a rank that measures: a child process, so that its parent sees how it ends, `os._exit(86)` included.

The child tells through a pipe which cards it has, waits for the word to begin, tells of each run that it saved, and at
last of an error. Its stdout is stderr: the one answer on stdout is another's. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dieplace.errors import DieplaceError

STOPPED = 130
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Line:
    """The child's way to its parent. Call `begin` with the cards once they are known: it returns when all ranks may."""

    _out: int
    _go: int

    def begin(self, cards: dict[str, Any]) -> None:
        """Tell the cards, and wait; SystemExit where the parent says that nothing will be measured."""
        self._tell({"cards": cards})
        if os.read(self._go, 1) != b"g":
            raise SystemExit(0)

    def saved(self, path: Path) -> None:
        """A run is whole on the disk."""
        self._tell({"saved": str(path)})

    def _tell(self, notice: dict[str, Any]) -> None:
        os.write(self._out, json.dumps(notice).encode() + b"\n")


Work = Callable[[Line], None]


@dataclass
class Child:
    """As the parent sees it: what was told, and the exit code once it has ended (128 + number for a signal)."""

    pid: int
    heard: int
    go: int
    cards: dict[str, Any] | None = None
    saved: list[Path] = field(default_factory=list)
    error: dict[str, Any] | None = None
    code: int | None = None
    signalled: int | None = None
    _rest: bytes = b""

    def poll(self) -> None:
        """Hear what there is, and whether it ended."""
        pid, status = (self.pid, 0) if self.code is not None else os.waitpid(self.pid, os.WNOHANG)
        self._hear()
        if pid and self.code is None:
            ended = os.waitstatus_to_exitcode(status)
            self.signalled = -ended if ended < 0 else None
            self.code = ended if ended >= 0 else 128 - ended

    def let_go(self, *, measure: bool) -> None:
        """The word that `begin` waits for."""
        with suppress(BrokenPipeError):
            os.write(self.go, b"g" if measure else b"n")

    def end(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it started."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self.heard, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, notice: dict[str, Any]) -> None:
        if "cards" in notice:
            self.cards = notice["cards"]
        if "saved" in notice:
            self.saved.append(Path(notice["saved"]))
        self.error = notice.get("error", self.error)


def start(work: Work) -> Child:
    """Fork, and let the child do `work`. Call it before any driver is started: a context does not survive a fork."""
    heard, out = os.pipe()
    waits, go = os.pipe()
    os.set_blocking(heard, False)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        os.close(go)
        _be_child(work, Line(out, waits), parent)
    os.close(out)
    os.close(waits)
    with suppress(OSError):
        os.setpgid(pid, pid)  # both sides do it: whoever comes first
    return Child(pid, heard, go)


def _be_child(work: Work, line: Line, parent: int) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)  # torchrun signals its worker's whole group: what comes here is for the parent to say
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(2, 1)
        work(line)
        code = 0
    except DieplaceError as error:
        code = error.exit_code
        line._tell({"error": {**error.to_json(), "exit_code": code}})
    except KeyboardInterrupt:
        code = STOPPED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException as error:
        traceback.print_exc()
        line._tell({"error": _bug(error)})
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _bug(error: BaseException) -> dict[str, Any]:
    told = DieplaceError(
        f"a bug in dieplace: {type(error).__name__}: {error}", hint="please report it with the lines above"
    )
    return {**told.to_json(), "exit_code": told.exit_code}


def wait_until_ended(child: Child, seconds: float) -> None:
    """Poll until it has ended, at most so long."""
    until = time.monotonic() + seconds
    while child.code is None and time.monotonic() < until:
        child.poll()
        time.sleep(0.02)
