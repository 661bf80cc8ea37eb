"""One gpt-oss-120b layer in our Triton ops: operands in the checkpoint's layouts, and the launches in order.

`triton_stages` makes one launch an op, for any number of tokens. `overlapped_stages` is the same layer of one token as
fast as the ops go: small ops fused, and every launch started before the one in front of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        "bad": torch.empty(1, dtype=torch.int32, device="cuda"),
        "arrived": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "arrived_heads": torch.zeros(KV_HEADS, dtype=torch.int32, device="cuda"),
        "act": new(CHOSEN, INNER), "r2": new(HIDDEN), "y": new(HIDDEN),
    }  # fmt: skip


def triton_stages(layer: Layer, w: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """The layer's launches in order, by stage."""
    from dieplace.kernels.triton import attention, experts, gemv, norm, rope, router

    t = layer.t
    q, cache = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD}, {"k_cache": t["k"], "v_cache": t["v"]}
    flat = {name: tensor.view(-1, KV_HEADS, HEAD) for name, tensor in cache.items()}
    norm_attrs = {"eps": EPS, "order": "before_cast"}
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
    up = {**_mx(t, "up", w["h"], w["act"]), "ids": w["ids"]}
    down = {**_mx(t, "down", w["act"], w["y"]), "ids": w["ids"], "weights": w["share"]}
    first = {"x": t["x"], "residual": t["x"], "weight": t["norm1"], "out": w["h"], "residual_out": w["r"]}
    second = {"x": w["o"], "residual": w["r"], "weight": t["norm2"], "out": w["h"], "residual_out": w["r2"]}
    return [
        ("norm", lambda: norm.rmsnorm(first, norm_attrs)),
        ("qkv", lambda: gemv.gemv_mxfp4(_mx(t, "qkv", w["h"], w["qkv"]), {})),
        ("rope", lambda: rope.rope_kv_append(rope_operands, q)),
        ("attention", lambda: attention.attention_split({**split, "partial_lse": w["lse"]}, attn_attrs)),
        ("merge", lambda: attention.attention_merge(merge, {})),
        ("o_proj", lambda: gemv.gemv_mxfp4(_mx(t, "o", w["attn"].flatten(1), w["o"]), {})),
        ("norm2", lambda: norm.rmsnorm(second, norm_attrs)),
        ("router", lambda: gemv.gemv_bf16(logits, {})),
        ("topk", lambda: router.router_topk(top, {})),
        ("gate_up", lambda: experts.expert_gate_up(up, {})),
        ("down", lambda: experts.expert_down(down, {})),
    ]


def overlapped_stages(layer: Layer, w: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """The same layer for one token in seven launches, each of which asks for its weights while the last one ends."""
    from dieplace.kernels.triton import experts, gemv, norm, rope_attention, router

    t = layer.t
    first = {"x": t["x"], "residual": t["x"], "weight": t["norm1"], "out": w["h"], "residual_out": w["r"]}
    attend = {
        **{name: w[name] for name in ("qkv", "cos", "sin", "partial")}, "positions": w["position"],
        "slots": w["position"], "page_table": w["table"], "lengths": w["length"], "sinks": t["sinks"],
        "q_out": w["q"], "k_cache": t["k"], "v_cache": t["v"], "partial_lse": w["lse"],
        "arrived": w["arrived_heads"], "out": w["attn"], "lse": w["attn_lse"],
    }  # fmt: skip
    attend_attrs = {
        "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD, "scale": HEAD**-0.5, "window": 0,
        "splits": w["partial"].shape[2],
    }  # fmt: skip
    route = {
        "x": w["o"], "residual": w["r"], "norm": t["norm2"], "router": t["router"], "bias": t["router_bias"],
        "normed": w["h"], "residual_out": w["r2"], "logits": w["logits"], "ids": w["ids"], "weights": w["share"],
        "nonfinite": w["bad"], "arrived": w["arrived"],
    }  # fmt: skip
    qkv, o, up, down = (_mx(t, *names) for names in (
        ("qkv", w["h"], w["qkv"]), ("o", w["attn"].flatten(1), w["o"]), ("up", w["h"], w["act"]),
        ("down", w["act"], w["y"]),
    ))  # fmt: skip
    chosen = {"ids": w["ids"]}
    order = {"eps": EPS, "order": "before_cast"}
    return [
        ("norm", lambda: norm.rmsnorm(first, order, overlap=True)),
        ("qkv", lambda: gemv.gemv_mxfp4(qkv, {}, overlap=True)),
        ("attention", lambda: rope_attention.rope_attention(attend, attend_attrs, overlap=True)),
        ("o_proj", lambda: gemv.gemv_mxfp4(o, {}, overlap=True)),
        ("router", lambda: router.norm_router(route, order, overlap=True)),
        ("gate_up", lambda: experts.expert_gate_up({**up, **chosen}, {}, overlap=True)),
        ("down", lambda: experts.expert_down({**down, **chosen, "weights": w["share"]}, {}, overlap=True)),
    ]


def _mx(t: dict[str, Any], name: str, x: Any, out: Any) -> dict[str, Any]:
    return {"x": x, "blocks": t[f"{name}_b"], "scales": t[f"{name}_s"], "bias": t[f"{name}_bias"], "out": out}


def stage_bytes(layer: Layer, stage: str) -> int:
    """Bytes of weights and cache that a stage reads for one token; 0 where only activations move."""
    t, share = layer.t, CHOSEN / EXPERTS
    named = {"qkv": ("qkv_b", "qkv_s"), "o_proj": ("o_b", "o_s"), "router": ("router",), "attention": ("k", "v")}
    chosen = {"gate_up": ("up_b", "up_s"), "down": ("down_b", "down_s")}
    return sum(t[n].nbytes for n in named.get(stage, ())) + int(sum(t[n].nbytes for n in chosen.get(stage, ())) * share)
