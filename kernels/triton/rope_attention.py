"""One token's rotation, cache append, attention over splits and merge in one launch.

A program takes one split of one KV head, rotates the head's queries itself, and puts the new key and value in the place
of the cache row that it must not read: that row is written by the same launch. The program that is last to finish a
head merges its splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import on_device_of, triton_op
from dieplace.kernels.triton.numbers import dot_bf16, dot_fp32_bf16, narrow, widen
from dieplace.kernels.triton.overlap import let_next_start, overlap_options, wait_for_previous

Operands = Mapping[str, torch.Tensor | None]
_MERGED_AT_ONCE = 8192  # fp32 values that four warps hold without spilling


@triton.jit
def _turned(base, lane, inside, c, s, HALF: tl.constexpr):
    """A head (or heads) at `base` + lane, rotated half against half, rounded to bf16."""
    partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
    value = widen(tl.load(base + lane, mask=inside, other=0.0))
    other = widen(tl.load(base + partner, mask=inside & (lane < 2 * HALF), other=0.0))
    return narrow(value * c + tl.where(lane < HALF, -other, other) * s, tl.bfloat16)


@triton.jit
def _rows(start, last, page_table, kv_head, PAGE, HKV: tl.constexpr, BK: tl.constexpr):
    """Cache rows (of all pages) of keys `start` on, and which of them are before `last`."""
    key = start + tl.arange(0, BK)
    ok = key < last
    page = tl.load(page_table + key // PAGE, mask=ok, other=0).to(tl.int64)
    return page * PAGE + key % PAGE, ok


@triton.jit
def _rope_attention(
    qkv, cos, sin, positions, slots, q_out, k_cache, v_cache, page_table, lengths, sinks, partial, partial_lse,
    arrived, out, lse_out, scale, PAGE, HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GM: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    SP: tl.constexpr, BK: tl.constexpr, HAS_SINK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    end, slot = tl.load(lengths), tl.load(slots).to(tl.int64)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    per_split = tl.cdiv(tl.cdiv(end - begin, BK), SPLITS) * BK
    first = begin + split * per_split
    last = tl.minimum(first + per_split, end)
    group, dim = tl.arange(0, GP), tl.arange(0, BD)
    inside = dim < D
    turns = tl.load(positions) * HALF + tl.where(dim < HALF, dim, dim - HALF)
    c = tl.load(cos + turns, mask=dim < 2 * HALF, other=1.0)
    s = tl.load(sin + turns, mask=dim < 2 * HALF, other=0.0)
    # Older rows are at rest: asked for before the launch that makes qkv has ended.
    row, ok = _rows(first, last, page_table, kv_head, PAGE, HKV, BK)
    at = (row * HKV + kv_head)[:, None] * D + dim[None, :]
    old = ok[:, None] & inside[None, :] & (row != slot)[:, None]
    keys = tl.load(k_cache + at, mask=old, other=0.0)
    values = tl.load(v_cache + at, mask=old, other=0.0)
    wait_for_previous(OVERLAP)
    q_ok = (group[:, None] < G) & inside[None, :]
    q_at = (kv_head * G + group)[:, None] * D
    query = _turned(qkv + q_at, dim[None, :], q_ok, c[None, :], s[None, :], HALF)
    new_key = _turned(qkv + (HKV * G + kv_head) * D, dim, inside, c, s, HALF)
    new_value = tl.load(qkv + (HKV * G + HKV + kv_head) * D + dim, mask=inside, other=0.0)
    if split == 0:
        tl.store(q_out + q_at + dim[None, :], query, mask=q_ok)
        # A negative slot is skipped, never wrapped to the end of the cache (vllm issue 43810).
        mine = slot + 0 * dim
        tl.store(k_cache + (mine * HKV + kv_head) * D + dim, new_key, mask=inside & (mine >= 0))
        tl.store(v_cache + (mine * HKV + kv_head) * D + dim, new_value, mask=inside & (mine >= 0))
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    result = tl.zeros((GP, BD), tl.float32)
    for start in range(first, last, BK):
        new = (row == slot)[:, None]
        keys = tl.where(new, new_key[None, :], keys)
        values = tl.where(new, new_value[None, :], values)
        score = tl.where(ok[None, :], dot_bf16(query, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        # A row whose scores are all -inf keeps exponent 0 instead of -inf minus -inf.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(score - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        result = result * shrink[:, None] + dot_fp32_bf16(p, values)
        top = higher
        row, ok = _rows(start + BK, last, page_table, kv_head, PAGE, HKV, BK)
        at = (row * HKV + kv_head)[:, None] * D + dim[None, :]
        old = ok[:, None] & inside[None, :] & (row != slot)[:, None]
        keys = tl.load(k_cache + at, mask=old, other=0.0)
        values = tl.load(v_cache + at, mask=old, other=0.0)
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    result = tl.where(empty[:, None], 0.0, result / tl.where(empty, 1.0, total)[:, None])
    place = (kv_head * G + group) * SPLITS + split
    tl.store(partial + place[:, None] * D + dim[None, :], result, mask=q_ok)
    tl.store(partial_lse + place, lse, mask=group < G)
    # All of this program's stores come before its count, and the last program's loads after it.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + kv_head, 1, sem="acq_rel", scope="gpu")
    if before == SPLITS - 1:
        tl.store(arrived + kv_head, 0)
        for head in range(kv_head * G, kv_head * G + G, GM):
            _merge(partial, partial_lse, sinks, out, lse_out, head, kv_head * G + G, GM, SPLITS, SP, D, BD, HAS_SINK)


@triton.jit
def _merge(
    partial, partial_lse, sinks, out, lse_out, head, end, GM: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """The splits of GM heads, read from the second-level cache, where other programs left them."""
    row, split, dim = head + tl.arange(0, GM), tl.arange(0, SP), tl.arange(0, BD)
    ok = row < end
    at = row[:, None] * SPLITS + split[None, :]
    here = ok[:, None] & (split < SPLITS)[None, :]
    part = tl.load(
        partial + at[:, :, None] * D + dim[None, None, :], mask=here[:, :, None] & (dim < D)[None, None, :], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    lse = tl.load(partial_lse + at, mask=here, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lse, axis=1)
    # The sink enlarges the denominator once, here, and has no value of its own.
    if HAS_SINK:
        sink = widen(tl.load(sinks + row, mask=ok, other=0.0))
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - safe[:, None])
    total = tl.sum(weight, axis=1)
    if HAS_SINK:
        total += tl.exp(sink - safe)
    none = total == 0.0
    some = tl.where(none, 1.0, total)
    result = tl.sum(part * weight[:, :, None], axis=1) / some[:, None]
    tl.store(
        out + row[:, None] * D + dim[None, :], narrow(result, out.dtype.element_ty),
        mask=ok[:, None] & (dim < D)[None, :],
    )  # fmt: skip
    tl.store(lse_out + row, tl.where(none, float("-inf"), safe + tl.log(some)), mask=ok)


@triton_op
def rope_attention(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(1,HQ,D) and lse from qkv; q_out, partials and the appended cache rows are as the single ops write them."""
    names = ("qkv", "cos", "sin", "positions", "slots", "q_out", "k_cache", "v_cache", "page_table", "lengths")
    k_cache, partial, sinks = operands["k_cache"], operands["partial"], operands.get("sinks")
    lse, qkv, cos = operands["partial_lse"], operands["qkv"], operands["cos"]
    assert k_cache is not None and partial is not None and qkv is not None and cos is not None
    page, kv_heads, size = k_cache.shape[1:]
    group, splits, wide = partial.shape[1] // kv_heads, partial.shape[2], triton.next_power_of_2(size)
    padded = triton.next_power_of_2(splits)
    with on_device_of(qkv, stream):
        _rope_attention[(kv_heads, splits)](
            *(operands[name] for name in names), lse if sinks is None else sinks, partial, lse, operands["arrived"],
            operands["out"], operands["lse"], float(attrs["scale"]), page, HKV=kv_heads, G=group,
            GP=max(16, triton.next_power_of_2(group)),
            GM=max(1, min(triton.next_power_of_2(group), _MERGED_AT_ONCE // (padded * wide))), D=size,
            BD=max(16, wide), HALF=cos.shape[1], WINDOW=attrs.get("window", 0), SPLITS=splits, SP=padded,
            BK=64 if size <= 64 else 32, HAS_SINK=sinks is not None, num_warps=4, **overlap_options(overlap),
        )  # fmt: skip
