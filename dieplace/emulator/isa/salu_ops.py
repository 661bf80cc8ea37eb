"""The scalar operations themselves (AMD Instinct MI300 ISA guide, SOP1, SOP2, SOPK, SOPC)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import EXEC, SGPR, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.salu import Scalar, build_scalar, scalar
from dieplace.emulator.isa.state import I32, I64, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.valu_int import bit_count, bit_reverse, leading_zeros, trailing_zeros

U31, U63 = U32(31), U64(63)


def _add_u(a: Any, b: Any) -> Any:
    total = a + b
    return total, total < a


def _sub_u(a: Any, b: Any) -> Any:
    return a - b, a < b


def _add_i(a: Any, b: Any) -> Any:
    total = a + b
    return total, ((a ^ total) & (b ^ total)) < 0


def _sub_i(a: Any, b: Any) -> Any:
    total = a - b
    return total, ((a ^ b) & (a ^ total)) < 0


def _addc(a: Any, b: Any, scc: Any) -> Any:
    total = np.asarray(a, U64) + np.asarray(b, U64) + scc.astype(U64)
    return total.astype(U32), total > 0xFFFFFFFF


def _subb(a: Any, b: Any, scc: Any) -> Any:
    need = np.asarray(b, U64) + scc.astype(U64)
    return (np.asarray(a, U64) - need).astype(U32), np.asarray(a, U64) < need


def _shift_add(k: int) -> Any:
    def fn(a: Any, b: Any) -> Any:
        total = (np.asarray(a, U64) << U64(k)) + np.asarray(b, U64)
        return (total & U64(0xFFFFFFFF)).astype(U32), total > 0xFFFFFFFF

    return fn


def _bfe(kind: Any, wide: Any, bits: int) -> Any:
    """Bit field: offset in src1[5:0], width in src1[22:16]; a width of 0 gives 0."""

    def fn(a: Any, b: Any) -> Any:
        offset = np.asarray(b & U32(bits - 1)).astype(np.uint64)
        width = np.minimum(np.asarray(b >> U32(16) & U32(0x7F)).astype(np.uint64), U64(bits) - offset)
        moved = np.asarray(a).view(wide) >> offset.astype(wide)
        empty = width == 0
        if kind in (I32, I64):
            up = np.where(empty, 0, U64(bits) - width).astype(wide)
            field = (moved << up).view(kind) >> up.view(kind)
            return np.where(empty, kind(0), field)
        mask = np.where(width >= bits, ~wide(0), (wide(1) << width.astype(wide)) - wide(1))
        return np.where(empty, wide(0), moved & mask)

    return fn


def _mul_hi_u(a: Any, b: Any) -> Any:
    return (np.asarray(a, U64) * np.asarray(b, U64) >> U64(32)).astype(U32)


def _mul_hi_i(a: Any, b: Any) -> Any:
    return (np.asarray(a, I64) * np.asarray(b, I64) >> I64(32)).astype(I32)


def _pick(better: Any) -> Any:
    return lambda a, b: (np.where(better(a, b), a, b), better(a, b))


def _swap64(a: Any) -> Any:
    low, high = (a & U64(0xFFFFFFFF)).astype(U32), (a >> U64(32)).astype(U32)
    return bit_reverse(low).astype(U64) << U64(32) | bit_reverse(high).astype(U64)


def _first64(a: Any, fn: Any, from_top: bool) -> Any:
    low, high = (a & U64(0xFFFFFFFF)).astype(U32), (a >> U64(32)).astype(U32)
    near, far = (high, low) if from_top else (low, high)
    return np.where(near != 0, fn(near), np.where(far != 0, fn(far) + U32(32), U32(0xFFFFFFFF)))


def _sign_run(a: Any) -> Any:
    flipped = np.where(a < 0, ~a, a).view(U32)
    return np.where(flipped == 0, U32(0xFFFFFFFF), leading_zeros(flipped))


def _quad(a: Any) -> Any:
    """Each group of four bits becomes all ones when any is set."""
    some = a | a >> U64(1)
    some = (some | some >> U64(2)) & U64(0x1111111111111111)
    return some * U64(15)


def _define_32() -> None:
    scalar("s_add_u32", "u32", "u32 u32", _add_u, "given", taint="up")
    scalar("s_sub_u32", "u32", "u32 u32", _sub_u, "given", taint="up")
    scalar("s_add_i32", "i32", "i32 i32", _add_i, "given", taint="up")
    scalar("s_sub_i32", "i32", "i32 i32", _sub_i, "given", taint="up")
    scalar("s_addc_u32", "u32", "u32 u32", _addc, "given", reads_scc=True, taint="up")
    scalar("s_subb_u32", "u32", "u32 u32", _subb, "given", reads_scc=True, taint="up")
    scalar("s_mul_i32", "u32", "u32 u32", np.multiply, taint="up")
    scalar("s_mul_hi_u32", "u32", "u32 u32", _mul_hi_u)
    scalar("s_mul_hi_i32", "i32", "i32 i32", _mul_hi_i)
    scalar("s_min_i32", "i32", "i32 i32", _pick(np.less), "given")
    scalar("s_max_i32", "i32", "i32 i32", _pick(np.greater), "given")
    scalar("s_min_u32", "u32", "u32 u32", _pick(np.less), "given")
    scalar("s_max_u32", "u32", "u32 u32", _pick(np.greater), "given")
    scalar("s_absdiff_i32", "i32", "i32 i32", lambda a, b: np.abs(a - b), "nonzero")
    scalar("s_abs_i32", "i32", "i32", np.abs, "nonzero")
    scalar("s_lshl_b32", "u32", "u32 u32", lambda a, b: a << (b & U31), "nonzero", taint="shift")
    scalar("s_lshr_b32", "u32", "u32 u32", lambda a, b: a >> (b & U31), "nonzero", taint="shift")
    scalar("s_ashr_i32", "i32", "i32 i32", lambda a, b: a >> (b & I32(31)), "nonzero", taint="shift")
    scalar("s_bfm_b32", "u32", "u32 u32", lambda a, b: ((U32(1) << (a & U31)) - U32(1)) << (b & U31))
    scalar("s_bfe_u32", "u32", "u32 u32", _bfe(U32, U32, 32), "nonzero", taint="shift")
    scalar("s_bfe_i32", "i32", "i32 u32", _bfe(I32, U32, 32), "nonzero", taint="shift")
    for k in (1, 2, 3, 4):
        scalar(f"s_lshl{k}_add_u32", "u32", "u32 u32", _shift_add(k), "given", taint="up")
    scalar("s_pack_ll_b32_b16", "u32", "u32 u32", lambda a, b: (a & U32(0xFFFF)) | b << U32(16), taint="through")
    scalar(
        "s_pack_lh_b32_b16", "u32", "u32 u32", lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), taint="through"
    )
    scalar("s_pack_hh_b32_b16", "u32", "u32 u32", lambda a, b: a >> U32(16) | (b & U32(0xFFFF0000)), taint="through")


def _define_logic() -> None:
    logic = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }  # fmt: skip
    for bits in (32, 64):
        kind = f"u{bits}"
        for name, fn in logic.items():
            scalar(f"s_{name}_b{bits}", kind, f"{kind} {kind}", fn, "nonzero", taint=name)
        scalar(f"s_mov_b{bits}", kind, kind, lambda a: a, taint="move")
        scalar(f"s_not_b{bits}", kind, kind, lambda a: ~a, "nonzero", taint="bits")
        scalar(
            f"s_cselect_b{bits}",
            kind,
            f"{kind} {kind}",
            lambda a, b, c: np.where(c, a, b),
            reads_scc=True,
            taint="select",
        )
        scalar(f"s_cmov_b{bits}", kind, f"{kind} {kind}", lambda old, a, c: np.where(c, a, old), reads_scc=True,
               reads_dst=True)  # fmt: skip
        scalar(f"s_bcnt1_i32_b{bits}", "u32", kind, bit_count, "nonzero")
        scalar(f"s_bcnt0_i32_b{bits}", "u32", kind, lambda a: bit_count(~a), "nonzero")
    scalar("s_brev_b32", "u32", "u32", bit_reverse)
    scalar("s_brev_b64", "u64", "u64", _swap64)
    scalar("s_ff1_i32_b32", "u32", "u32", trailing_zeros)
    scalar("s_ff1_i32_b64", "u32", "u64", lambda a: _first64(a, trailing_zeros, False))
    scalar("s_ff0_i32_b32", "u32", "u32", lambda a: trailing_zeros(~a))
    scalar("s_ff0_i32_b64", "u32", "u64", lambda a: _first64(~a, trailing_zeros, False))
    scalar("s_flbit_i32_b32", "u32", "u32", leading_zeros)
    scalar("s_flbit_i32_b64", "u32", "u64", lambda a: _first64(a, leading_zeros, True))
    scalar("s_flbit_i32", "u32", "i32", _sign_run)
    scalar("s_sext_i32_i8", "i32", "i32", lambda a: a << I32(24) >> I32(24), taint="through")
    scalar("s_sext_i32_i16", "i32", "i32", lambda a: a << I32(16) >> I32(16), taint="through")
    scalar("s_wqm_b64", "u64", "u64", _quad, "nonzero")
    scalar("s_bitset0_b32", "u32", "u32 u32", lambda old, a: old & ~(U32(1) << (a & U31)), reads_dst=True)
    scalar("s_bitset1_b32", "u32", "u32 u32", lambda old, a: old | U32(1) << (a & U31), reads_dst=True)


def _define_64() -> None:
    scalar("s_lshl_b64", "u64", "u64 u32", lambda a, b: a << (np.asarray(b, U64) & U63), "nonzero", taint="shift")
    scalar("s_lshr_b64", "u64", "u64 u32", lambda a, b: a >> (np.asarray(b, U64) & U63), "nonzero", taint="shift")
    scalar("s_ashr_i64", "i64", "i64 u32", lambda a, b: a >> np.asarray(b & U32(63), I64), "nonzero", taint="shift")
    scalar("s_bfm_b64", "u64", "u32 u32",
           lambda a, b: ((U64(1) << (a & U32(63)).astype(U64)) - U64(1)) << (b & U32(63)).astype(U64))  # fmt: skip
    scalar("s_bfe_u64", "u64", "u64 u32", _bfe(U64, U64, 64), "nonzero", taint="shift")
    scalar("s_bfe_i64", "i64", "i64 u32", _bfe(I64, U64, 64), "nonzero", taint="shift")
    scalar("s_bitset0_b64", "u64", "u64 u32", lambda old, a: old & ~(U64(1) << np.asarray(a & U32(63), U64)),
           reads_dst=True)  # fmt: skip
    scalar("s_bitset1_b64", "u64", "u64 u32", lambda old, a: old | U64(1) << np.asarray(a & U32(63), U64),
           reads_dst=True)  # fmt: skip


def _define_compares() -> None:
    relations = {"eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
                 "le": np.less_equal}  # fmt: skip
    for name, fn in relations.items():
        for kind in ("u32", "i32"):
            scalar(f"s_cmp_{name}_{kind}", "", f"{kind} {kind}", fn)
            constant = Scalar("", (kind, kind), fn)
            add(f"s_cmpk_{name}_{kind}", "salu", bound(_with_k, constant, kind))
        if name in ("eq", "lg"):
            scalar(f"s_cmp_{name}_u64", "", "u64 u64", fn)
    for bits in (32, 64):
        kind, mask = f"u{bits}", U32(bits - 1)
        for value in (0, 1):
            scalar(f"s_bitcmp{value}_b{bits}", "", f"{kind} u32",
                   lambda a, b, v=value, m=mask: (a >> (b & m).astype(a.dtype) & a.dtype.type(1)) == v)  # fmt: skip


def _with_k(inst: Instruction, layout: Layout, op: Scalar, kind: str) -> Step:
    """SOPK: the last operand is a 16-bit constant, sign- or zero-extended by the operation's type."""
    operand = inst.operands[-1]
    if operand.kind != "const" or isinstance(operand.value, float):
        raise inst.unknown(f"operand {operand.text!r} must be a 16-bit constant")
    low = operand.value & 0xFFFF
    value = low if kind == "u32" else (low ^ 0x8000) - 0x8000
    number = Operand("const", operand.text, value=value)
    fixed = Instruction(inst.opcode, (*inst.operands[:-1], number), inst.modifiers, inst.text, inst.line)
    return build_scalar(fixed, layout, op)


def _define_k() -> None:
    move = Scalar("i32", ("i32",), lambda a: a)
    plus = Scalar("i32", ("i32", "i32"), _add_i, "given", reads_dst=True, taint="up")
    times = Scalar("i32", ("i32", "i32"), lambda old, a: old * a, reads_dst=True, taint="up")
    conditional = Scalar("i32", ("i32", "i32"), lambda old, a, c: np.where(c, a, old), reads_scc=True, reads_dst=True)
    for name, op in (("movk", move), ("addk", plus), ("mulk", times), ("cmovk", conditional)):
        add(f"s_{name}_i32", "salu", bound(_with_k, op, "i32"))


# ---- EXEC save and modify: dst = EXEC, EXEC = fn(EXEC, src), SCC = EXEC != 0


def _build_saveexec(inst: Instruction, layout: Layout, fn: Any, taint: str) -> Step:
    if len(inst.operands) != 2:
        raise inst.unknown("saveexec takes a destination and a source")
    execute = Operand("s", "exec", EXEC, 2)
    dst, src = inst.operands
    change = Scalar("u64", ("u64", "u64"), lambda s, e: fn(e, s), "nonzero", taint=taint)
    body = Instruction(inst.opcode, (execute, src, execute), {}, inst.text, inst.line)
    built = build_scalar(body, layout, change)
    key = layout.register(inst, dst, "s", 2)
    pair = key - SGPR >> 1
    assert built.run is not None and built.slow is not None
    inner, inner_slow = built.run, built.slow

    def save(g: Group, then: Any) -> None:
        old = g.s64[EXEC >> 1].copy()
        then(g)
        g.s64[pair][...] = old

    def slow(g: Group) -> None:
        save(g, inner_slow)
        g.set_scalar_taint(key, None)
        g.set_scalar_taint(key + 1, None)

    writes = built.writes | 1 << key | 1 << (key + 1)
    return Step(inst, "salu", lambda g: save(g, inner), slow, built.reads, writes)


def _define_saveexec() -> None:
    rules = {
        "and": (lambda e, s: e & s, "and"), "or": (lambda e, s: e | s, "or"), "xor": (lambda e, s: e ^ s, "xor"),
        "andn2": (lambda e, s: s & ~e, "andn2"), "orn2": (lambda e, s: s | ~e, "orn2"),
        "andn1": (lambda e, s: ~s & e, "any"), "nand": (lambda e, s: ~(e & s), "any"),
        "nor": (lambda e, s: ~(e | s), "any"), "xnor": (lambda e, s: ~(e ^ s), "any"),
        "orn1": (lambda e, s: ~s | e, "any"),
    }  # fmt: skip
    for name, (fn, taint) in rules.items():
        add(f"s_{name}_saveexec_b64", "salu",
            bound(_build_saveexec, fn, taint))  # fmt: skip


_define_32()
_define_logic()
_define_64()
_define_compares()
_define_k()
_define_saveexec()
