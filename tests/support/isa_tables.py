"""Mnemonics that are tested one by one, with what the tests need to know about them; `covered()` is their union.

The tests take their parameters from these tables, so a mnemonic listed here is a mnemonic tested.
"""

from __future__ import annotations

from typing import Any

# Loads: bytes, sign-extended, half of the register that is written (None: the whole).
LOADS: dict[str, tuple[int, bool, int | None]] = {
    "ubyte": (1, False, None), "sbyte": (1, True, None), "ushort": (2, False, None), "sshort": (2, True, None),
    "dword": (4, False, None), "dwordx2": (8, False, None), "dwordx3": (12, False, None), "dwordx4": (16, False, None),
    "ubyte_d16": (1, False, 0), "ubyte_d16_hi": (1, False, 1), "sbyte_d16": (1, True, 0), "sbyte_d16_hi": (1, True, 1),
    "short_d16": (2, False, 0), "short_d16_hi": (2, False, 1),
}  # fmt: skip
# Stores: bytes, half of the register that is stored.
STORES = {"byte": (1, 0), "short": (2, 0), "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
          "byte_d16_hi": (1, 1), "short_d16_hi": (2, 1)}  # fmt: skip
SPACES = ("global", "flat", "buffer")
TO_LDS = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx3": 12, "dwordx4": 16}
SCALAR_LOADS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}

INTEGER_ATOMICS = ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec")
FLOAT_ATOMICS = {"add_f32": 4, "add_f64": 8, "min_f64": 8, "max_f64": 8, "pk_add_f16": 4, "pk_add_bf16": 4}
ATOMICS = {**{f"{n}{x}": size for n in INTEGER_ATOMICS for x, size in (("", 4), ("_x2", 8))}, **FLOAT_ATOMICS}

LDS_READS = {"b32": (4, False, None), "b64": (8, False, None), "b96": (12, False, None), "b128": (16, False, None),
             "u8": (1, False, None), "i8": (1, True, None), "u16": (2, False, None), "i16": (2, True, None),
             "u8_d16": (1, False, 0), "u8_d16_hi": (1, False, 1), "i8_d16": (1, True, 0), "i8_d16_hi": (1, True, 1),
             "u16_d16": (2, False, 0), "u16_d16_hi": (2, False, 1)}  # fmt: skip
LDS_WRITES = {"b8": (1, 0), "b16": (2, 0), "b32": (4, 0), "b64": (8, 0), "b96": (12, 0), "b128": (16, 0),
              "b8_d16_hi": (1, 1), "b16_d16_hi": (2, 1)}  # fmt: skip
LDS_PAIRS = {f"{verb}2{st}_b{8 * size}": (size, 64 if st else 1)
             for verb in ("read", "write") for st in ("", "st64") for size in (4, 8)}  # fmt: skip
# LDS atomics: operation as memory atomics spell it, bytes.
_LDS_VERBS = {"add_u": "add", "sub_u": "sub", "rsub_u": "rsub", "inc_u": "inc", "dec_u": "dec", "min_i": "smin",
              "max_i": "smax", "min_u": "umin", "max_u": "umax", "and_b": "and", "or_b": "or", "xor_b": "xor",
              "cmpst_b": "cmpst"}  # fmt: skip
LDS_ATOMICS: dict[str, tuple[str, int]] = {
    f"{name.split('_')[0]}{rtn}_{name.split('_')[1]}{8 * size}": (operation, size)
    for name, operation in _LDS_VERBS.items() for rtn in ("", "_rtn") for size in (4, 8)
}  # fmt: skip
LDS_ATOMICS |= {f"{verb}{rtn}_{kind}": (f"{verb}_{kind}", size)
                for verb, kind, size in (("add", "f32", 4), ("add", "f64", 8), ("min", "f32", 4), ("max", "f32", 4),
                                         ("min", "f64", 8), ("max", "f64", 8), ("pk_add", "f16", 4),
                                         ("pk_add", "bf16", 4)) for rtn in ("", "_rtn")}  # fmt: skip
LDS_ATOMICS |= {f"wrxchg_rtn_b{8 * size}": ("swap", size) for size in (4, 8)}

# Matrix: type, m, k, blocks, registers of A and B in a lane, other spelling that LLVM accepts or prints.
MATRIX: dict[str, tuple[str, int, int, int]] = {}
for _kind, _forms in {
    "f16": ((16, 32, 1), (32, 16, 1), (16, 16, 1), (32, 8, 1), (4, 4, 16), (16, 4, 4), (32, 4, 2)),
    "bf16": ((16, 32, 1), (32, 16, 1), (16, 16, 1), (32, 8, 1), (4, 4, 16), (16, 4, 4), (32, 4, 2)),
    "f32": ((16, 4, 1), (32, 2, 1), (4, 1, 16), (16, 1, 4), (32, 1, 2)),
    "i8": ((16, 64, 1), (32, 32, 1), (16, 32, 1), (32, 16, 1), (4, 4, 16), (16, 4, 4), (32, 4, 2)),
    "fp8_fp8": ((16, 32, 1), (32, 16, 1)), "fp8_bf8": ((16, 32, 1), (32, 16, 1)),
    "bf8_fp8": ((16, 32, 1), (32, 16, 1)), "bf8_bf8": ((16, 32, 1), (32, 16, 1)),
    "f64": ((16, 4, 1),),
}.items():  # fmt: skip
    for _m, _k, _blocks in _forms:
        _result = {"i8": "i32", "f64": "f64"}.get(_kind, "f32")
        _stem = f"v_mfma_{_result}_{_m}x{_m}x{_k}"
        MATRIX[f"{_stem}_{_blocks}b_{_kind}" if _blocks > 1 else f"{_stem}_{_kind}"] = (_kind, _m, _k, _blocks)
        _gfx90a = _kind == "bf16" and (_m, _k) in ((16, 16), (32, 8), (4, 4), (16, 4), (32, 4))
        MATRIX[f"{_stem}{_kind}{'_1k' if _gfx90a else ''}"] = (_kind, _m, _k, _blocks)
SCALED_MATRIX = {f"v_mfma_{s}f32_{m}x{m}x{k}_f8f6f4": (m, k, bool(s)) for m, k in ((16, 128), (32, 64))
                 for s in ("", "scale_")}  # fmt: skip

WIDEN_PAIR = {f"v_cvt_scalef32_pk_{w}_{n}": (w, n) for w in ("f32", "f16", "bf16") for n in ("fp8", "bf8", "fp4")}
NARROW_PAIR = {f"v_cvt_scalef32_pk_{n}_{w}": (w, n) for w in ("f32", "f16", "bf16") for n in ("fp8", "bf8", "fp4")}
WIDEN_ONE = {f"v_cvt_scalef32_{w}_{n}": (w, n) for w in ("f32", "f16") for n in ("fp8", "bf8")}
WIDEN_32 = {f"v_cvt_scalef32_pk32_{w}_{n}": (w, n) for w in ("f32", "f16", "bf16") for n in ("fp6", "bf6")}
NARROW_32 = {**{f"v_cvt_scalef32_pk32_{n}_{w}": (w, n) for w in ("f16", "bf16") for n in ("fp6", "bf6")},
             **{f"v_cvt_scalef32_2xpk16_{n}_f32": ("f32", n) for n in ("fp6", "bf6")}}  # fmt: skip
UNSCALED = {f"v_cvt_pk_{n}_f32": n for n in ("fp8", "bf8")}
UNSCALED_WIDEN = {**{f"v_cvt_f32_{n}": n for n in ("fp8", "bf8")}, **{f"v_cvt_pk_f32_{n}": n for n in ("fp8", "bf8")}}

PACKED_F32 = {"v_pk_add_f32": 2, "v_pk_mul_f32": 2, "v_pk_fma_f32": 3}
MIXED = ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
DIVISION = ("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32", "v_div_scale_f64", "v_div_fmas_f64",
            "v_div_fixup_f64", "v_div_fixup_f16")  # fmt: skip
LANES = ("v_readlane_b32", "v_writelane_b32", "v_readfirstlane_b32", "ds_swizzle_b32", "ds_bpermute_b32",
         "ds_permute_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32", "v_swap_b32", "v_mbcnt_lo_u32_b32",
         "v_mbcnt_hi_u32_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_pk_mov_b32",
         "v_pk_fmac_f16")  # fmt: skip
BRANCHES = ("s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz", "s_cbranch_execz",
            "s_cbranch_execnz")  # fmt: skip
HINTS = ("s_nop", "s_setprio", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_wakeup", "s_incperflevel",
         "s_decperflevel", "s_setreg_imm32_b32", "s_waitcnt", "s_sleep")  # fmt: skip
CONTROL = ("s_endpgm", "s_barrier", "s_getreg_b32", "s_memtime", "s_memrealtime", "buffer_wbl2", "buffer_inv")


def covered() -> set[str]:
    """Every mnemonic without its encoding suffix that some table names."""
    names: set[str] = set()
    tables: tuple[Any, ...] = (
        MATRIX, SCALED_MATRIX, WIDEN_PAIR, NARROW_PAIR, WIDEN_ONE, WIDEN_32, NARROW_32, UNSCALED, UNSCALED_WIDEN,
        PACKED_F32, MIXED, DIVISION, LANES, BRANCHES, HINTS, CONTROL,
    )  # fmt: skip
    for table in tables:
        names |= set(table)
    for space in SPACES:
        names |= {f"{space}_load_{x}" for x in LOADS} | {f"{space}_store_{x}" for x in STORES}
        names |= {f"{space}_atomic_{x}" for x in ATOMICS}
    names |= {f"global_load_lds_{x}" for x in TO_LDS}
    names |= {f"{p}_{x}" for p in ("s_load", "s_buffer_load") for x in SCALAR_LOADS}
    for table in (LDS_READS, LDS_WRITES):
        verb = "read" if table is LDS_READS else "write"
        names |= {f"ds_{verb}_{x}" for x in table}
    names |= {f"ds_{x}" for x in (*LDS_PAIRS, *LDS_ATOMICS)} | {"ds_read_b64_tr_b16"}
    return names
