"""Public reports of kernels taken from the wrong cache entry (triton PR 1242, vllm issue 41871, helion PR 1593)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trial_kernels as trial

from dieplace.codegen import flydsl
from dieplace.codegen.flydsl import CompileOptions, compile_launcher

_FILL = """
import sys, torch
from pathlib import Path
from dieplace.codegen.flydsl import CompileOptions, compile_launcher
import trial_kernels as trial
a = [torch.zeros(300) for _ in range(3)]
made = compile_launcher(trial.vector_add(), *a, 300, options=CompileOptions(arch="gfx942", cache_dir=Path(sys.argv[1])))
print(made.key, made.arch)
"""
_TRITON = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dieplace.probes import triton_stream
kernel = triton_stream._read
fixed = {"BLOCK": 256, "STEPS": 2, "ONCE": ".cs"}
source = ASTSource(kernel, {"words": "*i32", "out": "*i32", "WORDS": "i32", **dict.fromkeys(fixed, "constexpr")}, fixed)
def made(arch, warps):
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options={"num_warps": warps})
kernels = [made("gfx942", 4), made("gfx950", 4), made("gfx950", 2), made("gfx950", 4)]
print(json.dumps([[k.metadata.hash, k.metadata.target.arch, k.metadata.num_warps] for k in kernels]))
"""


def run(code: str, *words: str, **environ: str) -> str:
    """Standard output of a Python program that sees the test support."""
    support = Path(__file__).resolve().parents[1] / "support"
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    code_path = f"import sys; sys.path.append({str(support)!r})\n"
    command[4] = code_path + command[4]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environ}, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_f13_a_cache_filled_for_gfx942_is_a_miss_for_gfx950(tmp_path: Path) -> None:
    key, arch = run(_FILL, str(tmp_path)).split()
    assert arch == "gfx942" and [p for p in tmp_path.iterdir() if key in p.name]
    flydsl._process.by_key.clear()  # what earlier tests compiled in this process
    operands = [torch.zeros(300) for _ in range(3)]
    made = compile_launcher(trial.vector_add(), *operands, 300, options=CompileOptions(cache_dir=tmp_path))
    assert not made.from_cache and made.key != key
    assert '.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"' in made.isa


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its cache cannot be asked"
)
def test_f13_triton_keys_hold_the_architecture_and_the_warps(tmp_path: Path) -> None:
    kernels = json.loads(run(_TRITON, TRITON_CACHE_DIR=str(tmp_path)))
    assert [row[1:] for row in kernels] == [["gfx942", 4], ["gfx950", 4], ["gfx950", 2], ["gfx950", 4]]
    hashes = [row[0] for row in kernels]
    assert len(set(hashes)) == 3 and hashes[1] == hashes[3]
