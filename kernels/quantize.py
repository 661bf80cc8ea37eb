"""Microscaling formats: MXFP4 (e2m1 pairs + e8m0 scale per 32 values) and MXFP8 (e4m3 + e8m0), to and from float.

Formats: OCP Microscaling Formats (MX) v1.0, sections 5.2 to 5.4. Pair order: element 2i is the low nibble of byte i and
element 2i+1 the high one, as the GPT-OSS checkpoints store them (GGML pairs j with j+16 instead). Rounding: to nearest,
ties to even mantissa, saturating. Rule for the shared scale, named in run conditions: `SCALE_RULE`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.errors import UsageError

BLOCK = 32
SCALE_RULE = "ocp-floor"  # shared exponent = floor(log2(largest magnitude)) - largest exponent of the element format
SCALE_BIAS = 127
SCALE_NAN = 255
PAD_SCALE = 127  # factor 1: pad blocks hold zero nibbles, so any finite factor would do; 1 keeps them harmless

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halves between neighbours; a tie goes to the neighbour whose mantissa bit is 0, i.e. to the even code.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_EMAX, _E4M3_EMAX, _E4M3_MAX = 2, 8, 448.0


def e8m0_to_float(scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scale bytes (uint8 or float8_e8m0fnu) to 2^(byte - 127); byte 0 is 2^-127, byte 255 is NaN.

    Raises UsageError for another dtype: a scale read as a number is off by many powers of two.
    """
    exponent = e8m0_bytes(scales).to(torch.int32) - SCALE_BIAS
    value = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
    return torch.where(exponent == SCALE_NAN - SCALE_BIAS, torch.nan, value).to(dtype)


def e8m0_bytes(scales: Tensor) -> Tensor:
    """The bytes of scales stored as uint8 or as float8_e8m0fnu, without converting values."""
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    raise UsageError(f"scales have dtype {scales.dtype}; e8m0 scales are uint8 or float8_e8m0fnu")


def e2m1_encode(values: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of values, nearest with ties to even, saturating at 6; the sign of zero is kept."""
    magnitude = values.abs().to(torch.float64)
    code = torch.zeros(values.shape, dtype=torch.uint8)
    for lower, tie in enumerate(_E2M1_TIES):
        up = magnitude >= tie if lower % 2 else magnitude > tie
        code = torch.where(up, torch.tensor(lower + 1, dtype=torch.uint8), code)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of codes 0..15."""
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=dtype)
    return table[codes.to(torch.int64)]


def pack_pairs(codes: Tensor) -> Tensor:
    """(..., 2n) codes to (..., n) bytes, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """(..., n) bytes to (..., 2n) codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def mxfp4_quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) values, K a multiple of 32, to blocks (..., K/32, 16) and scales (..., K/32), both uint8."""
    grouped, scales = _scaled_groups(values, _E2M1_EMAX)
    return pack_pairs(e2m1_encode(grouped)), scales


def mxfp4_dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Blocks (..., G, 16) and scales (..., G) to (..., 32 G) values; a block with scale byte 255 is NaN."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != BLOCK // 2:
        raise UsageError(f"MXFP4 blocks {tuple(blocks.shape)} do not go with scales {tuple(scales.shape)}")
    values = e2m1_decode(unpack_pairs(blocks)) * e8m0_to_float(scales)[..., None]
    return values.flatten(-2).to(dtype)


def mxfp8_quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) values to float8_e4m3fn (..., K) and uint8 scales (..., K/32); saturates, non-finite blocks get 255."""
    grouped, scales = _scaled_groups(values, _E4M3_EMAX)
    # torch's own conversion rounds ties to even but turns what is above 448 into NaN; saturating means to clamp.
    codes = grouped.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float32).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


def mxfp8_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """float8_e4m3fn (..., K) and scales (..., K/32) to values."""
    grouped = codes.to(torch.float64).unflatten(-1, (-1, BLOCK))
    return (grouped * e8m0_to_float(scales)[..., None]).flatten(-2).to(dtype)


def _scaled_groups(values: Tensor, emax: int) -> tuple[Tensor, Tensor]:
    if values.shape[-1] % BLOCK:
        raise UsageError(f"{values.shape[-1]} values are not whole blocks of {BLOCK}")
    grouped = values.to(torch.float64).unflatten(-1, (-1, BLOCK))
    largest = grouped.abs().amax(-1)
    finite = torch.isfinite(largest)
    # frexp: m in [0.5, 1), so floor(log2) is the exponent minus 1; exact where log2 would round at powers of two.
    exponent = torch.frexp(torch.where(finite, largest, 1.0)).exponent - 1 - emax
    exponent = torch.where(largest == 0, -SCALE_BIAS, exponent).clamp(-SCALE_BIAS, SCALE_BIAS)
    scales = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN).to(torch.uint8)
    return torch.ldexp(grouped, -exponent[..., None]), scales
