"""Mixed-precision fused multiply-add and dot products of packed 8-, 4- and 16-bit values (MI300 ISA guide, VOP3P)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dieplace.emulator.isa.fma import fma
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import CONST
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import Source, make_source
from dieplace.emulator.isa.state import F32, I32, U32
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.targets import make_target
from dieplace.emulator.isa.valu_packed import PACKED
from dieplace.emulator.isa.vrun import Function, Operation, finish, general_run

# ---- mixed precision


def _mix_source(inst: Instruction, layout: Layout, number: int) -> Source:
    """v_fma_mix: op_sel_hi says that the source is a float16 half (chosen by op_sel), else it is float32."""
    half = inst.bits("op_sel", 3, 0)[number]
    is_half = inst.bits("op_sel_hi", 3, 0)[number]
    operand = inst.operands[1 + number]
    kind = "f16" if is_half else "f32"
    key = layout.key(inst, operand, kind)

    def value(g: Group) -> Any:
        if is_half:
            raw = np.uint16(key >> 16 * half & 0xFFFF) if key >= CONST else g.h[2 * key + half]
            number = np.asarray(raw).view(np.float16).astype(F32)
        else:
            number = g.f[key]
        if operand.absolute:
            number = np.abs(number)
        return -number if operand.negate else number

    return Source("f32", (key,), value, lambda g: g.taint(key), False)


def _build_mix(inst: Instruction, layout: Layout, half: int | None) -> Step:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: one fused multiply-add in float32, then perhaps rounded to
    float16.
    """
    if len(inst.operands) != 4:
        raise inst.unknown("v_fma_mix takes three sources")
    sources = [_mix_source(inst, layout, number) for number in range(3)]
    clamp = "clamp" in inst.modifiers

    def fn(a: Any, b: Any, c: Any) -> Any:
        result = fma(a, b, c)
        result = np.clip(np.where(np.isnan(result), F32(0), result), F32(0), F32(1)) if clamp else result
        return result if half is None else result.astype(np.float16)

    kind = "f32" if half is None else "f16"
    target = make_target(inst, layout, inst.operands[0], kind, half or 0, keep_high=True)
    op = Operation(inst.opcode, (kind,), ("f32",) * 3, fn)
    return finish(inst, op, sources, [target], general_run(sources, [target], fn))


# ---- dot products


def _parts(word: Any, bits: int, signed: bool) -> list[Any]:
    """The fields of a 32-bit word, low first, as int32 (or int64 for unsigned accumulation)."""
    fields = []
    for shift in range(0, 32, bits):
        if signed:
            fields.append((word.view(I32) << I32(32 - bits - shift)) >> I32(32 - bits))
        else:
            fields.append((word >> U32(shift) & U32((1 << bits) - 1)).view(I32))
    return fields


def _dot(bits: int, signed: bool, clamp: bool) -> Function:
    def fn(a: Any, b: Any, c: Any) -> Any:
        a, b = np.asarray(a), np.asarray(b)
        pairs = zip(_parts(a, bits, signed), _parts(b, bits, signed), strict=True)
        total = c.view(I32).astype(np.int64) if signed else np.asarray(c).astype(np.int64)
        for x, y in pairs:
            total = total + x.astype(np.int64) * y.astype(np.int64)
        if clamp:
            total = np.clip(total, -(2**31), 2**31 - 1) if signed else np.clip(total, 0, 2**32 - 1)
        return (total & 0xFFFFFFFF).astype(U32)

    return fn


def _dot_f16(a: Any, b: Any, c: Any) -> Any:
    """v_dot2_f32_f16: products and sum in float64, rounded to float32 (hardware keeps at least float32 precision)."""
    a, b = (np.ascontiguousarray(x).view(np.float16).reshape(*x.shape, 2).astype(np.float64) for x in (a, b))
    return ((a * b).sum(axis=-1) + np.asarray(c, F32).astype(np.float64)).astype(F32)


def _dot_bf16(a: Any, b: Any, c: Any) -> Any:
    """v_dot2_f32_bf16, summed like `_dot_f16`."""
    low = [(x << U32(16)).view(F32).astype(np.float64) for x in (a, b)]
    high = [(x & U32(0xFFFF0000)).view(F32).astype(np.float64) for x in (a, b)]
    return (low[0] * low[1] + high[0] * high[1] + np.asarray(c, F32).astype(np.float64)).astype(F32)


def _build_dot(inst: Instruction, layout: Layout, fn: Any, kinds: tuple[str, str], accumulates: bool) -> Step:
    operands = [*inst.operands, inst.operands[0]] if accumulates else list(inst.operands)
    if len(operands) != 4:
        raise inst.unknown("a dot product takes two sources and an addend")
    if any(name != "clamp" for name in inst.modifiers):
        default = {"op_sel_hi": (1, 1, 1), "op_sel": (0, 0, 0), "neg_lo": (0, 0, 0), "neg_hi": (0, 0, 0)}
        for name, value in inst.modifiers.items():
            if name != "clamp" and value not in (default[name], default[name][:2], (*default[name][:2], 0)):
                raise inst.unknown(f"modifier {name} on a dot product is not modelled")
    made = fn("clamp" in inst.modifiers) if kinds[0] == "u32" else fn
    sources = [make_source(inst, layout, operand, kind)
               for operand, kind in zip(operands[1:], ("u32", "u32", kinds[1]), strict=True)]  # fmt: skip
    target = make_target(inst, layout, operands[0], kinds[0])
    op = Operation(inst.opcode, (kinds[0],), ("u32", "u32", kinds[1]), made)
    return finish(inst, op, sources, [target], general_run(sources, [target], made))


def _define_mixed() -> None:
    for name, half in (("v_fma_mix_f32", None), ("v_fma_mixlo_f16", 0), ("v_fma_mixhi_f16", 1)):
        add(name, "valu", bound(_build_mix, half), ("op_sel", "op_sel_hi", "clamp"))


def _define_dots() -> None:
    modifiers = (*PACKED, "clamp")
    for name, bits in (("dot4", 8), ("dot8", 4), ("dot2", 16)):
        suffix = {8: "8", 4: "4", 16: "16"}[bits]
        for sign in ("i", "u"):
            make = partial(_dot, bits, sign == "i")
            add(f"v_{name}_{sign}32_{sign}{suffix}", "valu",
                bound(_build_dot, make, ("u32", "u32"), False), modifiers)  # fmt: skip
    for name, fn in (("f16", _dot_f16), ("bf16", _dot_bf16)):
        add(f"v_dot2_f32_{name}", "valu",
            bound(_build_dot, fn, ("f32", "f32"), False), modifiers)  # fmt: skip
        add(f"v_dot2c_f32_{name} v_dot2c_f32_{name}_e32", "valu",
            bound(_build_dot, fn, ("f32", "f32"), True))  # fmt: skip
    for name, bits, suffix in (("dot4c", 8, "i8"), ("dot8c", 4, "i4"), ("dot2c", 16, "i16")):
        make = partial(_dot, bits, True)
        add(f"v_{name}_i32_{suffix} v_{name}_i32_{suffix}_e32", "valu",
            bound(_build_dot, make, ("u32", "u32"), True))  # fmt: skip


_define_mixed()
_define_dots()
