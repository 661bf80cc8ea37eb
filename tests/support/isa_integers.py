"""What integer, bitwise, wide, packed and dot-product vector instructions compute, in Python integers on one lane."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from isa_numbers import F16, F32, FORMATS, is_nan, nan, round_to, signed, to_float
from isa_references import CASES, M16, M32, M64, Reference, case


def _s(value: int, bits: int = 32) -> int:
    return signed(value, bits)


def _reverse(a: int) -> int:
    return int(f"{a:032b}"[::-1], 2)


def _perm(a: int, b: int, selector: int) -> int:
    data = (a << 32 | b).to_bytes(8, "little")

    def byte(sel: int) -> int:
        if sel >= 13:
            return 0xFF
        if sel == 12:
            return 0
        if sel >= 8:
            return 0xFF if data[2 * (sel - 8) + 1] & 0x80 else 0
        return data[sel]

    return sum(byte(selector >> 8 * k & 255) << 8 * k for k in range(4))


def _bfe_i(a: int, offset: int, width: int) -> int:
    width &= 31
    if width == 0:
        return 0
    return _s(_s(a) >> (offset & 31) & ((1 << width) - 1), width) & M32


def _ffbh_i(a: int) -> int:
    bits = f"{a:032b}"
    return next((i for i in range(1, 32) if bits[i] != bits[0]), M32)


def _carry(fn: Callable[[int, int, int], int]) -> Reference:
    def ref(a: int, b: int, carry: int = 0) -> tuple[int, bool]:
        total = fn(a, b, int(carry))
        return total & M32, not 0 <= total <= M32

    return ref


def define_integers() -> None:
    for name in ("v_mov_b32", "v_accvgpr_mov_b32"):
        case(name, "b32", "b32", lambda a: a)
    case("v_not_b32", "u32", "u32", lambda a: ~a & M32)
    case("v_bfrev_b32", "u32", "u32", _reverse)
    case("v_ffbh_u32", "u32", "u32", lambda a: 32 - a.bit_length() if a else M32)
    case("v_ffbl_b32", "u32", "u32", lambda a: (a & -a).bit_length() - 1 if a else M32)
    case("v_ffbh_i32", "u32", "i32", _ffbh_i)
    case("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: (a.bit_count() + b) & M32)
    case("v_prng_b32", "u32", "u32", lambda a: (a << 1 & M32) ^ (197 if a >> 31 else 0))
    two = {
        "v_add_u32": lambda a, b: a + b, "v_sub_u32": lambda a, b: a - b, "v_subrev_u32": lambda a, b: b - a,
        "v_add_i32": lambda a, b: a + b, "v_sub_i32": lambda a, b: a - b, "v_and_b32": lambda a, b: a & b,
        "v_or_b32": lambda a, b: a | b, "v_xor_b32": lambda a, b: a ^ b, "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_lshlrev_b32": lambda a, b: b << (a & 31), "v_lshrrev_b32": lambda a, b: b >> (a & 31),
        "v_ashrrev_i32": lambda a, b: _s(b) >> (a & 31), "v_min_u32": min, "v_max_u32": max,
        "v_min_i32": lambda a, b: min(_s(a), _s(b)), "v_max_i32": lambda a, b: max(_s(a), _s(b)),
        "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), "v_mul_lo_u32": lambda a, b: a * b,
        "v_mul_hi_u32": lambda a, b: a * b >> 32, "v_mul_hi_i32": lambda a, b: _s(a) * _s(b) >> 32,
        "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
        "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
        "v_mul_i32_i24": lambda a, b: _s(a, 24) * _s(b, 24),
        "v_mul_hi_i32_i24": lambda a, b: _s(a, 24) * _s(b, 24) >> 32,
    }  # fmt: skip
    for name, fn in two.items():
        kind = "i32" if "_i32" in name else "u32"
        case(name, kind, f"{kind} {kind}", lambda a, b, f=fn: f(a, b) & M32)
    case("v_cndmask_b32", "b32", "b32 b32 mask", lambda a, b, k: b if k else a)


def define_three() -> None:
    three = {
        "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c, "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31), "v_and_or_b32": lambda a, b, c: a & b | c,
        "v_or3_b32": lambda a, b, c: a | b | c, "v_add3_u32": lambda a, b, c: a + b + c,
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_bfe_u32": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1), "v_bfe_i32": _bfe_i,
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
        "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3), "v_perm_b32": _perm,
        "v_min3_u32": lambda a, b, c: min(a, b, c), "v_max3_u32": lambda a, b, c: max(a, b, c),
        "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
        "v_min3_i32": lambda a, b, c: min(_s(a), _s(b), _s(c)), "v_max3_i32": lambda a, b, c: max(_s(a), _s(b), _s(c)),
        "v_med3_i32": lambda a, b, c: sorted(map(_s, (a, b, c)))[1],
        "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
        "v_mad_i32_i24": lambda a, b, c: _s(a, 24) * _s(b, 24) + c,
        "v_sad_u8": lambda a, b, c: c + _sad(a, b, 8), "v_sad_u16": lambda a, b, c: c + _sad(a, b, 16),
        "v_sad_u32": lambda a, b, c: c + abs(a - b), "v_sad_hi_u8": lambda a, b, c: (_sad(a, b, 8) << 16) + c,
    }  # fmt: skip
    for name, fn in three.items():
        kind = "i32" if name.endswith(("_i32", "_i24")) else "u32"
        case(name, kind, f"{kind} {kind} {kind}", lambda a, b, c, f=fn: f(a, b, c) & M32)
    case("v_mad_u32_u16", "u32", "u16 u16 u32", lambda a, b, c: (a * b + c) & M32)
    case("v_mad_i32_i16", "i32", "i16 i16 i32", lambda a, b, c: (_s(a, 16) * _s(b, 16) + c) & M32)
    table = 0x6C
    pick = lambda a, b, c, n: sum(  # noqa: E731
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(n))  # fmt: skip
    case("v_bitop3_b32", "u32", "u32 u32 u32", lambda a, b, c: pick(a, b, c, 32), modifiers=" bitop3:0x6c")
    case("v_bitop3_b16", "b16", "b16 b16 b16", lambda a, b, c: pick(a, b, c, 16), modifiers=" bitop3:0x6c")
    for name, low, high in (("i8", -128, 127), ("u8", 0, 255)):
        case(f"v_ashr_pk_{name}_i32", "u16", "i32 i32 i32",
             lambda a, b, c, lo=low, hi=high: sum(
                 (max(lo, min(hi, _s(x) >> (c & 31))) & 255) << 8 * k for k, x in enumerate((a, b))),
             keeps_high=True)  # fmt: skip


def _sad(a: int, b: int, bits: int) -> int:
    mask = (1 << bits) - 1
    return sum(abs((a >> k & mask) - (b >> k & mask)) for k in range(0, 32, bits))


def define_carries() -> None:
    add, sub, rev = (
        _carry(f) for f in (lambda a, b, c: a + b + c, lambda a, b, c: a - b - c, lambda a, b, c: b - a - c)
    )
    for name, ref in (("add", add), ("sub", sub), ("subrev", rev)):
        case(f"v_{name}_co_u32", "u32 mask", "u32 u32", ref)
    for name, ref in (("addc", add), ("subb", sub), ("subbrev", rev)):
        case(f"v_{name}_co_u32", "u32 mask", "u32 u32 mask", ref)
    case("v_mad_u64_u32", "u64 mask", "u32 u32 u64", lambda a, b, c: ((a * b + c) & M64, a * b + c > M64))
    case("v_mad_i64_i32", "i64 mask", "i32 i32 i64", _mad_i64)
    wide = {
        "v_lshlrev_b64": ("u64", "u32 u64", lambda a, b: b << (a & 63)),
        "v_lshrrev_b64": ("u64", "u32 u64", lambda a, b: b >> (a & 63)),
        "v_ashrrev_i64": ("i64", "u32 i64", lambda a, b: _s(b, 64) >> (a & 63)),
        "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & 7)) + c),
        "v_mov_b64": ("u64", "u64", lambda a: a),
    }
    for name, (dst, src, fn) in wide.items():
        case(name, dst, src, lambda *x, f=fn: f(*x) & M64)


def _mad_i64(a: int, b: int, c: int) -> tuple[int, bool]:
    total = _s(a) * _s(b) + _s(c, 64)
    return total & M64, not -(1 << 63) <= total < 1 << 63


def define_halves() -> None:
    two = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "max": max, "min": min,
    }  # fmt: skip
    for kind in ("u16", "i16"):
        number = (lambda x: _s(x, 16)) if kind == "i16" else (lambda x: x)
        for name, fn in two.items():
            keeps = kind == "i16" and name in ("add", "sub")
            ref = lambda a, b, f=fn, n=number: f(n(a), n(b)) & M16  # noqa: E731
            case(f"v_{name}_{kind}", kind, f"{kind} {kind}", ref, keeps_high=keeps)
            pair(f"v_pk_{name}_{kind}", kind, 2, ref)
        mad = lambda a, b, c: (a * b + c) & M16  # noqa: E731
        case(f"v_mad_{kind}", kind, f"{kind} {kind} {kind}", mad, keeps_high=True)
        pair(f"v_pk_mad_{kind}", kind, 3, mad)
        for name, fn in (("min3", min), ("max3", max), ("med3", lambda *x: sorted(x)[1])):
            case(f"v_{name}_{kind}", kind, f"{kind} {kind} {kind}",
                 lambda a, b, c, f=fn, n=number: f(n(a), n(b), n(c)) & M16, keeps_high=True)  # fmt: skip
    case("v_subrev_u16", "u16", "u16 u16", lambda a, b: (b - a) & M16)
    shifts = {"lshlrev_b16": ("u16", lambda a, b: b << (a & 15)), "lshrrev_b16": ("u16", lambda a, b: b >> (a & 15)),
              "ashrrev_i16": ("i16", lambda a, b: _s(b, 16) >> (a & 15)),
              "mul_lo_u16": ("u16", lambda a, b: a * b)}  # fmt: skip
    for name, (kind, fn) in shifts.items():
        ref = lambda a, b, f=fn: f(a, b) & M16  # noqa: E731
        case(f"v_{name}", kind, f"{kind} {kind}", ref)
        pair(f"v_pk_{name}", kind, 2, ref)
    case("v_pack_b32_f16", "u32", "b16 b16", lambda a, b: a | b << 16)
    for name in ("add", "mul", "max", "min"):
        pair(f"v_pk_{name}_f16", "f16", 2, CASES[f"v_{name}_f16"].ref)
    pair("v_pk_fma_f16", "f16", 3, CASES["v_fma_f16"].ref)
    for name, base in (("maximum3", "v_max_f16"), ("minimum3", "v_min_f16")):
        pick = CASES[base].ref
        pair(f"v_pk_{name}_f16", "f16", 3, lambda a, b, c, p=pick: (
            nan(F16) if any(is_nan(x, F16) for x in (a, b, c)) else p(p(a, b), c)))  # fmt: skip


def pair(name: str, kind: str, count: int, ref: Reference) -> None:
    """A packed 16-bit operation: both halves of every source, low half first."""
    both = lambda *words: ref(*[w & M16 for w in words]) | ref(*[w >> 16 for w in words]) << 16  # noqa: E731
    case(name, "pkf16" if kind == "f16" else "u32", " ".join(["u32"] * count), both)


def _fields(word: int, bits: int, is_signed: bool) -> list[int]:
    parts = [word >> k & ((1 << bits) - 1) for k in range(0, 32, bits)]
    return [_s(p, bits) for p in parts] if is_signed else parts


def _dot(bits: int, is_signed: bool) -> Reference:
    def ref(a: int, b: int, c: int) -> int:
        products = zip(_fields(a, bits, is_signed), _fields(b, bits, is_signed), strict=True)
        return (c + sum(x * y for x, y in products)) & M32

    return ref


def _dot_float(kind: str) -> Reference:
    fmt = FORMATS[kind]

    def ref(a: int, b: int, c: int) -> int:
        xs = [to_float(w >> k & M16, fmt) for w in (a, b) for k in (0, 16)]
        addend = to_float(c, F32)
        try:
            exact = sum((Fraction(xs[k]) * Fraction(xs[2 + k]) for k in (0, 1)), Fraction(addend))
        except (OverflowError, ValueError):
            return round_to(xs[0] * xs[2] + xs[1] * xs[3] + addend, F32)
        return round_to(exact, F32)

    return ref


def define_dots() -> None:
    for name, bits in (("dot2", 16), ("dot4", 8), ("dot8", 4)):
        for sign in ("i", "u"):
            case(f"v_{name}_{sign}32_{sign}{bits}", "u32", "u32 u32 u32", _dot(bits, sign == "i"))
        case(f"v_{name}c_i32_i{bits}", "u32", "u32 u32 u32", _dot(bits, True), reads_dst=True)
    for kind in ("f16", "bf16"):
        case(f"v_dot2_f32_{kind}", "f32", f"pk{kind} pk{kind} f32", _dot_float(kind), ulp=1)
        case(f"v_dot2c_f32_{kind}", "f32", f"pk{kind} pk{kind} f32", _dot_float(kind), ulp=1, reads_dst=True)


def define_all() -> dict[str, Any]:
    from isa_references import define_compares, define_conversions, define_floats

    if not CASES:
        define_floats()
        define_compares()
        define_conversions()
        define_integers()
        define_three()
        define_carries()
        define_halves()
        define_dots()
    return CASES
