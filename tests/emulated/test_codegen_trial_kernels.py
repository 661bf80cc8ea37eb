"""One kernel of each kind, from FlyDSL source to gfx950 code run on the emulated card, against float64 torch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import trial_kernels as trial
from torch import Tensor

from dieplace.codegen.flydsl_names import flyc, fx, range_constexpr
from dieplace.emulator.devices import logical_device
from dieplace.emulator.execution import run

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
PLAIN = pytest.mark.parametrize("two_die", [True, False], ids=["two-die", "plain"])


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def mxfp4(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Packed words int32[n, k/8], scale bytes uint8[n, k/32], and their values in float64 (OCP MX 1.0)."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(115, 135, (n, k // 32), dtype=torch.uint8, generator=g)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(n, k)  # low nibble first
    values = FP4[codes.long()] * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    return packed.view(torch.int32), scales, values


@PLAIN
@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_vector_add_is_exact(n: int, two_die: bool) -> None:
    a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), torch.nan)
    run(trial.vector_add(), a, b, c, n, two_die=two_die)
    assert torch.equal(c, a + b)


GEMVS = {
    "buffer, nt": {"cache": 2},
    "global": {"buffered": False},
    "rolled": {"rolled": True},
}


@PLAIN
@pytest.mark.parametrize("form", GEMVS)
def test_gemv_bf16(form: str, two_die: bool) -> None:
    n, k = 32, 2048
    w, x, y = bf16(n, k, scale=1 / 32), bf16(k, seed=1), torch.full((n,), torch.nan)
    run(trial.gemv_bf16(n, k, **GEMVS[form]), w, x, y, two_die=two_die)
    exact = w.double() @ x.double()
    # fp32 accumulation of k terms: half an ulp a step is the worst, of the sum of magnitudes
    bound = k * 2**-24 * (w.double().abs() @ x.double().abs())
    assert ((y - exact).abs() <= bound).all()


def test_gemv_mfma_bf16() -> None:
    n, k = 64, 1024
    w, x, y = bf16(n, k, scale=1 / 32), bf16(k, seed=1), torch.full((n,), torch.nan)
    run(trial.gemv_mfma_bf16(n, k), w, x, y)
    assert ((y - w.double() @ x.double()).abs() <= k * 2**-24 * (w.double().abs() @ x.double().abs())).all()


@PLAIN
def test_gemv_mxfp4(two_die: bool) -> None:
    n, k = 16, 2880  # 90 blocks of 32: not a multiple of a wave
    w, s, values = mxfp4(n, k)
    x, y = bf16(k, seed=1), torch.full((n,), torch.nan)
    run(trial.gemv_mxfp4(n, k), w, s, x, y, two_die=two_die)
    assert ((y - values @ x.double()).abs() <= k * 2**-24 * (values.abs() @ x.double().abs())).all()


def test_gemv_mfma_mxfp4() -> None:
    n, k = 32, 1024
    w, ws, a = mxfp4(n, k)
    x, xs, b = mxfp4(1, k, seed=5)
    y = torch.full((n,), torch.nan)
    run(trial.gemv_mfma_mxfp4(n, k), w, ws, x[0], xs[0], y)
    assert ((y - a @ b[0]).abs() <= k * 2**-24 * (a.abs() @ b[0].abs())).all()


@PLAIN
def test_rmsnorm(two_die: bool) -> None:
    x, g, y = bf16(3, 4096), bf16(4096, seed=1), bf16(3, 4096, seed=2)
    run(trial.rmsnorm(4096), x, g, y, 3, two_die=two_die)
    d = x.double()
    exact = d / (d.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * g.double()
    assert ((y.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-16)).all()  # one rounding to bf16


@pytest.mark.parametrize(("length", "splits"), [(100, 4), (7, 8), (64, 1)])
def test_attention_split_and_merge(length: int, splits: int) -> None:
    heads, dim = 4, 64
    g = torch.Generator().manual_seed(0)
    q = torch.randn(heads, dim, generator=g)
    k, v = (torch.randn(length, heads, dim, generator=g) for _ in range(2))
    o, m, total = torch.zeros(splits, heads, dim), torch.zeros(splits, heads), torch.zeros(splits, heads)
    y, scale = torch.full((heads, dim), torch.nan), dim**-0.5
    chunk = -(-length // splits)
    run(trial.attention_split(dim), q, k, v, o, m, total, length, chunk, scale, heads, splits)
    run(trial.attention_merge(dim), o, m, total, y, splits, heads)
    scores = torch.einsum("hd,thd->ht", q.double(), k.double()) * scale
    exact = torch.einsum("ht,thd->hd", scores.softmax(1), v.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


def test_top_k_and_its_ties() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 128, generator=g)
    x[3] = 0.25  # all equal: the lowest indices win
    x[4, ::2] = 3.0
    ids, weights = torch.zeros(5, 4, dtype=torch.int32), torch.zeros(5, 4)
    run(trial.top_k(), x, ids, weights, 5)
    order = torch.sort(x.double(), dim=1, descending=True, stable=True)
    assert torch.equal(ids.long(), order.indices[:, :4])
    torch.testing.assert_close(weights.double(), order.values[:, :4].softmax(1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("device", "xcc"), [("gpu0/p0", 0), ("gpu0/p1", 0)])
def test_chase_ends_where_it_should_and_reads_its_xcc(device: str, xcc: int) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).int()
    result = torch.zeros(3, dtype=torch.int64)
    run(trial.chase(), order, result, 37, device=device)
    at = 0
    for _ in range(37):
        at = int(order[at])
    assert result[1] == at and result[2] == xcc
    assert result[0] > 0


def test_xcc_ids_of_the_second_partition_are_a_setting() -> None:
    result = torch.zeros(3, dtype=torch.int64)
    device = logical_device("gpu0/p1", physical_xcc_id=True)
    run(trial.chase(), torch.zeros(64, dtype=torch.int32), result, 1, device=device)
    assert result[2] == 4


@PLAIN
def test_stream_reads_everything_once(two_die: bool) -> None:
    blocks, turns = 4, 3
    data = torch.randint(-(2**31), 2**31 - 1, (blocks * 256 * turns * 4 * 4,), dtype=torch.int32)
    out = torch.zeros(blocks * 256, dtype=torch.int32)
    record = run(trial.stream_read(), data, out, turns, blocks, two_die=two_die)
    each = data.view(turns * 4, blocks * 256, 4)
    expected = torch.zeros_like(out)
    for part in each:
        for word in part.unbind(1):
            expected ^= word
    assert torch.equal(out, expected)
    if two_die:
        traffic = record.kernels[0].traffic
        assert traffic is not None and traffic.buffer("S").read.distinct == data.numel() * 4


# -- cases f1 and f3: 64 lanes, not 32 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 32, 16, 8])
def test_f1_every_lane_has_the_result_of_a_reduction(width: int) -> None:
    ones = torch.eye(64)
    out = torch.full((64, 64), torch.nan)
    run(trial.wave_reduce("sum", width), ones.flatten(), out.view(-1), 64)
    group = torch.arange(64) // width
    assert torch.equal(out, (group[:, None] == group[None, :]).float())
    low = torch.full((64, 64), -5.0)
    low.fill_diagonal_(-1.0)
    run(trial.wave_reduce("max", width), low.flatten(), out.view(-1), 64)
    assert torch.equal(out, torch.where(group[:, None] == group[None, :], -1.0, -5.0))


def broken_sum() -> Any:
    """Scan steps used as a reduction (llvm-project pull request 141825): only the last lane of the wave has the sum."""

    @flyc.kernel
    def scan(X: fx.Tensor, Y: fx.Tensor):
        at = fx.block_idx.x * 64 + fx.thread_idx.x
        value, lane = X[at], fx.thread_idx.x
        for step in range_constexpr(6):
            other = fx.shuffle_up(value, 1 << step, 64)
            value = (lane >= (1 << step)).select(value + other, value)
        Y[at] = value

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, blocks: fx.Int32, stream: fx.Stream = trial.STREAM):
        scan(X, Y).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def test_f1_a_scan_in_place_of_a_reduction_is_noticed() -> None:
    out = torch.full((64, 64), torch.nan)
    run(broken_sum(), torch.eye(64).flatten(), out.view(-1), 64)
    assert torch.equal(out[:, 63], torch.ones(64))  # the one lane that would have hidden it
    assert not torch.equal(out, torch.ones(64, 64))


@pytest.mark.parametrize("count", [64, 96, 128, 256, 1000])
def test_f3_block_sums_of_odd_sizes(count: int) -> None:
    # powers of two that fp32 adds exactly, different in every lane of a wave of 64 (and not of 32)
    x = torch.exp2(-(torch.arange(2 * count) % 16).float())
    y = torch.full((2,), torch.nan)
    run(trial.block_sums(count), x, y, 2)
    assert torch.equal(y.double(), x.view(2, count).double().sum(1))


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_2880_square_mxfp4_gemv_takes_under_two_seconds_compile_included() -> None:
    n = k = 2880
    w, s, values = mxfp4(n, k)
    x, y = bf16(k, seed=1), torch.full((n,), torch.nan)
    small = mxfp4(4, 64)
    run(trial.gemv_mxfp4(4, 64), *small[:2], bf16(64), torch.zeros(4))  # a warm process
    start = time.perf_counter()
    record = run(trial.gemv_mxfp4(n, k), w, s, x, y)
    seconds = time.perf_counter() - start
    assert ((y - values @ x.double()).abs() <= k * 2**-24 * (values.abs() @ x.double().abs())).all()
    print(f"\n2880 x 2880 MXFP4 GEMV: {seconds:.2f} s, {record.instructions} wave-instructions")
    assert seconds < 2.0
