"""The Triton probes on the CPU with Triton's interpreter: which loads they do; their PTX and machine code, compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be interpreted"
)
_INTERPRETED = """
import functools, json, operator, torch
from dieplace.probes import triton_chase as c, triton_stream as s
found = {}
following = c.chain(64 * 128, "cpu", seed=1)
path, at = [], 0
for _ in range(64):
    path.append(at)
    at = int(following[at])
found["closed"] = at == 0 and sorted(path) == [32 * i for i in range(64)]
out = torch.zeros(3, dtype=torch.int64)
for hops in (1, 2, 10, 63):
    c.chase(following, out, start=path[3], hops=hops, device=None)
    found[f"chase {hops}"] = int(out[0]) == path[(3 + hops) % 64]
words = torch.randint(-2**31, 2**31 - 1, (3 * 2048 + 5,), dtype=torch.int32)
before, rows = words.clone(), torch.zeros(3, 3, dtype=torch.int64)
found["windows"] = c.walk(words, rows, window_bytes=8192, hops=64, device=None)
ends = set()
for hops in range(1, 65):
    c.walk(words, rows, window_bytes=8192, hops=hops, device=None)
    ends.add(int(rows[1, 0]))
found["walk visits"] = len(ends)
found["unchanged"] = torch.equal(words, before)
x = torch.randint(-2**31, 2**31 - 1, (40003,), dtype=torch.int32)
y = torch.zeros_like(x)
s.copy(x, y, device=None)
found["copied"] = torch.equal(x, y)
parts = torch.zeros(s.programs_for(x.numel()), dtype=torch.int32)
s.read(x, parts, device=None)
xor = lambda t: functools.reduce(operator.xor, t.tolist())
found["read"] = xor(parts) == xor(x)
print(json.dumps(found))
"""
_COMPILED = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dieplace.probes import triton_chase as c
target = GPUTarget("cuda", 90, 32)
chase = triton.compile(ASTSource(c._chase, {"following": "*i32", "out": "*i64", "start": "i32", "hops": "i32",
    "CLOCKS": "constexpr"}, {"CLOCKS": True}), target=target, options={"num_warps": 1, "num_stages": 1})
walk = triton.compile(ASTSource(c._walk, {"words": "*i32", "out": "*i64", "hops": "i32", "nothing": "i32",
    "first": "i32", "WINDOW_WORDS": "constexpr", "LINES": "constexpr", "CLOCKS": "constexpr"},
    {"WINDOW_WORDS": 524288, "LINES": 16384, "CLOCKS": True}), target=target, options={"num_warps": 1, "num_stages": 1})
print(json.dumps({"chase": chase.asm["ptx"], "walk": walk.asm["ptx"]}))
"""


def child(code: str, **environ: str) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_triton
def test_every_load_is_where_it_should_be() -> None:
    found = child(_INTERPRETED, TRITON_INTERPRET="1")
    assert found.pop("windows") == 3  # the five words behind the last whole window are left out
    assert found.pop("walk visits") == 64  # every line of a window once before any comes again
    assert all(found.values()), found


@needs_triton
@pytest.mark.parametrize("name", ["chase", "walk"])
def test_clocks_stand_around_the_loop_and_no_load_is_cached_in_l1(name: str) -> None:
    """In the PTX for sm_90: two reads of each clock, with the loop's loads between them, each `.cg` (L2 only)."""
    text = child(_COMPILED, TRITON_INTERPRET="0")[name]
    lines = [line.strip() for line in text.splitlines()]
    clocks = [i for i, line in enumerate(lines) if "%clock64" in line]
    loads = [i for i, line in enumerate(lines) if "ld.global" in line]
    assert len(clocks) == 2 and text.count("%globaltimer") == 2
    assert any(clocks[0] < i < clocks[1] for i in loads) and min(loads) < clocks[0]
    assert all(".cg" in lines[i] for i in loads)
