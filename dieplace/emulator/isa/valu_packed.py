"""Packed math: two float32 in a register pair, two 16-bit values in a register.

Which half or register of each source feeds the low and the high result is `op_sel` and `op_sel_hi`; `neg_lo` and
`neg_hi` flip signs (AMD Instinct MI300 ISA guide, VOP3P).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.fma import fma
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import CONST
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import HALF, Source
from dieplace.emulator.isa.state import F32, U32
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.targets import make_target
from dieplace.emulator.isa.valu_float import fma_half, maximum_number, minimum_number
from dieplace.emulator.isa.vrun import Function, Operation, finish, general_run

PACKED = frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
SIGN32 = U32(0x80000000)


def _selected(inst: Instruction, layout: Layout, number: int, kind: str, high: bool, count: int) -> Source:
    """Source `number` as the low or the high result sees it."""
    half = inst.bits("op_sel_hi", count, 1)[number] if high else inst.bits("op_sel", count, 0)[number]
    negate = bool(inst.bits("neg_hi" if high else "neg_lo", count, 0)[number])
    operand = inst.operands[1 + number]
    if operand.is_modified:
        raise inst.unknown("packed operations take neg_lo and neg_hi, no operand modifier")
    if kind == "f32" or kind == "b32":
        return _pair_half(inst, layout, number, half, negate)
    constant = "f16" if kind in ("f16",) else kind
    key = layout.key(inst, operand, constant)
    dtype, place = HALF[kind], 2 * key + half
    sign = np.uint16(0x8000)

    def value(g: Group) -> Any:
        bits = np.uint16(key >> 16 * half & 0xFFFF) if key >= CONST else g.h[place]
        return (bits ^ sign if negate else bits).view(dtype)

    def taint(g: Group) -> Any:
        bits = g.taint(key)
        return None if bits is None else bits >> U32(16 * half) & U32(0xFFFF)

    return Source(kind, (key,), value, taint, False)


def _pair_half(inst: Instruction, layout: Layout, number: int, half: int, negate: bool) -> Source:
    """One float32 of a register pair; a constant is the low one, and the high one too (MI300 ISA guide,
    V_PK_MUL_F32).
    """
    operand = inst.operands[1 + number]
    words = 1 if operand.kind == "const" else 2
    first = layout.key(inst, operand, "f32", words)
    key = first if first >= CONST else first + half

    def value(g: Group) -> Any:
        return (g.u[key] ^ SIGN32).view(F32) if negate else g.f[key]

    return Source("f32", (key,), value, lambda g: g.taint(key), False)


def _build_pair(inst: Instruction, layout: Layout, count: int, fn: Function, ufunc: bool) -> Step:
    """Two float32 results into a register pair."""
    if len(inst.operands) != 1 + count:
        raise inst.unknown(f"{len(inst.operands)} operands where {1 + count} are expected")
    sides = [[_selected(inst, layout, k, "f32", high, count) for k in range(count)] for high in (False, True)]
    dst = layout.register(inst, inst.operands[0], "va", 2)
    sources = [*sides[0], *sides[1]]
    target = make_target(inst, layout, inst.operands[0], "u64")
    low, high = (tuple(source.keys[0] for source in side) for side in sides)

    def halves(*values: Any) -> Any:
        return fn(*values[:count]), fn(*values[count:])

    def run(g: Group) -> None:
        first, second = halves(*[source.value(g) for source in sources])
        if g.full:
            g.f[dst][...] = first
            g.f[dst + 1][...] = second
        else:
            np.copyto(g.f[dst], first, where=g.mask)
            np.copyto(g.f[dst + 1], second, where=g.mask)

    def direct(g: Group) -> None:
        if not g.full:
            run(g)
            return
        values = g.f
        fn(*[values[key] for key in low], out=values[dst])
        fn(*[values[key] for key in high], out=values[dst + 1])

    plain = not any(name in inst.modifiers for name in ("neg_lo", "neg_hi"))
    safe = ufunc and plain and dst not in high
    op = Operation(inst.opcode, ("u64",), ("f32",) * (2 * count), halves)
    step = finish(inst, op, sources, [target], direct if safe else run)
    return Step(
        inst, "valu", step.run, _pair_slow(sides, dst, step.run, step.reads | step.writes), step.reads, step.writes
    )


def _pair_slow(sides: list[list[Source]], dst: int, run: Any, touched: int) -> Any:
    def slow(g: Group) -> None:
        if not g.st.tainted & touched:
            run(g)
            return
        found = []
        for side in sides:
            bits, origin = None, None
            for source in side:
                own = source.taint(g)
                if own is not None:
                    origin = origin or g.st.origin(source.keys[0])
                    spread = np.where(own != 0, U32(0xFFFFFFFF), U32(0))
                    bits = spread if bits is None else bits | spread
            found.append((bits, origin))
        run(g)
        for place, (bits, origin) in enumerate(found):
            g.set_taint(dst + place, bits, g.lanes, origin)

    return slow


def _build_halves(inst: Instruction, layout: Layout, count: int, kind: str, fn: Function) -> Step:
    """Two 16-bit results into one register."""
    if len(inst.operands) != 1 + count:
        raise inst.unknown(f"{len(inst.operands)} operands where {1 + count} are expected")
    sources = [_selected(inst, layout, k, kind, high, count) for high in (False, True) for k in range(count)]
    target = make_target(inst, layout, inst.operands[0], "u32")
    dtype = HALF[kind]

    def both(*values: Any) -> Any:
        low, high = (np.asarray(fn(*part), dtype).view(np.uint16) for part in (values[:count], values[count:]))
        return low.astype(U32) | high.astype(U32) << U32(16)

    op = Operation(inst.opcode, ("u32",), (kind,) * (2 * count), both, "pair")
    return finish(inst, op, sources, [target], general_run(sources, [target], both))


def _build_move(inst: Instruction, layout: Layout) -> Step:
    """v_pk_mov_b32: low result from src0 by op_sel[0], high result from src1 by op_sel[1]."""
    if len(inst.operands) != 3:
        raise inst.unknown(f"{len(inst.operands)} operands where 3 are expected")
    select = inst.bits("op_sel", 2, 0)
    keys = []
    for number, operand in enumerate(inst.operands[1:]):
        first = layout.key(inst, operand, "u32", 1 if operand.kind == "const" else 2)
        keys.append(first if first >= CONST else first + select[number])
    dst = layout.register(inst, inst.operands[0], "va", 2)

    def run(g: Group) -> None:
        low, high = g.u[keys[0]], g.u[keys[1]]
        if keys[1] == dst:
            high = np.array(high)
        if g.full:
            g.u[dst][...] = low
            g.u[dst + 1][...] = high
        else:
            np.copyto(g.u[dst], low, where=g.mask)
            np.copyto(g.u[dst + 1], high, where=g.mask)

    def slow(g: Group) -> None:
        bits = [g.taint(key) for key in keys]
        bits = [None if own is None else own.copy() for own in bits]
        names = [None if own is None else g.st.origin(key) for key, own in zip(keys, bits, strict=True)]
        run(g)
        for place in (0, 1):
            g.set_taint(dst + place, bits[place], g.lanes, names[place])

    reads = sum(1 << key for key in set(keys) if key < CONST)
    return Step(inst, "valu", run, slow, reads, 1 << dst | 1 << (dst + 1))


def _define_pairs() -> None:
    for name, count, fn, ufunc in (("add", 2, np.add, True), ("mul", 2, np.multiply, True), ("fma", 3, fma, False)):
        add(f"v_pk_{name}_f32", "valu", bound(_build_pair, count, fn, ufunc), PACKED)
    add("v_pk_mov_b32", "valu", _build_move, ("op_sel", "op_sel_hi"))


def _shift(fn: Any) -> Any:
    return lambda a, b: fn(b, a & a.dtype.type(15))


def _define_halves() -> None:
    floats = {"add": np.add, "mul": np.multiply, "max": maximum_number, "min": minimum_number}
    table: list[tuple[str, int, str, Any]] = [(f"{name}_f16", 2, "f16", fn) for name, fn in floats.items()]
    table.append(("fma_f16", 3, "f16", fma_half))
    table.append(("maximum3_f16", 3, "f16", lambda a, b, c: np.maximum(np.maximum(a, b), c)))
    table.append(("minimum3_f16", 3, "f16", lambda a, b, c: np.minimum(np.minimum(a, b), c)))
    for kind in ("u16", "i16"):
        table += [(f"add_{kind}", 2, kind, np.add), (f"sub_{kind}", 2, kind, np.subtract),
                  (f"max_{kind}", 2, kind, np.maximum), (f"min_{kind}", 2, kind, np.minimum),
                  (f"mad_{kind}", 3, kind, lambda a, b, c: a * b + c)]  # fmt: skip
    table += [("mul_lo_u16", 2, "u16", np.multiply), ("lshlrev_b16", 2, "u16", _shift(np.left_shift)),
              ("lshrrev_b16", 2, "u16", _shift(np.right_shift)),
              ("ashrrev_i16", 2, "i16", _shift(np.right_shift))]  # fmt: skip
    for name, count, kind, fn in table:
        add(f"v_pk_{name}", "valu", bound(_build_halves, count, kind, fn), PACKED)


def _build_fmac(inst: Instruction, layout: Layout) -> Step:
    """v_pk_fmac_f16: the destination is the addend of both halves."""
    operands = (*inst.operands, inst.operands[0])
    fused = Instruction(inst.opcode, operands, inst.modifiers, inst.text, inst.line)
    return _build_halves(fused, layout, 3, "f16", fma_half)


_define_pairs()
_define_halves()
add("v_pk_fmac_f16 v_pk_fmac_f16_e32", "valu", _build_fmac)
