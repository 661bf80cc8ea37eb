"""Conversions whose rounding is stated, so that the CPU interpreter and a device give the same bits.

Triton's interpreter truncates fp32 to bf16 unless told to round, loses bf16 subnormals when widening, and multiplies
bf16 matrices as integers (seen with 3.9.0); on a device these forms compile to what the plain ones do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dieplace.kernels.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def widen(value):
    """bf16 (exactly, subnormals included) or fp32 as fp32."""
    if value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 rounded to nearest even in `dtype` (bf16 or fp32)."""
    if dtype == tl.bfloat16:
        if _INTERPRETED:
            bits = value.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nan = value != value
            return tl.where(nan, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return value.to(tl.bfloat16)
    else:
        return value


@triton.jit
def dot_bf16(a, b):
    """a(bf16) @ b(bf16) in fp32."""
    if _INTERPRETED:
        return tl.dot(widen(a), widen(b))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_fp32_bf16(a, b):
    """a(fp32) @ b(bf16): `a` is split into two bf16 parts, so that matrix units keep about 16 bits of it."""
    if _INTERPRETED:
        return tl.dot(a, widen(b))
    else:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, b) + tl.dot(low, b)
