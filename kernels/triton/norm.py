"""RMSNorm with residual add in both norm orders, and the per-head norm of Qwen3's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import on_device_of, triton_op
from dieplace.kernels.triton.numbers import narrow, widen
from dieplace.kernels.triton.overlap import let_next_start, overlap_options, wait_for_previous

Operands = Mapping[str, torch.Tensor | None]


@triton.jit
def normalised(h, weight, eps, H: tl.constexpr, BEFORE_CAST: tl.constexpr):
    """RMSNorm of one padded fp32 row, as bf16."""
    # Padding columns are zero, and the mean divides by the true width (issue class of padded norms).
    r = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=0) / H + eps)
    if BEFORE_CAST:
        return narrow(weight * (h * r), tl.bfloat16)
    else:
        return narrow(weight * widen(narrow(h * r, tl.bfloat16)), tl.bfloat16)


@triton.jit
def _rmsnorm(
    x, residual, weight, out, residual_out, eps, H: tl.constexpr, BH: tl.constexpr, RESIDUAL: tl.constexpr,
    BEFORE_CAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    columns = tl.arange(0, BH)
    inside = columns < H
    at = tl.program_id(0) * H + columns
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    h = widen(tl.load(x + at, mask=inside, other=0.0))
    if RESIDUAL:
        h += widen(tl.load(residual + at, mask=inside, other=0.0))
        rounded = narrow(h, tl.bfloat16)
        tl.store(residual_out + at, rounded, mask=inside)
        h = widen(rounded)
    tl.store(out + at, normalised(h, widen(scale), eps, H, BEFORE_CAST), mask=inside)


@triton.jit
def _qk_norm(qkv, q_weight, k_weight, eps, Q_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    head = tl.program_id(1)
    columns = tl.arange(0, BD)
    inside = columns < D
    at = tl.program_id(0) * ROW + head * D + columns
    h = widen(tl.load(qkv + at, mask=inside, other=0.0))
    r = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=0) / D + eps)
    if head < Q_HEADS:
        w = widen(tl.load(q_weight + columns, mask=inside, other=0.0))
    else:
        w = widen(tl.load(k_weight + columns, mask=inside, other=0.0))
    result = w * widen(narrow(h * r, tl.bfloat16))
    tl.store(qkv + at, narrow(result, tl.bfloat16), mask=inside)


@triton_op
def rmsnorm(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,H) = rmsnorm(x + residual) * weight; `order` says whether the weight comes before or after the cast."""
    x, residual, weight = operands["x"], operands.get("residual"), operands["weight"]
    out, residual_out = operands["out"], operands.get("residual_out")
    assert x is not None and weight is not None and out is not None
    tokens, width = x.shape
    with on_device_of(x, stream):
        _rmsnorm[(tokens,)](
            x, x if residual is None else residual, weight, out, out if residual_out is None else residual_out,
            float(attrs["eps"]), H=width, BH=triton.next_power_of_2(width), RESIDUAL=residual is not None,
            BEFORE_CAST=attrs["order"] == "before_cast", num_warps=8, **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def qk_norm(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None) -> None:
    """Normalise the query and key heads of qkv(T, (HQ+2*HKV)*D) in place, weight after the cast."""
    qkv, q_weight, k_weight = operands["qkv"], operands["q_weight"], operands["k_weight"]
    assert qkv is not None and q_weight is not None and k_weight is not None
    heads, size = attrs["q_heads"] + attrs["kv_heads"], attrs["head_dim"]
    with on_device_of(qkv, stream):
        _qk_norm[(qkv.shape[0], heads)](
            qkv, q_weight, k_weight, float(attrs["eps"]), Q_HEADS=attrs["q_heads"], ROW=qkv.shape[1], D=size,
            BD=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip
