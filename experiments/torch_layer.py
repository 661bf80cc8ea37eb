"""The layer of `layer_speed` in plain torch ops: what a user writes without fused kernels, and what ours are held to.

Weights are dequantised to bf16 beforehand and the chosen experts are gathered; every step can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

from dieplace.experiments.layer_speed import (
    CHOSEN,
    CONTEXT,
    EPS,
    EXPERTS,
    HEAD,
    HIDDEN,
    INNER,
    KV_HEADS,
    Q_HEADS,
    Layer,
)


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
