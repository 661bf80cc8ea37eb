"""Which HIP runtime is opened: never a second one beside one that is loaded, and torch's own before ROCm's."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.backends.amd import hip_library
from dieplace.errors import Unsupported


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_library, "mapped", lambda name: None)


def library(folder: Path, name: str = "libamdhip64.so") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder / name


def packages(monkeypatch: pytest.MonkeyPatch, places: dict[str, Path]) -> None:
    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in places:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(places[name])]
        return spec

    monkeypatch.setattr(hip_library.importlib.util, "find_spec", find)


def test_torchs_own_copy_comes_first(nothing_loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"torch": tmp_path / "torch", "_rocm_sdk_core": tmp_path / "sdk"})
    sdk = library(tmp_path / "sdk" / "lib", "libamdhip64.so.7")
    assert hip_library.find_hip() == str(sdk), "a torch without HIP inside takes it from the ROCm wheels"
    own = library(tmp_path / "torch" / "lib")
    assert hip_library.find_hip() == str(own)


def test_without_any_the_loader_is_asked(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {})
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    assert hip_library.find_hip() == "libamdhip64.so"


@pytest.mark.parametrize("folder", ["lib", "lib64"])
def test_a_named_rocm(nothing_loaded: None, tmp_path: Path, folder: str) -> None:
    with pytest.raises(Unsupported, match="no libamdhip64"):
        hip_library.find_hip(str(tmp_path))
    there = library(tmp_path / folder)
    assert hip_library.find_hip(str(tmp_path)) == str(there)


def test_a_loaded_copy_wins_over_everything(tmp_path: Path) -> None:
    """The dynamic loader's own list says what is loaded: here the C library under HIP's name."""
    code = (
        "import ctypes\n"
        "from dieplace.backends.amd.hip_library import find_hip, mapped\n"
        "before = find_hip('/nowhere') if mapped('libamdhip64.so') else None\n"
        f"ctypes.CDLL({str(tmp_path / 'libamdhip64.so.7')!r})\n"
        "print(before, find_hip('/nowhere'))\n"
    )
    places = [*Path("/").glob("lib*/*-linux-gnu/libm.so.6"), *Path("/").glob("lib64/libm.so.6")]
    source = next(iter(places), None)
    if source is None:
        pytest.skip("no libm.so.6 was found here to load under another name")
    (tmp_path / "libamdhip64.so.7").write_bytes(source.read_bytes())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["None", str(tmp_path / "libamdhip64.so.7")], done.stderr
