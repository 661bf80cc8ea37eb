"""Whether the torch and Triton of this process can run kernels on a backend's devices, asked without importing either.

torch says what it was built for in its `version` module, which is a page of constants.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_BUILT_FOR = {"nvidia": "cuda", "amd": "hip"}
_WORDS = {"cuda": "CUDA", "hip": "ROCm"}


def built_for(version_file: Path | None = None) -> dict[str, str] | None:
    """`version`, and `cuda` and `hip` where torch was built for them; None where torch is not installed."""
    path = version_file if version_file is not None else _version_file()
    if path is None or not path.is_file():
        return None
    found = re.findall(r"""^(?:__)?(version|cuda|hip)(?:__)?\b[^=\n]*=\s*['"]([^'"]+)['"]""", path.read_text(), re.M)
    return dict(found)


def why_not(backend: str, *, version_file: Path | None = None) -> str | None:
    """None where torch is built for the backend's devices and Triton is installed, else one sentence why not."""
    built = built_for(version_file)
    if built is None:
        return "torch is not installed"
    wanted = _BUILT_FOR[backend]
    if wanted not in built:
        has = next((f"for {_WORDS[kind]} {built[kind]}" for kind in _WORDS if kind in built), "for the CPU alone")
        return f"torch {built.get('version', 'of unknown version')} is built {has}, not for {_WORDS[wanted]}"
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def _version_file() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "version.py"
