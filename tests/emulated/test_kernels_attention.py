"""Decode attention on its real ISA: heads, windows, pages, splits, sinks, extreme scores."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_runs import BF16, F32, I32, launches, mostly_slow, run_op
from torch import Tensor

from dieplace.emulator.execution import Session
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.kernels import registry
from dieplace.machine import Domain


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: list[int], *, scale: float = 1.0, window: int = 0,
    splits: int = 1, table: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of split and merge; caches are (pages, page, kv heads, D)."""
    tokens, heads, dim = q.shape
    partial = torch.full((tokens, heads, splits, dim), torch.nan)
    partial_lse = torch.full((tokens, heads, splits), torch.nan)
    table = torch.zeros(1, dtype=I32) if table is None else table
    lengths_ = torch.tensor(lengths, dtype=I32)
    operands = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": table, "lengths": lengths_}
    outputs = {"partial": partial, "partial_lse": partial_lse}
    run_op("attention_split", {**operands, **outputs}, scale=scale, window=window, splits=splits)
    out, lse = torch.full(q.shape, torch.nan, dtype=BF16), torch.full((tokens, heads), torch.nan)
    run_op("attention_merge", {**outputs, "sinks": sinks, "out": out, "lse": lse})
    return out, lse


def expected(
    q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """One row (heads, D) in float64; k and v (tokens, kv heads, D)."""
    low = max(0, length - window) if window else 0
    group = q.shape[0] // k.shape[1]
    keys = k[low:length].double().repeat_interleave(group, dim=1)
    values = v[low:length].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,khd->hk", q.double(), keys) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        values = torch.cat((values, torch.zeros_like(values[:1])))
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


def ramp(tokens: int, kv_heads: int = 1, dim: int = 64) -> tuple[Tensor, Tensor]:
    """Keys of zero (equal scores) and V[j] = j in every lane, exact in bf16 up to 256."""
    keys = torch.zeros(1, tokens, kv_heads, dim, dtype=BF16)
    return keys, torch.arange(tokens, dtype=F32).to(BF16)[None, :, None, None].expand_as(keys).contiguous()


SHAPES = [  # heads, kv heads, D, lengths, window, splits
    (64, 8, 64, [1], 0, 1), (64, 8, 64, [127], 128, 4), (64, 8, 64, [128], 128, 4), (64, 8, 64, [129], 128, 4),
    (8, 8, 16, [3], 0, 2), (12, 2, 64, [33], 0, 3), (6, 3, 32, [50], 7, 5), (48, 2, 64, [70], 0, 2),
    (40, 8, 128, [31], 0, 1), (5, 1, 64, [100], 0, 8), (16, 8, 128, [65], 33, 2), (64, 8, 64, [300], 0, 6),
    (8, 1, 64, [20, 21], 0, 2), (8, 2, 64, [9, 10, 11], 4, 3), (16, 2, 64, [126, 127, 128, 129], 128, 2),
    (8, 8, 64, [5, 6, 7, 8, 9], 0, 2), (64, 8, 64, [40, 41, 42, 43, 44, 45, 46, 47], 0, 2), (4, 2, 32, [1, 2], 1, 1),
    (2, 1, 256, [17], 0, 2), (32, 4, 128, [80], 16, 4), (1, 1, 64, [257], 0, 7),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "lengths", "window", "splits"), mostly_slow(SHAPES, 5))
def test_against_float64(heads: int, kv_heads: int, dim: int, lengths: list[int], window: int, splits: int) -> None:
    generator = torch.Generator().manual_seed(heads + dim + lengths[0])
    total = max(lengths)
    q = torch.randn(len(lengths), heads, dim, generator=generator).to(BF16)
    k, v = (torch.randn(1, total, kv_heads, dim, generator=generator).to(BF16) for _ in range(2))
    sinks = torch.randn(heads, generator=generator).to(BF16) if heads % 2 == 0 else None
    scale = dim**-0.5
    out, _ = attend(q, k, v, lengths, scale=scale, window=window, splits=splits, sinks=sinks)
    for row, length in enumerate(lengths):
        want = expected(q[row], k[0], v[0], length, scale=scale, window=window, sinks=sinks)
        # one rounding to bf16, and fp32 exponentials (within 2^-17 of the largest value)
        assert ((out[row].double() - want).abs() <= want.abs() * 2.0**-8 + 2.0**-15).all(), length


@pytest.mark.parametrize(("position", "mean"), [(200, 136.5), (127, 63.5), (128, 64.5)])
def test_the_window_counts_the_current_token(position: int, mean: float) -> None:
    """Megatron-LM issue 3690: 128 includes the token itself; 136.0 and 64.0 are the off-by-one, 100.0 is no window."""
    k, v = ramp(position + 1)
    out, _ = attend(torch.zeros(1, 8, 64, dtype=BF16), k, v, [position + 1], window=128, splits=3)
    # the merged value is rounded to bf16, which has no 136.5: the partial sums tell it from 136.0
    partial, lse = torch.zeros(1, 8, 3, 64), torch.zeros(1, 8, 3)
    operands = {"q": torch.zeros(1, 8, 64, dtype=BF16), "k_cache": k, "v_cache": v}
    operands |= {"page_table": torch.zeros(1, dtype=I32)}
    operands |= {"lengths": torch.tensor([position + 1], dtype=I32), "partial": partial, "partial_lse": lse}
    run_op("attention_split", operands, scale=1.0, window=128, splits=3)
    whole = (partial.double() * lse.double().exp()[..., None]).sum(2) / lse.double().exp().sum(2, keepdim=True)
    assert torch.allclose(whole, torch.full_like(whole, mean), rtol=1e-6)
    assert abs(out[0, 0, 0].item() - mean) <= 0.5


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("window", "value"), [(0, 0.5), (3, 3 / 11)])
def test_a_sink_counts_once_whatever_the_splits(splits: int, window: int, value: float) -> None:
    """rocm-libraries pull request 12229: 8 equal keys and a sink of ln 8; 0.2 is once per split, 1.0 never."""
    k = torch.zeros(1, 8, 1, 64, dtype=BF16)
    sinks = torch.full((2,), math.log(8))
    q = torch.zeros(1, 2, 64, dtype=BF16)
    out, lse = attend(q, k, torch.ones_like(k), [8], window=window, splits=splits, sinks=sinks)
    assert torch.allclose(out.to(F32), torch.full_like(out, value, dtype=F32), rtol=2.0**-8)
    visible = window if window else 8
    assert torch.allclose(lse, torch.full_like(lse, math.log(visible + 8)), atol=1e-5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_pages_equal_a_contiguous_cache_bit_for_bit(length: int) -> None:
    """pegainfer issue 291: page 9 is in the table, but at length 16 none of its 100s may be read."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, 8, 64, generator=generator).to(BF16)
    k, v = (torch.randn(1, 48, 2, 64, generator=generator).to(BF16) for _ in range(2))
    table = torch.tensor([5, 9, 2], dtype=I32)
    paged_k, paged_v = (torch.full((11, 16, 2, 64), 100.0, dtype=BF16) for _ in range(2))
    for place, page in enumerate(table.tolist()):
        rows = slice(place * 16, min(length, place * 16 + 16))
        count = max(0, rows.stop - rows.start)
        paged_k[page, :count], paged_v[page, :count] = k[0, rows][:count], v[0, rows][:count]
    plain, _ = attend(q, k, v, [length], scale=0.125, splits=2)
    paged, _ = attend(q, paged_k, paged_v, [length], scale=0.125, splits=2, table=table)
    assert torch.equal(plain, paged)


def test_page_numbers_beyond_16_bits() -> None:
    """ROCm/ATOM issue 702: entries 65,536 and 70,000 of a sparse pool equal entries 1 and 2."""
    domain = Domain("gpu0/mem0", "gpu0", (0,), 16 << 30)
    memory = EmulatedHBM([domain])
    generator = torch.Generator().manual_seed(0)
    pages = [torch.randn(2, 16, 8, 64, generator=generator).to(BF16) for _ in range(2)]
    q = torch.randn(1, 8, 64, generator=generator).to(BF16)
    results = []
    for first, second in ((1, 2), (65_536, 70_000)):
        caches = [memory.empty((second + 1, 16, 8, 64), BF16, domain.id, role="kv_cache") for _ in range(2)]
        for cache, content in zip(caches, pages, strict=True):
            cache[first], cache[second] = content[0], content[1]
        table = torch.tensor([first, second], dtype=I32)
        results.append(attend(q, caches[0], caches[1], [32], scale=0.125, splits=2, table=table)[0])
    assert torch.equal(results[0], results[1]) and results[0].abs().max() > 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (12, 2), (6, 3), (48, 2), (40, 8), (5, 1), (8, 8)])
def test_every_query_head_reads_its_own_kv_head(heads: int, kv_heads: int) -> None:
    k = torch.zeros(1, 20, kv_heads, 64, dtype=BF16)
    v = torch.arange(1, kv_heads + 1, dtype=F32).to(BF16)[None, None, :, None].expand_as(k).contiguous()
    out, _ = attend(torch.zeros(1, heads, 64, dtype=BF16), k, v, [20], splits=2)
    want = torch.tensor([1 + q // (heads // kv_heads) for q in range(heads)], dtype=F32)
    assert torch.equal(out[0].to(F32), want[:, None].expand(heads, 64))


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2)])
def test_unequal_groups_are_refused_before_launch(heads: int, kv_heads: int) -> None:
    k = torch.zeros(1, 4, kv_heads, 64, dtype=BF16)
    with pytest.raises(ValueError, match="groups"):
        attend(torch.zeros(1, heads, 64, dtype=BF16), k, k, [4])


def test_a_context_of_one_in_32_splits_is_its_value() -> None:
    v = torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    out, _ = attend(torch.ones(1, 4, 64, dtype=BF16), torch.ones_like(v), v, [1], splits=32)
    assert torch.equal(out[0], v[0, 0].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("sink", [None, 0.75])
def test_nothing_seen_gives_zeros(sink: float | None) -> None:
    sinks = None if sink is None else torch.full((4,), sink)
    k = torch.full((1, 8, 2, 64), torch.nan, dtype=BF16)
    out, lse = attend(torch.ones(1, 4, 64, dtype=BF16), k, k, [0], splits=4, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf if sink is None else sink))


def test_scores_far_below_zero_are_scores() -> None:
    """flashinfer issue 4267: minus infinity was a finite number. All keys at -2.45e5, then two that differ by 1."""
    q = torch.zeros(1, 1, 64, dtype=BF16)
    q[0, 0, 0], q[0, 0, 1] = 1.0, 1.0
    k = torch.zeros(1, 2, 1, 64, dtype=BF16)
    k[0, :, 0, 0] = -244736.0  # 239 * 2^10, exact in bf16
    v = torch.ones_like(k)
    assert torch.equal(attend(q, k, v, [2], splits=2)[0], torch.ones_like(q))
    k[0, 1, 0, 1] = 1.0
    v[0, 0] = 0
    out, _ = attend(q, k, v, [2])
    assert abs(out[0, 0, 0].item() - 0.7310586) <= 0.7310586 * 2.0**-9


def test_one_wave_reads_keys_once_and_streams_them() -> None:
    """With one query wave the loads carry `nt`; with several they share the lines and must not."""
    from dieplace.codegen.flydsl import compile_launcher

    def isa(heads: int) -> str:
        k = torch.zeros(1, 64, 1, 64, dtype=BF16)
        operands = {"q": torch.zeros(1, heads, 64, dtype=BF16), "k_cache": k, "v_cache": k}
        operands |= {"page_table": torch.zeros(1, dtype=I32), "lengths": torch.ones(1, dtype=I32)}
        operands |= {"partial": torch.zeros(1, heads, 1, 64), "partial_lse": torch.zeros(1, heads, 1)}
        launch = launches("attention_split", operands, scale=1.0, splits=1)[0]
        return compile_launcher(launch.launcher, *launch.args).isa

    def key_loads(text: str) -> list[str]:
        return [line for line in text.splitlines() if "global_load_dwordx4" in line]

    assert all(" nt" in line for line in key_loads(isa(4))) and key_loads(isa(4))
    assert all(" nt" not in line for line in key_loads(isa(8))) and key_loads(isa(8))


def test_distinct_cache_bytes_equal_the_contract() -> None:
    k = torch.zeros(4, 16, 8, 64, dtype=BF16)
    operands = {"q": torch.zeros(1, 64, 64, dtype=BF16), "k_cache": k, "v_cache": k.clone()}
    operands |= {"page_table": torch.arange(4, dtype=I32), "lengths": torch.tensor([61], dtype=I32)}
    operands |= {"partial": torch.zeros(1, 64, 3, 64), "partial_lse": torch.zeros(1, 64, 3)}
    attrs = {"scale": 0.125, "window": 37, "splits": 3}
    with Session() as session:
        registry.run("attention_split", operands, attrs, backend="flydsl", strict=True)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None
    read = sum(traffic.buffer(name).read.distinct for name in ("k_cache", "v_cache"))
    assert read == 2 * 37 * 8 * 64 * 2
