"""How a vector ALU instruction is built from a description: operand types, a function on arrays, and a taint rule.

`define` registers one operation under all its encodings (VOP3, _e32, _e64, _dpp, _sdwa). The function sees numpy arrays
[n, 64] (or [n, 1], or scalars) of the declared types and returns one array for each destination.
"""

from __future__ import annotations

from dieplace.emulator.isa.lanes import DPP_MODIFIERS, build_dpp
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import HALF, WIDE, make_source
from dieplace.emulator.isa.subword import SDWA_MODIFIERS, build_sdwa
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.targets import make_target
from dieplace.emulator.isa.vrun import (
    VOP3,
    Function,
    Operation,
    finish,
    general_run,
    simple_run,
    with_output_modifiers,
)

ENCODINGS = {"1": ("", "_e32", "_e64", "_dpp", "_sdwa"), "2": ("", "_e32", "_e64", "_dpp", "_sdwa"), "3": ("", "_e64")}


def define(
    name: str,
    dst: str,
    src: str,
    fn: Function,
    vop: str = "3",
    *,
    taint: str = "any",
    data: tuple[int, ...] = (),
    reads_dst: bool = False,
    keep_high: bool = False,
    saturate: Function | None = None,
) -> None:
    """Register operation `name`; `dst` and `src` are space-separated types, `vop` is "1", "2" or "3"."""
    operation = Operation(name, tuple(dst.split()), tuple(src.split()), fn, taint, data, reads_dst, keep_high, saturate)
    for suffix in ENCODINGS[vop]:
        if suffix == "_sdwa" and any(kind in WIDE for kind in (*operation.dst, *operation.src)):
            continue
        modifiers: frozenset[str] = frozenset()
        if suffix == "_dpp":
            modifiers = DPP_MODIFIERS
        elif suffix == "_sdwa":
            modifiers = SDWA_MODIFIERS
        elif suffix == "_e64" or vop == "3" or suffix == "":
            modifiers = VOP3
        add(name + suffix, "valu", bound(build_valu, operation), modifiers)


def build_valu(inst: Instruction, layout: Layout, op: Operation) -> Step:
    """Build one vector ALU instruction."""
    operands = list(inst.operands)
    if op.reads_dst:
        operands.append(operands[0])
    expected = len(op.dst) + len(op.src)
    if len(operands) != expected:
        raise inst.unknown(f"{len(operands)} operands where {expected} are expected")
    halves = inst.bits("op_sel", len(op.src) + 1, 0)
    sources = []
    for number, (operand, kind) in enumerate(zip(operands[len(op.dst) :], op.src, strict=True)):
        half = halves[number] if kind in HALF else 0
        sources.append(make_source(inst, layout, operand, kind, half))
    if "op_sel" in inst.modifiers and not any(kind in HALF for kind in (*op.src, *op.dst)):
        raise inst.unknown("op_sel on an operation without 16-bit operands")
    if inst.opcode.endswith("_dpp"):
        return build_dpp(inst, layout, op, sources)
    if inst.opcode.endswith("_sdwa"):
        return build_sdwa(inst, layout, op, operands)
    fn = with_output_modifiers(inst, op)
    targets = [
        make_target(inst, layout, o, k, halves[len(op.src)] if k in HALF else 0, op.keep_high)
        for o, k in zip(operands, op.dst, strict=False)
    ]
    run = simple_run(sources, targets, fn) or general_run(sources, targets, fn)
    return finish(inst, op, sources, targets, run)
