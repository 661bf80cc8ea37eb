"""Which libamdhip64 to open: the one this process already uses, else torch's own, else ROCm's.

Two HIP runtimes in one process do not know each other's memory, so a second copy is never opened beside a loaded one,
and before torch is loaded the copy is taken that torch will load: in its own wheel, or in the ROCm wheels it needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dieplace.errors import Unsupported

_NAME = "libamdhip64.so"
_WHEELS = ("torch", "_rocm_sdk_core")  # where pip puts HIP: torch/lib, or lib of AMD's own ROCm wheels


def find_hip(rocm_path: str | None = None) -> str:
    """Path or name for the dynamic loader; Unsupported where an explicit `rocm_path` holds none."""
    loaded = mapped(_NAME)
    if loaded is not None:
        return loaded
    if rocm_path is not None:
        return _in_rocm(Path(rocm_path))
    folders = [*_wheel_folders(), Path("/opt/rocm/lib")]
    found = next((path for folder in folders for path in sorted(folder.glob(f"{_NAME}*"))), None)
    return str(found) if found is not None else _NAME


def _wheel_folders() -> Iterator[Path]:
    for name in _WHEELS:
        found = importlib.util.find_spec(name)
        for place in (found.submodule_search_locations or ()) if found is not None else ():
            yield Path(place) / "lib"


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
