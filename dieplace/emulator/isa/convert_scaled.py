"""Conversions from and to 8-, 6- and 4-bit floats, with and without a block scale (gfx950 V_CVT_SCALEF32_*).

The scale operand is a float32 of which only the exponent counts: values are multiplied by 2 to the (exponent - 127) when
they are widened and divided by it when they are narrowed (AMD Instinct MI350 ISA guide).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.formats import FP4, values32
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import make_source
from dieplace.emulator.isa.state import F32, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add
from dieplace.emulator.isa.targets import make_target
from dieplace.emulator.isa.vrun import Operation, finish, general_run


def power_of_scale(scale: Any) -> Any:
    """2 to the exponent of a float32, as float32: sign and mantissa are ignored."""
    exponent = (np.asarray(scale, U32) >> U32(23)) & U32(0xFF)
    normal = (exponent << U32(23)).view(F32)
    return np.where(exponent == 0, F32(2.0**-127), normal).astype(F32)


def _build_pk_f32_fp4(inst: Instruction, layout: Layout) -> Step:
    select = inst.bits("op_sel", 3, 0)
    shift = U32(8 * (select[0] + 2 * select[1]))
    table = values32(FP4)

    def fn(word: Any, scale: Any) -> Any:
        byte = np.asarray(word >> shift)
        power = power_of_scale(scale)
        low, high = table[byte & U32(15)] * power, table[(byte >> U32(4)) & U32(15)] * power
        return low.view(U32).astype(U64) | high.view(U32).astype(U64) << U64(32)

    sources = [make_source(inst, layout, operand, "u32") for operand in inst.operands[1:3]]
    target = make_target(inst, layout, inst.operands[0], "u64")
    op = Operation(inst.opcode, ("u64",), ("u32", "u32"), fn)
    return finish(inst, op, sources, [target], general_run(sources, [target], fn))


add("v_cvt_scalef32_pk_f32_fp4", "valu", _build_pk_f32_fp4, ("op_sel",))
