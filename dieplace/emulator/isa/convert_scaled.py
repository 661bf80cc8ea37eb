"""Conversions from and to 8-, 6- and 4-bit floats, with and without a block scale (gfx950 V_CVT_SCALEF32_*).

The scale operand is a float32 of which only the exponent counts: values are multiplied by 2 to the (exponent - 127)
when they are widened and divided by it when they are narrowed. Narrowing rounds to nearest even; beyond the largest
finite value FP8 gives NaN, BF8 infinity, and the 4- and 6-bit formats saturate (AMD Instinct MI350 ISA guide;
FP16_OVFL is off). The stochastic forms (`_sr_`) are not modelled: the guide does not define their rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dieplace.emulator.isa.formats import BF6, BF8, FP4, FP6, FP8, Format, bf16_bits, bf16_values, encode, values32
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import Source, make_source
from dieplace.emulator.isa.state import F32, F64, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.targets import Target, assign, make_target
from dieplace.emulator.isa.vrun import Operation, finish, general_run

NARROW: dict[str, Format] = {"fp8": FP8, "bf8": BF8, "fp4": FP4, "fp6": FP6, "bf6": BF6}


def power_of_scale(scale: Any) -> Any:
    """2 to the exponent of a float32 given by its bits, as float32; sign and mantissa are ignored, exponent 255 is
    NaN.
    """
    exponent = np.asarray(scale, U32) & U32(0x7F800000)
    power = np.where(exponent == 0, F32(2.0**-127), exponent.view(F32))
    return np.where(exponent == U32(0x7F800000), F32(np.nan), power).astype(F32)


@cache
def _pairs(fmt: Format) -> np.ndarray:
    """Two float32 values for every byte (fp4) or 16-bit word (fp8, bf8) of packed values, as uint64, low value
    first.
    """
    table = values32(fmt)
    codes = np.arange(1 << 2 * fmt.bits)
    both = np.stack([table[codes & ((1 << fmt.bits) - 1)], table[codes >> fmt.bits]], axis=-1)
    return np.ascontiguousarray(both, F32).view(U64)[:, 0]


def _sources(inst: Instruction, layout: Layout, first: int, kinds: tuple[str, ...]) -> list[Source]:
    if len(inst.operands) != first + len(kinds):
        raise inst.unknown(f"{len(inst.operands)} operands where {first + len(kinds)} are expected")
    return [
        make_source(inst, layout, operand, kind) for operand, kind in zip(inst.operands[first:], kinds, strict=True)
    ]


def scale_source(inst: Instruction, layout: Layout, operand: Operand) -> Source:
    """The scale as the bits of a float32: an inline 1.0 is 0x3f800000."""
    source = make_source(inst, layout, operand, "f32")
    return Source("u32", source.keys, lambda g: np.asarray(source.value(g)).view(U32), source.taint, False)


def register_part(operand: Operand, offset: int, count: int = 1) -> Operand:
    return Operand(operand.kind, operand.text, operand.index + offset, count)


def field_target(inst: Instruction, layout: Layout, operand: Operand, shift: int, width: int) -> Target:
    """A bit field of a register; the other bits keep their value."""
    key = layout.register(inst, operand, "va", 1)
    field = U32(((1 << width) - 1) << shift)

    def write(g: Group, value: Any, mask: Any) -> None:
        row = g.u[key]
        assign(row, (row & ~field) | (np.asarray(value, U32) << U32(shift) & field), mask)

    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        old = g.taint(key)
        new = U32(0) if bits is None else np.where(np.asarray(bits) != 0, field, U32(0))
        g.set_taint(key, new if old is None else new | (old & ~field), mask, origin)

    return Target("u32", (key,), write, taint)


def conversion_step(inst: Instruction, sources: list[Source], targets: list[Target], fn: Any) -> Step:
    op = Operation(inst.opcode, ("b32",) * len(targets), ("u32",) * len(sources), fn)
    return finish(inst, op, sources, targets, general_run(sources, targets, fn))


# ---- widening: one or two narrow values of a register to float32, float16 or bfloat16


def _build_widen_pair(inst: Instruction, layout: Layout, fmt: Format, wide: str, scaled: bool) -> Step:
    """Two values; op_sel picks the 16-bit word (8-bit formats) or the byte (fp4) that holds them."""
    select = inst.bits("op_sel", 4, 0)
    shift = U32(16 * select[0] if fmt.bits == 8 else 8 * (select[0] + 2 * select[1]))
    low, table = U32((1 << 2 * fmt.bits) - 1), _pairs(fmt)
    sources = _sources(inst, layout, 1, ("u32", "u32") if scaled else ("u32",))
    if scaled:
        sources[1] = scale_source(inst, layout, inst.operands[2])

    def both(word: Any, *scale: Any) -> Any:
        found = table.take(np.asarray(word >> shift & low, np.int64))
        pair = np.asarray(found).reshape(*np.shape(found), 1).view(F32)
        return pair * np.asarray(power_of_scale(scale[0]))[..., None] if scale else pair

    if wide == "f32":
        targets = [make_target(inst, layout, register_part(inst.operands[0], k), "f32") for k in (0, 1)]
        layout.register(inst, inst.operands[0], "va", 2)

        def fn(*words: Any) -> Any:
            pair = both(*words)
            return pair[..., 0], pair[..., 1]

        return conversion_step(inst, sources, targets, fn)
    target = make_target(inst, layout, inst.operands[0], "u32")
    return conversion_step(inst, sources, [target], lambda *words: _join(both(*words), wide))


def bits16(number: Any, wide: str) -> Any:
    return bf16_bits(number) if wide == "bf16" else np.asarray(number, F32).astype(np.float16).view(np.uint16)


def _join(pair: Any, wide: str) -> Any:
    low, high = bits16(pair[..., 0], wide), bits16(pair[..., 1], wide)
    return low.astype(U32) | high.astype(U32) << U32(16)


def _build_widen_one(inst: Instruction, layout: Layout, fmt: Format, wide: str, scaled: bool) -> Step:
    """One value; op_sel picks the byte, and for float16 results the half that is written."""
    select = inst.bits("op_sel", 4, 0)
    byte = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "DWORD": 0}.get(
        str(inst.modifiers.get("src0_sel", "")), select[0] + 2 * select[1])  # fmt: skip
    shift, table = U32(8 * byte), values32(fmt)
    sources = _sources(inst, layout, 1, ("u32", "u32") if scaled else ("u32",))
    if scaled:
        sources[1] = scale_source(inst, layout, inst.operands[2])

    def number(word: Any, *scale: Any) -> Any:
        found = table[np.asarray(word >> shift & U32(255))]
        return found * power_of_scale(scale[0]) if scale else found

    if wide == "f32":
        return conversion_step(inst, sources, [make_target(inst, layout, inst.operands[0], "f32")], number)
    target = field_target(inst, layout, inst.operands[0], 16 * _destination_half(inst), 16)
    return conversion_step(inst, sources, [target], lambda *words: bits16(number(*words), wide).astype(U32))


def _destination_half(inst: Instruction) -> int:
    """The last entry of op_sel, whether or not the text spells the unused third source (LLVM, gfx950 MC support)."""
    given = inst.bits("op_sel", 0, 0)
    return given[-1] if len(given) >= 3 else 0


# ---- narrowing: two values to the low or high half (8-bit) or to one byte (fp4) of a register


def _narrow_pair(fmt: Format, first: Any, second: Any) -> Any:
    low, high = (encode(fmt, x, saturate=False).astype(U32) for x in np.broadcast_arrays(first, second))
    return low | high << U32(fmt.bits)


def _build_narrow_pair(inst: Instruction, layout: Layout, fmt: Format, wide: str, scaled: bool) -> Step:
    select = inst.bits("op_sel", 4, 0)
    place = 16 * _destination_half(inst) if fmt.bits == 8 else 8 * (select[2] + 2 * select[3])
    if wide == "f32":
        sources = _sources(inst, layout, 1, ("f32", "f32", "u32") if scaled else ("f32", "f32"))
    else:
        sources = _sources(inst, layout, 1, ("u32", "u32"))
    if scaled:
        sources[-1] = scale_source(inst, layout, inst.operands[-1])

    def fn(*words: Any) -> Any:
        power = np.asarray(power_of_scale(words[-1]), F64) if scaled else F64(1)
        first, second = words[:2] if wide == "f32" else _halves(words[0], wide)
        return _narrow_pair(fmt, np.asarray(first, F64) / power, np.asarray(second, F64) / power)

    target = field_target(inst, layout, inst.operands[0], place, 2 * fmt.bits)
    return conversion_step(inst, sources, [target], fn)


def _halves(word: Any, wide: str) -> tuple[Any, Any]:
    low, high = np.asarray(word & U32(0xFFFF), np.uint16), np.asarray(word >> U32(16)).astype(np.uint16)
    if wide == "bf16":
        return bf16_values(low), bf16_values(high)
    return low.view(np.float16), high.view(np.float16)


def _define_pairs() -> None:
    for name in ("fp8", "bf8", "fp4"):
        fmt = NARROW[name]
        for wide in ("f32", "f16", "bf16"):
            add(f"v_cvt_scalef32_pk_{wide}_{name}", "valu",
                bound(_build_widen_pair, fmt, wide, True), ("op_sel",))  # fmt: skip
            add(f"v_cvt_scalef32_pk_{name}_{wide}", "valu",
                bound(_build_narrow_pair, fmt, wide, True), ("op_sel",))  # fmt: skip


def _define_singles() -> None:
    for name in ("fp8", "bf8"):
        fmt = NARROW[name]
        for wide in ("f32", "f16"):
            add(f"v_cvt_scalef32_{wide}_{name}", "valu",
                bound(_build_widen_one, fmt, wide, True), ("op_sel",))  # fmt: skip
        add(f"v_cvt_pk_{name}_f32", "valu",
            bound(_build_narrow_pair, fmt, "f32", False), ("op_sel",))  # fmt: skip
        for suffix, modifiers in (("", ("op_sel",)), ("_e32", ()), ("_e64", ("op_sel",)), ("_sdwa", ("src0_sel",))):
            add(f"v_cvt_f32_{name}{suffix}", "valu",
                bound(_build_widen_one, fmt, "f32", False), modifiers)  # fmt: skip
            add(f"v_cvt_pk_f32_{name}{suffix}", "valu",
                bound(_build_widen_word, fmt), modifiers)  # fmt: skip


def _build_widen_word(inst: Instruction, layout: Layout, fmt: Format) -> Step:
    """v_cvt_pk_f32_fp8: the word comes from op_sel, or from src0_sel in the SDWA form."""
    if "src0_sel" in inst.modifiers:
        word = int(str(inst.modifiers["src0_sel"]) == "WORD_1")
        inst = Instruction(inst.opcode, inst.operands, {"op_sel": (word,)}, inst.text, inst.line)
    return _build_widen_pair(inst, layout, fmt, "f32", False)


_define_pairs()
_define_singles()
