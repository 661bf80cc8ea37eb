"""Top-k of the router's logits and the softmax over the chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import on_device_of, triton_op

Operands = Mapping[str, torch.Tensor | None]


@triton.jit
def _router_topk(
    logits, ids, weights, nonfinite, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):
    expert, place = tl.arange(0, EP), tl.arange(0, KP)
    bad = 0
    for token in range(T):
        value = tl.load(logits + token * E + expert, mask=expert < E, other=0.0)
        wrong = (value != value) | (tl.abs(value) == float("inf"))
        bad += tl.sum(tl.where((expert < E) & wrong, 1, 0), axis=0)
        # NaN compares false with everything, so it is taken as -inf; chosen and padding experts fall below it.
        value = tl.where(value != value, float("-inf"), value)
        free = expert < E
        chosen = tl.zeros((KP,), tl.int32)
        score = tl.full((KP,), float("-inf"), tl.float32)
        for k in tl.static_range(K):
            top = tl.max(tl.where(free, value, float("-inf")), axis=0)
            best = tl.min(tl.where(free & (value == top), expert, EP), axis=0)
            chosen = tl.where(place == k, best, chosen)
            score = tl.where(place == k, top, score)
            free = tl.where(expert == best, False, free)
        highest = tl.max(score, axis=0)
        flat = highest == float("-inf")
        p = tl.where(place < K, tl.where(flat, 1.0, tl.exp(score - tl.where(flat, 0.0, highest))), 0.0)
        # inf minus inf would be NaN: infinite logits share the weight.
        shared = tl.where(place < K, tl.where(score == highest, 1.0, 0.0), 0.0)
        p = tl.where(highest == float("inf"), shared, p)
        tl.store(ids + token * K + place, chosen, mask=place < K)
        tl.store(weights + token * K + place, p / tl.sum(p, axis=0), mask=place < K)
    tl.store(nonfinite, bad)


@triton_op
def router_topk(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None) -> None:
    """The k best of up to 128 logits, lowest index first on ties, NaN last; weights sum to 1 over the chosen."""
    logits, ids, weights, nonfinite = (operands[name] for name in ("logits", "ids", "weights", "nonfinite"))
    assert logits is not None and ids is not None
    tokens, experts = logits.shape
    with on_device_of(logits, stream):
        _router_topk[(1,)](
            logits, ids, weights, nonfinite, tokens, E=experts, EP=triton.next_power_of_2(experts), K=ids.shape[1],
            KP=triton.next_power_of_2(ids.shape[1]), num_warps=1,
        )  # fmt: skip
