"""Top-k of the router's logits and the softmax over the chosen; alone, and behind one token's norm and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import on_device_of, triton_op
from dieplace.kernels.triton.norm import normalised
from dieplace.kernels.triton.numbers import narrow, widen
from dieplace.kernels.triton.overlap import let_next_start, overlap_options, wait_for_previous

Operands = Mapping[str, torch.Tensor | None]


@triton.jit
def _choose(logits, ids, weights, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Store the K largest of E logits and the softmax over them; returns how many logits are not finite.

    A logit and its place are one number, the lower place the larger, so that a round is one search. Logits are read
    from the second-level cache, where other programs may have left them.
    """
    expert, place = tl.arange(0, EP), tl.arange(0, KP)
    value = tl.load(logits + expert, mask=expert < E, other=0.0, cache_modifier=".cg")
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # NaN comes behind -inf, and padding behind NaN.
    ordered = tl.where(expert < E, tl.where(value != value, -0x7FFFFFFF, ordered), -0x80000000)
    key = (ordered.to(tl.int64) << 32) | (EP - 1 - expert).to(tl.int64)
    chosen = tl.zeros((KP,), tl.int32)
    score = tl.full((KP,), float("-inf"), tl.float32)
    for k in tl.static_range(K):
        top = tl.max(key, axis=0)
        key = tl.where(key == top, -0x8000000000000000, key)
        found = (top >> 32).to(tl.int32)
        back = (found ^ ((found >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where(place == k, EP - 1 - (top & 0x7FFFFFFF).to(tl.int32), chosen)
        score = tl.where(place == k, tl.where(back != back, float("-inf"), back), score)
    highest = tl.max(score, axis=0)
    flat = highest == float("-inf")
    p = tl.where(place < K, tl.where(flat, 1.0, tl.exp(score - tl.where(flat, 0.0, highest))), 0.0)
    # inf minus inf would be NaN: infinite logits share the weight.
    shared = tl.where(place < K, tl.where(score == highest, 1.0, 0.0), 0.0)
    p = tl.where(highest == float("inf"), shared, p)
    tl.store(ids + place, chosen, mask=place < K)
    tl.store(weights + place, p / tl.sum(p, axis=0), mask=place < K)
    wrong = (value != value) | (tl.abs(value) == float("inf"))
    return tl.sum(tl.where((expert < E) & wrong, 1, 0), axis=0)


@triton.jit
def _router_topk(
    logits, ids, weights, nonfinite, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    bad = 0
    for token in range(T):
        bad += _choose(logits + token * E, ids + token * K, weights + token * K, E, EP, K, KP)
    tl.store(nonfinite, bad)


@triton.jit
def _norm_router(
    x, residual, norm, router, bias, normed, residual_out, logits, ids, weights, nonfinite, arrived, eps,
    H: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RESIDUAL: tl.constexpr, BEFORE_CAST: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One expert's logit a program, each of which normalises the token; the last one ranks the logits."""
    let_next_start(OVERLAP)
    mine = tl.program_id(0)
    columns = tl.arange(0, BH)
    inside = columns < H
    row = tl.load(router + mine * H + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    scale = tl.load(norm + columns, mask=inside, other=0.0)
    before = 0.0
    if HAS_BIAS:
        before = widen(tl.load(bias + mine))
    wait_for_previous(OVERLAP)
    h = widen(tl.load(x + columns, mask=inside, other=0.0))
    if RESIDUAL:
        rounded = narrow(h + widen(tl.load(residual + columns, mask=inside, other=0.0)), tl.bfloat16)
        h = widen(rounded)
    token = normalised(h, widen(scale), eps, H, BEFORE_CAST)
    if mine == 0:
        tl.store(normed + columns, token, mask=inside)
        if RESIDUAL:
            tl.store(residual_out + columns, rounded, mask=inside)
    tl.store(logits + mine, tl.sum(widen(token) * widen(row), axis=0) + before)
    # All of this program's stores come before its count, and the last program's loads after it.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == E - 1:
        tl.store(arrived, 0)
        tl.store(nonfinite, _choose(logits, ids, weights, E, EP, K, KP))


@triton_op
def router_topk(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """The k best of up to 128 logits, lowest index first on ties, NaN last; weights sum to 1 over the chosen."""
    logits, ids, weights, nonfinite = (operands[name] for name in ("logits", "ids", "weights", "nonfinite"))
    assert logits is not None and ids is not None
    tokens, experts = logits.shape
    with on_device_of(logits, stream):
        _router_topk[(1,)](
            logits, ids, weights, nonfinite, tokens, E=experts, EP=triton.next_power_of_2(experts), K=ids.shape[1],
            KP=triton.next_power_of_2(ids.shape[1]), num_warps=1, **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def norm_router(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """ids and weights of the k best experts for rmsnorm(x + residual), which goes to `normed`; one token."""
    x, residual, router, bias = (operands.get(name) for name in ("x", "residual", "router", "bias"))
    normed, ids = operands["normed"], operands["ids"]
    assert x is not None and router is not None and normed is not None and ids is not None
    experts, width = router.shape
    outputs = (operands[name] for name in ("logits", "ids", "weights", "nonfinite", "arrived"))
    with on_device_of(x, stream):
        _norm_router[(experts,)](
            x, x if residual is None else residual, operands["norm"], router, x if bias is None else bias, normed,
            normed if residual is None else operands["residual_out"], *outputs, float(attrs["eps"]), H=width,
            BH=triton.next_power_of_2(width), E=experts, EP=triton.next_power_of_2(experts), K=ids.shape[1],
            KP=triton.next_power_of_2(ids.shape[1]), RESIDUAL=residual is not None,
            BEFORE_CAST=attrs["order"] == "before_cast", HAS_BIAS=bias is not None, num_warps=4,
            **overlap_options(overlap),
        )  # fmt: skip
