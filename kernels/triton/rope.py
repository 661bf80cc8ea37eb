"""RoPE on queries and keys, and the append of keys and values to the cache."""

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
def _rope_kv_append(
    qkv, cos, sin, positions, slots, q_out, k_cache, v_cache, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BD)
    inside = lane < D
    rotated = lane < 2 * HALF
    pair = tl.where(lane < HALF, lane, lane - HALF)
    partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
    row = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * D) + head * D
    value = widen(tl.load(row + lane, mask=inside, other=0.0))
    # Values are copied, queries and keys rotated: rotate-half over the first 2 * HALF dimensions.
    if head < Q_HEADS + KV_HEADS:
        other = widen(tl.load(row + partner, mask=inside & rotated, other=0.0))
        at = tl.load(positions + token) * HALF + pair
        c = tl.load(cos + at, mask=rotated, other=1.0)
        s = tl.load(sin + at, mask=rotated, other=0.0)
        value = value * c + tl.where(lane < HALF, -other, other) * s
    result = narrow(value, tl.bfloat16)
    # A negative slot is skipped, never wrapped to the end of the cache (vllm issue 43810).
    slot = tl.load(slots + token).to(tl.int64) + lane * 0
    append = inside & (slot >= 0)
    if head < Q_HEADS:
        tl.store(q_out + (token * Q_HEADS + head) * D + lane, result, mask=inside)
    elif head < Q_HEADS + KV_HEADS:
        tl.store(k_cache + (slot * KV_HEADS + head - Q_HEADS) * D + lane, result, mask=append)
    else:
        kv_head = head - Q_HEADS - KV_HEADS
        tl.store(v_cache + (slot * KV_HEADS + kv_head) * D + lane, result, mask=append)


@triton_op
def rope_kv_append(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """Rotate the heads of qkv by the fp32 cos/sin tables; q to q_out, k and v to flat cache slots (-1 skipped)."""
    names = ("qkv", "cos", "sin", "positions", "slots", "q_out", "k_cache", "v_cache")
    qkv, cos, sin, positions, slots, q_out, k_cache, v_cache = (operands[name] for name in names)
    assert qkv is not None and cos is not None
    heads = attrs["q_heads"] + 2 * attrs["kv_heads"]
    with on_device_of(qkv, stream):
        _rope_kv_append[(qkv.shape[0], heads)](
            qkv, cos, sin, positions, slots, q_out, k_cache, v_cache, Q_HEADS=attrs["q_heads"],
            KV_HEADS=attrs["kv_heads"], D=attrs["head_dim"], BD=triton.next_power_of_2(attrs["head_dim"]),
            HALF=cos.shape[1], num_warps=1, **overlap_options(overlap),
        )  # fmt: skip
