"""Every FlyDSL name that FlyDSL does not promise to keep, in one place (pinned: flydsl==0.5.0).

By FlyDSL's own stability page only names in `__all__` of `flydsl.expr`, `flydsl.expr.rocdl` and `flydsl.compiler`
are stable. Kernels take those through `fx` and `flyc` below and everything else from the helpers of this module, so
that a FlyDSL update is repaired here alone. The host half (tracing, lowering, engines) is `flydsl_host.py`.

Helpers that emit instructions are called while a kernel is traced; their arguments are FlyDSL values.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr import const_expr, range_constexpr
from flydsl.expr.typing import ReductionOp

from dieplace.codegen.lint import RULES, asm_faults
from dieplace.errors import CompileError

__all__ = [
    "AGENT",
    "STREAM",
    "SYSTEM",
    "WAVE",
    "WORKGROUP",
    "AtomicOrdering",
    "ReductionOp",
    "ballot",
    "bit_count",
    "const_expr",
    "coop",
    "cvt_pk_fp8_f32",
    "cvt_scalef32_pk_bf16_fp4",
    "cvt_scalef32_pk_f32_fp4",
    "e8m0_to_f32",
    "exponent_scale",
    "first_bit",
    "flyc",
    "fx",
    "getreg",
    "hw_id",
    "inline_asm",
    "memrealtime",
    "memtime",
    "mfma_f32_16x16x32_bf16",
    "mfma_scale_f32_16x16x128_f8f6f4",
    "permlane_swap",
    "pointer",
    "range_constexpr",
    "readfirstlane",
    "sched_barrier",
    "setprio",
    "sleep",
    "u8",
    "waitcnt_vmem",
    "xcc_id",
]

WAVE = 64
STREAM = fx.Stream(None)  # the default of launchers
AtomicOrdering = fx.AtomicOrdering
SYSTEM = None  # LLVM's default scope: every agent and the host
AGENT = fx.rocdl.SyncScope.Agent
WORKGROUP = fx.rocdl.SyncScope.Workgroup
coop = fx.coop  # BlockReduce, warp_sum, ...: unstable by FlyDSL's page

# Hardware register ids of s_getreg_b32, LLVM SIDefines.h (Hwreg::ID_HW_ID, ID_XCC_ID).
_HW_ID, _XCC_ID = 4, 20


def _call(result: type, name: str, *operands: Any) -> Any:
    return _llvm.call_intrinsic(result.ir_type, name, [o.ir_value() for o in operands], [], [])  # type: ignore[attr-defined]


def getreg(register: int, offset: int = 0, size: int = 32) -> Any:
    """`s_getreg_b32 hwreg(register, offset, size)` as Int32; the immediate is id | offset << 6 | (size - 1) << 11."""
    return fx.Int32(_call(fx.Int32, "llvm.amdgcn.s.getreg", fx.Int32(register | offset << 6 | (size - 1) << 11)))


def xcc_id() -> Any:
    """The XCD this wave runs on, as the hardware numbers it (Int32, 4 bits of HW_REG_XCC_ID)."""
    return getreg(_XCC_ID, 0, 4)


def hw_id() -> Any:
    """HW_REG_HW_ID: wave slot, SIMD, CU and shader engine of this wave (Int32)."""
    return getreg(_HW_ID)


def memtime() -> Any:
    """`s_memtime`: shader clock ticks (Int64)."""
    return fx.Int64(_call(fx.Int64, "llvm.amdgcn.s.memtime"))


def memrealtime() -> Any:
    """`s_memrealtime`: the constant-rate clock, shared by all XCDs (Int64)."""
    return fx.Int64(_call(fx.Int64, "llvm.amdgcn.s.memrealtime"))


def sleep(units: int) -> None:
    """`s_sleep`: about 64 clocks times `units`; every polling loop should have one."""
    fx.rocdl.s_sleep(units)


def setprio(level: int) -> None:
    """`s_setprio`: wave priority 0 to 3."""
    fx.rocdl.s_setprio(level)


def waitcnt_vmem() -> None:
    """`s_waitcnt vmcnt(0)`: everything this wave asked of global memory has arrived or been accepted."""
    fx.rocdl.s_waitcnt(vmcnt=0)


def cvt_scalef32_pk_f32_fp4(dword: Any, scale: Any, byte: int) -> Any:
    """The two fp4 values of `byte` (0 to 3, low nibble first) times 2^(exponent field of `scale`), as Float32x2."""
    return fx.Float32x2(fx.rocdl.cvt_scalef32_pk_f32_fp4(fx.Float32x2.ir_type, dword, scale, byte))


def cvt_scalef32_pk_bf16_fp4(dword: Any, scale: Any, byte: int) -> Any:
    """As `cvt_scalef32_pk_f32_fp4`, rounded to bf16 (BFloat16x2)."""
    return fx.BFloat16x2(fx.rocdl.cvt_scalef32_pk_bf16_fp4(fx.BFloat16x2.ir_type, dword, scale, byte))


def mfma_f32_16x16x32_bf16(a: Any, b: Any, acc: Any) -> Any:
    """D = A B + C: lane l gives row (A) or column (B) l % 16 and k = 8 * (l // 16) .. + 7; D is column l % 16."""
    operands = [a.ir_value(), b.ir_value(), acc.ir_value()]
    return fx.Vector(fx.rocdl.mfma_f32_16x16x32_bf16(acc.ir_value().type, operands), dtype=fx.Float32)


def mfma_scale_f32_16x16x128_f8f6f4(
    a: Any, b: Any, acc: Any, scale_a: Any, scale_b: Any, *, cbsz: int = 4, blgp: int = 4
) -> Any:
    """Block-scaled D = A B + C, 128 deep; formats 0 fp8, 1 bf8, 2 fp6, 3 bf6, 4 fp4 for A (`cbsz`) and B (`blgp`).

    Lane l holds row l % 16; with g = l // 16, fp4 is k = 32 g .. 32 g + 31, an 8-bit operand is k = 16 g .. 16 g + 15
    in bytes 0 to 15 and k = 64 + 16 g .. in bytes 16 to 31 (AMD "Matrix Core programming on CDNA", figure 9). Byte 0 of
    `scale_a`, `scale_b` is the e8m0 scale of the k-block g. Operands are 8 x Int32; the upper four are zero for fp4.
    """
    operands = [
        a.ir_value(),
        b.ir_value(),
        acc.ir_value(),
        cbsz,
        blgp,
        0,
        scale_a.ir_value(),
        0,
        scale_b.ir_value(),
    ]
    return fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(acc.ir_value().type, operands), dtype=fx.Float32)


def u8(value: Any) -> Any:
    """An unsigned byte as Int32 0 to 255.

    FlyDSL 0.5.0 hands out Int8 for torch.uint8 and for `fx.Uint8` fragments, so 200 arrives as -56.
    """
    return fx.Int32(value) & 255


def exponent_scale(byte: Any) -> Any:
    """An e8m0 byte (Int32 0 to 255) placed in a float's exponent field, as the scaled converts read it."""
    return (byte << 23).bitcast(fx.Float32)


def e8m0_to_f32(byte: Any) -> Any:
    """An e8m0 byte (Int32 0 to 255) as 2^(byte - 127): 0 is the denormal 2^-127 and 255 is NaN (OCP MX 1.0)."""
    bits = (byte == 0).select(fx.Int32(0x00400000), byte << 23)
    return (byte == 255).select(fx.Int32(0x7FC00000), bits).bitcast(fx.Float32)


def inline_asm(result: Any, operands: list[Any], text: str, constraints: str) -> Any:
    """One block of gfx950 assembly with side effects.

    CompileError when a load in `text` has not its wait there too, or an output no early clobber (`=&v`): the value
    could be used before it arrived, or share registers with the address.
    """
    broken = asm_faults([text, constraints])
    if broken:
        raise CompileError(f"inline assembly `{text}`: " + "; ".join(RULES[rule] for rule in broken))
    values = [o.ir_value() if hasattr(o, "ir_value") else o for o in operands]
    return _llvm.inline_asm(result, values, text, constraints, has_side_effects=True)


def readfirstlane(value: Any) -> Any:
    """An Int32 equal on every lane, told to the compiler: it becomes a scalar, and so do addresses made of it."""
    return fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, value))


def sched_barrier() -> None:
    """No instruction moves across this point: keeps loads in front of the arithmetic that waits for them."""
    fx.rocdl.sched_barrier(0)


def permlane_swap(a: Any, b: Any, distance: int) -> tuple[Any, Any]:
    """`v_permlane32_swap` or `v_permlane16_swap` (`distance` 32 or 16) of two Float32.

    For 32 the upper half of `a` changes places with the lower half of `b`; for 16 the odd rows of 16 lanes of `a` with
    the even rows of `b`.
    """
    swap = _rocdl.permlane32_swap if distance == 32 else _rocdl.permlane16_swap
    pair = _llvm.StructType.get_literal([fx.Int32.ir_type, fx.Int32.ir_type])
    both = swap(pair, a.bitcast(fx.Int32).ir_value(), b.bitcast(fx.Int32).ir_value(), False, False)
    first, second = (_llvm.extractvalue(fx.Int32.ir_type, both, [i]) for i in (0, 1))
    return fx.Int32(first).bitcast(fx.Float32), fx.Int32(second).bitcast(fx.Float32)


def ballot(condition: Any) -> Any:
    """The lanes (Int64, lane 0 lowest) on which a condition holds; the same on every lane."""
    return fx.Int64(fx.rocdl.ballot(fx.Int64.ir_type, condition))


def first_bit(mask: Any) -> Any:
    """Number (Int32) of the lowest set bit of an Int64; 64 for none."""
    return fx.Int32(fx.Int64(fx.cttz(mask)))


def bit_count(mask: Any) -> Any:
    """How many bits (Int32) of an Int64 are set."""
    return fx.Int32(fx.Int64(fx.ctpop(mask)))


def cvt_pk_fp8_f32(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four Float32 as e4m3 bytes of one Int32, `a` lowest, ties to even; the caller clamps to +-448, the largest."""
    low = fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, a, b, fx.Int32(0), False)
    return fx.Int32(fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, c, d, low, True))


def pointer(tensor: Any, dtype: Any = None, offset: Any = None, align: int = 0) -> Any:
    """Address of a tensor's first element, read as `dtype`, moved by `offset` elements (64-bit).

    Torch allocations start on 64 bytes, so `align` (bytes, default one element) may be larger than the tensor's dtype.
    """
    start = fx.get_iter(tensor)
    if dtype is not None:
        kind = fx.Pointer[dtype, fx.AddressSpace.Global, align or max(dtype.width // 8, 1)]
        start = fx.recast_iter(kind.ir_type, start)
    return start if offset is None else start + offset
