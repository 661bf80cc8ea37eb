"""Dependence goes one way, vendors stay in their backend, and the quick commands import nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "dieplace": "dieplace",
    "kernels": "dieplace.kernels",
    "experiments": "dieplace.experiments",
    "cli": "dieplace.cli",
}
RANK = {"dieplace": 0, "dieplace.kernels": 1, "dieplace.experiments": 2, "dieplace.cli": 3}
VENDORS = {"amdsmi": "dieplace/backends/amd", "pyrsmi": "dieplace", "pynvml": "dieplace/backends/nvidia"}
HEAVY = ("torch", "flydsl", "numpy", "scipy", "matplotlib")


def modules():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path


def imported(path: Path, package: str, *, top_only: bool) -> set[str]:
    """Absolute names a file imports; `top_only` leaves out those inside functions and under TYPE_CHECKING."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in _walk(tree) if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def _walk(node):
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or guarded:
            continue
        yield child
        yield from _walk(child)


def package_of(folder: str, path: Path) -> str:
    inside = path.relative_to(ROOT / folder).parent.parts
    return ".".join([FOLDERS[folder], *inside])


def group_of(name: str) -> str | None:
    if name != "dieplace" and not name.startswith("dieplace."):
        return None
    return next(
        (g for g in ("dieplace.kernels", "dieplace.experiments", "dieplace.cli") if f"{name}.".startswith(f"{g}.")),
        "dieplace",
    )


def test_nothing_imports_upwards():
    wrong = []
    for folder, path in modules():
        rank = RANK[FOLDERS[folder]]
        for name in imported(path, package_of(folder, path), top_only=False):
            group = group_of(name)
            if group is not None and RANK[group] > rank:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_discover_imports_a_backend():
    """`backends/base.py` is free for all; a backend may use another (emulated and replayed stand on amd)."""
    allowed = {"dieplace/discover.py", "dieplace/recording.py", "cli/env.py"}
    wrong = []
    for folder, path in modules():
        short = str(path.relative_to(ROOT))
        if folder != "dieplace" or short.startswith("dieplace/backends/") or short in allowed:
            continue
        for name in imported(path, package_of(folder, path), top_only=True):
            if name.startswith("dieplace.backends.") and not name.startswith("dieplace.backends.base"):
                wrong.append(f"{short} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_vendor_bindings_stay_in_their_backend():
    wrong = []
    for folder, path in modules():
        short = str(path.relative_to(ROOT))
        for name in imported(path, package_of(folder, path), top_only=False):
            home = VENDORS.get(name.split(".")[0])
            if home is not None and not short.startswith(home):
                wrong.append(f"{short} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_short_names_are_never_imported():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder, path in modules()
        for name in imported(path, package_of(folder, path), top_only=False)
        if name.split(".")[0] in ("kernels", "cli", "experiments", "tests")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["kernels", "cli", "experiments"])
def test_a_folder_refuses_its_short_name(folder):
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"dieplace.{folder}" in done.stderr and "ImportError" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["--version"], ["list"], ["list", "--help"], ["topo"], ["doctor"], ["env"],
        ["partition", "show"], ["partition", "plan", "DPX/NPS2"], ["partition", "--help"],
    ],
)  # fmt: skip
def test_quick_commands_import_nothing_heavy(words, tmp_path):
    code = (
        "import sys\nfrom dieplace.cli.main import main\n"
        f"code = main({['--backend', 'emulated', *words]!r})\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert code == 0, code\nassert not found, found\n"
    )
    environ = {"XDG_STATE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr


def test_help_imports_no_command_module():
    code = (
        "import sys\nfrom dieplace.cli.main import main, COMMANDS\nmain(['--help'])\n"
        "loaded = [t for t, _ in COMMANDS.values() if t.split(':')[0] in sys.modules]\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
