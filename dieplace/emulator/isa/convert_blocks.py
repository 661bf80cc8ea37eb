"""Conversions of 32 values at once from and to the 6-bit formats (gfx950 V_CVT_SCALEF32_PK32_*, _2XPK16_*)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.convert_scaled import (
    NARROW,
    bits16,
    conversion_step,
    power_of_scale,
    register_part,
    scale_source,
)
from dieplace.emulator.isa.formats import Format, bf16_values, encode, values32
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import Source
from dieplace.emulator.isa.state import F32, F64, U32
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.targets import Target, make_target


def _rows(g: Group, key: int, count: int) -> np.ndarray:
    return np.stack([g.u[key + k] for k in range(count)], axis=-1)


def _unpack6(words: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return bits.reshape(*bits.shape[:-1], 32, 6) @ (1 << np.arange(6))


def _pack6(codes: np.ndarray) -> np.ndarray:
    bits = (codes[..., None] >> np.arange(6, dtype=np.uint8)) & np.uint8(1)
    return np.packbits(bits.reshape(*bits.shape[:-2], 192), axis=-1, bitorder="little").view(U32)


def _block_source(inst: Instruction, layout: Layout, operand: Operand, count: int) -> Source:
    key = layout.register(inst, operand, "va", count)
    keys = tuple(range(key, key + count))

    def taint(g: Group) -> Any:
        found = [bits for bits in map(g.taint, keys) if bits is not None]
        return np.bitwise_or.reduce(found) if found else None

    return Source("u32", keys, lambda g: _rows(g, key, count), taint, False)


def _block_targets(inst: Instruction, layout: Layout, count: int) -> list[Target]:
    layout.register(inst, inst.operands[0], "va", count)
    return [make_target(inst, layout, register_part(inst.operands[0], k), "u32") for k in range(count)]


def _spread(words: np.ndarray, count: int) -> tuple[Any, ...]:
    return tuple(words[..., k] for k in range(count))


def _build_widen32(inst: Instruction, layout: Layout, fmt: Format, wide: str) -> Step:
    if len(inst.operands) != 3:
        raise inst.unknown("three operands are expected")
    count = 32 if wide == "f32" else 16
    sources = [_block_source(inst, layout, inst.operands[1], 6), scale_source(inst, layout, inst.operands[2])]
    table = values32(fmt)

    def fn(words: Any, scale: Any) -> Any:
        numbers = table[_unpack6(words)] * np.asarray(power_of_scale(scale))[..., None]
        if wide == "f32":
            return _spread(numbers.view(U32), count)
        return _spread(np.ascontiguousarray(bits16(numbers, wide)).view(U32), count)

    return conversion_step(inst, sources, _block_targets(inst, layout, count), fn)


def _build_narrow32(inst: Instruction, layout: Layout, fmt: Format, wide: str) -> Step:
    """pk32 from sixteen registers of 16-bit values, or 2xpk16 from twice sixteen float32 that interleave."""
    if len(inst.operands) != (4 if wide == "f32" else 3):
        raise inst.unknown(f"{4 if wide == 'f32' else 3} operands are expected")
    sources = [_block_source(inst, layout, operand, 16) for operand in inst.operands[1:-1]]
    sources.append(scale_source(inst, layout, inst.operands[-1]))

    def fn(*words: Any) -> Any:
        if wide == "f32":
            numbers = np.stack([np.ascontiguousarray(w).view(F32) for w in words[:2]], axis=-1)
            numbers = numbers.reshape(*numbers.shape[:-2], 32)
        elif wide == "bf16":
            numbers = bf16_values(np.ascontiguousarray(words[0]).view(np.uint16))
        else:
            numbers = np.ascontiguousarray(words[0]).view(np.float16)
        power = np.asarray(power_of_scale(words[-1]), F64)[..., None]
        return _spread(_pack6(encode(fmt, numbers.astype(F64) / power)), 6)

    return conversion_step(inst, sources, _block_targets(inst, layout, 6), fn)


def _define_blocks() -> None:
    for name in ("fp6", "bf6"):
        fmt = NARROW[name]
        for wide in ("f32", "f16", "bf16"):
            add(f"v_cvt_scalef32_pk32_{wide}_{name}", "valu",
                bound(_build_widen32, fmt, wide))  # fmt: skip
        for wide in ("f16", "bf16"):
            add(f"v_cvt_scalef32_pk32_{name}_{wide}", "valu",
                bound(_build_narrow32, fmt, wide))  # fmt: skip
        add(f"v_cvt_scalef32_2xpk16_{name}_f32", "valu",
            bound(_build_narrow32, fmt, "f32"))  # fmt: skip


_define_blocks()
