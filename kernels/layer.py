"""One layer of a decode step as op calls: norm, Q/K/V, attention, O, norm, router and experts or MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dieplace.kernels.decode import DecodeModel

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def run_layer(
    model: DecodeModel, layer: int, hidden: list[Tensor], residual: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """hidden and residual per shard, (T, H) each, to those after the layer; the sum of both is still to be taken."""
    name = f"layers.{layer}"
    attended, between = [], []
    for shard in range(model.shards):
        x, total = model.norm("norm", layer, shard, f"{name}.input_norm", hidden[shard], residual[shard])
        between.append(total)
        qkv = _linear(model, "qkv", layer, shard, f"{name}.qkv", x, BF16)
        attended.append(_attention(model, layer, shard, qkv))
    merged = _project(model, "o_proj", layer, f"{name}.o_proj", attended, "merge")
    normed, after = [], []
    for shard in range(model.shards):
        x, total = model.norm("norm", layer, shard, f"{name}.post_norm", merged[shard], between[shard])
        normed.append(x)
        after.append(total)
    out = (_experts if model.config.experts else _mlp)(model, layer, normed)
    return out, list(after)


def _linear(
    model: DecodeModel, stage: str, layer: int, shard: int, weight: str, x: Tensor, dtype: torch.dtype
) -> Tensor:
    """x W^T + bias in whichever format the weight has."""
    plain = model.weights.get(shard, weight)
    blocks, bias = model.weights.get(shard, f"{weight}.blocks"), model.weights.get(shard, f"{weight}.bias")
    matrix = plain if plain is not None else blocks
    assert matrix is not None
    out = model.scratch(shard, f"{stage}_out_{weight.rsplit('.', 1)[-1]}", (x.shape[0], matrix.shape[0]), dtype)
    if plain is not None:
        model.call(stage, layer, shard, "gemv_bf16", {"x": x, "weight": plain, "bias": bias, "out": out})
        return out
    operands: dict[str, Any] = {"x": x, "blocks": blocks, "scales": model.weights.get(shard, f"{weight}.scales")}
    operands |= {"bias": bias, "out": out}
    if not model.settings.mxfp8:
        model.call(stage, layer, shard, "gemv_mxfp4", operands)
        return out
    codes = model.scratch(shard, f"{stage}_codes", x.shape, torch.float8_e4m3fn)
    scales = model.scratch(shard, f"{stage}_scales", (x.shape[0], x.shape[1] // 32), torch.uint8)
    model.call(stage, layer, shard, "quantize_mxfp8", {"x": x, "out": codes, "scales": scales})
    model.call(stage, layer, shard, "gemv_mxfp4_mxfp8", {**operands, "x": codes, "x_scales": scales})
    return out


def _project(
    model: DecodeModel, stage: str, layer: int, weight: str, inputs: list[Tensor], handoff: str
) -> list[Tensor]:
    """A projection whose columns are divided: bf16 on one shard, fp32 partials and a hand-off on two."""
    dtype = BF16 if model.shards == 1 else F32
    parts = [_linear(model, stage, layer, shard, weight, x, dtype) for shard, x in enumerate(inputs)]
    return parts if model.shards == 1 else model.exchange(stage, layer, handoff, parts)


def _attention(model: DecodeModel, layer: int, shard: int, qkv: Tensor) -> Tensor:
    """Per-head norm where the model has one, rotation and append, split attention, merge: (T, HQ * D)."""
    c, state, count = model.config, model.states[shard], qkv.shape[0]
    window = c.window_of(layer)
    stage = "attention_window" if window else "attention"
    heads = {"q_heads": c.q_heads // model.shards, "kv_heads": c.kv_heads // model.shards, "head_dim": c.head_dim}
    hq, d = heads["q_heads"], c.head_dim
    if c.qk_norm:
        norms = {f"{side}_weight": model.weights.get(shard, f"layers.{layer}.{side}_norm") for side in ("q", "k")}
        model.call("qkv", layer, shard, "qk_norm", {"qkv": qkv, **norms}, {**heads, "eps": c.eps})
    q = model.scratch(shard, "q", (count, hq, d), BF16)
    cos, sin = state.ropes[c.ropes[layer]]
    k_cache, v_cache = state.k_caches[layer], state.v_caches[layer]
    positions, slots, lengths = _where(model, shard, count)
    append = {"qkv": qkv, "cos": cos, "sin": sin, "positions": positions, "slots": slots, "q_out": q}
    append |= {"k_cache": k_cache.flatten(0, 1), "v_cache": v_cache.flatten(0, 1)}
    model.call("qkv", layer, shard, "rope_kv_append", append, heads)
    splits = model.settings.splits
    partial = model.scratch(shard, "partial", (count, hq, splits, d), F32)
    partial_lse = model.scratch(shard, "partial_lse", (count, hq, splits), F32)
    split = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": model.page_tables[shard]}
    split |= {"lengths": lengths, "partial": partial, "partial_lse": partial_lse}
    attrs = {"scale": d**-0.5, "window": window, "splits": splits}
    model.call(stage, layer, shard, "attention_split", split, attrs)
    out = model.scratch(shard, "attended", (count, hq, d), BF16)
    merge: dict[str, Any] = {"partial": partial, "partial_lse": partial_lse, "out": out}
    merge |= {"sinks": model.weights.get(shard, f"layers.{layer}.sinks")}
    merge |= {"lse": model.scratch(shard, "lse", (count, hq), F32)}
    model.call(stage, layer, shard, "attention_merge", merge)
    return out.flatten(1)


def _where(model: DecodeModel, shard: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, cache slots and visible lengths of the step's tokens, on the shard."""
    positions = torch.arange(model.position, model.position + count, dtype=I32)
    pages = model.page_tables[shard].cpu()[positions // model.page]
    rows = (positions, pages * model.page + positions % model.page, positions + 1)
    named = zip(("positions", "slots", "lengths"), rows, strict=True)
    first, second, third = (model.scratch(shard, name, (count,), I32).copy_(values) for name, values in named)
    return first, second, third


def _experts(model: DecodeModel, layer: int, inputs: list[Tensor]) -> list[Tensor]:
    """Router on every shard (the same values), experts divided by rows, partial sums exchanged."""
    c, name, parts = model.config, f"layers.{layer}", []
    for shard, x in enumerate(inputs):
        count = x.shape[0]
        logits = _linear(model, "router", layer, shard, f"{name}.router", x, F32)
        ids = model.scratch(shard, "ids", (count, c.experts_per_token), I32)
        share = model.scratch(shard, "share", (count, c.experts_per_token), F32)
        bad = model.scratch(shard, "nonfinite", (1,), I32)
        top = {"logits": logits, "ids": ids, "weights": share, "nonfinite": bad}
        model.call("router", layer, shard, "router_topk", top)
        model.nonfinite += int(bad) if shard == 0 else 0
        rows = c.intermediate // model.shards
        active = model.scratch(shard, "active", (count, c.experts_per_token, rows), BF16)
        up = {"x": x, "ids": ids, "out": active, **_moe_weights(model, shard, f"{name}.gate_up")}
        model.call("experts", layer, shard, "expert_gate_up", up, {"alpha": c.alpha, "limit": c.limit})
        out = model.scratch(shard, "expert_out", x.shape, BF16 if model.shards == 1 else F32)
        down = {"x": active, "ids": ids, "weights": share, "out": out, **_moe_weights(model, shard, f"{name}.down")}
        model.call("experts", layer, shard, "expert_down", down)
        parts.append(out)
    return parts if model.shards == 1 else model.exchange("experts", layer, "experts", parts)


def _moe_weights(model: DecodeModel, shard: int, name: str) -> dict[str, Tensor | None]:
    return {part: model.weights.get(shard, f"{name}.{part}") for part in ("blocks", "scales", "bias")}


def _mlp(model: DecodeModel, layer: int, inputs: list[Tensor]) -> list[Tensor]:
    """silu(gate) * up by rows, down by columns."""
    name, active = f"layers.{layer}", []
    for shard, x in enumerate(inputs):
        out = model.scratch(shard, "active", (x.shape[0], model.config.intermediate // model.shards), BF16)
        sides = {side: model.weights.get(shard, f"{name}.{side}") for side in ("gate", "up")}
        if sides["gate"] is not None:
            model.call("mlp", layer, shard, "mlp_gate_up", {"x": x, **sides, "out": out})
        else:
            parts = {
                f"{side}_{part}": model.weights.get(shard, f"{name}.{side}.{part}")
                for side in ("gate", "up")
                for part in ("blocks", "scales")
            }
            model.call("mlp", layer, shard, "mlp_gate_up_mxfp4", {"x": x, **parts, "out": out})
        active.append(out)
    return _project(model, "mlp", layer, f"{name}.down", active, "mlp")
