"""The PTX that multiplies MXFP4 rows on matrix units, evaluated lane by lane against float64."""

from __future__ import annotations

import pytest
import torch
from ptx_lanes import Warp, floats
from torch import Tensor

from dieplace.kernels.quantize import mxfp4_dequantize
from dieplace.kernels.triton import mx_ptx

ROWS = 2


def operands(low: int, high: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Words (2, 32 lanes, 4), scale bytes (2, 32) and x (32 lanes, 32 values)."""
    generator = torch.Generator().manual_seed(low)
    words = torch.randint(0, 2**32, (ROWS, 32, 4), generator=generator)
    scales = torch.randint(low, high + 1, (ROWS, 32), generator=generator)
    return words, scales, (torch.randn(32, 32, generator=generator) * size).bfloat16()


def wanted(words: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    """[2, 32] float64 dot product of each lane's block with its x, by the loader's dequantisation."""
    blocks = torch.stack([words >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8).reshape(ROWS, 32, 1, 16)
    weight = mxfp4_dequantize(blocks, scales[..., None].to(torch.uint8)).double()
    return (weight * x.double()).sum(-1)


def evaluated(text: str, words: Tensor, factors: Tensor, x: Tensor, start: float = 0.0) -> Tensor:
    """[32 lanes, 4] results, as the operands are handed over by `mx_rows`."""
    stored = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    registers = {f"${36 + i}": torch.full((32,), start).view(torch.int32).to(torch.int64) for i in range(4)}
    for word in range(4):
        pairs = Warp({f"${4 + i}": stored[:, 4 * word + i] for i in range(4)})
        pairs.run(mx_ptx.PAIRS)
        registers |= {f"${12 + 4 * word + i}": pairs.registers[f"${i}"] for i in range(4)}
        registers |= {f"${first + word}": words[row, :, word] for row, first in enumerate((4, 8))}
        registers |= {f"${first + word}": factors[row] for row, first in enumerate((28, 32))}
    warp = Warp(registers)
    warp.run(text)
    return torch.stack([floats(warp.registers[f"${i}"]) for i in range(4)], -1).double()


def on_diagonal(results: Tensor) -> Tensor:
    """[2] sums over the warp of the elements (g, g) and (g + 8, g)."""
    lane, place = torch.arange(32)[:, None], torch.arange(4)[None, :]
    quad = lane // 4
    kept = torch.where((lane % 4 == quad // 2) & (place % 2 == quad % 2), results, 0.0)
    return kept.reshape(32, 2, 2).sum((0, 2))


def factor(scales: Tensor) -> Tensor:
    """As `mx_rows` makes it from a scale byte."""
    return (scales.clamp(max=mx_ptx.LARGEST_SCALE + 1) + mx_ptx.FACTOR_BIAS) * mx_ptx.FACTOR_PAIR


@pytest.mark.parametrize(("low", "high", "size"), [(100, 128, 1.0), (0, 3, 2.0**100), (0, 128, 1.0)])
def test_the_diagonal_holds_the_sums_of_every_lane(low: int, high: int, size: float) -> None:
    """Scale byte 0 is 2^-127, whose weights are subnormal bf16."""
    words, scales, x = operands(low, high, size)
    found = on_diagonal(evaluated(mx_ptx.diagonal(), words, factor(scales), x))
    lanes = wanted(words, scales, x)
    assert found == pytest.approx(lanes.sum(-1), abs=float(lanes.abs().sum() * 2.0**-18))


def test_what_it_starts_with_is_added() -> None:
    words, scales, x = operands(120, 125)
    with_start = evaluated(mx_ptx.diagonal(), words, factor(scales), x, start=3.0)
    assert with_start == pytest.approx(evaluated(mx_ptx.diagonal(), words, factor(scales), x) + 3, abs=1e-4)


@pytest.mark.parametrize("byte", [129, 200, 254, 255])
def test_a_factor_too_large_for_bf16_gives_no_finite_result(byte: int) -> None:
    """So that the row is noticed and done again exactly."""
    words, scales, x = operands(120, 125)
    scales[1, 17] = byte
    assert torch.isfinite(on_diagonal(evaluated(mx_ptx.diagonal(), words, factor(scales), x))).tolist() == [True, False]


@pytest.mark.parametrize(("low", "high", "size"), [(0, 254, 2.0**-100), (250, 254, 2.0**-110), (0, 2, 2.0**100)])
def test_the_exact_form_takes_every_scale(low: int, high: int, size: float) -> None:
    words, scales, x = operands(low, high, size)
    found = evaluated(mx_ptx.exact(), words, scales, x).reshape(32, 2, 2).sum(-1).T
    lanes = wanted(words, scales, x)
    assert ((found - lanes).abs() <= lanes.abs() * 2.0**-18 + 2.0**-126 + lanes.abs().mean() * 2.0**-18).all()


def test_scale_byte_255_is_not_a_number() -> None:
    words, scales, x = operands(120, 125)
    scales[0, 3] = 255
    found = evaluated(mx_ptx.exact(), words, scales, x).reshape(32, 2, 2).sum(-1).T
    assert torch.isnan(found).nonzero().tolist() == [[0, 3]]


def test_neighbours_of_another_order_are_noticed() -> None:
    """A fault in the text: the upper half of a word is shifted by one nibble instead of two."""
    words, scales, x = operands(120, 125)
    faulty = mx_ptx.diagonal().replace(", 8;", ", 4;")
    lanes = wanted(words, scales, x)
    found = on_diagonal(evaluated(faulty, words, factor(scales), x))
    assert ((found - lanes.sum(-1)).abs() > 1e-3 * lanes.abs().sum()).any()
