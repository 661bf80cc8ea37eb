"""What vector instructions compute, in plain Python on one lane, after AMD's published instruction descriptions.

Nothing here uses the interpreter: integers are Python integers, floating point is exact rational arithmetic rounded by
`isa_numbers`, and transcendental functions come from `math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from isa_numbers import (
    BF8,
    BF16,
    F16,
    F32,
    F64,
    FORMATS,
    FP8,
    FloatFormat,
    is_nan,
    nan,
    round_to,
    signed,
    to_float,
)

M16, M32, M64 = 0xFFFF, 0xFFFFFFFF, (1 << 64) - 1
Reference = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operation: types, the reference, tolerated units in the last place, and text after the operands."""

    dst: tuple[str, ...]
    src: tuple[str, ...]
    ref: Reference
    ulp: int = 0
    keeps_high: bool = False
    reads_dst: bool = False
    modifiers: str = ""
    domain: dict[int, Callable[[int], int]] = field(default_factory=dict)
    implicit_vcc: bool = False


CASES: dict[str, Case] = {}


def case(names: str, dst: str, src: str, ref: Reference, **how: Any) -> None:
    for name in names.split():
        assert name not in CASES, name
        CASES[name] = Case(tuple(dst.split()), tuple(src.split()), ref, **how)


# ---- floating point on rationals


def _finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)


def _arith(kind: str, exact: Callable[..., Fraction], plain: Callable[..., float]) -> Reference:
    """Exact for finite operands; infinities, NaNs and the sign of zero from Python floats."""
    fmt = FORMATS[kind]

    def ref(*codes: int) -> int:
        numbers = [to_float(code, fmt) for code in codes]
        if _finite(*numbers):
            value = exact(*map(Fraction, numbers))
            if value != 0:
                return round_to(value, fmt)
        return round_to(float(plain(*numbers)), fmt)

    return ref


def _fma_plain(a: float, b: float, c: float) -> float:
    if _finite(a, b) and not math.isfinite(c):
        return c
    if _finite(a, b, c) and (a == 0 or b == 0):
        return math.copysign(1, a) * math.copysign(0.0, b) + c
    return a * b + c if not _finite(a, b, c) else 0.0


def _max(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int, b: int) -> int:
        if is_nan(a, fmt) or is_nan(b, fmt):
            return b if is_nan(a, fmt) else a
        x, y = to_float(a, fmt), to_float(b, fmt)
        if x == y == 0:
            return b if a >> (fmt.bits - 1) else a
        return a if x >= y else b

    return ref


def _min(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int, b: int) -> int:
        if is_nan(a, fmt) or is_nan(b, fmt):
            return b if is_nan(a, fmt) else a
        x, y = to_float(a, fmt), to_float(b, fmt)
        if x == y == 0:
            return a if a >> (fmt.bits - 1) else b
        return a if x < y else b

    return ref


def _median(kind: str) -> Reference:
    fmt, least, most = FORMATS[kind], _min(kind), _max(kind)

    def ref(a: int, b: int, c: int) -> int:
        if any(is_nan(x, fmt) for x in (a, b, c)):
            return least(least(a, b), c)
        x, y, z = (to_float(code, fmt) for code in (a, b, c))
        top = max(x, y, z)
        if top == x:
            return most(b, c)
        return most(a, c) if top == y else most(a, b)

    return ref


def _through(kind: str, fn: Callable[[float], float]) -> Reference:
    """A function of one float; a domain error is a NaN, a pole an infinity."""
    fmt = FORMATS[kind]

    def ref(a: int) -> int:
        x = to_float(a, fmt)
        if math.isnan(x):
            return nan(fmt)
        try:
            return round_to(fn(x), fmt)
        except OverflowError:
            return round_to(math.inf, fmt)
        except ValueError:
            return nan(fmt)

    return ref


def _rcp(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def _rsq(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log2(x)


def _integral(fn: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: math.copysign(float(fn(x)), x) if math.isfinite(x) else x


def _fract(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int) -> int:
        x = to_float(a, fmt)
        if not math.isfinite(x):
            return nan(fmt)
        code = round_to(Fraction(x) - math.floor(x), fmt)
        one = round_to(Fraction(1), fmt)
        return min(code, one - 1)

    return ref


def _frexp_mant(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int) -> int:
        x = to_float(a, fmt)
        return a if not math.isfinite(x) else round_to(math.frexp(x)[0], fmt)

    return ref


def _frexp_exp(kind: str, bits: int) -> Reference:
    def ref(a: int) -> int:
        x = to_float(a, FORMATS[kind])
        return (math.frexp(x)[1] if math.isfinite(x) else 0) & ((1 << bits) - 1)

    return ref


def _ldexp(kind: str, bits: int) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int, e: int) -> int:
        x = to_float(a, fmt)
        if not math.isfinite(x) or x == 0:
            return round_to(x, fmt)
        return round_to(Fraction(x) * Fraction(2) ** max(-5000, min(5000, signed(e, bits))), fmt)

    return ref


def _class(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int, wanted: int) -> bool:
        negative = a >> (fmt.bits - 1)
        exponent = a >> fmt.mantissa & ((1 << fmt.exponent) - 1)
        fraction = a & ((1 << fmt.mantissa) - 1)
        if exponent == (1 << fmt.exponent) - 1 and fraction:
            bit = 1 if fraction >> (fmt.mantissa - 1) else 0
        elif exponent == (1 << fmt.exponent) - 1:
            bit = 2 if negative else 9
        elif exponent:
            bit = 3 if negative else 8
        elif fraction:
            bit = 4 if negative else 7
        else:
            bit = 5 if negative else 6
        return bool(wanted >> bit & 1)

    return ref


def _floats(kind: str, with_transcendentals: bool) -> None:
    one, two, three = kind, f"{kind} {kind}", f"{kind} {kind} {kind}"
    binary = {"add": (lambda a, b: a + b, lambda a, b: a + b), "mul": (lambda a, b: a * b, lambda a, b: a * b)}
    for name, (exact, plain) in binary.items():
        case(f"v_{name}_{kind}", one, two, _arith(kind, exact, plain))
    case(f"v_max_{kind}", one, two, _max(kind))
    case(f"v_min_{kind}", one, two, _min(kind))
    case(f"v_fract_{kind}", one, one, _fract(kind))
    case(f"v_frexp_mant_{kind}", one, one, _frexp_mant(kind))
    for name, fn in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc), ("rndne", round)):
        case(f"v_{name}_{kind}", one, one, _through(kind, _integral(fn)))
    loose = 1 if kind != "f64" else 2
    for name, fn in (("rcp", _rcp), ("rsq", _rsq), ("sqrt", math.sqrt)):
        case(f"v_{name}_{kind}", one, one, _through(kind, fn), ulp=loose)
    case(f"v_fma_{kind}", one, three, _arith(kind, lambda a, b, c: a * b + c, _fma_plain), keeps_high=kind == "f16")
    case(f"v_fmac_{kind}", one, three, _arith(kind, lambda a, b, c: a * b + c, _fma_plain), reads_dst=True)
    if with_transcendentals:
        case(f"v_sub_{kind}", one, two, _arith(kind, lambda a, b: a - b, lambda a, b: a - b))
        case(f"v_subrev_{kind}", one, two, _arith(kind, lambda a, b: b - a, lambda a, b: b - a))
        case(f"v_exp_{kind}", one, one, _through(kind, math.exp2), ulp=1)
        case(f"v_log_{kind}", one, one, _through(kind, _log), ulp=1)
        small = {0: lambda code: code & (0x3FFFFFFF if kind == "f32" else 0x3FFF)}
        for name, fn in (("sin", math.sin), ("cos", math.cos)):
            turn = _through(kind, lambda x, fn=fn: fn(2 * math.pi * x))
            case(f"v_{name}_{kind}", one, one, turn, ulp=2, domain=small)
        least, most = _min(kind), _max(kind)
        case(f"v_max3_{kind}", one, three, lambda a, b, c: most(most(a, b), c), keeps_high=kind == "f16")
        case(f"v_min3_{kind}", one, three, lambda a, b, c: least(least(a, b), c), keeps_high=kind == "f16")
        case(f"v_med3_{kind}", one, three, _median(kind), keeps_high=kind == "f16")


def _propagating(kind: str, pick: Reference) -> Reference:
    """IEEE 754-2019 minimum and maximum: any NaN gives a NaN."""
    fmt = FORMATS[kind]

    def ref(a: int, b: int, c: int) -> int:
        return nan(fmt) if any(is_nan(x, fmt) for x in (a, b, c)) else pick(pick(a, b), c)

    return ref


def _legacy(a: int, b: int) -> int:
    x, y = to_float(a, F32), to_float(b, F32)
    return 0 if x == 0 or y == 0 else CASES["v_mul_f32"].ref(a, b)


def define_floats() -> None:
    _floats("f32", True)
    _floats("f16", True)
    _floats("f64", False)
    case("v_rcp_iflag_f32", "f32", "f32", _through("f32", _rcp), ulp=1)
    case("v_mul_legacy_f32", "f32", "f32 f32", _legacy)
    case("v_maximum3_f32", "f32", "f32 f32 f32", _propagating("f32", _max("f32")))
    case("v_minimum3_f32", "f32", "f32 f32 f32", _propagating("f32", _min("f32")))
    fma = CASES["v_fma_f32"].ref
    case("v_fmaak_f32", "f32", "f32 f32 f32", fma)
    case("v_fmamk_f32", "f32", "f32 f32 f32", fma)
    case("v_ldexp_f32", "f32", "f32 i32", _ldexp("f32", 32))
    case("v_ldexp_f16", "f16", "f16 i16", _ldexp("f16", 16))
    case("v_ldexp_f64", "f64", "f64 i32", _ldexp("f64", 32))
    case("v_frexp_exp_i32_f32", "i32", "f32", _frexp_exp("f32", 32))
    case("v_frexp_exp_i32_f64", "i32", "f64", _frexp_exp("f64", 32))
    case("v_frexp_exp_i16_f16", "i16", "f16", _frexp_exp("f16", 16))


# ---- comparisons


def _relation(name: str) -> Callable[[Any, Any], bool]:
    table = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
             "ge": lambda a, b: a >= b, "ne": lambda a, b: a != b, "lg": lambda a, b: a < b or a > b,
             "o": lambda a, b: a == a and b == b, "u": lambda a, b: a != a or b != b, "f": lambda a, b: False,
             "t": lambda a, b: True, "tru": lambda a, b: True}  # fmt: skip
    if name in table:
        return table[name]
    base = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "nlt": "lt", "neq": "eq"}[name]
    return lambda a, b: not table[base](a, b)


def define_compares() -> None:
    for kind, bits in (("u32", 32), ("i32", 32), ("u64", 64), ("i64", 64), ("u16", 16), ("i16", 16)):
        for name in ("f", "lt", "eq", "le", "gt", "ne", "ge", "t"):
            relation = _relation(name)
            convert = (lambda x, b=bits: signed(x, b)) if kind[0] == "i" else (lambda x: x)
            ref = lambda a, b, r=relation, c=convert: r(c(a), c(b))  # noqa: E731
            case(f"v_cmp_{name}_{kind}", "mask", f"{kind} {kind}", ref)
            case(f"v_cmpx_{name}_{kind}", "mask", f"{kind} {kind}", ref)
    names = ["f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru"]
    for kind in ("f32", "f16", "f64"):
        for name in names:
            relation = _relation(name)
            ref = lambda a, b, r=relation, f=FORMATS[kind]: r(to_float(a, f), to_float(b, f))  # noqa: E731
            case(f"v_cmp_{name}_{kind}", "mask", f"{kind} {kind}", ref)
            case(f"v_cmpx_{name}_{kind}", "mask", f"{kind} {kind}", ref)
        case(f"v_cmp_class_{kind}", "mask", f"{kind} u32", _class(kind))
        case(f"v_cmpx_class_{kind}", "mask", f"{kind} u32", _class(kind))


# ---- conversions


def _to_int(kind: str, low: int, high: int, bits: int, rounding: Callable[[float], float] = math.trunc) -> Reference:
    def ref(a: int) -> int:
        x = to_float(a, FORMATS[kind])
        if math.isnan(x):
            return 0
        value = (high if x > 0 else low) if math.isinf(x) else int(rounding(x))
        return max(low, min(high, value)) & ((1 << bits) - 1)

    return ref


def _from_int(kind: str, bits: int, is_signed: bool) -> Reference:
    return lambda a: round_to(Fraction(signed(a, bits) if is_signed else a), FORMATS[kind])


def _recode(old: str, new: str) -> Reference:
    return lambda a: round_to(to_float(a, FORMATS[old]), FORMATS[new])


def _norm(kind: str, scale: int, low: int) -> Reference:
    def ref(a: int) -> int:
        x = to_float(a, FORMATS[kind])
        if math.isnan(x):
            return 0
        return round(Fraction(max(low, min(1.0, x))) * scale) & M16

    return ref


def _two(ref: Reference, bits: int = 16) -> Reference:
    return lambda a, b: ref(a) | ref(b) << bits


def _toward_zero(a: int) -> int:
    x = to_float(a, F32)
    return round_to(Fraction(x), F16, to_zero=True) if math.isfinite(x) and x else round_to(x, F16)


def _clamp(bits: int, low: int, high: int, is_signed: bool) -> Reference:
    return lambda a: max(low, min(high, signed(a, bits) if is_signed else a)) & M16


def define_conversions() -> None:
    case("v_cvt_f32_u32", "f32", "u32", _from_int("f32", 32, False))
    case("v_cvt_f32_i32", "f32", "i32", _from_int("f32", 32, True))
    case("v_cvt_f64_u32", "f64", "u32", _from_int("f64", 32, False))
    case("v_cvt_f64_i32", "f64", "i32", _from_int("f64", 32, True))
    case("v_cvt_f16_u16", "f16", "u16", _from_int("f16", 16, False))
    case("v_cvt_f16_i16", "f16", "i16", _from_int("f16", 16, True))
    for place in range(4):
        case(f"v_cvt_f32_ubyte{place}", "f32", "u32", lambda a, p=place: round_to(Fraction(a >> 8 * p & 255), F32))
    for kind in ("f32", "f64"):
        case(f"v_cvt_u32_{kind}", "u32", kind, _to_int(kind, 0, M32, 32))
        case(f"v_cvt_i32_{kind}", "i32", kind, _to_int(kind, -(2**31), 2**31 - 1, 32))
    case("v_cvt_flr_i32_f32", "i32", "f32", _to_int("f32", -(2**31), 2**31 - 1, 32, math.floor))
    half = lambda x: math.floor(Fraction(x) + Fraction(1, 2))  # noqa: E731
    case("v_cvt_rpi_i32_f32", "i32", "f32", _to_int("f32", -(2**31), 2**31 - 1, 32, half))
    case("v_cvt_u16_f16", "u16", "f16", _to_int("f16", 0, 65535, 16))
    case("v_cvt_i16_f16", "i16", "f16", _to_int("f16", -32768, 32767, 16))
    for old, new in (("f32", "f16"), ("f16", "f32"), ("f32", "f64"), ("f64", "f32"), ("bf16", "f32")):
        case(f"v_cvt_{new}_{old}", new, old, _recode(old, new))
    case("v_cvt_norm_i16_f16", "i16", "f16", _norm("f16", 32767, -1))
    case("v_cvt_norm_u16_f16", "u16", "f16", _norm("f16", 65535, 0))
    for kind in ("f32", "f16"):
        case(f"v_cvt_pknorm_i16_{kind}", "u32", f"{kind} {kind}", _two(_norm(kind, 32767, -1)))
        case(f"v_cvt_pknorm_u16_{kind}", "u32", f"{kind} {kind}", _two(_norm(kind, 65535, 0)))
    case("v_cvt_pk_bf16_f32", "pkbf16", "f32 f32", _two(_recode("f32", "bf16")))
    case("v_cvt_pk_f16_f32", "pkf16", "f32 f32", _two(_recode("f32", "f16")))
    case("v_cvt_pkrtz_f16_f32", "pkf16", "f32 f32", _two(_toward_zero))
    case("v_cvt_pk_u16_u32", "u32", "u32 u32", _two(_clamp(32, 0, 65535, False)))
    case("v_cvt_pk_i16_i32", "u32", "i32 i32", _two(_clamp(32, -32768, 32767, True)))
    byte = _to_int("f32", 0, 255, 32, round)
    case("v_cvt_pk_u8_f32", "u32", "f32 u32 u32",
         lambda a, p, old: old & ~(255 << 8 * (p & 3)) | byte(a) << 8 * (p & 3))  # fmt: skip
    case("v_sat_pk_u8_i16", "u32", "u32",
         lambda a: sum(max(0, min(255, signed(a >> 16 * k & M16, 16))) << 8 * k for k in (0, 1)))  # fmt: skip


__all__ = ["BF8", "BF16", "CASES", "F64", "FP8", "Case", "FloatFormat", "case", "define_compares", "define_conversions",
           "define_floats"]  # fmt: skip
