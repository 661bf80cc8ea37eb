"""What is installed: a wheel, a wheel from the sdist, and an editable install, each in an environment of its own.

No network: the environments see the packages of this one, and the build uses its setuptools.
"""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("kernels", "cli", "experiments", "tests", "scripts")


def run(*words, cwd=None, check=True):
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git tracks, so that no build folder is left in the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    names = run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "README.md").touch()
    return copy


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """The sdist of the checkout, and a wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def environment(folder) -> Path:
    """An environment that sees this one's packages but not this one's dieplace."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for entry in Path(sys.prefix).glob("lib/python*/site-packages/*"):
        if "dieplace" not in entry.name.lower() and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    return folder / "bin/python"


def install(python, *words):
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", *words)


PROBE = """
import importlib.util, sys
for name in {short!r}:
    assert importlib.util.find_spec(name) is None, name
import dieplace, dieplace.kernels, dieplace.cli.main, dieplace.experiments, dieplace.backends.amd.backend
from dieplace.kernels.models import model_names
assert len(model_names()) >= 3
print(dieplace.__file__)
"""


def assert_works(python, elsewhere):
    done = run(python, "-P", "-c", PROBE.format(short=SHORT), cwd=elsewhere)
    script = python.parent / "dieplace"
    assert run(script, "--version", cwd=elsewhere).stdout.startswith("dieplace ")
    assert run(script, "--backend", "cpu", "list", "--json", cwd=elsewhere).stdout.startswith("{")
    return done.stdout.strip()


@pytest.mark.slow
def test_a_wheel_made_from_the_sdist_works_elsewhere(built, tmp_path):
    _, wheel = built
    python = environment(tmp_path / "env")
    install(python, wheel)
    assert str(tmp_path) in assert_works(python, tmp_path)


@pytest.mark.slow
def test_an_editable_install_works_and_sees_a_new_sub_package(checkout, tmp_path):
    python = environment(tmp_path / "env")
    install(python, "-e", checkout)
    assert_works(python, tmp_path)
    new = checkout / "kernels/newly_made"
    new.mkdir()
    (new / "__init__.py").write_text("answer = 42\n")
    try:
        code = "from dieplace.kernels.newly_made import answer; print(answer)"
        assert run(python, "-P", "-c", code, cwd=tmp_path).stdout == "42\n"
    finally:
        (new / "__init__.py").unlink()


@pytest.mark.slow
def test_the_wheel_has_one_top_level_package_and_every_module(built, checkout):
    sdist, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dieplace"}
    wanted = {f"dieplace/{p.relative_to(checkout / 'dieplace')}" for p in (checkout / "dieplace").rglob("*.py")}
    for folder in ("kernels", "cli", "experiments"):
        wanted |= {f"dieplace/{p.relative_to(checkout)}" for p in (checkout / folder).rglob("*.py")}
    data = {f"dieplace/{p.relative_to(checkout)}" for p in (checkout / "kernels/models").rglob("*.toml")}
    data |= {f"dieplace/{p.relative_to(checkout)}" for p in (checkout / "kernels/models").rglob("*.json")}
    assert (wanted | data) - set(names) == set()
    assert "dieplace/py.typed" in names
    assert not [name for name in names if "/results/" in name], "committed runs stay out of the wheel"
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"setup.py", "pyproject.toml", "kernels/__init__.py", "cli/main.py", "experiments/__init__.py"} <= inside


def test_the_lock_is_exact_and_is_what_these_tests_run_with():
    text = (ROOT / "requirements.lock").read_text() + (ROOT / "requirements-cpu.lock").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    locked = dict(line.split("==") for line in lines)
    assert locked["torch"] == "2.13.0"
    for name, version in locked.items():
        assert metadata.version(name).partition("+")[0] == version, name


def test_the_lock_holds_every_declared_dependency():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {line.split("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}
    for requirement in [*declared["dependencies"], *declared["optional-dependencies"]["dev"]]:
        assert re.split(r"[<>=]", requirement)[0].lower() in locked, requirement


def test_the_lower_bounds_admit_older_machines():
    """A ROCm machine keeps its own torch and amdsmi; the NVIDIA test machine had torch 2.11 (read there)."""
    bounds = {
        re.split(r"[<>=]", text)[0]: text
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    assert bounds["torch"].startswith("torch>=2.") and int(bounds["torch"].split(".")[1]) <= 11
    assert bounds["amdsmi"].startswith("amdsmi>=")


def test_the_version_is_one():
    import dieplace

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == dieplace.__version__


def test_shipped_text_speaks_of_no_machine_of_ours():
    """No path of a developer's machine and no registry host in anything that is tracked."""
    names = [name for name in run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0") if name]
    wrong = []
    for name in names:
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".gz") or path == Path(__file__):
            continue
        text = path.read_text(errors="replace")
        wrong += [
            f"{name}: {word}"
            for word in ("/work/", "/tmp/dp", "pypi.org", "files.pythonhosted", "/root/.")
            if word in text
        ]
    assert not wrong, "\n".join(wrong)


def test_no_init_file_makes_the_tests_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for path in (ROOT / "tests").rglob("*.py"):
        ast.parse(path.read_text())
