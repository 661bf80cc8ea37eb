"""Finds an `ld.lld` that can link gfx950 code objects, and lays it out where LLVM looks for it.

LLVM runs `$ROCM_PATH/llvm/bin/ld.lld` and never searches PATH. LLD 14 stops at `unknown abi version`; 19 and 22
linked FlyDSL's objects (code object v6, ABI version 4).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLDEST = 19
_ROCM = ("ROCM_PATH", "ROCM_HOME")


@dataclass(frozen=True)
class Linker:
    """An `ld.lld`: its path, major version, and a ROCm-shaped root that holds it."""

    path: str
    version: int
    rocm_path: str


@lru_cache(maxsize=1)
def find_linker() -> tuple[Linker | None, str]:
    """The newest usable linker and an empty string, or None and one sentence that says why."""
    seen: list[str] = []
    for path in _candidates():
        version = _version(path)
        seen.append(f"{path} is version {version or 'unknown'}")
        if version is not None and version >= OLDEST:
            return Linker(str(path), version, _root(path)), ""
    found = "; ".join(seen) or "none found"
    return None, f"needs ld.lld {OLDEST} or newer to link a code object ({found}; Debian's package is lld-{OLDEST})"


def _candidates() -> list[Path]:
    roots = [os.environ.get(name, "") for name in _ROCM] + ["/opt/rocm"]
    paths = [Path(root, "llvm", "bin", "ld.lld") for root in roots if root]
    names = [f"ld.lld-{n}" for n in range(OLDEST + 20, OLDEST - 1, -1)] + ["ld.lld"]
    paths += [Path(found) for name in names if (found := shutil.which(name))]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _version(path: Path) -> int | None:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"LLD (\d+)", text)
    return int(match.group(1)) if match else None


def _root(path: Path) -> str:
    if path.parts[-3:] == ("llvm", "bin", "ld.lld"):
        return str(path.parents[2])
    root = Path(tempfile.mkdtemp(prefix="dieplace-rocm-"))
    (root / "llvm" / "bin").mkdir(parents=True)
    (root / "llvm" / "bin" / "ld.lld").symlink_to(path.resolve() if path.name != "ld.lld" else path)
    bitcode = next((b for r in _ROCM if (b := Path(os.environ.get(r) or "/opt/rocm", "amdgcn")).is_dir()), None)
    (root / "amdgcn").symlink_to(bitcode) if bitcode else (root / "amdgcn" / "bitcode").mkdir(parents=True)
    return str(root)
