"""MX formats against torch's own fp8 types, struct-level arithmetic and the values of public reports."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dieplace.errors import UsageError
from dieplace.kernels import quantize as q


def test_pairs_are_neighbours_low_nibble_first() -> None:
    """Block `21 F7 00...`, scale 127: 0.5, 1, 6, -6; GGML's order would give a dot product of 60.5."""
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, 0], block[0, 1] = 0x21, 0xF7
    values = q.mxfp4_dequantize(block, torch.tensor([127], dtype=torch.uint8))
    assert values[:4].tolist() == [0.5, 1.0, 6.0, -6.0]
    x = torch.zeros(32, dtype=torch.float64)
    x[:4] = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    assert float(values @ x) == -5389.5
    ggml = torch.zeros(32, dtype=torch.float64)
    ggml[0], ggml[16], ggml[1], ggml[17] = 0.5, 1.0, 6.0, -6.0
    assert float(ggml @ x) == 60.5


def test_scale_bytes_at_their_edges() -> None:
    """Bytes 0, 125, 127, 254, 255 against torch's own e8m0 type; 0 is not zero, 255 is not infinity."""
    data = torch.tensor([0, 1, 125, 127, 254, 255], dtype=torch.uint8)
    ours = q.e8m0_to_float(data)
    assert ours[:5].tolist() == [2.0**-127, 2.0**-126, 0.25, 1.0, 2.0**127]
    assert math.isnan(float(ours[5]))
    theirs = data.view(torch.float8_e8m0fnu).to(torch.float32).to(torch.float64)
    assert torch.equal(ours[:5], theirs[:5]) and torch.isnan(theirs[5])


def test_published_dot_products_at_extreme_scales() -> None:
    codes = torch.full((1, 16), 0x77, dtype=torch.uint8)
    small = q.mxfp4_dequantize(codes, torch.tensor([0], dtype=torch.uint8))
    assert float(small @ torch.full((32,), 2.0**100, dtype=torch.float64)) == pytest.approx(1.4305115e-06, rel=1e-7)
    halves = torch.full((1, 16), 0x11, dtype=torch.uint8)
    large = q.mxfp4_dequantize(halves, torch.tensor([254], dtype=torch.uint8))
    assert float(large @ torch.full((32,), 2.0**-100, dtype=torch.float64)) == 2147483648.0


def test_scales_stored_as_bytes_or_as_e8m0_give_equal_weights() -> None:
    blocks = torch.randint(0, 256, (5, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([[125, 127, 0]] * 5, dtype=torch.uint8)
    assert torch.equal(
        q.mxfp4_dequantize(blocks, scales), q.mxfp4_dequantize(blocks, scales.view(torch.float8_e8m0fnu))
    )
    with pytest.raises(UsageError, match="float32"):
        q.mxfp4_dequantize(blocks, scales.float())


def test_ties_go_to_even() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert q.e2m1_decode(q.e2m1_encode(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert q.e2m1_decode(q.e2m1_encode(-ties)).tolist() == [-0.0, -1, -1, -2, -2, -4, -4]
    assert q.e2m1_decode(q.e2m1_encode(torch.tensor([6.1, 1e9, -1e9]))).tolist() == [6, 6, -6]


@given(st.floats(-7, 7, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_encoding_is_the_nearest_of_all_sixteen_values(value: float) -> None:
    chosen = float(q.e2m1_decode(q.e2m1_encode(torch.tensor([value], dtype=torch.float64)))[0])
    best = min(abs(value - s * m) for m in q.E2M1_MAGNITUDES for s in (1, -1))
    assert abs(value - chosen) == pytest.approx(best, abs=1e-15)


def test_every_byte_survives_unpacking_and_packing() -> None:
    data = torch.arange(256, dtype=torch.int16).to(torch.uint8).reshape(16, 16)
    assert torch.equal(q.pack_pairs(q.unpack_pairs(data)), data)


def test_representable_weights_survive_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (7, 96), generator=generator)
    codes[:, ::32] = 7  # each block has a 6, so the rule finds the scale it was made with
    values = q.e2m1_decode(codes) * 2.0 ** torch.randint(-20, 20, (7, 3), generator=generator).repeat_interleave(32, 1)
    blocks, scales = q.mxfp4_quantize(values)
    assert torch.equal(q.mxfp4_dequantize(blocks, scales), values)


def test_scale_rule_at_powers_of_two_zero_and_extremes() -> None:
    rows = torch.zeros(5, 32, dtype=torch.float64)
    rows[0, 0], rows[1, 0], rows[2, 0], rows[3, 0] = 4.0, math.nextafter(8.0, 0), 2.0**-140, math.inf
    _, scales = q.mxfp4_quantize(rows)
    assert scales[:, 0].tolist() == [127, 127, 0, 255, 0]


def test_mxfp8_elements_are_torch_s_and_saturate() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 128, generator=generator)
    codes, scales = q.mxfp8_quantize(x)
    factor = torch.ldexp(torch.ones(4, 4), scales.to(torch.int32) - 127).repeat_interleave(32, 1)
    assert torch.equal(codes.view(torch.uint8), (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    error = (q.mxfp8_dequantize(codes, scales) - x).abs()
    assert bool((error <= x.abs() * 2**-4 + factor * 2**-10)[(x / factor).abs() <= 448].all())
    top = torch.full((1, 32), 511.9)  # scale 2^0, so the elements lie above 448 and clamp
    assert q.mxfp8_dequantize(*q.mxfp8_quantize(top)).unique().tolist() == [448.0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="33 values"):
        q.mxfp4_quantize(torch.zeros(2, 33))
    with pytest.raises(UsageError, match="do not go with"):
        q.mxfp4_dequantize(torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8))
