"""One gpt-oss-120b layer at batch 1: our Triton ops under a graph beside the same layer in plain torch ops.

The torch layer has its weights dequantised to bf16 beforehand and gathers the chosen experts, as a user without
fused kernels would write it. Both walk over distinct layers, so that weights come from HBM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dieplace.experiments.kernel_speed import Speed, timed

HIDDEN, INNER, EXPERTS, CHOSEN = 2880, 2880, 128, 4
Q_HEADS, KV_HEADS, HEAD = 64, 8, 64
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD
CONTEXT, PAGE, SPLITS, EPS = 1024, 1024, 16, 1e-5


@dataclass
class Layer:
    """Random operands of one layer in the checkpoint's layouts, on the current CUDA device."""

    t: dict[str, Any]

    @property
    def read_bytes(self) -> int:
        """Distinct bytes one token reads: dense parts, the chosen experts, the router, the cache."""
        dense = sum(self.t[name].nbytes for name in ("qkv_b", "qkv_s", "o_b", "o_s", "router", "k", "v"))
        experts = sum(self.t[name].nbytes for name in ("up_b", "up_s", "down_b", "down_s"))
        return dense + experts * CHOSEN // EXPERTS


def make_layer(seed: int, *, context: int = CONTEXT, tokens: int = 1) -> Layer:
    """Operands from a seed; scale bytes keep activations near 1. `context` tokens are in the cache, `tokens` run."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed)

    def byte(*shape: int, low: int = 0, high: int = 256) -> Any:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=g)

    def real(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, device="cuda", generator=g) * scale).bfloat16()

    def packed(name: str, *rows: int, width: int) -> dict[str, Any]:
        return {f"{name}_b": byte(*rows, width // 32, 16), f"{name}_s": byte(*rows, width // 32, low=118, high=120)}

    t = {
        "x": real(tokens, HIDDEN), "norm1": real(HIDDEN), "norm2": real(HIDDEN), "sinks": real(Q_HEADS),
        "router": real(EXPERTS, HIDDEN, scale=0.02), "router_bias": real(EXPERTS), "qkv_bias": real(QKV),
        "o_bias": real(HIDDEN), "up_bias": real(EXPERTS, 2 * INNER), "down_bias": real(EXPERTS, HIDDEN),
        "k": real(1, context, KV_HEADS, HEAD), "v": real(1, context, KV_HEADS, HEAD),
        **packed("qkv", QKV, width=HIDDEN), **packed("o", HIDDEN, width=Q_HEADS * HEAD),
        **packed("up", EXPERTS, 2 * INNER, width=HIDDEN), **packed("down", EXPERTS, HIDDEN, width=INNER),
    }  # fmt: skip
    return Layer(t)


def workspace(*, context: int = CONTEXT, tokens: int = 1, splits: int = SPLITS) -> dict[str, Any]:
    """Outputs and small operands shared by all layers of one stream; `tokens` are the last of the context."""
    import torch

    def new(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty((tokens, *shape), dtype=dtype, device="cuda")

    half = HEAD // 2
    angle = torch.arange(context)[:, None] * 150000.0 ** (-torch.arange(half) / half)
    position = torch.arange(context - tokens, context, dtype=torch.int32).cuda()
    return {
        "h": new(HIDDEN), "r": new(HIDDEN), "qkv": new(QKV), "q": new(Q_HEADS, HEAD), "o": new(HIDDEN),
        "cos": angle.cos().float().cuda(), "sin": angle.sin().float().cuda(),
        "position": position, "length": position + 1,
        "table": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "partial": new(Q_HEADS, splits, HEAD, dtype=torch.float32),
        "lse": new(Q_HEADS, splits, dtype=torch.float32), "attn": new(Q_HEADS, HEAD),
        "attn_lse": new(Q_HEADS, dtype=torch.float32), "logits": new(EXPERTS, dtype=torch.float32),
        "ids": new(CHOSEN, dtype=torch.int32), "share": new(CHOSEN, dtype=torch.float32),
        "bad": torch.empty(1, dtype=torch.int32, device="cuda"), "act": new(CHOSEN, INNER), "r2": new(HIDDEN),
        "y": new(HIDDEN),
    }  # fmt: skip


def triton_stages(layer: Layer, w: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """The layer's launches in order, by stage."""
    from dieplace.kernels.triton import attention, experts, gemv, norm, rope, router

    t = layer.t
    q, cache = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD}, {"k_cache": t["k"], "v_cache": t["v"]}
    flat = {name: tensor.view(-1, KV_HEADS, HEAD) for name, tensor in cache.items()}
    norm_attrs = {"eps": EPS, "order": "before_cast"}
    mx = lambda x, name, out: {  # noqa: E731
        "x": x, "blocks": t[f"{name}_b"], "scales": t[f"{name}_s"], "bias": t[f"{name}_bias"], "out": out
    }  # fmt: skip
    attn_attrs = {"scale": HEAD**-0.5, "window": 0, "splits": w["partial"].shape[2]}
    split = {"q": w["q"], **cache, "page_table": w["table"], "lengths": w["length"], "partial": w["partial"]}
    rope_operands = {
        "qkv": w["qkv"], "cos": w["cos"], "sin": w["sin"], "positions": w["position"], "slots": w["position"],
        "q_out": w["q"], **flat,
    }  # fmt: skip
    merge = {
        "partial": w["partial"],
        "partial_lse": w["lse"],
        "sinks": t["sinks"],
        "out": w["attn"],
        "lse": w["attn_lse"],
    }
    top = {"logits": w["logits"], "ids": w["ids"], "weights": w["share"], "nonfinite": w["bad"]}
    logits = {"x": w["h"], "weight": t["router"], "bias": t["router_bias"], "out": w["logits"]}
    up = {**mx(w["h"], "up", w["act"]), "ids": w["ids"]}
    down = {**mx(w["act"], "down", w["y"]), "ids": w["ids"], "weights": w["share"]}
    first = {"x": t["x"], "residual": t["x"], "weight": t["norm1"], "out": w["h"], "residual_out": w["r"]}
    second = {"x": w["o"], "residual": w["r"], "weight": t["norm2"], "out": w["h"], "residual_out": w["r2"]}
    return [
        ("norm", lambda: norm.rmsnorm(first, norm_attrs)),
        ("qkv", lambda: gemv.gemv_mxfp4(mx(w["h"], "qkv", w["qkv"]), {})),
        ("rope", lambda: rope.rope_kv_append(rope_operands, q)),
        ("attention", lambda: attention.attention_split({**split, "partial_lse": w["lse"]}, attn_attrs)),
        ("merge", lambda: attention.attention_merge(merge, {})),
        ("o_proj", lambda: gemv.gemv_mxfp4(mx(w["attn"].flatten(1), "o", w["o"]), {})),
        ("norm2", lambda: norm.rmsnorm(second, norm_attrs)),
        ("router", lambda: gemv.gemv_bf16(logits, {})),
        ("topk", lambda: router.router_topk(top, {})),
        ("gate_up", lambda: experts.expert_gate_up(up, {})),
        ("down", lambda: experts.expert_down(down, {})),
    ]


def dequantised(layer: Layer) -> dict[str, Any]:
    """The layer's weights as dense bf16 matrices."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    values = torch.cat([values, -values])

    def dense(name: str) -> Any:
        blocks, scales = layer.t[f"{name}_b"], layer.t[f"{name}_s"]
        out = torch.empty((*blocks.shape[:-1], 32), dtype=torch.bfloat16, device="cuda")
        scale = torch.exp2(scales.float() - 127)[..., None]
        out[..., 0::2] = values[(blocks & 15).int()] * scale
        out[..., 1::2] = values[(blocks >> 4).int()] * scale
        return out.flatten(-2)

    return {name: dense(name) for name in ("qkv", "o")}


def dequantised_experts(layer: Layer, into: dict[str, Any]) -> dict[str, Any]:
    """Add the experts' dense matrices, one expert at a time to bound the peak."""
    import torch

    for name, rows, width in (("up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        out = torch.empty((EXPERTS, rows, width), dtype=torch.bfloat16, device="cuda")
        for e in range(EXPERTS):
            one = Layer({"qkv_b": layer.t[f"{name}_b"][e], "qkv_s": layer.t[f"{name}_s"][e], "o_b": layer.t["o_b"][:1],
                         "o_s": layer.t["o_s"][:1]})  # fmt: skip
            out[e] = dequantised(one)["qkv"]
        into[name] = out
    return into


def torch_layer(layer: Layer, m: dict[str, Any], w: dict[str, Any]) -> Any:
    """The same layer in plain torch ops; every step is one that a graph can capture."""
    import torch
    from torch.nn import functional as F

    t = layer.t
    h = (F.rms_norm((t["x"] + t["x"]).float(), (HIDDEN,), eps=EPS) * t["norm1"]).bfloat16()
    r = t["x"] + t["x"]
    qkv = F.linear(h, m["qkv"], t["qkv_bias"]).view(-1, HEAD)
    cos, sin = w["cos"][CONTEXT - 1], w["sin"][CONTEXT - 1]
    a, b = qkv[: Q_HEADS + KV_HEADS].float().chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()
    t["k"][0, CONTEXT - 1].copy_(turned[Q_HEADS:])
    t["v"][0, CONTEXT - 1].copy_(qkv[Q_HEADS + KV_HEADS :])
    q = turned[:Q_HEADS].view(KV_HEADS, -1, HEAD)
    score = torch.matmul(q, t["k"][0].permute(1, 2, 0)).float() * HEAD**-0.5
    score = torch.cat([score, t["sinks"].float().view(KV_HEADS, -1, 1)], -1)
    p = score.softmax(-1)[..., :-1].bfloat16()
    attn = torch.matmul(p, t["v"][0].transpose(0, 1)).reshape(1, -1)
    r = r + F.linear(attn, m["o"], t["o_bias"])
    h = (F.rms_norm(r.float(), (HIDDEN,), eps=EPS) * t["norm2"]).bfloat16()
    logits = F.linear(h, t["router"], t["router_bias"])
    value, ids = logits.topk(CHOSEN)
    share = value.softmax(-1)
    gu = torch.einsum("ehk,k->eh", m["up"][ids[0]], h[0]) + t["up_bias"][ids[0]]
    gate, up = gu[:, ::2].clamp(max=7.0), gu[:, 1::2].clamp(-7.0, 7.0)
    act = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    down = torch.einsum("ehk,ek->eh", m["down"][ids[0]], act) + t["down_bias"][ids[0]]
    return r + share @ down


def layer_speeds(count: int) -> list[Speed]:
    """Whole layer and each stage by our ops over `count` layers, then the torch layer over as many as fit."""
    layers = [make_layer(seed) for seed in range(count)]
    w = workspace()
    stages = [triton_stages(layer, w) for layer in layers]
    nbytes = layers[0].read_bytes
    whole = timed("layer, Triton ops", nbytes, [_all([f for _, f in one]) for one in stages])
    parts = [
        timed(f"stage {stages[0][i][0]}", _stage_bytes(layers[0], stages[0][i][0]), [one[i][1] for one in stages])
        for i in range(len(stages[0]))
    ]
    few = layers[: min(count, 4)]
    matrices = [dequantised_experts(layer, dequantised(layer)) for layer in few]
    plain = timed("layer, torch ops", nbytes, [
        partial(torch_layer, layer, m, w) for layer, m in zip(few, matrices, strict=True)
    ])  # fmt: skip
    return [whole, plain, *parts]


def _stage_bytes(layer: Layer, stage: str) -> int:
    t, share = layer.t, CHOSEN / EXPERTS
    named = {"qkv": ("qkv_b", "qkv_s"), "o_proj": ("o_b", "o_s"), "router": ("router",), "attention": ("k", "v")}
    chosen = {"gate_up": ("up_b", "up_s"), "down": ("down_b", "down_s")}
    return sum(t[n].nbytes for n in named.get(stage, ())) + int(sum(t[n].nbytes for n in chosen.get(stage, ())) * share)


def _all(functions: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for function in functions:
            function()

    return run
