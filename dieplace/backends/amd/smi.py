"""The parent's side of a conversation with AMD's library: start a clean child, wait with a limit, read one answer."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.partition.control import Answer

CHILD = Path(__file__).with_name("smi_child.py")
TELEMETRY_CHILD = Path(__file__).with_name("telemetry_child.py")
TIMEOUT_S = 60.0  # amdsmi_init can hang on gfx950; AMD's own command gives it 60 s (rocm-systems PR 6462)
_LIMIT_BYTES = 1 << 20

# What a status means for a switch (amdsmi's errno map: EACCES 10, EPERM and ENOENT 2, EBUSY 30, EIO 42, ENXIO 43).
MEANING_OF_STATUS = {
    "INVAL": "refused",
    "NO_PERM": "refused",
    "NOT_SUPPORTED": "refused",
    "SETTING_UNAVAILABLE": "refused",
    "BUSY": "busy",
    "UNEXPECTED_SIZE": "broken",
    "UNEXPECTED_DATA": "broken",
    "INIT_ERROR": "absent",
    "DRIVER_NOT_LOADED": "absent",
    "NO_DRV": "absent",
}


def clean_environment() -> dict[str, str]:
    """The whole environment of every child: nothing of the caller's, so no library path and no Python variables."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}


@dataclass(frozen=True)
class Smi:
    """How to reach the library: `rocm_path` names a ROCm to use instead of the default one."""

    rocm_path: str | None = None
    timeout_s: float = TIMEOUT_S
    python: str = field(default_factory=lambda: sys.executable)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One conversation. The reply always has `ok`; a child that hung or died is `stage` "child"."""
        return self._converse(CHILD, {"op": op, **request})

    def telemetry(self) -> dict[str, Any]:
        """Power (W) and utilisation (%) of each logical device through pyrsmi; None where a reading failed."""
        return self._converse(TELEMETRY_CHILD, {})

    def _converse(self, child: Path, request: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps({"rocm_path": self.rocm_path or default_rocm(), **request})
        command = [self.python, "-I", "-B", str(child), text]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=clean_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return _no_answer(f"cannot start {self.python}: {error.strerror}")
        try:
            out, _ = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            return _no_answer(f"no answer within {self.timeout_s:.0f} s{_end(process)}", name="TIMEOUT")
        return _parsed(out, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Kill our own child; one that sleeps in the kernel cannot be, which is said and not waited for."""
    process.kill()
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        return f", and pid {process.pid} does not end (it sleeps in the kernel)"
    return ""


def _parsed(out: bytes, status: int) -> dict[str, Any]:
    try:
        reply = json.loads(out[:_LIMIT_BYTES])
    except ValueError:
        died = f"died with signal {-status}" if status < 0 else f"ended with status {status}"
        return _no_answer(f"the library's process {died} and gave no answer")
    return reply if isinstance(reply, dict) and "ok" in reply else _no_answer("the answer is not one of ours")


def _no_answer(text: str, name: str | None = None) -> dict[str, Any]:
    return {"ok": False, "stage": "child", "text": text, "code": None, "name": name}


def default_rocm() -> str | None:
    """`/opt/rocm` where it is there, whatever the caller's environment says."""
    return "/opt/rocm" if os.path.isdir("/opt/rocm") else None


def check_rocm_path(path: str) -> str:
    """A ROCm folder named by the user, as an absolute real path; UsageError when it holds no library, or when others
    could replace what root is about to load."""
    real = Path(path).resolve()
    library = real / "lib" / "libamd_smi.so"
    if not library.exists():
        raise UsageError(f"{path} holds no lib/libamd_smi.so", hint="name the ROCm folder, for example /opt/rocm-7.0.2")
    if os.geteuid() == 0 and (part := changeable_by_others(library)) is not None:
        raise UsageError(
            f"{part} may be changed by others than root, so root will not load a library from it",
            hint="install ROCm in a folder that only root can write",
        )
    return str(real)


def changeable_by_others(library: Path) -> Path | None:
    """The first part of a library's path that somebody other than root could replace, or None."""
    for part in (library.resolve(), library.parent, *library.resolve().parents):
        found = os.stat(part)
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid != 0 or (found.st_mode & 0o022 and not sticky):
            return part
    return None


def answer_of(reply: dict[str, Any], versions: dict[str, str]) -> Answer:
    """A mutating conversation's reply as an Answer. No answer at all means not knowing, never failure."""
    via = " ".join(filter(None, ("amdsmi", versions.get("library") or versions.get("binding"))))
    if reply["ok"]:
        return Answer("ok", via, reply.get("how", ""))
    code, name = reply.get("code"), reply.get("name")
    # Before the call itself nothing was asked of the driver.
    asked = reply["stage"] not in ("import", "init", "find")
    meaning = MEANING_OF_STATUS.get(name or "", "unknown") if asked else "absent"
    return Answer(meaning, via, reply.get("text", ""), code, name)


def what_to_install(reply: dict[str, Any]) -> str:
    """A sentence for a library that cannot be used, with what would help."""
    text = reply.get("text", "")
    if "No module named" in text:
        return (
            "the Python package amdsmi is not installed; it comes with ROCm (share/amd_smi) or from the package index"
        )
    if reply.get("stage") == "import":
        return (
            f"AMD's library libamd_smi.so does not load ({text}); install ROCm's amd-smi-lib of the same release as "
            "the Python package, or name a ROCm with --rocm-path"
        )
    return f"AMD's library does not answer ({text})"
