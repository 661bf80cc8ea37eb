"""Reported faults of decode attention, each with its input and right value, on the reference and on the kernels.

Sources: public issue threads on paged caches, sliding windows, sinks, grouped heads and split attention.
"""

import math

import pytest
import torch
from attention_calls import Attended, normal
from attention_calls import attend as attend_on

BACKENDS = ["reference", "flydsl"]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def attend(backend: str, *arguments: torch.Tensor, **options: object) -> Attended:
    """Output and log-sum of one token on `backend`."""
    return attend_on(*arguments, backend=backend, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_pages_end_where_the_length_says(length: int, backend: str) -> None:
    """The page after the last one holds 100: at multiples of 16 it must not be read."""
    q, k, v = normal(4, 32), normal(length, 2, 32, seed=1), normal(length, 2, 32, seed=2)
    table = [5, 9, 2, 7]
    pages_k, pages_v = (torch.full((12, 16, 2, 32), 100.0, dtype=torch.bfloat16) for _ in range(2))
    for j in range(length):
        pages_k[table[j // 16], j % 16], pages_v[table[j // 16], j % 16] = k[j], v[j]
    paged, lse, _ = attend(backend, q, pages_k, pages_v, length=length, page_table=table)
    flat, flat_lse, _ = attend(backend, q, k, v)
    assert torch.equal(paged, flat) and torch.equal(lse, flat_lse)


@pytest.mark.parametrize("entry", [65_536, 70_000])
def test_page_numbers_beyond_sixteen_bits(entry: int, backend: str) -> None:
    pool_k, pool_v = (torch.zeros(70_001, 2, 1, 16, dtype=torch.bfloat16) for _ in range(2))
    k, v, q = normal(4, 1, 16), normal(4, 1, 16, seed=1), normal(2, 16, seed=2)
    for first in (1, entry - 1):
        for n in range(2):
            pool_k[first + n], pool_v[first + n] = k[2 * n : 2 * n + 2], v[2 * n : 2 * n + 2]
    low, _, _ = attend(backend, q, pool_k, pool_v, length=4, page_table=[1, 2])
    high, _, _ = attend(backend, q, pool_k, pool_v, length=4, page_table=[entry - 1, entry])
    assert torch.equal(low, high) and bool(low.any())


@pytest.mark.parametrize(("position", "mean"), [(200, 136.5), (127, 63.5), (128, 64.5)])
def test_a_window_of_128_counts_the_current_token(position: int, mean: float, backend: str) -> None:
    """Equal scores and V[j] = j; 136.0 or 64.0 would be one key too many, 100.0 no window."""
    keys = position + 1
    k, v = torch.zeros(keys, 1, 16), torch.arange(keys).float()[:, None, None].expand(keys, 1, 16)
    fine = attend(backend, torch.zeros(1, 16), k, v, window=128).fine
    assert fine.flatten().tolist() == pytest.approx([mean] * 16, rel=1e-6)  # bf16 could not tell 136.5 from 136


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 32])
def test_a_sink_counts_once_for_any_number_of_splits(splits: int, backend: str) -> None:
    """8 keys of score 0, sink ln 8: 0.5; with a window of 3: 3/11. 0.2, 0.3333 and 1.0 are the reported wrong ones."""
    k, v, sink = torch.zeros(8, 1, 16), torch.ones(8, 1, 16), torch.tensor([math.log(8)])
    out, _, _ = attend(backend, torch.zeros(1, 16), k, v, splits=splits, sinks=sink)
    assert out.unique().tolist() == [0.5]
    out, _, _ = attend(backend, torch.zeros(1, 16), k, v, splits=splits, sinks=sink, window=3)
    assert out.flatten().tolist() == pytest.approx([0.2727273] * 16, rel=2**-8)


@pytest.mark.parametrize(("hq", "hkv"), [(64, 8), (12, 2), (6, 3), (48, 2), (40, 8), (5, 1), (8, 8)])
def test_each_query_head_reads_its_own_kv_head(hq: int, hkv: int, backend: str) -> None:
    k = torch.zeros(3, hkv, 16)
    v = (torch.arange(hkv) + 1.0)[None, :, None].expand(3, hkv, 16)
    out, _, _ = attend(backend, torch.zeros(hq, 16), k, v)
    assert out[:, 0].tolist() == [1 + q // (hq // hkv) for q in range(hq)]


def test_one_key_over_many_splits_is_that_value(backend: str) -> None:
    v = normal(1, 1, 16)
    out, _, _ = attend(backend, normal(2, 16), normal(1, 1, 16, seed=3), v, splits=32)
    assert torch.equal(out, v[0].double().expand(2, 16))


def test_no_key_gives_zeros_never_nan(backend: str) -> None:
    k = v = torch.full((4, 1, 16), torch.nan)
    out, lse, _ = attend(backend, torch.zeros(1, 16), k, v, length=0, splits=32)
    assert not out.any() and lse.tolist() == [-math.inf]
    out, lse, _ = attend(backend, torch.zeros(1, 16), k, v, length=0, splits=32, sinks=torch.tensor([1.5]))
    assert not out.any() and lse.tolist() == [1.5]


def test_scores_far_below_any_finite_minus_infinity(backend: str) -> None:
    """All scores -2.45e5 with V = 1 gives 1; one higher by 1 over V = (0, 1) gives sigmoid(1)."""
    q = torch.zeros(1, 16)
    q[0, 0] = 4.0  # scale 1/4 makes the score exactly k
    k = torch.zeros(2, 1, 16)
    k[:, 0, 0] = -245760.0  # -2.45e5 in bf16
    out, _, _ = attend(backend, q, k, torch.ones(2, 1, 16), splits=2)
    assert out.unique().tolist() == [1.0]
    q[0, 1], k[1, 0, 1] = 4.0, 1.0
    fine = attend(backend, q, k, torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1, 16), splits=2).fine
    # fp32 scores near 2.45e5 have a spacing of 2^-6, and the log-sums of the splits are rounded to it.
    assert fine.flatten().tolist() == pytest.approx([0.7310586] * 16, rel=2**-6)
