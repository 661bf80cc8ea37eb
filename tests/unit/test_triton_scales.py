"""Case d2 through Triton's MXFP4 ops under its interpreter: scale bytes 0, 127, 254, 255 of every op that reads them.

TransformerEngine PR 3262, vllm PR 46676: blocks with byte 0 vanished, byte 255 became infinite or a finite number. The
values are exact products of powers of two. The same ops' gfx950 code is in tests/emulated/test_reported_layers.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be interpreted"
)
_RUN = """
import json, torch
from dieplace.kernels import registry
BF16 = torch.bfloat16

def blocks(value, *shape):
    return torch.full((*shape, 16), value, dtype=torch.uint8)

def gemv(nibbles, scale, x):
    out = torch.full((1, 1), 7.0)
    registry.run("gemv_mxfp4", {"x": torch.full((1, 32), x, dtype=BF16), "blocks": blocks(nibbles, 1, 1),
        "scales": torch.full((1, 1), scale, dtype=torch.uint8), "bias": None, "out": out},
        backend="triton", strict=True)
    return out[0, 0].item()

def down(nibbles, scale, x):
    out = torch.full((1, 1), 7.0)
    registry.run("expert_down", {"x": torch.full((1, 1, 32), x, dtype=BF16), "blocks": blocks(nibbles, 2, 1, 1),
        "scales": torch.full((2, 1, 1), scale, dtype=torch.uint8), "bias": torch.zeros(2, 1, dtype=BF16),
        "ids": torch.tensor([[1]], dtype=torch.int32), "weights": torch.ones(1, 1), "out": out},
        backend="triton", strict=True)
    return out[0, 0].item()

def gate_up(nibbles, scale, x):
    out = torch.full((1, 1, 1), 7.0, dtype=BF16)
    registry.run("expert_gate_up", {"x": torch.full((1, 32), x, dtype=BF16), "blocks": blocks(nibbles, 2, 2, 1),
        "scales": torch.full((2, 2, 1), scale, dtype=torch.uint8), "bias": torch.zeros(2, 2, dtype=BF16),
        "ids": torch.tensor([[1]], dtype=torch.int32), "out": out}, backend="triton", strict=True)
    return out.flatten()[0].item()

SIXES, HALVES = 0x77, 0x11
cases = [(SIXES, 0, 2.0**100), (HALVES, 254, 2.0**-100), (HALVES, 127, 2.0), (HALVES, 255, 1.0)]
print(json.dumps({f.__name__: [f(*case) for case in cases] for f in (gemv, down, gate_up)}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    command = [sys.executable, "-W", "ignore", "-c", _RUN]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}  # chosen before the kernel modules are imported
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", ["gemv", "down"])
def test_products_are_exact_powers_of_two(found: Any, op: str) -> None:
    """32 x 6 x 2^-127 x 2^100, 32 x 0.5 x 2^127 x 2^-100, 32 x 0.5 x 2; byte 255 is NaN."""
    low, high, one, nan = found[op]
    assert low == pytest.approx(32 * 6 * 2.0**-27, rel=1e-6) and low == pytest.approx(1.4305115e-06, rel=1e-6)
    assert high == 2147483648.0 and one == 32.0 and math.isnan(nan)


def test_gate_and_up_see_the_same_scales(found: Any) -> None:
    """g = u = the product: out = (u + 1) g sigmoid(1.702 g) with g at most 7, as GPT-OSS has it (in float64 here)."""
    low, high, one, nan = found["gate_up"]

    def activated(product: float) -> float:
        gate, up = min(product, 7.0), max(-7.0, min(product, 7.0))
        return (up + 1) * gate / (1 + math.exp(-1.702 * gate))

    assert low == pytest.approx(activated(32 * 6 * 2.0**-27), rel=2**-8) and low != 0
    assert high == one == pytest.approx(activated(32.0), rel=2**-8) and math.isnan(nan)
