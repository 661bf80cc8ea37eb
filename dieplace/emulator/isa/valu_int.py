"""Integer and bitwise vector operations on 32-bit and 16-bit lanes (AMD Instinct MI300 ISA guide, VOP1, VOP2, VOP3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import I32, I64, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound
from dieplace.emulator.isa.valu import build_valu, define
from dieplace.emulator.isa.vrun import Operation

U31, MAX_U32 = U32(31), U32(0xFFFFFFFF)


def _low5(a: Any) -> Any:
    return a & U31


def _mad24(a: Any, b: Any, c: Any) -> Any:
    return (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c


def sext24(a: Any) -> Any:
    """The low 24 bits, sign-extended to int32."""
    return ((a.view(U32) << U32(8)).view(I32)) >> I32(8)


def _mul_hi_u(a: Any, b: Any) -> Any:
    return (np.asarray(a, U64) * np.asarray(b, U64) >> U64(32)).astype(U32)


def _mul_hi_i(a: Any, b: Any) -> Any:
    return (np.asarray(a, I64) * np.asarray(b, I64) >> I64(32)).astype(I32)


def _bfe_u(a: Any, offset: Any, width: Any) -> Any:
    return (a >> _low5(offset)) & ((U32(1) << _low5(width)) - U32(1))


def _bfe_i(a: Any, offset: Any, width: Any) -> Any:
    w = (width & I32(31)).astype(I32)
    field = a >> (offset & I32(31))
    up = np.where(w == 0, I32(0), I32(32) - w).astype(I32)
    return np.where(w == 0, I32(0), (field << up) >> up)


def _alignbit(a: Any, b: Any, c: Any) -> Any:
    both = np.asarray(a, U64) << U64(32) | np.asarray(b, U64)
    return (both >> np.asarray(c & U31, U64)).astype(U32)


def _alignbyte(a: Any, b: Any, c: Any) -> Any:
    both = np.asarray(a, U64) << U64(32) | np.asarray(b, U64)
    return (both >> np.asarray((c & U32(3)) << U32(3), U64)).astype(U32)


def permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """V_PERM_B32: selector bytes 0-3 pick from src1, 4-7 from src0, 8-11 replicate a sign, 12 is 0, above it 0xFF."""
    pool = np.asarray(a, U64) << U64(32) | np.asarray(b, U64)
    out: Any = U32(0)
    for place in range(4):
        pick = (selector >> U32(8 * place)) & U32(0xFF)
        byte = (pool >> (np.asarray(pick & U32(7), U64) << U64(3))).astype(U32) & U32(0xFF)
        sign_bit = np.asarray((pick & U32(3)) * U32(16) + U32(15), U64)
        sign = (pool >> sign_bit).astype(U32) & U32(1)
        byte = np.where(pick <= 7, byte, np.where(pick <= 11, sign * U32(0xFF), np.where(pick == 12, 0, 0xFF)))
        out = out | (byte.astype(U32) << U32(8 * place))
    return out


def bit_count(a: Any) -> Any:
    """Number of set bits of uint32 or uint64 values."""
    return np.bitwise_count(a).astype(U32)


def bit_reverse(a: Any) -> Any:
    """Bits of a uint32 in the opposite order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = ((a >> U32(shift)) & U32(mask)) | ((a & U32(mask)) << U32(shift))
    return a


def leading_zeros(a: Any) -> Any:
    """V_FFBH_U32: position of the first 1 from the top, all ones when there is none."""
    highest = np.frexp(np.asarray(a, np.float64))[1]
    return np.where(a == 0, MAX_U32, U32(32) - highest.astype(U32))


def trailing_zeros(a: Any) -> Any:
    """V_FFBL_B32: position of the first 1 from the bottom, all ones when there is none."""
    return np.where(a == 0, MAX_U32, bit_count((a & (~a + U32(1))) - U32(1)))


def sign_run(a: Any) -> Any:
    """V_FFBH_I32: count of leading bits equal to the sign bit, all ones when every bit is."""
    flipped = np.where(a < 0, ~a, a).view(U32)
    return np.where(flipped == 0, MAX_U32, leading_zeros(flipped))


def _sad_u8(a: Any, b: Any, c: Any) -> Any:
    total = c
    for shift in (0, 8, 16, 24):
        x, y = (a >> U32(shift)) & U32(0xFF), (b >> U32(shift)) & U32(0xFF)
        total = total + np.where(x > y, x - y, y - x)
    return total


def _sad_u16(a: Any, b: Any, c: Any) -> Any:
    total = c
    for shift in (0, 16):
        x, y = (a >> U32(shift)) & U32(0xFFFF), (b >> U32(shift)) & U32(0xFFFF)
        total = total + np.where(x > y, x - y, y - x)
    return total


def _saturate(low: int, high: int, fn: Any) -> Any:
    def saturated(*values: Any) -> Any:
        wide = fn(*[np.asarray(v).astype(I64) for v in values])
        return np.clip(wide, low, high).astype(U32 if low == 0 else I32)

    return saturated


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _carry(fn: Any) -> Any:
    def with_carry(a: Any, b: Any, carry: Any = 0) -> Any:
        total = fn(np.asarray(a, I64), np.asarray(b, I64), np.asarray(carry, I64))
        return (total & 0xFFFFFFFF).astype(U32), (total < 0) | (total > 0xFFFFFFFF)

    return with_carry


def bit_table(table: int) -> Any:
    """V_BITOP3: bit i of the table is the result for a, b, c = the bits of i (a highest)."""

    def apply(a: Any, b: Any, c: Any) -> Any:
        out: Any = np.zeros_like(np.asarray(a & b & c))
        for i in range(8):
            if table >> i & 1:
                out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return out

    return apply


def _build_bitop(inst: Instruction, layout: Layout, kind: str) -> Step:
    if "bitop3" not in inst.modifiers:
        raise inst.unknown("bitop3 needs its truth table")
    fn = bit_table(inst.number("bitop3"))
    return build_valu(inst, layout, Operation(inst.opcode, (kind,), (kind, kind, kind), fn, "bits"))


def _define_bitop() -> None:
    modifiers = ("bitop3", "op_sel")
    add("v_bitop3_b32 v_bitop3_b32_e64", "valu", bound(_build_bitop, "u32"), modifiers[:1])
    add("v_bitop3_b16 v_bitop3_b16_e64", "valu", bound(_build_bitop, "b16"), modifiers)


def _define_32() -> None:
    define("v_mov_b32", "b32", "b32", np.positive, "1", taint="move", data=(0,))
    define("v_accvgpr_write_b32", "b32", "b32", np.positive, taint="move", data=(0,))
    define("v_accvgpr_read_b32", "b32", "b32", np.positive, taint="move", data=(0,))
    define("v_accvgpr_mov_b32", "b32", "b32", np.positive, "1", taint="move", data=(0,))
    define("v_not_b32", "u32", "u32", np.invert, "1", taint="bits")
    define("v_bfrev_b32", "u32", "u32", bit_reverse, "1", taint="move", data=(0,))
    define("v_ffbh_u32", "u32", "u32", leading_zeros, "1")
    define("v_ffbl_b32", "u32", "u32", trailing_zeros, "1")
    define("v_ffbh_i32", "u32", "i32", sign_run, "1")
    define("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: bit_count(a) + b)
    define("v_add_u32", "u32", "u32 u32", np.add, "2", saturate=_saturate(0, 0xFFFFFFFF, np.add), taint="up")
    define("v_sub_u32", "u32", "u32 u32", np.subtract, "2", saturate=_saturate(0, 0xFFFFFFFF, np.subtract), taint="up")
    define("v_subrev_u32", "u32", "u32 u32", lambda a, b: b - a, "2",
           saturate=_saturate(0, 0xFFFFFFFF, lambda a, b: b - a))  # fmt: skip
    define("v_add_i32", "i32", "i32 i32", np.add, saturate=_saturate(-(2**31), 2**31 - 1, np.add), taint="up")
    define("v_sub_i32", "i32", "i32 i32", np.subtract, saturate=_saturate(-(2**31), 2**31 - 1, np.subtract), taint="up")
    define("v_and_b32", "u32", "u32 u32", np.bitwise_and, "2", taint="and")
    define("v_or_b32", "u32", "u32 u32", np.bitwise_or, "2", taint="or")
    define("v_xor_b32", "u32", "u32 u32", np.bitwise_xor, "2", taint="bits")
    define("v_xnor_b32", "u32", "u32 u32", lambda a, b: ~(a ^ b), "2", taint="bits")
    define("v_lshlrev_b32", "u32", "u32 u32", lambda a, b: b << _low5(a), "2", taint="move", data=(1,))
    define("v_lshrrev_b32", "u32", "u32 u32", lambda a, b: b >> _low5(a), "2", taint="move", data=(1,))
    define("v_ashrrev_i32", "i32", "i32 i32", lambda a, b: b >> (a & I32(31)), "2", taint="move", data=(1,))
    define("v_min_u32", "u32", "u32 u32", np.minimum, "2")
    define("v_max_u32", "u32", "u32 u32", np.maximum, "2")
    define("v_min_i32", "i32", "i32 i32", np.minimum, "2")
    define("v_max_i32", "i32", "i32 i32", np.maximum, "2")
    define("v_cndmask_b32", "b32", "b32 b32 mask", lambda a, b, k: np.where(k, b, a), "2", taint="move", data=(0, 1))
    define("v_bfm_b32", "u32", "u32 u32", lambda a, b: ((U32(1) << _low5(a)) - U32(1)) << _low5(b))


def _ashr_pack(low: int, high: int) -> Any:
    """V_ASHR_PK: two shifted int32 saturated to bytes, in the low half; the upper half is kept."""

    def fn(a: Any, b: Any, shift: Any) -> Any:
        parts = [np.clip(x >> (shift & I32(31)), low, high).astype(I64) & 0xFF for x in (a, b)]
        return (parts[0] | parts[1] << 8).astype(np.uint16)

    return fn


def _define_gfx950() -> None:
    define("v_prng_b32", "u32", "u32", lambda a: a << U32(1) ^ (a >> U32(31)) * U32(197), "1")
    define("v_ashr_pk_i8_i32", "u16", "i32 i32 i32", _ashr_pack(-128, 127), keep_high=True)
    define("v_ashr_pk_u8_i32", "u16", "i32 i32 i32", _ashr_pack(0, 255), keep_high=True)


def _define_three() -> None:
    define("v_lshl_or_b32", "u32", "u32 u32 u32", lambda a, b, c: a << _low5(b) | c, taint="move", data=(0, 2))
    define("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, b, c: (a << _low5(b)) + c, taint="up")
    define("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, c: (a + b) << _low5(c), taint="up")
    define("v_and_or_b32", "u32", "u32 u32 u32", lambda a, b, c: a & b | c, taint="move", data=(0, 2))
    define("v_or3_b32", "u32", "u32 u32 u32", lambda a, b, c: a | b | c, taint="move", data=(0, 1, 2))
    define("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c, taint="up")
    define("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c, taint="up")
    define("v_bfe_u32", "u32", "u32 u32 u32", _bfe_u, taint="move", data=(0,))
    define("v_bfe_i32", "i32", "i32 i32 i32", _bfe_i, taint="move", data=(0,))
    define("v_bfi_b32", "u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c, taint="move", data=(1, 2))
    define("v_alignbit_b32", "u32", "u32 u32 u32", _alignbit, taint="move", data=(0, 1))
    define("v_alignbyte_b32", "u32", "u32 u32 u32", _alignbyte, taint="move", data=(0, 1))
    define("v_perm_b32", "u32", "u32 u32 u32", permute_bytes, taint="move", data=(0, 1))
    define("v_min3_u32", "u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    define("v_max3_u32", "u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define("v_med3_u32", "u32", "u32 u32 u32", _median)
    define("v_min3_i32", "i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    define("v_max3_i32", "i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define("v_med3_i32", "i32", "i32 i32 i32", _median)
    define("v_sad_u8", "u32", "u32 u32 u32", _sad_u8)
    define("v_sad_hi_u8", "u32", "u32 u32 u32", lambda a, b, c: (_sad_u8(a, b, U32(0)) << U32(16)) + c)
    define("v_sad_u16", "u32", "u32 u32 u32", _sad_u16)
    define("v_sad_u32", "u32", "u32 u32 u32", lambda a, b, c: np.where(a > b, a - b, b - a) + c)


def _define_products() -> None:
    define("v_mul_lo_u32", "u32", "u32 u32", np.multiply, taint="up")
    define("v_mul_hi_u32", "u32", "u32 u32", _mul_hi_u)
    define("v_mul_hi_i32", "i32", "i32 i32", _mul_hi_i)
    define("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: _mad24(a, b, U32(0)), "2", taint="up")
    define("v_mul_i32_i24", "i32", "i32 i32", lambda a, b: sext24(a) * sext24(b), "2")
    define("v_mul_hi_u32_u24", "u32", "u32 u32", lambda a, b: _mul_hi_u(a & U32(0xFFFFFF), b & U32(0xFFFFFF)), "2")
    define("v_mul_hi_i32_i24", "i32", "i32 i32", lambda a, b: _mul_hi_i(sext24(a), sext24(b)), "2")
    define("v_mad_u32_u24", "u32", "u32 u32 u32", _mad24, taint="up")
    define("v_mad_i32_i24", "i32", "i32 i32 i32", lambda a, b, c: sext24(a) * sext24(b) + c)
    define("v_mad_u32_u16", "u32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c, taint="up")
    define("v_mad_i32_i16", "i32", "i16 i16 i32", lambda a, b, c: a.astype(I32) * b.astype(I32) + c)


def _define_carries() -> None:
    plus, minus = _carry(lambda a, b, c: a + b + c), _carry(lambda a, b, c: a - b - c)
    reverse = _carry(lambda a, b, c: b - a - c)
    for name, fn in (("v_add_co_u32", plus), ("v_sub_co_u32", minus), ("v_subrev_co_u32", reverse)):
        define(name, "u32 mask", "u32 u32", fn, "2", taint="up")
    for name, fn in (("v_addc_co_u32", plus), ("v_subb_co_u32", minus), ("v_subbrev_co_u32", reverse)):
        define(name, "u32 mask", "u32 u32 mask", fn, "2", taint="up")


def _define_16() -> None:
    for kind in ("u16", "i16"):
        define(f"v_min_{kind}", kind, f"{kind} {kind}", np.minimum, "2")
        define(f"v_max_{kind}", kind, f"{kind} {kind}", np.maximum, "2")
        define(f"v_min3_{kind}", kind, f"{kind} {kind} {kind}", lambda a, b, c: np.minimum(np.minimum(a, b), c),
               keep_high=True)  # fmt: skip
        define(f"v_max3_{kind}", kind, f"{kind} {kind} {kind}", lambda a, b, c: np.maximum(np.maximum(a, b), c),
               keep_high=True)  # fmt: skip
        define(f"v_med3_{kind}", kind, f"{kind} {kind} {kind}", _median, keep_high=True)
        define(f"v_mad_{kind}", kind, f"{kind} {kind} {kind}", lambda a, b, c: a * b + c, keep_high=True)
    define("v_add_u16", "u16", "u16 u16", np.add, "2")
    define("v_sub_u16", "u16", "u16 u16", np.subtract, "2")
    define("v_subrev_u16", "u16", "u16 u16", lambda a, b: b - a, "2")
    define("v_add_i16", "i16", "i16 i16", np.add, keep_high=True)
    define("v_sub_i16", "i16", "i16 i16", np.subtract, keep_high=True)
    define("v_mul_lo_u16", "u16", "u16 u16", np.multiply, "2")
    define("v_lshlrev_b16", "u16", "u16 u16", lambda a, b: b << (a & np.uint16(15)), "2", taint="move", data=(1,))
    define("v_lshrrev_b16", "u16", "u16 u16", lambda a, b: b >> (a & np.uint16(15)), "2", taint="move", data=(1,))
    define("v_ashrrev_i16", "i16", "i16 i16", lambda a, b: b >> (a & np.int16(15)), "2", taint="move", data=(1,))
    define("v_pack_b32_f16", "u32", "b16 b16", lambda a, b: a.astype(U32) | b.astype(U32) << U32(16),
           taint="move", data=(0, 1))  # fmt: skip


_define_bitop()
_define_gfx950()
_define_32()
_define_three()
_define_products()
_define_carries()
_define_16()
