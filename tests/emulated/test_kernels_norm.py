"""Norms and RoPE on their real ISA: both weight orders, odd rows, positions, skipped slots."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_runs import BF16, F32, I32, mostly_slow, run_op
from torch import Tensor

NEIGHBOUR = 2.0**-7  # distance of two bf16 values relative to the smaller: one unit in the last place


def norm(
    x: Tensor, weight: Tensor, order: str, eps: float = 1e-5, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    out = torch.full_like(x, torch.nan)
    residual_out = None if residual is None else torch.full_like(x, torch.nan)
    operands = {"x": x, "residual": residual, "weight": weight, "out": out, "residual_out": residual_out}
    run_op("rmsnorm", operands, eps=eps, order=order)
    return out, residual_out


@pytest.mark.parametrize(("order", "first"), [("before_cast", 0.27148438), ("after_cast", 0.2734375)])
def test_the_weight_multiplies_before_or_after_the_cast(order: str, first: float) -> None:
    """GPT-OSS multiplies in fp32 before the cast, Llama and Qwen3 after it: element 0 tells them apart."""
    x = torch.tensor([[0.37695312, -0.39648438, 1.921875, 0.31445312]]).to(BF16)
    w = torch.tensor([0.73046875, 1.1796875, 1.6484375, 1.4765625]).to(BF16)
    # rows are whole 16-byte items: the four values twice have the same mean square
    out, _ = norm(x.repeat(1, 2), w.repeat(2), order)
    assert out[0, 0].item() == pytest.approx(first, abs=1e-8)
    other, _ = norm(x.repeat(1, 2), w.repeat(2), "after_cast" if order == "before_cast" else "before_cast")
    assert torch.equal(out[0, 1:4], other[0, 1:4]) and out[0, 0] != other[0, 0]


def test_the_mean_is_over_the_true_width() -> None:
    """2880 ones: a mean over a padded block of 4096 would give 1.19257."""
    out, _ = norm(torch.ones(1, 2880, dtype=BF16), torch.ones(2880, dtype=F32), "before_cast")
    assert torch.equal(out, torch.ones_like(out))
    tall, _ = norm(torch.ones(1, 2880, dtype=BF16), torch.full((2880,), 128.0), "before_cast")
    assert torch.equal(tall, torch.full_like(tall, 128.0))


ROWS = [
    (1, 2880), (8, 96), (4, 8200), (1, 8), (2, 64), (1, 72), (3, 520), (1, 1024), (2, 1440), (5, 2880), (1, 4096),
    (1, 5120),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "hidden"), mostly_slow(ROWS, 3))
@pytest.mark.parametrize("order", ["before_cast", "after_cast"])
@pytest.mark.parametrize("scale", [1.0, 2.0**40, 2.0**-60])
def test_rows_of_any_length_with_residual(tokens: int, hidden: int, order: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(hidden + tokens)
    x, residual = ((torch.randn(tokens, hidden, generator=generator) * scale).to(BF16) for _ in range(2))
    weight = (1 + torch.randn(hidden, generator=generator) / 8).to(BF16)
    out, summed = norm(x, weight, order, residual=residual)
    h = (x.double() + residual.double()).to(BF16)
    assert summed is not None and torch.equal(summed, h)
    unit = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    want = unit * weight.double() if order == "before_cast" else unit.to(BF16).double() * weight.double()
    assert ((out.double() - want).abs() <= want.abs() * NEIGHBOUR).all()
    # most agree to the last bit: fp32 moves a rounding only where float64 is next to a tie
    assert (out == want.to(BF16)).double().mean() > 0.99 or hidden < 200


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"),
    mostly_slow([(64, 8, 128), (4, 2, 16), (16, 8, 128), (8, 2, 64), (5, 1, 32)], 2),
)
def test_query_and_key_heads_are_normed_and_values_are_not(q_heads: int, kv_heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(2, (q_heads + 2 * kv_heads) * dim, generator=generator).to(BF16)
    q_weight, k_weight = (torch.rand(dim, generator=generator).to(BF16) for _ in range(2))
    before = qkv.clone().unflatten(1, (-1, dim))
    operands = {"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight}
    run_op("qk_norm", operands, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, eps=1e-6)
    after = qkv.unflatten(1, (-1, dim))
    unit = before.double() / (before.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    weight = torch.cat((q_weight.expand(q_heads, dim), k_weight.expand(kv_heads, dim))).double()
    heads = q_heads + kv_heads
    want = unit[:, :heads].to(BF16).double() * weight
    assert ((after[:, :heads].double() - want).abs() <= want.abs() * NEIGHBOUR).all()
    assert torch.equal(after[:, heads:], before[:, heads:])


def rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: list[int],
    slots: list[int],
    heads: tuple[int, int, int],
    cache: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads, dim = heads
    caches = [torch.full((cache, kv_heads, dim), 7.0, dtype=BF16) for _ in range(2)]
    q_out = torch.full((qkv.shape[0], q_heads, dim), torch.nan, dtype=BF16)
    operands = {"qkv": qkv, "cos": cos, "sin": sin, "q_out": q_out, "k_cache": caches[0], "v_cache": caches[1]}
    operands |= {"positions": torch.tensor(positions, dtype=I32), "slots": torch.tensor(slots, dtype=I32)}
    run_op("rope_kv_append", operands, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)
    return q_out, caches[0], caches[1]


@pytest.mark.parametrize(
    ("heads", "rotary"),
    mostly_slow(
        [((64, 8, 64), 64), ((8, 2, 128), 32), ((8, 8, 16), 8), ((32, 4, 128), 128), ((16, 8, 128), 128),
         ((4, 2, 16), 16),         ((6, 3, 32), 16), ((2, 1, 64), 32)], 3),
)  # fmt: skip
@pytest.mark.parametrize("slots", [[0], [3, -1], [5, 2, 4]])
def test_heads_turn_and_land_in_their_slots(heads: tuple[int, int, int], rotary: int, slots: list[int]) -> None:
    q_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(dim + len(slots))
    qkv = torch.randn(len(slots), (q_heads + 2 * kv_heads) * dim, generator=generator).to(BF16)
    positions = [4095, 17, 0][: len(slots)]
    phases = torch.arange(4096, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    q_out, k_cache, v_cache = rope(qkv, phases.cos().float(), phases.sin().float(), positions, slots, heads, cache=6)
    per_head = qkv.double().unflatten(1, (-1, dim))
    c, s = (f(phases[positions])[:, None] for f in (torch.cos, torch.sin))
    first, second = per_head[..., : rotary // 2], per_head[..., rotary // 2 : rotary]
    turned = torch.cat((first * c - second * s, second * c + first * s, per_head[..., rotary:]), dim=-1)
    slack = per_head.abs().max() * 2.0**-20
    assert ((q_out.double() - turned[:, :q_heads]).abs() <= turned[:, :q_heads].abs() * 2.0**-8 + slack).all()
    for row, slot in enumerate(slots):
        if slot >= 0:
            want = turned[row, q_heads : q_heads + kv_heads]
            assert ((k_cache[slot].double() - want).abs() <= want.abs() * 2.0**-8 + slack).all()
            assert torch.equal(v_cache[slot].double(), per_head[row, q_heads + kv_heads :])
    untouched = [slot for slot in range(6) if slot not in slots]
    assert torch.equal(k_cache[untouched], torch.full_like(k_cache[untouched], 7.0))
    assert torch.equal(v_cache[untouched], torch.full_like(v_cache[untouched], 7.0))


def test_slot_minus_one_leaves_the_last_slot_alone() -> None:
    """vllm issue 43810: a negative index wrapped to the last slot of the cache."""
    qkv = torch.ones(2, 4 * 64, dtype=BF16)
    one, zero = torch.ones(1, 32), torch.zeros(1, 32)
    _, k_cache, v_cache = rope(qkv, one, zero, [0, 0], [3, -1], (2, 1, 64), cache=9)
    changed = (k_cache != 7.0).flatten(1).any(1)
    assert changed.tolist() == [slot == 3 for slot in range(9)]
    assert (v_cache[8] == 7.0).all()


def test_high_positions_keep_their_phase() -> None:
    """gpt-neox issue 1003, base 1e6: cosine of pair 1 at position 4095 is 0.3139245; a bf16 position gives -0.468."""
    position, dim = 4095, 128
    phases = position / 1e6 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cos, sin = (f(phases).float()[None] for f in (torch.cos, torch.sin))
    qkv = torch.zeros(1, 3 * dim, dtype=BF16)
    qkv[0, 1] = 1.0  # first half, pair 1: comes out as the cosine there and as the sine in the second half
    q_out, _, _ = rope(qkv, cos, sin, [0], [0], (1, 1, dim), cache=1)
    assert math.cos(4095 / 1e6 ** (2 / dim)) == pytest.approx(0.3139245, abs=1e-6)
    assert q_out[0, 0, 1].item() == pytest.approx(0.3139245, rel=2.0**-8)
    assert q_out[0, 0, 65].item() == pytest.approx(math.sin(4095 / 1e6 ** (2 / dim)), rel=2.0**-8)
