"""GEMVs on their real ISA: values against float64 torch, scale bytes, padding, odd sizes, MXFP8 and the matrix form."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import BF16, F32, U8, mostly_slow, mxfp4_values, random_mxfp4, run_op
from torch import Tensor

from dieplace.emulator.execution import Session
from dieplace.kernels.flydsl import rows
from dieplace.kernels.flydsl.gemv import build_gemv_bf16, build_gemv_mxfp4
from dieplace.kernels.flydsl.rows import RowTile

# What fp32 sums may add: 2^-18 of the sum of magnitudes, as the contract says; one rounding to the output type.
ACCUMULATION = 2.0**-18


def bound(x: Tensor, w: Tensor, out: Tensor, expected: Tensor, bias: Tensor | None = None) -> Tensor:
    magnitudes = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
    unit = 2.0**-8 if out.dtype == BF16 else 2.0**-24
    return ACCUMULATION * magnitudes + unit * expected.abs() + 2.0**-126


SHAPES = [
    (1, 1, 8), (3, 17, 520), (5, 37, 1440), (1, 33, 2880), (8, 65, 2880), (1, 7, 5120), (1, 3, 64), (2, 33, 80),
    (4, 5, 1024), (6, 9, 2048), (7, 16, 2880), (1, 100, 4096), (2, 7, 8200), (1, 130, 2560),
    (8, 1, 8), (3, 64, 256), (1, 31, 25600),
    (4, 33, 96), (8, 40, 1016), (1, 19, 45 * 32), (2, 4, 17 * 512),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "n", "k"), mostly_slow(SHAPES, 6))
def test_bf16_rows_of_any_length(tokens: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(tokens, k, generator=generator).to(BF16)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(BF16)
    bias = torch.randn(n, generator=generator).to(BF16)
    out = torch.full((tokens, n), torch.nan, dtype=BF16 if n % 2 else F32)
    run_op("gemv_bf16", {"x": x, "weight": w, "bias": bias, "out": out})
    expected = x.double() @ w.double().T + bias.double()
    assert ((out.double() - expected).abs() <= bound(x, w, out, expected, bias)).all()


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    mostly_slow([(t, n, max(32, k // 32 * 32)) for t, n, k in SHAPES if k < 20000] + [(1, 9, 32768)], 6),
)
def test_mxfp4_rows_of_any_length(tokens: int, n: int, k: int) -> None:
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(k)).to(BF16)
    blocks, scales = random_mxfp4((n,), k, seed=n)
    out = torch.full((tokens, n), torch.nan, dtype=F32 if n % 2 else BF16)
    run_op("gemv_mxfp4", {"x": x, "blocks": blocks, "scales": scales, "bias": None, "out": out})
    w = mxfp4_values(blocks, scales)
    expected = x.double() @ w.T
    assert ((out.double() - expected).abs() <= bound(x, w, out, expected)).all()


def one_row(first_bytes: list[int], scale: int, k: int = 32, fill: int = 0) -> tuple[Tensor, Tensor]:
    blocks = torch.full((1, k // 32, 16), fill, dtype=U8)
    blocks[0, 0, : len(first_bytes)] = torch.tensor(first_bytes, dtype=U8)
    return blocks, torch.full((1, k // 32), scale, dtype=U8)


def gemv(blocks: Tensor, scales: Tensor, x: Tensor) -> float:
    out = torch.zeros(1, 1, dtype=F32)
    run_op("gemv_mxfp4", {"x": x.to(BF16)[None], "blocks": blocks, "scales": scales, "bias": None, "out": out})
    return out.item()


def test_neighbours_share_a_byte() -> None:
    """imp pull request 567: bytes 21 F7 are 0.5, 1, 6, -6; element j with j + 16 (GGML) would give 60.5."""
    x = torch.zeros(32)
    x[:4] = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    assert gemv(*one_row([0x21, 0xF7], 127), x) == -5389.5


@pytest.mark.parametrize(
    ("nibbles", "byte", "x", "expected"),
    [
        (0x77, 0, 2.0**100, 32 * 6 * 2.0**-27),  # 1.4305115e-06: byte 0 is 2^-127, not 0
        (0x11, 254, 2.0**-100, 2147483648.0),
        (0x11, 127, 1.0, 16.0),
        (0x11, 125, 1.0, 4.0),
    ],
)
def test_scale_bytes(nibbles: int, byte: int, x: float, expected: float) -> None:
    """TransformerEngine pull request 3262: a byte shifted into the exponent makes 0 of byte 0."""
    assert gemv(*one_row([nibbles] * 16, byte), torch.full((32,), x)) == expected


@pytest.mark.parametrize(
    ("nibbles", "byte", "x_byte", "expected"),
    [(0x77, 0, 227, 32 * 6 * 2.0**-27), (0x11, 254, 27, 2147483648.0), (0x11, 127, 127, 16.0)],
)
def test_scale_bytes_of_the_matrix_form(nibbles: int, byte: int, x_byte: int, expected: float) -> None:
    """The same products, the activation being 1 (e4m3 code 0x38) with a scale of its own."""
    blocks, scales = one_row([nibbles] * 16, byte)
    x, out = torch.full((1, 32), 0x38, dtype=U8).view(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=F32)
    x_scales = torch.full((1, 1), x_byte, dtype=U8)
    run_op("gemv_mxfp4_mxfp8", {"x": x, "x_scales": x_scales, "blocks": blocks, "scales": scales, "out": out})
    assert out.item() == expected


@pytest.mark.parametrize("op", ["gemv_mxfp4", "gemv_mxfp4_mxfp8"])
def test_scale_byte_255_is_nan_in_its_row_only(op: str) -> None:
    blocks, scales = torch.zeros(17, 3, 16, dtype=U8), torch.full((17, 3), 127, dtype=U8)
    scales[5, 2] = 255
    out = torch.zeros(2, 17, dtype=F32)
    x = torch.ones(2, 96).to(BF16)
    operands = {"blocks": blocks, "scales": scales, "bias": None, "out": out}
    if op == "gemv_mxfp4":
        run_op(op, {"x": x, **operands})
    else:
        codes = torch.full((2, 96), 0x38, dtype=U8).view(torch.float8_e4m3fn)
        run_op(op, {"x": codes, "x_scales": torch.full((2, 3), 127, dtype=U8), **operands})
    assert torch.equal(out.isnan().any(0), torch.arange(17) == 5)
    assert out[:, 5].isnan().all()


@pytest.mark.parametrize("padded", [2944, 3072])
def test_padded_rows_change_no_bit(padded: int) -> None:
    """vllm issue 52051: a padded width must stay inside the kernel; NaN in the padding changes nothing."""
    n, k = 7, 2880
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1)).to(BF16)
    blocks, scales = random_mxfp4((n,), k)
    wide_blocks = torch.zeros(n, padded // 32, 16, dtype=U8)
    wide_scales = torch.full((n, padded // 32), 127, dtype=U8)
    wide_blocks[:, : k // 32], wide_scales[:, : k // 32] = blocks, scales
    wide_x = torch.full((2, padded), torch.nan, dtype=BF16)
    wide_x[:, :k] = x
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(2)).to(BF16)
    wide_w = torch.full((n, padded), torch.nan, dtype=BF16)
    wide_w[:, :k] = w
    plain, wide = torch.zeros(2, n), torch.zeros(2, n)
    with Session(two_die=False):
        build_gemv_mxfp4(k, 2, bias=False, fp32=True)(blocks, scales, x, x, plain, n)
        build_gemv_mxfp4(k, 2, bias=False, fp32=True, stride=padded, x_stride=padded)(
            wide_blocks, wide_scales, wide_x, wide_x, wide, n
        )
        assert torch.equal(plain, wide)
        build_gemv_bf16(k, 2, bias=False, fp32=True)(w, x, x, plain, n)
        build_gemv_bf16(k, 2, bias=False, fp32=True, stride=padded, x_stride=padded)(wide_w, wide_x, wide_x, wide, n)
    assert torch.equal(plain, wide) and not plain.isnan().any()


@pytest.mark.parametrize(("op", "k"), [("gemv_bf16", 360), ("gemv_mxfp4", 1440)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_lies_behind_a_row_or_the_matrix_is_not_read(op: str, k: int, bad: float) -> None:
    """The next row's NaN, and rows past the end, stay out of a row whose length is no multiple of a wave's."""
    x = torch.ones(3, k, dtype=BF16)
    x[1] = bad
    out = torch.zeros(3, 5, dtype=F32)
    if op == "gemv_bf16":
        w = torch.ones(5, k, dtype=BF16)
        w[2] = bad
        run_op(op, {"x": x, "weight": w, "bias": None, "out": out})
    else:
        blocks, scales = torch.full((5, k // 32, 16), 0x22, dtype=U8), torch.full((5, k // 32), 127, dtype=U8)
        scales[2] = 255
        run_op(op, {"x": x, "blocks": blocks, "scales": scales, "bias": None, "out": out})
    good = torch.ones(3, 5, dtype=torch.bool)
    good[1], good[:, 2] = False, False
    assert (out[good] == k).all()
    assert not out[~good].isfinite().any()


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("k", mostly_slow([96, 2880, 32, 1440], 2))
def test_the_matrix_form_equals_the_dequantised_product(tokens: int, k: int) -> None:
    """Weights decoded by the format's table, activations by torch; products of both formats are exact in fp32."""
    generator = torch.Generator().manual_seed(k + tokens)
    codes = torch.randint(0, 0x7F, (tokens, k), dtype=U8, generator=generator)
    codes |= torch.randint(0, 2, (tokens, k), dtype=U8, generator=generator) << 7
    x_scales = torch.randint(110, 130, (tokens, k // 32), dtype=U8, generator=generator)
    blocks, scales = random_mxfp4((19,), k, seed=tokens)
    out = torch.zeros(tokens, 19, dtype=F32)
    x = codes.view(torch.float8_e4m3fn)
    run_op("gemv_mxfp4_mxfp8", {"x": x, "x_scales": x_scales, "blocks": blocks, "scales": scales, "out": out})
    factors = torch.pow(torch.tensor(2.0, dtype=torch.float64), x_scales.double() - 127).repeat_interleave(32, dim=1)
    values, w = x.to(torch.float64) * factors, mxfp4_values(blocks, scales)
    expected = values @ w.T
    assert ((out.double() - expected).abs() <= bound(values, w, out, expected)).all()


def test_quantising_to_mxfp8_saturates_and_rounds_to_even() -> None:
    """One block: largest 448 * 1.1 has exponent 8, so the factor is 1; ties of e4m3 at 1.0625 and 1.1875 go to even."""
    x = torch.zeros(1, 96, dtype=BF16)
    x[0, :6] = torch.tensor([492.0, -492.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10])
    x[0, 32] = torch.inf
    out, scales = torch.zeros(1, 96, dtype=U8).view(torch.float8_e4m3fn), torch.zeros(1, 3, dtype=U8)
    run_op("quantize_mxfp8", {"x": x, "out": out, "scales": scales})
    assert out[0, :6].to(F32).tolist() == [448.0, -448.0, 1.0, 1.25, 0.0, 2.0**-8]
    assert scales.tolist() == [[127, 255, 0]]


def test_a_replaced_helper_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlyDSL issue 453: a helper changed in the same process, and the old code went on running."""
    blocks, scales = one_row([0x11] * 16, 127)
    assert gemv(blocks, scales, torch.ones(32)) == 16.0
    plain = rows.e8m0_scale
    monkeypatch.setattr(rows, "e8m0_scale", lambda byte: plain(byte) * 2.0)
    assert gemv(blocks, scales, torch.ones(32)) == 32.0
    monkeypatch.undo()
    assert gemv(blocks, scales, torch.ones(32)) == 16.0


def test_lanes_follow_the_row_length() -> None:
    """2880 = 90 blocks: 64 lanes would leave 30 % idle, 32 leave 6 %."""
    assert [RowTile(items, 1, items).lanes for items in (64, 90, 45, 128, 360)] == [64, 32, 16, 64, 64]
