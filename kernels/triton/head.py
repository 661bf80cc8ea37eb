"""The output head: logits, and the argmax bounded by the true vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.gemv import gemv_bf16
from dieplace.kernels.triton.launch import on_device_of, triton_op

Operands = Mapping[str, torch.Tensor | None]


@triton.jit
def _argmax(logits, value, token_out, V, VOCAB, OFFSET, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32) + lane
    for start in range(0, VOCAB, BLOCK):
        at = start + lane
        seen = tl.load(logits + token * V + at, mask=at < VOCAB, other=float("-inf"))
        # `>` keeps the lowest index of equal values and never takes a NaN.
        better = seen > best
        best = tl.where(better, seen, best)
        where = tl.where(better, at, where)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where((best == top) & (where < VOCAB), where, VOCAB), axis=0)
    tl.store(value + token, top)
    tl.store(token_out + token, lowest + OFFSET)


@triton_op
def head_argmax(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None) -> None:
    """logits(T,V) fp32, value and token of the largest among the first `vocab`; `offset` is added to the token."""
    x, weight, logits = operands["x"], operands["weight"], operands["logits"]
    value, token = operands["value"], operands["token"]
    assert x is not None and logits is not None
    gemv_bf16({"x": x, "weight": weight, "bias": None, "out": logits}, {}, stream=stream)
    with on_device_of(x, stream):
        _argmax[(x.shape[0],)](
            logits, value, token, logits.shape[1], attrs["vocab"], attrs.get("offset", 0),
            BLOCK=min(4096, triton.next_power_of_2(attrs["vocab"])), num_warps=8,
        )  # fmt: skip
