"""Exact number handling for instruction tests: bits, signs, and rounding of rational numbers, in plain Python."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class FloatFormat:
    """An IEEE binary format; `specials` tells formats without infinity ("nan") and without either ("none")."""

    exponent: int
    mantissa: int
    specials: str = "ieee"

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


F16, BF16, F32, F64 = FloatFormat(5, 10), FloatFormat(8, 7), FloatFormat(8, 23), FloatFormat(11, 52)
FP8, BF8 = FloatFormat(4, 3, "nan"), FloatFormat(5, 2)
FP6, BF6, FP4 = FloatFormat(2, 3, "none"), FloatFormat(3, 2, "none"), FloatFormat(2, 1, "none")
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "fp8": FP8, "bf8": BF8, "fp6": FP6, "bf6": BF6, "fp4": FP4}


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def to_float(code: int, fmt: FloatFormat) -> float:
    """The value of an encoding; a Python float holds all of them."""
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    exponent = code >> fmt.mantissa & ((1 << fmt.exponent) - 1)
    fraction = code & ((1 << fmt.mantissa) - 1)
    top = (1 << fmt.exponent) - 1
    if exponent == top and fmt.specials == "ieee":
        return math.nan if fraction else sign * math.inf
    if exponent == top and fmt.specials == "nan" and fraction == (1 << fmt.mantissa) - 1:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - fmt.bias - fmt.mantissa)
    return sign * math.ldexp(fraction + (1 << fmt.mantissa), exponent - fmt.bias - fmt.mantissa)


def round_to(value: Fraction | float, fmt: FloatFormat, *, to_zero: bool = False) -> int:
    """The encoding nearest to a number, ties to even; a float may be an infinity, a NaN or a signed zero."""
    if isinstance(value, float):
        if math.isnan(value):
            return nan(fmt)
        if math.isinf(value):
            return overflow(value < 0, fmt)
        if value == 0:
            return (1 << (fmt.bits - 1)) if math.copysign(1, value) < 0 else 0
        value = Fraction(value)
    if value == 0:
        return 0
    negative, magnitude = value < 0, abs(value)
    exponent = max(_floor_log2(magnitude), 1 - fmt.bias)
    step = Fraction(2) ** (exponent - fmt.mantissa)
    count = magnitude / step
    whole = count.numerator // count.denominator
    rest = count - whole
    if not to_zero and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)):
        whole += 1
    rounded = whole * step
    if rounded > _largest(fmt):
        return (_largest_code(fmt) | negative << (fmt.bits - 1)) if to_zero else overflow(negative, fmt)
    if rounded == 0:
        return int(negative) << (fmt.bits - 1)
    exponent = max(_floor_log2(rounded), 1 - fmt.bias)
    scaled = int(rounded / Fraction(2) ** (exponent - fmt.mantissa))
    code = (
        scaled if scaled < 1 << fmt.mantissa else (exponent + fmt.bias) << fmt.mantissa | scaled - (1 << fmt.mantissa)
    )
    return code | int(negative) << (fmt.bits - 1)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _largest_code(fmt: FloatFormat) -> int:
    top = (1 << (fmt.bits - 1)) - 1
    return top - {"ieee": 1 << fmt.mantissa, "nan": 1, "none": 0}[fmt.specials]


def _largest(fmt: FloatFormat) -> Fraction:
    return Fraction(to_float(_largest_code(fmt), fmt))


def overflow(negative: bool, fmt: FloatFormat) -> int:
    """What a value beyond the largest becomes: infinity, NaN (E4M3), or the largest (4- and 6-bit formats)."""
    code = {"ieee": _largest_code(fmt) + 1, "nan": nan(fmt), "none": _largest_code(fmt)}[fmt.specials]
    return code | int(negative) << (fmt.bits - 1)


def nan(fmt: FloatFormat) -> int:
    if fmt.specials == "none":
        return _largest_code(fmt)
    if fmt.specials == "nan":
        return (1 << (fmt.bits - 1)) - 1
    return ((1 << fmt.exponent) - 1) << fmt.mantissa | 1 << (fmt.mantissa - 1)


def is_nan(code: int, fmt: FloatFormat) -> bool:
    return math.isnan(to_float(code, fmt))


def ulps(a: int, b: int, fmt: FloatFormat) -> int:
    """Distance of two encodings in units in the last place; NaNs are equal to each other, infinities to themselves."""
    if is_nan(a, fmt) or is_nan(b, fmt):
        return 0 if is_nan(a, fmt) and is_nan(b, fmt) else 1 << 62
    sign = 1 << (fmt.bits - 1)
    x, y = (-(c & (sign - 1)) if c & sign else c for c in (a, b))
    return abs(x - y)


SPECIAL = {
    "f32": [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x007FFFFF,
            0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000, 0x40200000, 0xC0200000, 0x4B800001, 0x34000000],
    "f16": [0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x3800, 0x4100],
    "bf16": [0, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 1, 0x8001, 0x80, 0x7F7F],
    "f64": [0, 1 << 63, 0x3FF << 52, 0xBFF << 52, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 1, (1 << 52) - 1, 1 << 52,
            (0x7FF << 52) - 1, 0x3FE << 52, 0x4004 << 48],
    "u32": [0, 1, 2, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 0x01020304],
    "u16": [0, 1, 2, 15, 16, 0x7FFF, 0x8000, 0xFFFF, 0xFF, 0x100],
    "u64": [0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1, 0xFFFFFFFF, 1 << 32, 63, 64],
}  # fmt: skip
WIDTH = {"f32": 32, "u32": 32, "i32": 32, "b32": 32, "f16": 16, "bf16": 16, "u16": 16, "i16": 16, "b16": 16, "f64": 64,
         "u64": 64, "i64": 64}  # fmt: skip


def samples(kind: str, seed: str, count: int = 64) -> list[int]:
    """Encodings of one operand type: special values first in a seeded order, then random ones of ordinary size."""
    rng = random.Random(f"{kind} {seed}")
    special = list(SPECIAL.get(kind, SPECIAL[{16: "u16", 32: "u32", 64: "u64"}[WIDTH[kind]]]))
    rng.shuffle(special)
    values = special[: count // 3]
    while len(values) < count:
        values.append(_ordinary(kind, rng))
    rng.shuffle(values)
    return values


def _ordinary(kind: str, rng: random.Random) -> int:
    if kind in FORMATS:
        fmt = FORMATS[kind]
        if rng.random() < 0.3:
            return rng.getrandbits(fmt.bits)
        return round_to(rng.choice([-1, 1]) * rng.random() * 2.0 ** rng.randint(-6, 6), fmt)
    bits = WIDTH[kind]
    return rng.getrandbits(rng.choice([bits, bits, bits // 2, 5]))


def bits_of(value: float, kind: str) -> int:
    """A Python float as the bits of a type, through struct."""
    code, raw = {"f32": ("<f", "<I"), "f16": ("<e", "<H"), "f64": ("<d", "<Q")}[kind]
    return int(struct.unpack(raw, struct.pack(code, value))[0])
