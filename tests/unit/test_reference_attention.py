"""Attention references against torch's own attention, and the values of public reports on pages, windows, sinks."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from dieplace.kernels import registry

BACKENDS = ["reference"]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    length: int | None = None,
    window: int = 0,
    splits: int = 4,
    sinks: torch.Tensor | None = None,
    page_table: list[int] | None = None,
    backend: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: q (HQ, D), contiguous k, v (n, HKV, D) or pages (PAGES, PAGE, HKV, D) -> out (HQ, D), lse (HQ)."""
    if k.ndim == 3:
        k, v, page_table = k[None], v[None], [0]
    length = k.shape[0] * k.shape[1] if length is None else length
    hq, d = q.shape
    split: dict[str, Any] = {
        "q": q[None].to(torch.bfloat16),
        "k_cache": k.to(torch.bfloat16).contiguous(),
        "v_cache": v.to(torch.bfloat16).contiguous(),
        "page_table": torch.tensor(page_table, dtype=torch.int32),
        "lengths": torch.tensor([length], dtype=torch.int32),
        "partial": torch.full((1, hq, splits, d), torch.nan),
        "partial_lse": torch.full((1, hq, splits), torch.nan),
    }
    attrs = {"scale": d**-0.5, "window": window, "splits": splits}
    registry.run("attention_split", split, attrs, backend=backend, strict=True)
    merged: dict[str, Any] = {
        "partial": split["partial"],
        "partial_lse": split["partial_lse"],
        "sinks": None if sinks is None else sinks.to(torch.float32),
        "out": torch.full((1, hq, d), torch.nan, dtype=torch.bfloat16),
        "lse": torch.full((1, hq), torch.nan),
    }
    registry.run("attention_merge", merged, {}, backend=backend, strict=True)
    return merged["out"][0].double(), merged["lse"][0].double()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("hq", "hkv", "d", "n"), [(64, 8, 64, 33), (12, 2, 64, 200), (6, 3, 32, 1), (5, 1, 16, 129)])
def test_attention_is_torch_s_own(hq: int, hkv: int, d: int, n: int) -> None:
    q, k, v = _random(hq, d), _random(n, hkv, d, seed=1), _random(n, hkv, d, seed=2)
    wanted = functional.scaled_dot_product_attention(
        q.double()[None, :, None],
        k.double().transpose(0, 1)[None],
        v.double().transpose(0, 1)[None],
        enable_gqa=True,
    )[0, :, 0]
    for splits in (1, 3, 32):
        out, _ = attend(q, k, v, splits=splits)
        assert torch.allclose(out, wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_pages_end_where_the_length_says(length: int) -> None:
    """The page after the last one holds 100: at multiples of 16 it must not be read."""
    q, k, v = _random(4, 32), _random(length, 2, 32, seed=1), _random(length, 2, 32, seed=2)
    table = [5, 9, 2, 7]
    pages_k, pages_v = (torch.full((12, 16, 2, 32), 100.0, dtype=torch.bfloat16) for _ in range(2))
    for j in range(length):
        pages_k[table[j // 16], j % 16], pages_v[table[j // 16], j % 16] = k[j], v[j]
    paged, lse = attend(q, pages_k, pages_v, length=length, page_table=table)
    flat, flat_lse = attend(q, k, v)
    assert torch.equal(paged, flat) and torch.equal(lse, flat_lse)


@pytest.mark.parametrize("entry", [65_536, 70_000])
def test_page_numbers_beyond_sixteen_bits(entry: int) -> None:
    pool_k, pool_v = (torch.zeros(70_001, 2, 1, 16, dtype=torch.bfloat16) for _ in range(2))
    k, v, q = _random(4, 1, 16), _random(4, 1, 16, seed=1), _random(2, 16, seed=2)
    for first in (1, entry - 1):
        for n in range(2):
            pool_k[first + n], pool_v[first + n] = k[2 * n : 2 * n + 2], v[2 * n : 2 * n + 2]
    low, _ = attend(q, pool_k, pool_v, length=4, page_table=[1, 2])
    high, _ = attend(q, pool_k, pool_v, length=4, page_table=[entry - 1, entry])
    assert torch.equal(low, high) and bool(low.any())


@pytest.mark.parametrize(("position", "mean"), [(200, 136.5), (127, 63.5), (128, 64.5)])
def test_a_window_of_128_counts_the_current_token(position: int, mean: float) -> None:
    """Equal scores and V[j] = j; 136.0 or 64.0 would be one key too many, 100.0 no window."""
    keys = position + 1
    k, v = torch.zeros(keys, 1, 16), torch.arange(keys).float()[:, None, None].expand(keys, 1, 16)
    out, _ = attend(torch.zeros(1, 16), k, v, window=128)
    assert out[0, 0].item() == pytest.approx(mean, rel=2**-8, abs=0.2)
    assert len(range(max(0, keys - 128), keys)) == min(128, keys)


def test_the_window_mean_exactly() -> None:
    """bf16 cannot tell 136.5 from 136.0 apart, float64 partials can."""
    from dieplace.kernels.reference_attention import attend as exact
    from dieplace.kernels.reference_attention import visible

    for position, mean in ((200, 136.5), (127, 63.5), (128, 64.5)):
        seen = visible(position + 1, 128)
        v = torch.tensor([float(j) for j in seen], dtype=torch.float64)[:, None, None]
        out, _, _ = exact(torch.zeros(1, 1, dtype=torch.float64), torch.zeros_like(v), v, 1.0)
        assert float(out) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 32])
def test_a_sink_counts_once_for_any_number_of_splits(splits: int) -> None:
    """8 keys of score 0, sink ln 8: 0.5; with a window of 3: 3/11. 0.2, 0.3333 and 1.0 are the reported wrong ones."""
    k, v, sink = torch.zeros(8, 1, 16), torch.ones(8, 1, 16), torch.tensor([math.log(8)])
    out, _ = attend(torch.zeros(1, 16), k, v, splits=splits, sinks=sink)
    assert out.unique().tolist() == [0.5]
    out, _ = attend(torch.zeros(1, 16), k, v, splits=splits, sinks=sink, window=3)
    assert out[0, 0].item() == pytest.approx(0.2727273, rel=2**-8)


@pytest.mark.parametrize(("hq", "hkv"), [(64, 8), (12, 2), (6, 3), (48, 2), (40, 8), (5, 1), (8, 8)])
def test_each_query_head_reads_its_own_kv_head(hq: int, hkv: int) -> None:
    k = torch.zeros(3, hkv, 16)
    v = (torch.arange(hkv) + 1.0)[None, :, None].expand(3, hkv, 16)
    out, _ = attend(torch.zeros(hq, 16), k, v)
    assert out[:, 0].tolist() == [1 + q // (hq // hkv) for q in range(hq)]


def test_one_key_over_many_splits_is_that_value() -> None:
    v = _random(1, 1, 16)
    out, _ = attend(_random(2, 16), _random(1, 1, 16, seed=3), v, splits=32)
    assert torch.equal(out, v[0].double().expand(2, 16))


def test_no_key_gives_zeros_never_nan() -> None:
    k = v = torch.full((4, 1, 16), torch.nan)
    out, lse = attend(torch.zeros(1, 16), k, v, length=0, splits=32)
    assert not out.any() and lse.tolist() == [-math.inf]
    out, lse = attend(torch.zeros(1, 16), k, v, length=0, splits=32, sinks=torch.tensor([1.5]))
    assert not out.any() and lse.tolist() == [1.5]


def test_scores_far_below_any_finite_minus_infinity() -> None:
    """All scores -2.45e5 with V = 1 gives 1; one higher by 1 over V = (0, 1) gives sigmoid(1)."""
    q = torch.zeros(1, 16)
    q[0, 0] = 4.0  # scale 1/4 makes the score exactly k
    k = torch.zeros(2, 1, 16)
    k[:, 0, 0] = -245760.0  # -2.45e5 in bf16
    out, _ = attend(q, k, torch.ones(2, 1, 16), splits=2)
    assert out.unique().tolist() == [1.0]
    q[0, 1], k[1, 0, 1] = 4.0, 1.0
    out, _ = attend(q, k, torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1, 16), splits=2)
    assert out[0, 0].item() == pytest.approx(0.7310586, rel=2**-8)
