"""SDWA: a vector instruction that reads and writes bytes or halves of registers (AMD Instinct MI300 ISA guide,
SDWA).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import CONST, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import BANKS, HALF, Source, make_source
from dieplace.emulator.isa.state import U32
from dieplace.emulator.isa.table import Layout, Step
from dieplace.emulator.isa.targets import Target, assign, make_target
from dieplace.emulator.isa.vrun import Operation, finish, general_run

SDWA_MODIFIERS = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp"})
SELECTIONS = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16),
              "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip


def build_sdwa(inst: Instruction, layout: Layout, op: Operation, operands: list[Operand]) -> Step:
    """Build the SDWA form of a vector operation."""
    if "clamp" in inst.modifiers:
        raise inst.unknown("clamp on an SDWA form")
    given = operands[len(op.dst) :]
    sources = []
    for number, (operand, kind) in enumerate(zip(given, op.src, strict=True)):
        if kind == "mask" or (op.reads_dst and number == len(op.src) - 1):
            sources.append(make_source(inst, layout, operand, kind))
        else:
            sources.append(_selected(inst, layout, operand, kind, _selection(inst, f"src{number}_sel")))
    targets = [_target(inst, layout, o, k) for o, k in zip(operands, op.dst, strict=False)]
    return finish(inst, op, sources, targets, general_run(sources, targets, op.fn))


def _selection(inst: Instruction, name: str) -> tuple[int, int]:
    word = inst.modifiers.get(name, "DWORD")
    if word not in SELECTIONS:
        raise inst.unknown(f"{name}:{word} is not known")
    return SELECTIONS[str(word)]


def _selected(inst: Instruction, layout: Layout, operand: Operand, kind: str, selection: tuple[int, int]) -> Source:
    if kind not in BANKS and kind not in HALF:
        raise inst.unknown(f"SDWA on a {kind} operand")
    bare = Operand(operand.kind, operand.text, operand.index, operand.count, operand.value)
    word = make_source(inst, layout, bare, "u32")
    if operand.kind == "const" or word.keys[0] >= CONST:
        word = make_source(inst, layout, bare, kind)
    shift, width = U32(selection[0]), selection[1]
    low = U32((1 << width) - 1)
    dtype: Any = HALF[kind] if kind in HALF else {"u": np.uint32, "i": np.int32, "f": np.float32}[BANKS[kind]]

    def value(g: Group) -> Any:
        bits: Any = (
            (np.asarray(word.value(g)).view(U32) >> shift) & low if kind not in HALF or operand.kind != "const" else 0
        )
        if operand.kind == "const" and kind in HALF:
            return word.value(g)
        if operand.sext and width < 32:
            sign = U32(1 << (width - 1))
            bits = (bits ^ sign) - sign
        return sign_modified(bits, operand, kind).astype(np.uint16).view(dtype) if kind in HALF else (
            sign_modified(bits, operand, kind).view(dtype))  # fmt: skip

    def taint(g: Group) -> Any:
        bits = word.taint(g)
        return None if bits is None else (bits >> shift) & low

    return Source(kind, word.keys, value, taint, False)


def sign_modified(bits: Any, operand: Operand, kind: str) -> Any:
    """Absolute value and negation of the selected bits."""
    sign = U32(0x8000 if kind in HALF else 0x80000000)
    if operand.absolute:
        bits = bits & ~sign
    if operand.negate:
        bits = bits ^ sign
    return np.asarray(bits, U32)


def _target(inst: Instruction, layout: Layout, operand: Operand, kind: str) -> Target:
    if kind == "mask":
        return make_target(inst, layout, operand, kind)
    shift, width = _selection(inst, "dst_sel")
    unused = inst.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"):
        raise inst.unknown(f"dst_unused:{unused} is not known")
    key = layout.register(inst, operand, "v", 1)
    field = U32(((1 << width) - 1) << shift)
    kept = ~field if unused == "UNUSED_PRESERVE" else U32(0)

    def place(value: Any, old: Any) -> Any:
        bits = value.view(np.uint16).astype(U32) if value.dtype.itemsize == 2 else value.view(U32)
        if unused == "UNUSED_SEXT":
            sign = U32(1 << (width - 1))
            return (((bits & (field >> U32(shift))) ^ sign) - sign) << U32(shift)
        return ((bits << U32(shift)) & field) | (old & kept)

    def write(g: Group, value: Any, mask: Any) -> None:
        row = g.u[key]
        assign(row, place(np.asarray(value), row), mask)

    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        old = g.taint(key)
        new = (
            U32(0)
            if bits is None
            else np.where(np.asarray(bits) != 0, field if unused != "UNUSED_SEXT" else ~U32(0), 0)
        )
        g.set_taint(key, new | (U32(0) if old is None else old & kept), mask, origin)

    return Target(kind, (key,), write, taint)
