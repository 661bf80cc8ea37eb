"""Conversions between integer and float types, 16-bit and packed forms (AMD Instinct MI300 ISA guide, VOP1, VOP3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.formats import bf16_bits, bf16_values
from dieplace.emulator.isa.state import F32, F64, I32, U32
from dieplace.emulator.isa.valu import define

F16, I16, U16 = np.float16, np.int16, np.uint16


def to_integer(low: int, high: int, dtype: Any, rounding: Any = np.trunc) -> Any:
    """Round, saturate to [low, high], NaN to 0 (MI300 ISA guide, V_CVT_I32_F32 and V_CVT_U32_F32)."""

    def convert(a: Any) -> Any:
        x = np.asarray(a, F64)
        return np.clip(np.where(np.isnan(x), 0, rounding(x)), low, high).astype(np.int64).astype(dtype)

    return convert


def _byte(place: int) -> Any:
    return lambda a: ((a >> U32(8 * place)) & U32(255)).astype(F32)


def _normalised(scale: int, low: int, dtype: Any) -> Any:
    """V_CVT_PKNORM: clamp to the unit range, scale, round to nearest even."""

    def convert(a: Any) -> Any:
        x = np.asarray(a, F64)
        x = np.clip(np.where(np.isnan(x), 0, x), low, 1)
        return np.rint(x * scale).astype(np.int64).astype(dtype).view(U16).astype(U32)

    return convert


def _pack(low: Any, high: Any) -> Any:
    return np.asarray(low, U32) | np.asarray(high, U32) << U32(16)


def _to_zero_f16(a: Any) -> Any:
    """float32 to float16 rounded toward zero, as uint16."""
    x = np.asarray(a, F32)
    near = x.astype(F16)
    over = np.abs(near.astype(F32)) > np.abs(x)
    bits = np.asarray(near).view(U16)
    return np.where(over & ~np.isnan(x) & ~np.isinf(x), bits - U16(1), bits).astype(U16)


def _pack_bf16(a: Any, b: Any) -> Any:
    return _pack(bf16_bits(a), bf16_bits(b))


def _clip_pack(low: int, high: int) -> Any:
    return lambda a, b: _pack(
        np.clip(a.astype(np.int64), low, high).astype(np.int64) & 0xFFFF,
        np.clip(b.astype(np.int64), low, high).astype(np.int64) & 0xFFFF,
    )


def _pack_byte(a: Any, place: Any, old: Any) -> Any:
    """V_CVT_PK_U8_F32: round src0 to a byte and put it into byte src1 of src2."""
    byte = to_integer(0, 255, U32, np.rint)(a)
    shift = (place & U32(3)) << U32(3)
    return (old & ~(U32(255) << shift)) | byte << shift


def _define_integers() -> None:
    define("v_cvt_f32_u32", "f32", "u32", lambda a: a.astype(F32), "1")
    define("v_cvt_f32_i32", "f32", "i32", lambda a: a.astype(F32), "1")
    define("v_cvt_u32_f32", "u32", "f32", to_integer(0, 2**32 - 1, U32), "1")
    define("v_cvt_i32_f32", "i32", "f32", to_integer(-(2**31), 2**31 - 1, I32), "1")
    define("v_cvt_rpi_i32_f32", "i32", "f32",
           to_integer(-(2**31), 2**31 - 1, I32, lambda x: np.floor(x + 0.5)), "1")  # fmt: skip
    define("v_cvt_flr_i32_f32", "i32", "f32", to_integer(-(2**31), 2**31 - 1, I32, np.floor), "1")
    for place in range(4):
        define(f"v_cvt_f32_ubyte{place}", "f32", "u32", _byte(place), "1")
    define("v_cvt_f64_f32", "f64", "f32", lambda a: a.astype(F64), "1")
    define("v_cvt_f32_f64", "f32", "f64", lambda a: a.astype(F32), "1")
    define("v_cvt_f64_i32", "f64", "i32", lambda a: a.astype(F64), "1")
    define("v_cvt_f64_u32", "f64", "u32", lambda a: a.astype(F64), "1")
    define("v_cvt_i32_f64", "i32", "f64", to_integer(-(2**31), 2**31 - 1, I32), "1")
    define("v_cvt_u32_f64", "u32", "f64", to_integer(0, 2**32 - 1, U32), "1")


def _define_halves() -> None:
    define("v_cvt_f16_f32", "f16", "f32", lambda a: a.astype(F16), "1")
    define("v_cvt_f32_f16", "f32", "f16", lambda a: a.astype(F32), "1")
    define("v_cvt_f16_u16", "f16", "u16", lambda a: a.astype(F16), "1")
    define("v_cvt_f16_i16", "f16", "i16", lambda a: a.astype(F16), "1")
    define("v_cvt_u16_f16", "u16", "f16", to_integer(0, 65535, U16), "1")
    define("v_cvt_i16_f16", "i16", "f16", to_integer(-32768, 32767, I16), "1")
    define("v_cvt_norm_i16_f16", "i16", "f16", lambda a: _normalised(32767, -1, I16)(a).astype(U16).view(I16), "1")
    define("v_cvt_norm_u16_f16", "u16", "f16", lambda a: _normalised(65535, 0, U16)(a).astype(U16), "1")
    define("v_cvt_f32_bf16", "f32", "bf16", bf16_values, "1")
    define(
        "v_cvt_pkrtz_f16_f32", "u32", "f32 f32", lambda a, b: _pack(_to_zero_f16(a), _to_zero_f16(b)), "2", taint="pair"
    )
    define("v_cvt_pk_bf16_f32", "u32", "f32 f32", _pack_bf16, taint="pair")
    define("v_cvt_pk_f16_f32", "u32", "f32 f32",
           lambda a, b: _pack(a.astype(F16).view(U16), b.astype(F16).view(U16)), taint="pair")  # fmt: skip
    define(
        "v_cvt_pknorm_i16_f32",
        "u32",
        "f32 f32",
        lambda a, b: _pack(*map(_normalised(32767, -1, I16), (a, b))),
        taint="pair",
    )
    define(
        "v_cvt_pknorm_u16_f32",
        "u32",
        "f32 f32",
        lambda a, b: _pack(*map(_normalised(65535, 0, U16), (a, b))),
        taint="pair",
    )
    define(
        "v_cvt_pknorm_i16_f16",
        "u32",
        "f16 f16",
        lambda a, b: _pack(*map(_normalised(32767, -1, I16), (a, b))),
        taint="pair",
    )
    define(
        "v_cvt_pknorm_u16_f16",
        "u32",
        "f16 f16",
        lambda a, b: _pack(*map(_normalised(65535, 0, U16), (a, b))),
        taint="pair",
    )
    define("v_cvt_pk_u16_u32", "u32", "u32 u32", _clip_pack(0, 65535), taint="pair")
    define("v_cvt_pk_i16_i32", "u32", "i32 i32", _clip_pack(-32768, 32767), taint="pair")
    define("v_cvt_pk_u8_f32", "u32", "f32 u32 u32", _pack_byte)
    define("v_sat_pk_u8_i16", "u32", "u32", _saturate_bytes, "1")


def _saturate_bytes(a: Any) -> Any:
    """Two signed 16-bit halves to two unsigned bytes."""
    low, high = (a << U32(16)).view(I32) >> I32(16), a.view(I32) >> I32(16)
    return np.clip(low, 0, 255).astype(U32) | np.clip(high, 0, 255).astype(U32) << U32(8)


_define_integers()
_define_halves()
