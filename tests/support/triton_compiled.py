"""Compiles the Triton hand-offs for sm_90 and gfx950 without a device; prints {target: {kernel: assembly}} as JSON."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dieplace.kernels.triton import handoff, visibility

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx950": GPUTarget("hip", "gfx950", 64)}
I32, I64 = "*i32", "*i64"
WAIT = {"status": I32, "record": I32, "epoch": I32}


def numbers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def kernels(cuda: bool) -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Function, signature, constants and warps of each kernel."""
    kept = {"COUNTED": True, "RECORD": True}
    put = {"x": "*fp32", "mailbox": I64, "epoch": I32, **numbers("n", "tag")}
    add = {"own": "*fp32", "mailbox": I64, "residual": "*bf16", "out": "*bf16", **WAIT}
    wait = {"flag": I32, **WAIT, **numbers("count", "stride", "value", "spin_limit")}
    rounds = numbers("first", "rounds", "pitch", "readers", "spin_limit", "first_party")
    seen = {"flag": I32, "acks": I32, "stamps": I64, "place": I32, **rounds}
    return {
        "handoff_put": (handoff._handoff_put, put, {"BLOCK": 256, "COUNTED": True, "PTX": cuda}, 4),
        "handoff_sum": (
            handoff._handoff_sum, {**add, **numbers("n", "tag", "spin_limit")},
            {"BLOCK": 4096, "RESIDUAL": True, "PTX": cuda, **kept}, 16,
        ),
        "flag_set": (
            handoff._flag_set, {"flag": I32, "epoch": I32, **numbers("count", "stride", "value")},
            {"LANES": 32, "COUNTED": True, "PTX": cuda}, 1,
        ),
        "flag_wait": (handoff._flag_wait, wait, {"LANES": 32, "PTX": cuda, **kept}, 1),
        "epoch_next": (handoff._epoch_next, {"epoch": I32, **numbers("step")}, {}, 1),
        "flag_visibility": (visibility._visibility, seen, {"LANES": 64, "CLOCK": 1 if cuda else 2, "PTX": cuda}, 1),
    }  # fmt: skip


def assembly(name: str) -> dict[str, str]:
    found = {}
    for kernel, (function, signature, constants, warps) in kernels(name == "sm_90").items():
        source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
        made = triton.compile(source, target=TARGETS[name], options={"num_warps": warps})
        found[kernel] = made.asm["ptx" if name == "sm_90" else "amdgcn"]
        assert "cubin" in made.asm or "hsaco" in made.asm
    return found


if __name__ == "__main__":
    print(json.dumps({name: assembly(name) for name in TARGETS}))
