"""Rules for code that runs as root, read from the source: no shell, no inherited environment, no PATH look-up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dieplace.backends.amd as amd
import dieplace.partition as partition

SOURCES = sorted([*Path(amd.__file__).parent.glob("*.py"), *Path(partition.__file__).parent.glob("*.py")])
FORBIDDEN = {"os.system", "os.popen", "os.execvp", "os.spawnvp", "shutil.which", "eval", "exec", "pickle.loads"}
STARTERS = {"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_children_are_started_in_one_way_only(path: Path) -> None:
    for name, call in calls(path):
        assert name not in FORBIDDEN, f"{path.name}:{call.lineno} {name}"
        if name in STARTERS:
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert "shell" not in words, f"{path.name}:{call.lineno}"
            assert words.get("env") == "clean_environment()" and words.get("cwd") == "'/'", f"{path.name}:{call.lineno}"
            assert words.get("stdin") == "subprocess.DEVNULL", f"{path.name}:{call.lineno}"


def test_the_rule_would_be_noticed(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import subprocess\nsubprocess.run('ls', shell=True)\n")
    with pytest.raises(AssertionError):
        test_children_are_started_in_one_way_only(bad)


def test_only_named_variables_of_the_environment_are_read() -> None:
    """A switch takes nothing from its caller's environment but where emulated state lies and which backend is meant."""
    allowed = {"XDG_STATE_HOME", "DIEPLACE_BACKEND", "ROCM_PATH", "ROCM_HOME"}  # the ROCM names are set, in the child
    for path in (p for p in SOURCES if p.name not in ("backend.py", "topology.py", "visibility.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
            if text.startswith(("os.environ", "os.getenv")) and "'" in text:
                assert text.split("'")[1] in allowed, f"{path.name}: {text}"
