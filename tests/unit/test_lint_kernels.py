"""The kernel lint: planted faults are found, right code is not, dieplace's own kernels are clean and all read."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dieplace.kernels.flydsl
import dieplace.probes
from dieplace.cli.main import main
from dieplace.codegen.lint import RULES, lint
from dieplace.errors import UsageError

HEAD = """
import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr
from dieplace.codegen import flydsl_names as fn
"""

FAULTY = {
    "early-return": """
        @flyc.kernel
        def k(X: fx.Tensor, n: fx.Int32):
            if fx.thread_idx.x >= n:
                return
            X[fx.thread_idx.x] = 1.0
        """,
    "early-return in a helper that returns a value": """
        def clamp(x):
            if x > 0:
                return x
            return 0
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = clamp(X[1])
        """,
    "early-return two helpers down": """
        def inner(x):
            while x < 4:
                return x
            return x
        def outer(x):
            return inner(x)
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = outer(X[1])
        """,
    "break": """
        @flyc.kernel
        def k(X: fx.Tensor, n: fx.Int32):
            for i in range(n):
                if X[i] > 0:
                    break
        """,
    "continue": """
        @flyc.kernel
        def k(X: fx.Tensor, n: fx.Int32):
            i = fx.Int32(0)
            while i < n:
                i = i + 1
                if X[i] > 0:
                    continue
                X[i] = 1.0
        """,
    "grid-dim": """
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = fx.grid_dim.x
        """,
    "tanh": """
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = fx.tanh(X[1])
        """,
    "print": """
        @flyc.kernel
        def k(X: fx.Tensor):
            print(X[0])
            X[0] = 1.0
        """,
    "unsigned-byte": """
        @flyc.kernel
        def k(S: fx.Tensor, Y: fx.Tensor):
            atom = fx.make_copy_atom(fx.rocdl.BufferCopy8b(), fx.Uint8)
            byte = fx.make_rmem_tensor(1, fx.Uint8)
            fx.copy_atom_call(atom, S, byte)
            Y[0] = (fx.Int32(byte.load()[0]) << 23).bitcast(fx.Float32)
        """,
    "asm-wait": """
        @flyc.kernel
        def k(X: fx.Tensor, Y: fx.Tensor):
            Y[0] = fn.inline_asm(fx.Int32.ir_type, [X], "global_load_dword $0, $1, off sc0 sc1", "=&v,v")
        """,
    "asm-early-clobber": """
        @flyc.kernel
        def k(X: fx.Tensor, Y: fx.Tensor):
            Y[0] = fn.inline_asm(
                fx.Int32.ir_type, [X], "global_load_dword $0, $1, off\\\\n s_waitcnt vmcnt(0)", "=v,v")
        """,
}

RIGHT = {
    "a Python condition over a closure constant": """
        def make(cached):
            @flyc.kernel
            def k(X: fx.Tensor):
                if const_expr(cached):
                    X[0] = 1.0
                for i in range_constexpr(4):
                    X[i] = 2.0
        """,
    "a helper over a configuration object": """
        class Tile:
            window = 4
        def first(tile: Tile, length):
            if not tile.window:
                return 0
            return length - tile.window
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = first(Tile(), X[1])
        """,
    "masked bytes": """
        @flyc.kernel
        def k(S: fx.Tensor, Y: fx.Tensor):
            byte = fx.make_rmem_tensor(1, fx.Uint8)
            Y[0] = fx.Int32(byte.load()[0]) & 255
            Y[1] = fn.u8(byte.load()[0])
        """,
    "asm with its wait": """
        @flyc.kernel
        def k(X: fx.Tensor, Y: fx.Tensor):
            Y[0] = fn.inline_asm(
                fx.Int32.ir_type, [X], "global_load_dword $0, $1, off\\\\n s_waitcnt vmcnt(0)", "=&v,v")
        """,
    "host code beside a kernel": """
        @flyc.kernel
        def k(X: fx.Tensor):
            X[0] = 1.0
        @flyc.jit
        def launch(X: fx.Tensor, n: fx.Int32):
            print("host")
            if n > 0:
                return
        """,
}


def write(folder: Path, sources: dict[str, str]) -> list[Path]:
    files = []
    for i, body in enumerate(sources.values()):
        files.append(folder / f"case{i}.py")
        files[-1].write_text(HEAD + textwrap.dedent(body))
    return files


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    result = lint(write(tmp_path, {name: FAULTY[name]}))
    assert [f.rule for f in result.findings] == [name.split()[0]]
    assert result.kernels == 1


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_is_left_alone(name: str, tmp_path: Path) -> None:
    result = lint(write(tmp_path, {name: RIGHT[name]}))
    assert result.findings == ()
    assert result.kernels == 1


def test_every_rule_has_a_planted_fault() -> None:
    assert {name.split()[0] for name in FAULTY} == set(RULES)


def test_a_helper_from_another_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def clamp(x):\n    if x > 0:\n        return x\n    return 0\n")
    kernel = "from helpers import clamp as limit\n@flyc.kernel\ndef k(X: fx.Tensor):\n    X[0] = limit(X[1])\n"
    (tmp_path / "kernel.py").write_text(HEAD + kernel)
    (finding,) = lint([tmp_path]).findings
    assert (Path(finding.path).name, finding.line, finding.function) == ("helpers.py", 3, "clamp")


def test_our_own_kernels_are_clean_and_every_file_was_read() -> None:
    folders = [Path(m.__path__[0]) for m in (dieplace.kernels.flydsl, dieplace.probes)]
    result = lint(folders)
    assert result.findings == (), "\n".join(map(str, result.findings))
    on_disk = {str(p) for folder in folders for p in folder.rglob("*.py")}
    assert set(result.files) == on_disk
    kernel_sources = [p for p in on_disk if "@flyc.kernel" in Path(p).read_text()]
    assert result.kernels == sum(Path(p).read_text().count("@flyc.kernel\n") for p in kernel_sources) > 5


def test_command_counts_what_it_read_and_exits_1_on_findings(tmp_path: Path) -> None:
    write(tmp_path, FAULTY)
    command = [sys.executable, "-m", "dieplace.cli", "kernel", "lint", "--json"]
    found = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    body = json.loads(found.stdout)
    assert found.returncode == 1 and body["ok"] is False
    assert len(body["files"]) == len(FAULTY) == len(body["findings"])
    clean = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert clean.returncode == 0 and json.loads(clean.stdout)["findings"] == []
    missing = subprocess.run([*command, str(tmp_path / "no.py")], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2


def test_a_source_that_does_not_parse_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def k(:\n")
    with pytest.raises(UsageError, match=r"broken\.py as Python"):
        lint([tmp_path])


def test_installed_packages_below_a_folder_are_not_ours(tmp_path: Path) -> None:
    """A checkout with its `.venv`: torch ships files for newer Pythons, which do not parse here."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    for folder in (".venv/lib", "env/lib/python3.11/site-packages/torch"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "new.py").write_text("def f(:\n")
    assert lint([tmp_path]).files == (str(tmp_path / "mine.py"),)
    with pytest.raises(UsageError, match="as Python"):
        lint([tmp_path / ".venv/lib"])


def test_clean_sources_give_a_csv_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert main(["kernel", "lint", str(tmp_path), "-o", "csv"]) == 0
    assert capsys.readouterr().out == "path,line,function,rule,message\n"
