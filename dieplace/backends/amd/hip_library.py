"""Which libamdhip64 to open: the one this process already uses, else torch's own, else ROCm's.

Two HIP runtimes in one process do not know each other's memory, so a second copy is never opened beside a loaded one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dieplace.errors import Unsupported

_NAME = "libamdhip64.so"


def find_hip(rocm_path: str | None = None) -> str:
    """Path or name for the dynamic loader; Unsupported where an explicit `rocm_path` holds none."""
    loaded = mapped(_NAME)
    if loaded is not None:
        return loaded
    if rocm_path is not None:
        return _in_rocm(Path(rocm_path))
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        bundled = Path(found.origin).parent / "lib" / _NAME
        if bundled.exists():
            return str(bundled)
    standard = Path("/opt/rocm/lib") / _NAME
    return str(standard) if standard.exists() else _NAME


def mapped(name: str) -> str | None:
    """The file of this process whose name begins with `name`, where the loader has mapped one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = [line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6]
    return next((file for file in files if Path(file).name.startswith(name) and Path(file).exists()), None)


def _in_rocm(rocm_path: Path) -> str:
    for folder in ("lib", "lib64"):
        if (rocm_path / folder / _NAME).exists():
            return str(rocm_path / folder / _NAME)
    raise Unsupported(f"there is no {_NAME} in {rocm_path}", hint="name the folder of a ROCm installation")
