"""The scripts' own sentences: Python too old, no venv module, no network; and that they work from any folder."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("python3", "python", "python3.11", "python3.12", "python3.13")


@pytest.fixture
def checkout(tmp_path):
    """The files the scripts need, without an environment."""
    copy = tmp_path / "checkout"
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("requirements.lock", "requirements-cpu.lock", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def fake_pythons(folder: Path, script: str) -> str:
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def run(script, cwd, **environ):
    keep = {"HOME": str(cwd), "LC_ALL": "C"}
    return subprocess.run([str(script)], cwd=cwd, env={**keep, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["scripts/test", "scripts/demo", ".ci/run"])
def test_an_old_python_is_one_sentence(checkout, tmp_path, script):
    path = fake_pythons(tmp_path / "bin", 'case "$2" in *python_version*) echo 3.9.2;; *) exit 1;; esac')
    done = run(checkout / script, tmp_path, PATH=path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "dieplace: Python 3.11 or newer is needed and python3 is 3.9.2: install it, or name one with "
        "PYTHON=/path/to/python\n"
    )


def test_no_python_at_all(checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "cat", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    done = run(checkout / "scripts/test", tmp_path, PATH=str(tools))
    assert done.returncode == 1 and "python3 is none" in done.stderr


def test_no_venv_module_is_one_sentence(checkout, tmp_path):
    script = f'if [ "$1" = -m ]; then echo "ensurepip is not available" >&2; exit 1; fi\nexec {sys.executable} "$@"'
    done = run(checkout / "scripts/test", tmp_path, PATH=fake_pythons(tmp_path / "bin", script))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("dieplace: making .venv with ")
    assert "apt install python3-venv" in lines[1] and "ensurepip is not available" in lines[1]
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_no_network_is_one_sentence(checkout, tmp_path):
    nowhere = {
        "PIP_INDEX_URL": "https://192.0.2.1/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_DEFAULT_TIMEOUT": "1",
        "PIP_RETRIES": "0", "PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin",
    }  # fmt: skip
    done = run(checkout / "scripts/demo", tmp_path, **nowhere)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("dieplace: the packages could not be fetched: the package index")
    # A second try starts where the first stopped: nothing half installed passes for done.
    assert run(checkout / "scripts/demo", tmp_path, **nowhere).returncode == 1


def test_a_second_run_installs_nothing(tmp_path):
    """With this environment in place the preparation is silent, from any folder."""
    if not (ROOT / ".venv/dieplace-installed").exists():
        pytest.skip("this environment was not made by the scripts")
    code = f"source {ROOT}/scripts/prepare.sh && pwd && echo $BIN"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.split() == [str(ROOT), f"{ROOT}/.venv/bin"]


def test_the_scripts_can_be_run_and_read():
    for name in ("scripts/test", "scripts/demo", "scripts/lint", ".ci/run"):
        assert os.stat(ROOT / name).st_mode & stat.S_IXUSR, name
        subprocess.run(["bash", "-n", ROOT / name], check=True)
    done = subprocess.run([ROOT / "scripts/test", "--help"], capture_output=True, text=True)
    assert "--quick" in done.stdout or done.returncode


def test_python_beside_the_checkout_finds_the_package(tmp_path):
    """A folder called dieplace, as a clone makes, hides an editable install from programs beside it."""
    if not (ROOT / ".venv/dieplace-installed").exists():
        pytest.skip("this environment was not made by the scripts")
    (tmp_path / "dieplace").mkdir()
    look = "import dieplace; print(hasattr(dieplace, 'discover'))"
    late = "import sys; sys.meta_path.sort(key=lambda f: '__editable___dieplace' in getattr(f, '__module__', '')); "
    for code, found in ((look, "True"), (late + look, "False")):
        words = [ROOT / ".venv/bin/python", "-c", code]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.strip() == found, done.stderr
