"""Lowers traced kernels in one persistent child process, because a mistake in a kernel can abort Python.

What travels is the traced IR as text, not the launcher: tracing happens in the caller, where the launcher's closures,
globals and default arguments already are, and costs about 20 ms; no closure has to be pickled or rebuilt by name, and
the text is at the same time the key of the cache. The aborts that FlyDSL 0.5.0 is known for (an LLVM assertion when a
copy atom and its fragment disagree) come from the passes, which run here. A spawned process, not a fork: the parent
has torch's and LLVM's threads.

Protocol: pickled (job, link, rocm_path) and replies over pipes, each after an 8-byte length; file descriptor 2 of the
child is a file that the parent reads, so that messages which the compiler only prints are seen, also after an abort.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import CompileError

if TYPE_CHECKING:
    from dieplace.codegen.flydsl_host import Lowered, Lowering

DEFAULT_TIMEOUT_S = 300.0


class Worker:
    """One child process, started at the first job and again after it died."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.starts = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._stderr: Path | None = None

    def lower(self, job: Lowering, *, link: bool = False, rocm_path: str | None = None) -> tuple[Lowered, str]:
        """Lower one job: the result and what was printed; CompileError when it failed, died or was too slow."""
        with self._lock:
            process = self._running()
            try:
                _write(process.stdin, (job, link, rocm_path))
                reply = _read(process.stdout, time.monotonic() + self.timeout_s)
            except (EOFError, BrokenPipeError):
                raise self._died(job) from None
            except TimeoutError:
                process.kill()
                process.wait()
                raise CompileError(
                    f"compiling {job.entry} took more than {self.timeout_s:.0f} s and was stopped",
                    hint="use fewer constant iterations, or a run-time loop",
                ) from None
            printed = self._printed()
        if isinstance(reply, str):
            raise CompileError(f"{job.entry} does not compile: {reply}", compiler_output=printed)
        return reply, printed

    def close(self) -> None:
        """End the child, if it is ours."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self._stderr is not None:
                self._stderr.unlink(missing_ok=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if self._stderr is None or self._owner != os.getpid():
            handle, name = tempfile.mkstemp(prefix="dieplace-compiler-", suffix=".log")
            os.close(handle)
            self._stderr = Path(name)
            atexit.register(self.close)
        with self._stderr.open("wb") as log:  # inherited append mode keeps writes in order after truncation
            log.truncate()
        with self._stderr.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dieplace.codegen.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._owner = os.getpid()
        self.starts += 1
        return self._process

    def _printed(self) -> str:
        return self._stderr.read_text(errors="replace") if self._stderr else ""

    def _died(self, job: Lowering) -> CompileError:
        assert self._process is not None
        code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        printed = self._printed()
        telling = (line for line in printed.splitlines() if "Assertion" in line or "error" in line.lower())
        reason = next(telling, printed.strip()[-300:])
        return CompileError(
            f"compiling {job.entry} ended the compiler process ({name}): {reason.strip() or 'it printed nothing'}",
            hint="a known cause: a copy atom's bits differ from its fragment's size",
            signal=name,
            compiler_output=printed[-4000:],
        )


def _write(pipe: Any, value: Any) -> None:
    body = pickle.dumps(value)
    pipe.write(struct.pack("<Q", len(body)) + body)
    pipe.flush()


def _read(pipe: Any, deadline: float | None) -> Any:
    size = struct.unpack("<Q", _exactly(pipe, 8, deadline))[0]
    return pickle.loads(_exactly(pipe, size, deadline))


def _exactly(pipe: Any, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _serve() -> None:
    from dieplace.codegen import flydsl_host

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that the compiler prints may get between the replies
    while True:
        try:
            job, link, rocm_path = _read(sys.stdin.buffer, None)
        except EOFError:
            return
        os.ftruncate(2, 0)
        os.environ["FLYDSL_GPU_ARCH"] = job.arch
        if rocm_path:
            os.environ["ROCM_PATH"] = rocm_path
        reply: Any
        try:
            reply = flydsl_host.lower(job, link=link)
        except Exception as error:  # every failure of a compile is the caller's to see, none may end the worker
            reply = str(error)
        sys.stdout.flush()
        sys.stderr.flush()
        _write(replies, reply)


if __name__ == "__main__":
    _serve()
