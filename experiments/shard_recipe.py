"""One tensor-parallel half of a gpt-oss layer: half of the heads, half of each expert's inner width, sums exchanged.

The output projection and the experts' down projection are row-parallel: each shard multiplies its half of the columns
and both add the other's fp32 partial sums, which come as words with their tag into an own mailbox. Norms and router
run on both shards. A bias that is added after a sum is on shard 0 alone; shard 1 has zeros, and runs the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from dieplace.experiments import layer_speed
from dieplace.experiments.step_recipe import Recipe, Stage

if TYPE_CHECKING:
    from dieplace.kernels.exchange import Side

SHARDS = 2
HAND_OFFS = 2  # of a layer: behind the output projection, behind the experts
Run = Callable[[str, dict[str, Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Sizes:
    """Of the whole layer; each shard has half of the heads and of the inner width."""

    hidden: int
    inner: int
    experts: int
    chosen: int
    q_heads: int
    kv_heads: int
    head: int
    context: int
    splits: int = layer_speed.SPLITS

    @property
    def mine(self) -> dict[str, int]:
        """Heads of one shard, as the ops' attributes name them."""
        q, kv = self.q_heads // SHARDS, self.kv_heads // SHARDS
        return {"q_heads": q, "kv_heads": kv, "head_dim": self.head}


GPT_OSS = Sizes(
    layer_speed.HIDDEN, layer_speed.INNER, layer_speed.EXPERTS, layer_speed.CHOSEN, layer_speed.Q_HEADS,
    layer_speed.KV_HEADS, layer_speed.HEAD, layer_speed.CONTEXT,
)  # fmt: skip


def half_of(whole: Mapping[str, Any], shard: int, sizes: Sizes) -> dict[str, Any]:
    """A shard's operands of a whole layer's, by the same names; every tensor is contiguous and a copy."""
    import torch

    q, kv, head = sizes.q_heads // SHARDS, sizes.kv_heads // SHARDS, sizes.head
    starts = (shard * q, sizes.q_heads + shard * kv, sizes.q_heads + sizes.kv_heads + shard * kv)
    rows = torch.cat(
        [torch.arange(s * head, (s + n) * head) for s, n in zip(starts, (q, kv, kv), strict=True)]
    ).to(whole["qkv_b"].device)  # fmt: skip
    attended, inner = slice(shard * q * head // 32, (shard + 1) * q * head // 32), sizes.inner // SHARDS
    narrow = slice(shard * inner // 32, (shard + 1) * inner // 32)
    wide = slice(shard * 2 * inner, (shard + 1) * 2 * inner)  # rows alternate gate and up: whole pairs stay together
    cut: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("qkv_b", "qkv_s", "qkv_bias"), lambda t: t[rows]),
        **dict.fromkeys(("o_b", "o_s"), lambda t: t[:, attended]),
        **dict.fromkeys(("up_b", "up_s", "up_bias"), lambda t: t[:, wide]),
        **dict.fromkeys(("down_b", "down_s"), lambda t: t[:, :, narrow]),
        **dict.fromkeys(("o_bias", "down_bias"), lambda t: t * (shard == 0)),
        **dict.fromkeys(("k", "v"), lambda t: t[:, :, shard * kv : (shard + 1) * kv]),
        "sinks": lambda t: t[shard * q : (shard + 1) * q],
    }
    return {name: cut.get(name, lambda t: t)(tensor).clone().contiguous() for name, tensor in whole.items()}


def workspace(sizes: Sizes, device: str = "cuda") -> dict[str, Any]:
    """Outputs and small operands of one shard, shared by its layers; one token, the last of the context."""
    import torch

    mine, half = sizes.mine, sizes.head // 2

    def new(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty((1, *shape), dtype=dtype, device=device)

    def zeros(count: int) -> Any:
        return torch.zeros(count, dtype=torch.int32, device=device)

    angle = torch.arange(sizes.context)[:, None] * 150000.0 ** (-torch.arange(half) / half)
    position = torch.tensor([sizes.context - 1], dtype=torch.int32, device=device)
    heads, rows = mine["q_heads"], (mine["q_heads"] + 2 * mine["kv_heads"]) * sizes.head
    return {
        "h": new(sizes.hidden), "r": new(sizes.hidden), "qkv": new(rows), "q": new(heads, sizes.head),
        "cos": angle.cos().float().to(device), "sin": angle.sin().float().to(device), "position": position,
        "length": position + 1, "table": zeros(1),
        "partial": new(heads, sizes.splits, sizes.head, dtype=torch.float32),
        "split_lse": new(heads, sizes.splits, dtype=torch.float32), "attn": new(heads, sizes.head),
        "lse": new(heads, dtype=torch.float32), "arrived_heads": zeros(mine["kv_heads"]),
        "arrived": zeros(1), "o_part": new(sizes.hidden, dtype=torch.float32),
        "o": new(sizes.hidden), "r2": new(sizes.hidden), "logits": new(sizes.experts, dtype=torch.float32),
        "ids": new(sizes.chosen, dtype=torch.int32), "share": new(sizes.chosen, dtype=torch.float32),
        "bad": torch.empty(1, dtype=torch.int32, device=device), "act": new(sizes.chosen, sizes.inner // SHARDS),
        "y_part": new(sizes.hidden, dtype=torch.float32), "y": new(sizes.hidden),
    }  # fmt: skip


def stages(
    t: Mapping[str, Any], w: Mapping[str, Any], sizes: Sizes, side: Side, slots: Sequence[int], run: Run
) -> list[Stage]:
    """One layer's launches of a shard in order, by stage; `slots` are its two hand-offs' mailboxes.

    `run(op, operands, attrs)` makes the launches of all but the hand-offs, which are the side's.
    """
    return [
        *_attention(t, w, sizes, run),
        ("o_put", partial(side.put, slots[0], w["o_part"].view(-1))),
        ("o_sum", partial(side.sum, slots[0], w["o_part"].view(-1), w["o"].view(-1))),
        *_experts(t, w, run),
        ("y_put", partial(side.put, slots[1], w["y_part"].view(-1))),
        ("y_sum", partial(side.sum, slots[1], w["y_part"].view(-1), w["y"].view(-1))),
    ]


def overlapped(op: str, operands: dict[str, Any], attrs: dict[str, Any]) -> None:
    """A Triton op, checked against its contract; it begins under the launch before it where it can (`overlap`).

    Behind a hand-off there is nothing to begin under: a launch that waits for words lets nobody start.
    """
    from dieplace.kernels import registry

    call = registry.check_call(op, operands, attrs)
    kernel = registry.implementation(op, "triton")
    assert kernel is not None
    options = {"overlap": True} if "overlap" in inspect.signature(kernel).parameters else {}
    kernel(call.operands, call.attrs, **options)


def _attention(t: Mapping[str, Any], w: Mapping[str, Any], sizes: Sizes, run: Run) -> list[Stage]:
    norm = {"x": t["x"], "residual": t["x"], "weight": t["norm1"], "out": w["h"], "residual_out": w["r"]}
    attend = {
        **{name: w[name] for name in ("qkv", "cos", "sin", "partial", "lse")}, "positions": w["position"],
        "slots": w["position"], "page_table": w["table"], "lengths": w["length"], "sinks": t["sinks"],
        "q_out": w["q"], "k_cache": t["k"], "v_cache": t["v"], "partial_lse": w["split_lse"],
        "arrived": w["arrived_heads"], "out": w["attn"],
    }  # fmt: skip
    attrs = {**sizes.mine, "scale": sizes.head**-0.5, "window": 0, "splits": sizes.splits}
    return [
        ("norm", partial(run, "rmsnorm", norm, {"eps": layer_speed.EPS, "order": "before_cast"})),
        ("qkv", partial(run, "gemv_mxfp4", _mx(t, "qkv", w["h"], w["qkv"]), {})),
        ("attention", partial(run, "rope_attention", attend, attrs)),
        ("o_proj", partial(run, "gemv_mxfp4", _mx(t, "o", w["attn"].flatten(1), w["o_part"]), {})),
    ]


def _experts(t: Mapping[str, Any], w: Mapping[str, Any], run: Run) -> list[Stage]:
    route = {
        "x": w["o"], "residual": w["r"], "norm": t["norm2"], "router": t["router"], "bias": t["router_bias"],
        "normed": w["h"], "residual_out": w["r2"], "logits": w["logits"], "ids": w["ids"], "weights": w["share"],
        "nonfinite": w["bad"], "arrived": w["arrived"],
    }  # fmt: skip
    up = {**_mx(t, "up", w["h"], w["act"]), "ids": w["ids"]}
    down = {**_mx(t, "down", w["act"], w["y_part"]), "ids": w["ids"], "weights": w["share"]}
    return [
        ("router", partial(run, "norm_router", route, {"eps": layer_speed.EPS, "order": "before_cast"})),
        ("gate_up", partial(run, "expert_gate_up", up, {})),
        ("down", partial(run, "expert_down", down, {})),
    ]


def _mx(t: Mapping[str, Any], name: str, x: Any, out: Any) -> dict[str, Any]:
    return {"x": x, "blocks": t[f"{name}_b"], "scales": t[f"{name}_s"], "bias": t[f"{name}_bias"], "out": out}


def recipe_of(shard: int, side: Side, slots: Sequence[int], sizes: Sizes = GPT_OSS) -> Recipe:
    """A shard's step as `PlacedLayers` builds it: layer n takes the n-th pair of slots."""
    number = count()

    def one(layer: layer_speed.Layer, work: dict[str, Any]) -> list[Stage]:
        at = next(number) * HAND_OFFS
        return stages(layer.t, work, sizes, side, slots[at : at + HAND_OFFS], overlapped)

    return Recipe(
        lambda seed: layer_speed.Layer(half_of(layer_speed.make_layer(seed).t, shard, sizes)),
        lambda: workspace(sizes),
        one,
        lambda work: [("epoch_next", side.next)],
        lambda work: side.require_arrival(),
    )
