"""Number formats narrower than 16 bits as decode tables, and rounding to them (OCP FP8 and MX formats 1.0).

gfx950 uses the OCP encodings: E4M3 without infinity, E5M2 with infinity, E2M1, E2M3, E3M2, and the E8M0 block scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from dieplace.emulator.isa.state import F32, F64, I32, U8, U32


@dataclass(frozen=True)
class Format:
    """A sign-exponent-mantissa format; `specials` is "ieee" (infinity and NaN), "nan" (all ones only) or "none"."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str

    @property
    def bits(self) -> int:
        """Width of one value."""
        return 1 + self.exponent_bits + self.mantissa_bits


FP8 = Format("fp8", 4, 3, 7, "nan")
BF8 = Format("bf8", 5, 2, 15, "ieee")
FP6 = Format("fp6", 2, 3, 1, "none")
BF6 = Format("bf6", 3, 2, 3, "none")
FP4 = Format("fp4", 2, 1, 1, "none")


@cache
def values(fmt: Format) -> np.ndarray:
    """float64 value of every encoding."""
    codes = np.arange(1 << fmt.bits)
    exponent = codes >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1)
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    fraction = np.where(exponent == 0, mantissa, mantissa + (1 << fmt.mantissa_bits)).astype(F64)
    table = np.ldexp(fraction, (np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits).astype(I32))
    top = (1 << fmt.exponent_bits) - 1
    if fmt.specials == "ieee":
        table = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), table)
    elif fmt.specials == "nan":
        full = (exponent == top) & (mantissa == (1 << fmt.mantissa_bits) - 1)
        table = np.where(full, np.nan, table)
    return np.where(codes >> (fmt.bits - 1), -table, table)


@cache
def values32(fmt: Format) -> np.ndarray:
    """float32 value of every encoding; all are exact."""
    return values(fmt).astype(F32)


def decode(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """float64 values of encodings."""
    return values(fmt)[codes]


def encode(fmt: Format, numbers: np.ndarray, *, saturate: bool = True) -> np.ndarray:
    """Encodings (uint8) of float numbers, to nearest even; beyond the largest finite value saturate, or infinity or
    NaN.
    """
    x = np.asarray(numbers, F64)
    sign = np.signbit(x).astype(U8) << (fmt.bits - 1)
    positive = values(fmt)[: 1 << (fmt.bits - 1)]
    finite = positive[np.isfinite(positive)]
    magnitude = np.where(np.isnan(x), 0, np.abs(x))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - fmt.bias)
    step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    rounded = np.rint(magnitude / step) * step
    code = np.searchsorted(finite, np.minimum(rounded, finite[-1]))
    over = rounded > finite[-1]
    if fmt.specials != "none" and not saturate:
        code = np.where(over, len(finite), code)
    if fmt.specials == "ieee":
        code = np.where(np.isinf(x) & (not saturate), len(finite), code)
    code = np.where(np.isnan(x), (1 << (fmt.bits - 1)) - 1 if fmt.specials != "none" else len(finite) - 1, code)
    return (code.astype(U8) | sign).astype(U8)


def block_scale(e8m0: np.ndarray) -> np.ndarray:
    """float64 value of an E8M0 byte: 2 to the (byte - 127); 255 is NaN (OCP MX 1.0, section 5.4)."""
    byte = np.asarray(e8m0, U32).astype(I32)
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of float32 values, to nearest even; NaNs become quiet and keep their sign."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits."""
    return (np.asarray(bits).astype(U32) << U32(16)).view(F32)
