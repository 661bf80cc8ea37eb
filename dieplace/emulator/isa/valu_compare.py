"""Vector comparisons: V_CMP_* to a lane mask and V_CMPX_* to EXEC as well (AMD Instinct MI300 ISA guide, VOPC)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.operands import EXEC, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import WIDE
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.valu import build_valu
from dieplace.emulator.isa.valu_float import is_class
from dieplace.emulator.isa.vrun import VOP3, Operation


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


def _constant(value: bool) -> Any:
    return lambda a, b: np.full(np.broadcast_shapes(np.shape(a), np.shape(b)), value)


INTEGER = {
    "f": _constant(False), "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ne": np.not_equal,
    "ge": np.greater_equal, "t": _constant(True),
}  # fmt: skip
FLOAT = {
    "f": _constant(False), "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b), "ge": np.greater_equal, "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered, "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b), "neq": np.not_equal, "nlt": lambda a, b: ~(a < b),
    "tru": _constant(True),
}  # fmt: skip
CMP_SDWA = frozenset({"src0_sel", "src1_sel"})


def _build_compare(inst: Instruction, layout: Layout, op: Operation) -> Step:
    return build_valu(inst, layout, op)


def _build_cmpx(inst: Instruction, layout: Layout, op: Operation) -> Step:
    """V_CMPX writes its mask to the named pair and to EXEC."""
    execute = Operand("s", "exec", EXEC, 2)
    operands = (inst.operands[0], execute, *inst.operands[1:])
    both = Operation(op.name, ("mask", "mask"), op.src, _twice(op.fn))
    return build_valu(Instruction(inst.opcode, operands, inst.modifiers, inst.text, inst.line), layout, both)


def _twice(fn: Any) -> Any:
    def result(*values: Any) -> Any:
        mask = fn(*values)
        return mask, mask

    return result


def _define(name: str, src: tuple[str, ...], fn: Any) -> None:
    compare = Operation(f"v_cmp_{name}", ("mask",), src, fn)
    for suffix, modifiers in (("", VOP3), ("_e32", frozenset()), ("_e64", VOP3), ("_sdwa", CMP_SDWA)):
        if suffix == "_sdwa" and any(kind in WIDE for kind in src):
            continue
        add(f"v_cmp_{name}{suffix}", "valu", bound(_build_compare, compare), modifiers)
        add(f"v_cmpx_{name}{suffix}", "valu", bound(_build_cmpx, compare), modifiers)


for _kind in ("u32", "i32", "u64", "i64", "u16", "i16"):
    for _name, _fn in INTEGER.items():
        _define(f"{_name}_{_kind}", (_kind, _kind), _fn)
for _kind in ("f32", "f16", "f64"):
    for _name, _fn in FLOAT.items():
        _define(f"{_name}_{_kind}", (_kind, _kind), _fn)
    _define(f"class_{_kind}", (_kind, "u32"), is_class)
