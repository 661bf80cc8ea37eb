"""Vector operations on 64-bit lanes, register pairs, and the division helpers."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.fma import fma
from dieplace.emulator.isa.operands import VCC, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import F32, F64, I64, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.valu import build_valu, define
from dieplace.emulator.isa.valu_float import fma_double, ldexp
from dieplace.emulator.isa.vrun import VOP3, Operation


def _shift(a: Any) -> Any:
    return np.asarray(a & U32(63), U64)


def _mad_u64(a: Any, b: Any, c: Any) -> Any:
    product = np.asarray(a, U64) * np.asarray(b, U64)
    total = product + c
    return total, total < product


def _mad_i64(a: Any, b: Any, c: Any) -> Any:
    product = np.asarray(a, I64) * np.asarray(b, I64)
    total = product + c
    return total, ((product ^ total) & (c ^ total)) < 0


# ---- division: V_DIV_SCALE, reciprocal, Newton steps, V_DIV_FMAS, V_DIV_FIXUP


def _exponent(a: Any, dtype: Any) -> Any:
    raw: Any = U32 if dtype == F32 else U64
    shift, mask = (23, 0xFF) if dtype == F32 else (52, 0x7FF)
    return (np.ascontiguousarray(a).view(raw) >> raw(shift) & raw(mask)).astype(I64)


def _div_scale(dtype: Any) -> Any:
    """Scale src0 (the denominator src1 or the numerator src2) so that no step of the division leaves the normal range.

    Rules in the order of the MI300 ISA guide (V_DIV_SCALE_F32, _F64). Where both 1/d and n/d are denormal the guide
    prints a factor that overflows the denominator; the inverse factor is used, the only one with which the quotient
    comes out.
    """
    power, far_gap, tiny = (64, 96, 23) if dtype == F32 else (128, 768, 53)
    up, down = dtype(2.0**power), dtype(2.0**-power)
    smallest = np.finfo(dtype).tiny

    def scale(s0: Any, s1: Any, s2: Any) -> Any:
        s0, s1, s2 = np.broadcast_arrays(s0, s1, s2)
        e1, e2 = _exponent(s1, dtype), _exponent(s2, dtype)
        wide1, wide2 = s1.astype(np.longdouble), s2.astype(np.longdouble)
        tiny_quotient, tiny_inverse = np.abs(wide2 / wide1) < smallest, np.abs(1 / wide1) < smallest
        is_denominator, is_numerator = s0 == s1, s0 == s2
        cases = [(s1 == 0) | (s2 == 0), e2 - e1 >= far_gap, e1 == 0, tiny_inverse & tiny_quotient, tiny_inverse,
                 tiny_quotient, e2 <= tiny]  # fmt: skip
        raised, lowered = np.where(is_denominator, s0 * up, s0), np.where(is_denominator, s0 * down, s0)
        results = [dtype(np.nan), raised, s0 * up, lowered, s0 * down, np.where(is_numerator, s0 * up, s0), s0 * up]
        flags = [np.False_, np.True_, np.False_, np.True_, np.False_, np.True_, np.False_]
        return np.select(cases, results, s0).astype(dtype), np.select(cases, flags, np.False_).astype(bool)

    return scale


def _div_fmas(dtype: Any) -> Any:
    """Fused multiply-add that undoes the scaling: upwards for a quotient above 1, downwards below (src2 is the
    quotient).
    """
    power, bias = (64, 127) if dtype == F32 else (128, 1023)
    fused = fma if dtype == F32 else fma_double

    def fmas(a: Any, b: Any, c: Any, scaled: Any) -> Any:
        if not np.any(scaled):
            return fused(a, b, c)
        a, b, c = np.broadcast_arrays(a, b, c)
        shift = np.where(_exponent(c, dtype) > bias, power, -power)
        return np.where(scaled, ldexp_fused(a, b, c, shift, dtype), fused(a, b, c)).astype(dtype)

    return fmas


def ldexp_fused(a: Any, b: Any, c: Any, shift: Any, dtype: Any) -> Any:
    """The scaled result rounded once, also where it is denormal: scaling c and one factor first is exact."""
    if dtype == F64:
        return ldexp(fma_double(a, b, c), shift)
    total = a.astype(F64) * b.astype(F64) + c.astype(F64)
    return np.ldexp(total, shift.astype(np.int32)).astype(F32)


def _build_fmas(inst: Instruction, layout: Layout, op: Operation) -> Step:
    operands = (*inst.operands, Operand("s", "vcc", VCC, 2))
    return build_valu(Instruction(inst.opcode, operands, inst.modifiers, inst.text, inst.line), layout, op)


def _define_fmas(kind: str, dtype: Any) -> None:
    op = Operation(f"v_div_fmas_{kind}", (kind,), (kind, kind, kind, "mask"), _div_fmas(dtype))
    add(f"v_div_fmas_{kind} v_div_fmas_{kind}_e64", "valu", bound(_build_fmas, op), VOP3)


def _div_fixup(dtype: Any) -> Any:
    """Special cases of n / d given the quotient estimate q, in the order of the ISA guide.

    The guide's overflow rule names an exponent that cannot occur there; a NaN estimate of finite operands is what an
    overflowing Newton step leaves, and becomes infinity.
    """
    gap = {np.float16: None, F32: -150, F64: -1075}[dtype]

    def fixup(q: Any, d: Any, n: Any) -> Any:
        negative = np.signbit(d) ^ np.signbit(n)
        infinity, zero = dtype(np.inf), dtype(0)
        magnitude = np.where(np.isnan(q), infinity, np.abs(q))
        if gap is not None:
            magnitude = np.where(_exponent(n, dtype) - _exponent(d, dtype) < gap, zero, magnitude)
        magnitude = np.where((n == 0) | np.isinf(d), zero, magnitude)
        magnitude = np.where((d == 0) | np.isinf(n), infinity, magnitude)
        result = np.where(negative, -magnitude, magnitude)
        result = np.where(((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n)), dtype(-np.nan), result)
        result = np.where(np.isnan(d), d, result)
        return np.where(np.isnan(n), n, result).astype(dtype)

    return fixup


define("v_mov_b64", "u64", "u64", np.positive, "1", taint="move", data=(0,))
define("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, b, c: (a << np.asarray(b & U32(7), U64)) + c, taint="up")
define("v_lshlrev_b64", "u64", "u32 u64", lambda a, b: b << _shift(a), taint="move", data=(1,))
define("v_lshrrev_b64", "u64", "u32 u64", lambda a, b: b >> _shift(a), taint="move", data=(1,))
define("v_ashrrev_i64", "i64", "u32 i64", lambda a, b: b >> _shift(a).astype(I64), taint="move", data=(1,))
define("v_mad_u64_u32", "u64 mask", "u32 u32 u64", _mad_u64, taint="up")
define("v_mad_i64_i32", "i64 mask", "i32 i32 i64", _mad_i64, taint="up")
define("v_div_fixup_f16", "f16", "f16 f16 f16", _div_fixup(np.float16), keep_high=True)
for _kind, _dtype in (("f32", F32), ("f64", F64)):
    define(f"v_div_scale_{_kind}", f"{_kind} mask", f"{_kind} {_kind} {_kind}", _div_scale(_dtype))
    _define_fmas(_kind, _dtype)
    define(f"v_div_fixup_{_kind}", _kind, f"{_kind} {_kind} {_kind}", _div_fixup(_dtype))
