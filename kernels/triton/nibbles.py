"""MXFP4 in Triton: eight e2m1 values from a 32-bit word, and the e8m0 scale.

An e2m1 value is sign, two exponent bits, one mantissa bit. Shifted under the exponent of an fp16 it *is* an fp16
(subnormals included) 2^-14 too small, so decoding is two shifts and two logical operations for two values, and
one exact multiplication by 2^14 for each partial sum (OCP Microscaling Formats v1.0, section 5.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dieplace.kernels.triton.numbers import widen

FP16_SHIFT = tl.constexpr(16384.0)

# (a & b) | c is table 0xEA. Word nibbles i and i+4 sit 16 bits apart, so one shift serves both.
_PTX = tl.constexpr(
    """
    {
    .reg .b32 s, t; .reg .b16 lo, hi;
    shl.b32 s, $8, 12; and.b32 s, s, 0x80008000; shl.b32 t, $8, 9; lop3.b32 t, t, 0x0E000E00, s, 0xEA;
    mov.b32 {lo, hi}, t; cvt.f32.f16 $0, lo; cvt.f32.f16 $4, hi;
    shl.b32 s, $8, 8; and.b32 s, s, 0x80008000; shl.b32 t, $8, 5; lop3.b32 t, t, 0x0E000E00, s, 0xEA;
    mov.b32 {lo, hi}, t; cvt.f32.f16 $1, lo; cvt.f32.f16 $5, hi;
    shl.b32 s, $8, 4; and.b32 s, s, 0x80008000; shl.b32 t, $8, 1; lop3.b32 t, t, 0x0E000E00, s, 0xEA;
    mov.b32 {lo, hi}, t; cvt.f32.f16 $2, lo; cvt.f32.f16 $6, hi;
    and.b32 s, $8, 0x80008000; shr.u32 t, $8, 3; lop3.b32 t, t, 0x0E000E00, s, 0xEA;
    mov.b32 {lo, hi}, t; cvt.f32.f16 $3, lo; cvt.f32.f16 $7, hi;
    }
    """
)


@triton.jit
def nibble(words, position: tl.constexpr):
    """Value `position` (0 to 7, low nibble first) of each int32 word, times 2^-14, as fp32."""
    field = (words >> (4 * position)) & 15
    bits = ((field & 8) << 12) | ((field & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def eight(words, PTX: tl.constexpr):
    """All eight values of each word, times 2^-14: eight fp32 tensors shaped like `words`."""
    if PTX:
        values = tl.inline_asm_elementwise(
            _PTX,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [words],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
            ),
            is_pure=True,
            pack=1,
        )
        return values
    else:
        return (
            nibble(words, 0),
            nibble(words, 1),
            nibble(words, 2),
            nibble(words, 3),
            nibble(words, 4),
            nibble(words, 5),
            nibble(words, 6),
            nibble(words, 7),
        )


@triton.jit
def scale_of(byte):
    """2^(byte - 127) as fp32: byte 0 is 2^-127 (a subnormal), 255 is NaN (OCP MX v1.0, section 5.4.1)."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot_words(words, x_base, x_row, x_mask, T: tl.constexpr, TP: tl.constexpr, columns, PTX: tl.constexpr):
    """[TP, rows, words] partial products of MXFP4 words with `x[t, 8 * column + i]`; unscaled, 2^-14 folded back.

    `columns` are word indices within a row, `x_row` the stride of a token; tokens beyond T and columns outside
    `x_mask` read zero.
    """
    w0, w1, w2, w3, w4, w5, w6, w7 = eight(words, PTX)
    token = tl.arange(0, TP)
    at = x_base + token[:, None] * x_row + columns[None, :] * 8
    ok = (token[:, None] < T) & x_mask[None, :]
    part = w0[None, :, :] * widen(tl.load(at, mask=ok, other=0.0))[:, None, :]
    part += w1[None, :, :] * widen(tl.load(at + 1, mask=ok, other=0.0))[:, None, :]
    part += w2[None, :, :] * widen(tl.load(at + 2, mask=ok, other=0.0))[:, None, :]
    part += w3[None, :, :] * widen(tl.load(at + 3, mask=ok, other=0.0))[:, None, :]
    part += w4[None, :, :] * widen(tl.load(at + 4, mask=ok, other=0.0))[:, None, :]
    part += w5[None, :, :] * widen(tl.load(at + 5, mask=ok, other=0.0))[:, None, :]
    part += w6[None, :, :] * widen(tl.load(at + 6, mask=ok, other=0.0))[:, None, :]
    part += w7[None, :, :] * widen(tl.load(at + 7, mask=ok, other=0.0))[:, None, :]
    return part * FP16_SHIFT


@triton.jit
def rows_dot(
    blocks, scales, x_base, x_row, rows, row_ok, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[TP, BN] fp32 dot products of MXFP4 rows (checkpoint layout: K/8 int32 words, K/32 scale bytes) with x."""
    words_in_row: tl.constexpr = K // 8
    scales_in_row: tl.constexpr = K // 32
    total = tl.zeros((TP, BN, BW), tl.float32)
    for start in range(0, words_in_row, BW):
        columns = start + tl.arange(0, BW)
        inside = columns < words_in_row
        ok = row_ok[:, None] & inside[None, :]
        words = tl.load(
            blocks + rows[:, None] * words_in_row + columns[None, :], mask=ok, other=0, eviction_policy="evict_first"
        )
        byte = tl.load(scales + rows[:, None] * scales_in_row + (columns // 4)[None, :], mask=ok, other=127)
        part = dot_words(words, x_base, x_row, inside, T, TP, columns, PTX)
        total += part * scale_of(byte)[None, :, :]
    return tl.sum(total, axis=2)
