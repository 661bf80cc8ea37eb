"""Fused ops as chains of the ops they stand for: reference, bytes, and the check of each part on what was handed to it.

A part is judged on what the kernel handed to it, not on what the reference would have: a value that rounds the other
way is within the tolerance of the part that rounds it, and must not count against the parts behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dieplace.kernels import registry, traffic
from dieplace.kernels.reference import Attrs, Expected, Operands, rounded

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Part:
    """One op of a chain: its operands by the fused op's names, its attributes, and caches it takes as flat rows."""

    op: str
    operands: Mapping[str, str]
    attrs: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()


def _same(*names: str, **renamed: str) -> dict[str, str]:
    return {**{name: name for name in names}, **renamed}


PARTS: dict[str, tuple[Part, ...]] = {
    "rope_attention": (
        Part(
            "rope_kv_append",
            _same("qkv", "cos", "sin", "positions", "slots", "q_out", "k_cache", "v_cache"),
            ("q_heads", "kv_heads", "head_dim"),
            ("k_cache", "v_cache"),
        ),
        Part(
            "attention_split",
            _same("k_cache", "v_cache", "page_table", "lengths", "partial", "partial_lse", q="q_out"),
            ("scale", "window", "splits"),
        ),
        Part("attention_merge", _same("partial", "partial_lse", "sinks", "out", "lse")),
    ),
    "norm_router": (
        Part("rmsnorm", _same("x", "residual", "residual_out", weight="norm", out="normed"), ("eps", "order")),
        Part("gemv_bf16", _same("bias", x="normed", weight="router", out="logits")),
        Part("router_topk", _same("logits", "ids", "weights", "nonfinite")),
    ),
}
COUNTER = "arrived"  # zero before and after


def part_calls(name: str, before: Tensors, after: Tensors, attrs: Attrs) -> Iterator[tuple[Part, registry.Call]]:
    """The parts' calls: what a part reads of an earlier part comes from `after`, everything else from `before`."""
    made: set[str] = set()
    for part in PARTS[name]:
        contract = registry.op(part.op)
        taken: dict[str, Tensor | None] = {}
        for own, fused in part.operands.items():
            handed_on = fused in made and contract.operand(own).use == registry.INPUT
            taken[own] = _shaped(part, own, (after if handed_on else before)[fused])
        made |= {part.operands[spec.name] for spec in contract.outputs if spec.name in part.operands}
        yield part, registry.check_call(part.op, taken, {key: attrs[key] for key in part.attrs})


def part_results(part: Part, after: Tensors) -> dict[str, Tensor]:
    """What was written, by the part's own names."""
    results = {own: _shaped(part, own, after[fused]) for own, fused in part.operands.items() if fused in after}
    return {own: tensor for own, tensor in results.items() if tensor is not None}


def rope_attention(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The parts' references one after the other, each on the rounded results of those before."""
    return _chain("rope_attention", operands, attrs)


def norm_router(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The parts' references one after the other, each on the rounded results of those before."""
    return _chain("norm_router", operands, attrs)


def rope_attention_traffic(call: registry.Call) -> dict[str, int]:
    """Rows of K and V that the token sees or appends, and the table rows of its position."""
    rows: dict[str, int] = {}
    for part, one in part_calls("rope_attention", call.operands, call.operands, call.attrs):
        if part.op == "rope_kv_append":
            rows = traffic.rope_kv_append(one)
        if part.op == "attention_split":
            seen = traffic.attention_split(one)
            # The appended row is among those seen, unless nothing is.
            rows |= {name: max(rows[name], nbytes) for name, nbytes in seen.items()}
    return rows


def _chain(name: str, operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    held: dict[str, Tensor | None] = {key: None if t is None else t.clone() for key, t in operands.items()}
    expected: dict[str, Expected] = {}
    for part, call in part_calls(name, operands, held, attrs):
        for own, wanted in registry.resolve(call.op.reference)(call.operands, call.attrs).items():
            fused = part.operands[own]
            target = held[fused]
            if target is not None:
                shape = target.shape
                expected[fused] = Expected(wanted.value.reshape(shape), wanted.size.reshape(shape))
                held[fused] = rounded(wanted.value, target.dtype).reshape(shape).to(target.device)
    counter = operands[COUNTER]
    assert counter is not None
    return {**expected, COUNTER: Expected(torch.zeros_like(counter))}


def _shaped(part: Part, own: str, tensor: Tensor | None) -> Tensor | None:
    return tensor.flatten(0, 1) if tensor is not None and own in part.flat else tensor
