"""Decode attention split over the context with an online softmax, and the merge that counts a sink once."""

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


@triton.jit
def _attention_split(
    q, k_cache, v_cache, page_table, lengths, partial, partial_lse, scale, PAGE, HKV: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    token, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths + token)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    # Whole blocks of BK keys a split, counted from the window's first key.
    per_split = tl.cdiv(tl.cdiv(end - begin, BK), SPLITS) * BK
    first = begin + split * per_split
    last = tl.minimum(first + per_split, end)
    group, dim = tl.arange(0, GP), tl.arange(0, BD)
    heads = kv_head * G + group
    q_at = (token * HKV * G + heads)[:, None] * D + dim[None, :]
    q_ok = (group[:, None] < G) & (dim[None, :] < D)
    query = tl.load(q + q_at, mask=q_ok, other=0.0)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, BD), tl.float32)
    for start in range(first, last, BK):
        key = start + tl.arange(0, BK)
        ok = key < last
        page = tl.load(page_table + key // PAGE, mask=ok, other=0).to(tl.int64)
        row = (page * PAGE + key % PAGE) * HKV + kv_head
        at = row[:, None] * D + dim[None, :]
        kv_ok = ok[:, None] & (dim[None, :] < D)
        keys = tl.load(k_cache + at, mask=kv_ok, other=0.0)
        values = tl.load(v_cache + at, mask=kv_ok, other=0.0)
        score = tl.where(ok[None, :], dot_bf16(query, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        # A row whose scores are all -inf keeps exponent 0 instead of -inf minus -inf.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(score - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None] + dot_fp32_bf16(p, values)
        top = higher
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    out = tl.where(empty[:, None], 0.0, out / tl.where(empty, 1.0, total)[:, None])
    row = (token * HKV * G + heads) * SPLITS + split
    tl.store(partial + row[:, None] * D + dim[None, :], out, mask=q_ok)
    tl.store(partial_lse + row, lse, mask=group < G)


@triton.jit
def _attention_merge(
    partial, partial_lse, sinks, out, lse_out, HQ: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HAS_SINK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    row = token * HQ + head
    split, dim = tl.arange(0, SP), tl.arange(0, BD)
    lse = tl.load(partial_lse + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(lse, axis=0)
    # The sink enlarges the denominator once, here, and has no value of its own.
    if HAS_SINK:
        sink = widen(tl.load(sinks + head))
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - safe)
    total = tl.sum(weight, axis=0)
    if HAS_SINK:
        total += tl.exp(sink - safe)
    part = tl.load(
        partial + (row * SPLITS + split)[:, None] * D + dim[None, :],
        mask=(split[:, None] < SPLITS) & (dim[None, :] < D),
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + dim, narrow(result, out.dtype.element_ty), mask=dim < D)
    tl.store(lse_out + row, tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total))))


@triton_op
def attention_split(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """partial(T,HQ,SPLITS,D) and natural-log partial_lse of each split of the context; an empty split is (0, -inf)."""
    names = ("q", "k_cache", "v_cache", "page_table", "lengths", "partial", "partial_lse")
    q, k_cache, v_cache, page_table, lengths, partial, partial_lse = (operands[name] for name in names)
    assert q is not None and k_cache is not None
    tokens, q_heads, size = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    with on_device_of(q, stream):
        _attention_split[(tokens, kv_heads, attrs["splits"])](
            q, k_cache, v_cache, page_table, lengths, partial, partial_lse, float(attrs["scale"]), page,
            HKV=kv_heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=size,
            BD=max(16, triton.next_power_of_2(size)), WINDOW=attrs["window"], SPLITS=attrs["splits"], BK=32,
            num_warps=4, **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def attention_merge(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,HQ,D) and lse(T,HQ) from the splits, with the sink counted once; all empty gives 0 and -inf."""
    partial, partial_lse, sinks = operands["partial"], operands["partial_lse"], operands.get("sinks")
    out, lse = operands["out"], operands["lse"]
    assert partial is not None and partial_lse is not None
    tokens, q_heads, splits, size = partial.shape
    with on_device_of(partial, stream):
        _attention_merge[(tokens, q_heads)](
            partial, partial_lse, partial_lse if sinks is None else sinks, out, lse, HQ=q_heads, SPLITS=splits,
            SP=triton.next_power_of_2(splits), D=size, BD=triton.next_power_of_2(size), HAS_SINK=sinks is not None,
            num_warps=1, **overlap_options(overlap),
        )  # fmt: skip
