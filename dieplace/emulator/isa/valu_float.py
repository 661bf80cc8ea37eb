"""Floating-point vector operations on float32, float16 and float64 lanes.

Arithmetic is IEEE round-to-nearest-even with denormals (the mode FlyDSL's kernels request). Transcendental operations
are correctly rounded from float64, where hardware is within one unit in the last place (AMD Instinct MI300 ISA guide,
VOP1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dieplace.emulator.isa.fma import TORCH_IS_FUSED, fma, fma_by_float64
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import F32, F64, I32, U32, U64
from dieplace.emulator.isa.table import Layout, Run, Step, add, bound
from dieplace.emulator.isa.valu import build_valu, define
from dieplace.emulator.isa.vrun import VOP3, Operation, finish

F16, U16 = np.float16, np.uint16
TWO_PI = 6.283185307179586


def maximum_number(a: Any, b: Any) -> Any:
    """IEEE maxNum: the number when one operand is a NaN, +0 above -0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum_number(a: Any, b: Any) -> Any:
    """IEEE minNum: the number when one operand is a NaN, -0 below +0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def _median(a: Any, b: Any, c: Any) -> Any:
    low = np.fmin(np.fmin(a, b), c)
    middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, middle)


def _from64(fn: Any, dtype: Any) -> Any:
    return lambda a: fn(np.asarray(a, F64)).astype(dtype)


def _sine(fn: Any) -> Any:
    return lambda a: fn(np.asarray(a, F64) * TWO_PI)


def _fract(a: Any) -> Any:
    below_one = np.nextafter(np.asarray(1, a.dtype), np.asarray(0, a.dtype))
    return np.minimum(a - np.floor(a), below_one)


def ldexp(a: Any, e: Any) -> Any:
    """a times 2 to the e, rounded once to the type of a."""
    clipped = np.clip(np.asarray(e, np.int64), -4200, 4200).astype(I32)
    if a.dtype == F64:
        return np.ldexp(a, clipped)
    return np.ldexp(np.asarray(a, F64), np.clip(clipped, -600, 600)).astype(a.dtype)


def fma_half(a: Any, b: Any, c: Any) -> Any:
    """float16 a * b + c rounded once: exact product in float64 and a sum whose error cannot reach a float16 tie."""
    wide = np.asarray(a, F64) * np.asarray(b, F64)
    total = np.asarray(wide + np.asarray(c, F64))
    return total.astype(F16)


def fma_double(a: Any, b: Any, c: Any) -> Any:
    """float64 a * b + c rounded once, through exact rational arithmetic one lane at a time."""
    from dieplace.emulator.isa.exact import fma64

    a, b, c = np.broadcast_arrays(a, b, c)
    return fma64(a, b, c)


def _legacy_product(a: Any, b: Any) -> Any:
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def frexp_mantissa(a: Any) -> Any:
    """V_FREXP_MANT: in [0.5, 1), infinities and NaNs unchanged."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a).astype(a.dtype)


def frexp_exponent(a: Any) -> Any:
    """V_FREXP_EXP: 0 for zeros, infinities and NaNs."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


# Classes of V_CMP_CLASS, bit by bit (MI300 ISA guide): signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, ...
def is_class(a: Any, wanted: Any) -> Any:
    """V_CMP_CLASS on float16, float32 or float64 lanes."""
    dtype = np.asarray(a).dtype
    raw, exponent, fraction = {2: (U16, 0x7C00, 0x3FF), 4: (U32, 0x7F800000, 0x7FFFFF),
                               8: (U64, 0x7FF << 52, (1 << 52) - 1)}[dtype.itemsize]  # fmt: skip
    bits = np.asarray(a).view(raw)
    e, m = bits & raw(exponent), bits & raw(fraction)
    quiet = (m & raw((fraction + 1) >> 1)) != 0
    nan, infinite = (e == exponent) & (m != 0), (e == exponent) & (m == 0)
    zero, denormal = (e == 0) & (m == 0), (e == 0) & (m != 0)
    normal = ~(nan | infinite | zero | denormal)
    negative = np.signbit(a)
    kinds = (nan & ~quiet, nan & quiet, infinite & negative, normal & negative, denormal & negative, zero & negative,
             zero & ~negative, denormal & ~negative, normal & ~negative, infinite & ~negative)  # fmt: skip
    found = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(wanted)), bool)
    for bit, kind in enumerate(kinds):
        found |= kind & ((np.asarray(wanted, U32) >> U32(bit) & U32(1)) != 0)
    return found


def _define_unary(kind: str, dtype: Any) -> None:
    for name, fn in (("rcp", lambda a: 1 / a), ("rsq", lambda a: 1 / np.sqrt(a)), ("sqrt", np.sqrt), ("exp", np.exp2),
                     ("log", np.log2), ("sin", _sine(np.sin)), ("cos", _sine(np.cos))):  # fmt: skip
        if kind != "f64" or name in ("rcp", "rsq", "sqrt"):
            define(f"v_{name}_{kind}", kind, kind, _from64(fn, dtype), "1")
    for name, rounded in (("rndne", np.rint), ("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc)):
        define(f"v_{name}_{kind}", kind, kind, rounded, "1")
    define(f"v_fract_{kind}", kind, kind, _fract, "1")
    define(f"v_frexp_mant_{kind}", kind, kind, frexp_mantissa, "1")
    exponent = "i16" if kind == "f16" else "i32"
    define(f"v_frexp_exp_{exponent}_{kind}", exponent, kind, frexp_exponent, "1")


def _define_f32() -> None:
    define("v_rcp_iflag_f32", "f32", "f32", _from64(lambda a: 1 / a, F32), "1")
    define("v_add_f32", "f32", "f32 f32", np.add, "2")
    define("v_sub_f32", "f32", "f32 f32", np.subtract, "2")
    define("v_subrev_f32", "f32", "f32 f32", lambda a, b: b - a, "2")
    define("v_mul_f32", "f32", "f32 f32", np.multiply, "2")
    define("v_mul_legacy_f32", "f32", "f32 f32", _legacy_product, "3")
    define("v_max_f32", "f32", "f32 f32", maximum_number, "2")
    define("v_min_f32", "f32", "f32 f32", minimum_number, "2")
    define("v_ldexp_f32", "f32", "f32 i32", ldexp)
    define("v_max3_f32", "f32", "f32 f32 f32", lambda a, b, c: maximum_number(maximum_number(a, b), c))
    define("v_min3_f32", "f32", "f32 f32 f32", lambda a, b, c: minimum_number(minimum_number(a, b), c))
    define("v_med3_f32", "f32", "f32 f32 f32", _median)
    define("v_maximum3_f32", "f32", "f32 f32 f32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define("v_minimum3_f32", "f32", "f32 f32 f32", lambda a, b, c: np.minimum(np.minimum(a, b), c))


def _define_f16() -> None:
    for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        define(f"v_{name}_f16", "f16", "f16 f16", fn, "2")
    define("v_subrev_f16", "f16", "f16 f16", lambda a, b: b - a, "2")
    define("v_max_f16", "f16", "f16 f16", maximum_number, "2")
    define("v_min_f16", "f16", "f16 f16", minimum_number, "2")
    define("v_fma_f16", "f16", "f16 f16 f16", fma_half, keep_high=True)
    define("v_fmac_f16", "f16", "f16 f16 f16", fma_half, "2", reads_dst=True)
    define("v_ldexp_f16", "f16", "f16 i16", ldexp, "2")
    define("v_max3_f16", "f16", "f16 f16 f16", lambda a, b, c: maximum_number(maximum_number(a, b), c), keep_high=True)
    define("v_min3_f16", "f16", "f16 f16 f16", lambda a, b, c: minimum_number(minimum_number(a, b), c), keep_high=True)
    define("v_med3_f16", "f16", "f16 f16 f16", _median, keep_high=True)


def _define_f64() -> None:
    define("v_add_f64", "f64", "f64 f64", np.add)
    define("v_mul_f64", "f64", "f64 f64", np.multiply)
    define("v_max_f64", "f64", "f64 f64", maximum_number)
    define("v_min_f64", "f64", "f64 f64", minimum_number)
    define("v_fma_f64", "f64", "f64 f64 f64", fma_double)
    define("v_fmac_f64", "f64", "f64 f64 f64", fma_double, "2", reads_dst=True)
    define("v_ldexp_f64", "f64", "f64 i32", ldexp)


# ---- fused multiply-add on rows, the instruction that decode kernels execute most


def _fma_run(keys: tuple[int, int, int], d: int) -> Run:
    a, b, c = keys

    def fused(g: Group) -> None:
        tensors = g.t
        if g.full:
            torch.addcmul(tensors[c], tensors[a], tensors[b], out=tensors[d])
        else:
            np.copyto(g.f[d], torch.addcmul(tensors[c], tensors[a], tensors[b]).numpy(), where=g.mask)

    def separate(g: Group) -> None:
        values = g.f
        result = fma_by_float64(values[a], values[b], values[c])
        if g.full:
            values[d][...] = result
        else:
            np.copyto(values[d], result, where=g.mask)

    return fused if TORCH_IS_FUSED else separate


FMA = Operation("v_fma_f32", ("f32",), ("f32", "f32", "f32"), fma)
FMAC = Operation("v_fmac_f32", ("f32",), ("f32", "f32", "f32"), fma, reads_dst=True)
FMAMK = Operation("v_fmamk_f32", ("f32",), ("f32", "f32", "f32"), fma)


def build_fma(inst: Instruction, layout: Layout, op: Operation) -> Step:
    """v_fma_f32 and its relatives; the plain form works on whole rows in place."""
    if (
        not inst.modifiers
        and not any(o.is_modified for o in inst.operands)
        and not inst.opcode.endswith(("dpp", "sdwa"))
    ):
        return finish_fma(inst, layout, op)
    return build_valu(inst, layout, op)


def finish_fma(inst: Instruction, layout: Layout, op: Operation) -> Step:
    """The plain form: sources and destination are whole registers."""
    from dieplace.emulator.isa.sources import make_source
    from dieplace.emulator.isa.targets import make_target

    operands = [*inst.operands, inst.operands[0]] if op.reads_dst else list(inst.operands)
    if len(operands) != 4:
        raise inst.unknown(f"{len(operands)} operands where {4 - op.reads_dst} are expected")
    sources = [make_source(inst, layout, operand, "f32") for operand in operands[1:]]
    target = make_target(inst, layout, operands[0], "f32")
    keys = (sources[0].keys[0], sources[1].keys[0], sources[2].keys[0])
    return finish(inst, op, sources, [target], _fma_run(keys, target.keys[0]))


def _define_fma() -> None:
    add("v_fma_f32 v_fma_f32_e64", "valu", bound(build_fma, FMA), VOP3)
    add("v_fmac_f32 v_fmac_f32_e32 v_fmac_f32_e64", "valu", bound(build_fma, FMAC), VOP3)
    add("v_fmaak_f32 v_fmamk_f32", "valu", bound(build_fma, FMAMK))
    from dieplace.emulator.isa.lanes import DPP_MODIFIERS

    add("v_fmac_f32_dpp", "valu", bound(build_valu, FMAC), DPP_MODIFIERS)


_define_unary("f32", F32)
_define_unary("f16", F16)
_define_unary("f64", F64)
_define_f32()
_define_f16()
_define_f64()
_define_fma()
