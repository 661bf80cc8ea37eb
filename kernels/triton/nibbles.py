"""MXFP4 in Triton: eight e2m1 values from a 32-bit word, and the e8m0 scale.

An e2m1 value is sign, two exponent bits, one mantissa bit. Shifted under the exponent of an fp16 it *is* an fp16
(subnormals included) 2^-14 too small, so decoding is two shifts and two logical operations for two values, and
one exact multiplication by 2^14 for each partial sum (OCP Microscaling Formats v1.0, section 5.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dieplace.kernels.triton.numbers import widen

# How nibbles are decoded: plain Triton anywhere, or inline PTX through fp16 or through e4m3 pairs.
PLAIN, PTX_FP16, PTX_E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# (a & b) | c is table 0xEA. Word nibbles i and i+4 sit 16 bits apart, so one shift serves both.
_FP16 = tl.constexpr(
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


# Integer operations run at half rate on sm_90, so pairs go through e4m3: seven of them for eight values, not sixteen.
_E4M3 = tl.constexpr(
    """
    {
    .reg .b32 e, o, t, h; .reg .b16 lo, hi, a, b;
    shl.b32 t, $8, 4; and.b32 t, t, 0x80808080; shl.b32 e, $8, 2; lop3.b32 e, e, 0x1C1C1C1C, t, 0xEA;
    and.b32 t, $8, 0x80808080; shr.u32 o, $8, 2; lop3.b32 o, o, 0x1C1C1C1C, t, 0xEA;
    mov.b32 {lo, hi}, e;
    cvt.rn.f16x2.e4m3x2 h, lo; mov.b32 {a, b}, h; cvt.f32.f16 $0, a; cvt.f32.f16 $2, b;
    cvt.rn.f16x2.e4m3x2 h, hi; mov.b32 {a, b}, h; cvt.f32.f16 $4, a; cvt.f32.f16 $6, b;
    mov.b32 {lo, hi}, o;
    cvt.rn.f16x2.e4m3x2 h, lo; mov.b32 {a, b}, h; cvt.f32.f16 $1, a; cvt.f32.f16 $3, b;
    cvt.rn.f16x2.e4m3x2 h, hi; mov.b32 {a, b}, h; cvt.f32.f16 $5, a; cvt.f32.f16 $7, b;
    }
    """
)
_OUT = tl.constexpr("=f,=f,=f,=f,=f,=f,=f,=f,r")


@triton.jit
def unit_of(DECODE: tl.constexpr):
    """The power of two that decoded values lack: 2^14 through fp16, 2^6 through e4m3; both multiply exactly."""
    if DECODE == PTX_E4M3:
        return 64.0
    else:
        return 16384.0


@triton.jit
def nibble(words, position: tl.constexpr):
    """Value `position` (0 to 7, low nibble first) of each int32 word, times 2^-14, as fp32."""
    field = (words >> (4 * position)) & 15
    bits = ((field & 8) << 12) | ((field & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def eight(words, DECODE: tl.constexpr):
    """All eight values of each word, times 1 / `unit_of(DECODE)`: eight fp32 tensors shaped like `words`."""
    if DECODE == PLAIN:
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
    elif DECODE == PTX_FP16:
        return tl.inline_asm_elementwise(
            _FP16, _OUT, [words], is_pure=True, pack=1,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _E4M3, _OUT, [words], is_pure=True, pack=1,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        )  # fmt: skip


@triton.jit
def scale_of(byte):
    """2^(byte - 127) as fp32: byte 0 is 2^-127 (a subnormal), 255 is NaN (OCP MX v1.0, section 5.4.1)."""
    bits = tl.maximum(byte.to(tl.int32) << 23, 0x00400000)
    scale = bits.to(tl.float32, bitcast=True)
    # Byte 255 gives infinity here, and infinity times zero is NaN; every finite scale stays itself.
    return scale * 0.0 + scale


@triton.jit
def split_eight(x):
    """[T, 8 * W] as eight [T, W] tensors: element i of every group of eight."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    even, odd = tl.split(x)
    x00, x10 = tl.split(even)
    x01, x11 = tl.split(odd)
    x0, x4 = tl.split(x00)
    x1, x5 = tl.split(x01)
    x2, x6 = tl.split(x10)
    x3, x7 = tl.split(x11)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _scaled_words(blocks, scales, rows, row_ok, words_in_row, start, K: tl.constexpr, BW: tl.constexpr):
    """[BN, BW] words of the rows from word `start` on, each read once, and the fp32 scale of each."""
    columns = start + tl.arange(0, BW)
    ok = row_ok[:, None] & (columns < K // 8)[None, :]
    at = blocks + rows[:, None] * words_in_row + columns[None, :]
    words = tl.load(at, mask=ok, other=0, eviction_policy="evict_first")
    byte = tl.load(scales + rows[:, None] * (K // 32) + (columns // 4)[None, :], mask=ok, other=127)
    return words, scale_of(byte)


@triton.jit
def _one_token(
    blocks, scales, x_base, rows, row_ok, words_in_row, start, K: tl.constexpr, BW: tl.constexpr, DECODE: tl.constexpr
):
    """[BN, BW] scaled partial products with one token; a token axis would cost a change of layout."""
    words, scale = _scaled_words(blocks, scales, rows, row_ok, words_in_row, start, K, BW)
    elements = start * 8 + tl.arange(0, BW * 8)
    x = tl.load(x_base + elements[None, :], mask=(elements < K)[None, :], other=0.0)
    x0, x1, x2, x3, x4, x5, x6, x7 = split_eight(widen(x))
    w0, w1, w2, w3, w4, w5, w6, w7 = eight(words, DECODE)
    part = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5 + w6 * x6 + w7 * x7
    return (part * unit_of(DECODE)) * scale


@triton.jit
def _many_tokens(
    blocks, scales, x_base, x_row, rows, row_ok, words_in_row, start, K: tl.constexpr, T: tl.constexpr,
    TP: tl.constexpr, BW: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """[TP, BN, BW] scaled partial products with T tokens; the weights are read once."""
    words, scale = _scaled_words(blocks, scales, rows, row_ok, words_in_row, start, K, BW)
    token = tl.arange(0, TP)
    elements = start * 8 + tl.arange(0, BW * 8)
    ok = (token < T)[:, None] & (elements < K)[None, :]
    x = tl.load(x_base + token[:, None] * x_row + elements[None, :], mask=ok, other=0.0)
    x0, x1, x2, x3, x4, x5, x6, x7 = split_eight(widen(x))
    w0, w1, w2, w3, w4, w5, w6, w7 = eight(words, DECODE)
    part = w0[None, :, :] * x0[:, None, :] + w1[None, :, :] * x1[:, None, :]
    part += w2[None, :, :] * x2[:, None, :] + w3[None, :, :] * x3[:, None, :]
    part += w4[None, :, :] * x4[:, None, :] + w5[None, :, :] * x5[:, None, :]
    part += w6[None, :, :] * x6[:, None, :] + w7[None, :, :] * x7[:, None, :]
    return (part * unit_of(DECODE)) * scale[None, :, :]


@triton.jit
def rows_dot(
    blocks, scales, x_base, x_row, rows, row_ok, words_in_row, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """[TP, BN] fp32 dot products of MXFP4 rows (checkpoint layout: K/8 int32 words, K/32 scale bytes) with x.

    `words_in_row` is K / 8 as a run-time value that Triton was told not to specialise: not knowing the alignment of a
    row it loads one word a lane, which is the layout in which a lane already holds the eight x values of its word.
    With the constant it loads four words a lane and moves every decoded weight through shared memory (seen in the
    code for sm_90, Triton 3.9). One warp a program, for the same reason. Short rows are unrolled, so that all their
    loads are in flight at once.
    """
    if TP == 1:
        flat = tl.zeros((BN, BW), tl.float32)
        if BN * (K // 8) <= 1536:
            for start in tl.static_range(0, K // 8, BW):
                flat += _one_token(blocks, scales, x_base, rows, row_ok, words_in_row, start, K, BW, DECODE)
        else:
            for start in range(0, K // 8, BW):
                flat += _one_token(blocks, scales, x_base, rows, row_ok, words_in_row, start, K, BW, DECODE)
        return tl.sum(flat, axis=1)[None, :]
    else:
        total = tl.zeros((TP, BN, BW), tl.float32)
        for start in range(0, K // 8, BW):
            total += _many_tokens(
                blocks, scales, x_base, x_row, rows, row_ok, words_in_row, start, K, T, TP, BW, DECODE
            )
        return tl.sum(total, axis=2)
