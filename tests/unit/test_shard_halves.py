"""Two tensor-parallel halves of a layer against the whole layer in float64, written out in torch alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kernel_runs import BF16, mxfp4_values, random_mxfp4
from torch import Tensor

from dieplace.errors import KernelFault, UsageError
from dieplace.experiments import shard_recipe
from dieplace.experiments.shard_recipe import Sizes, half_of, stages, workspace
from dieplace.kernels import exchange

SIZES = Sizes(hidden=96, inner=128, experts=8, chosen=4, q_heads=8, kv_heads=2, head=32, context=24, splits=3)


def whole(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    s, qkv = SIZES, (SIZES.q_heads + 2 * SIZES.kv_heads) * SIZES.head

    def real(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).to(BF16)

    def packed(name: str, *rows: int, width: int) -> dict[str, Tensor]:
        blocks, scales = random_mxfp4(rows, width, seed + len(name))
        scales = scales % 3 + 120  # factors of 2^-7 to 2^-5: sums stay near 1, so that a bias is seen beside them
        return {f"{name}_b": blocks, f"{name}_s": scales}

    return {
        "x": real(1, s.hidden), "norm1": real(s.hidden), "norm2": real(s.hidden), "sinks": real(s.q_heads, scale=4.0),
        "router": real(s.experts, s.hidden, scale=0.3), "router_bias": real(s.experts), "qkv_bias": real(qkv),
        "o_bias": real(s.hidden), "up_bias": real(s.experts, 2 * s.inner), "down_bias": real(s.experts, s.hidden),
        "k": real(1, s.context, s.kv_heads, s.head), "v": real(1, s.context, s.kv_heads, s.head),
        **packed("qkv", qkv, width=s.hidden), **packed("o", s.hidden, width=s.q_heads * s.head),
        **packed("up", s.experts, 2 * s.inner, width=s.hidden),
        **packed("down", s.experts, s.hidden, width=s.inner),
    }  # fmt: skip


def in_float64(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(output, experts chosen) of the whole layer; no rounding but that of the operands."""
    s, d = SIZES, {n: v.double() for n, v in t.items() if v.dtype == BF16}
    m = {n: mxfp4_values(t[f"{n}_b"], t[f"{n}_s"]) for n in ("qkv", "o", "up", "down")}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * weight

    r = d["x"][0] * 2
    qkv = (m["qkv"] @ norm(r, d["norm1"]) + d["qkv_bias"]).view(-1, s.head)
    angle = (s.context - 1) * 150000.0 ** (-torch.arange(s.head // 2).double() / (s.head // 2))
    a, b = qkv[: s.q_heads + s.kv_heads].chunk(2, -1)
    turned = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    k, v = d["k"][0].clone(), d["v"][0].clone()
    k[-1], v[-1] = turned[s.q_heads :], qkv[s.q_heads + s.kv_heads :]
    heads = []
    for head in range(s.q_heads):
        at = head // (s.q_heads // s.kv_heads)
        score = torch.cat((k[:, at] @ turned[head] * s.head**-0.5, d["sinks"][head : head + 1]))
        heads.append(score.softmax(0)[:-1] @ v[:, at])
    r = r + m["o"] @ torch.cat(heads) + d["o_bias"]
    h = norm(r, d["norm2"])
    value, ids = (d["router"] @ h + d["router_bias"]).topk(s.chosen)
    out = torch.zeros(s.hidden, dtype=torch.float64)
    for share, e in zip(value.softmax(0), ids.tolist(), strict=True):
        both = m["up"][e] @ h + d["up_bias"][e]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        out += share * (m["down"][e] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate)) + d["down_bias"][e])
    return out, ids


def two_shards(t: dict[str, Tensor], steps: int = 1) -> tuple[list[dict[str, Tensor]], exchange.Exchange]:
    """Both shards' workspaces after their launches, by the ops' references, each put before the sums that need it."""

    def make(side: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    found = exchange.between(("a", "b"), make, slots=2, width=SIZES.hidden, backend="reference")
    slots = found.program(2)
    work = [workspace(SIZES, "cpu") for _ in range(2)]
    halves = [half_of(t, shard, SIZES) for shard in range(2)]
    launches = [
        stages(half, w, SIZES, side, slots, side.run) for half, w, side in zip(halves, work, found.sides, strict=True)
    ]
    for _ in range(steps):
        for pair in zip(*launches, strict=True):
            for _, launch in pair:
                launch()
        for side in found.sides:
            side.next()
    return work, found


@pytest.mark.parametrize("seed", range(3))
def test_two_halves_are_the_whole_layer(seed: int) -> None:
    t = whole(seed)
    wanted, ids = in_float64(t)
    work, found = two_shards(t, steps=2)
    found.require_arrival()
    assert torch.equal(work[0]["y"], work[1]["y"])
    assert set(work[0]["ids"][0].tolist()) == set(ids.tolist())
    # bf16 between the ops: a few unit roundoffs of the largest value.
    assert float((work[0]["y"][0].double() - wanted).abs().max() / wanted.abs().max()) < 4 * 2.0**-8


@pytest.mark.parametrize("name", ["qkv_b", "o_b", "up_s", "down_b", "k", "sinks", "o_bias", "down_bias"])
def test_a_half_of_the_wrong_part_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: shard 1 holds what shard 0 has of one operand."""
    t = whole(0)
    right = half_of

    def wrong(given: Any, shard: int, sizes: Sizes) -> dict[str, Tensor]:
        return {**right(given, shard, sizes), name: right(given, 0, sizes)[name]}

    monkeypatch.setitem(globals(), "half_of", wrong)
    wanted, _ = in_float64(t)
    work, _ = two_shards(t)
    assert float((work[0]["y"][0].double() - wanted).abs().max() / wanted.abs().max()) > 4 * 2.0**-8


def test_each_shard_has_half_of_the_weights_and_the_router_twice() -> None:
    t = whole(0)
    halves = [half_of(t, shard, SIZES) for shard in range(2)]
    for name, tensor in t.items():
        both = sum(half[name].nbytes for half in halves)
        shared = name in ("x", "norm1", "norm2", "router", "router_bias", "o_bias", "down_bias")
        assert both == tensor.nbytes * (2 if shared else 1), name
    assert shard_recipe.GPT_OSS.mine == {"q_heads": 32, "kv_heads": 4, "head_dim": 64}
    assert not halves[1]["o_bias"].any() and not halves[1]["down_bias"].any()


def test_a_shard_alone_is_told() -> None:
    t = whole(0)
    with pytest.raises(KernelFault, match="b, block 0, waited for mailbox of slot 0"):
        _alone(t)
    with pytest.raises(UsageError, match="from 2 to 63"):
        exchange.between(("a", "b"), lambda *a: torch.zeros(1), slots=64, width=2)


def _alone(t: dict[str, Tensor]) -> None:
    def make(side: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    found = exchange.between(("a", "b"), make, slots=2, width=SIZES.hidden, backend="reference")
    side = found.sides[1]
    launches = stages(half_of(t, 1, SIZES), workspace(SIZES, "cpu"), SIZES, side, found.program(2), side.run)
    for call in [partial(launch) for _, launch in launches]:
        call()
    found.sides[1].require_arrival()
