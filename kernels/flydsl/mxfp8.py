"""MXFP8 activations: quantisation, and the GEMV with MXFP4 weights on the scaled matrix instruction.

Kept beside the convert form (`gemv.py`): which is faster on the chip is not known, and stays a setting of the caller.
One instruction multiplies 16 rows with up to 16 tokens over 128 values and applies both scales itself, so that its cost
does not grow with the tokens; with one token 15 of 16 columns are wasted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.gemv import as_bytes
from dieplace.kernels.flydsl.tiles import (
    NOWHERE,
    STREAM,
    WAVE,
    bounded,
    flyc,
    fx,
    lane_index,
    load_items,
    pointer,
    range_constexpr,
    shared,
    split,
    store_items,
    wave_index,
)

THREADS = 256
BLOCK = 32
E4M3_MAX = 448.0
E4M3_EMAX = 8
SCALE_NAN = 255
ROWS = 16  # of one matrix instruction
DEPTH = 128
WAVES = 4
STATIC_STEPS = 8
FP4, FP8 = 4, 0  # operand formats of the f8f6f4 instructions (LLVM cbsz and blgp)


@cache
def build_quantize_mxfp8() -> Any:
    """Launcher (x, out, scales, items): four lanes a block of 32, eight bf16 a lane.

    out e4m3 and scales e8m0 as bytes. The shared exponent is floor(log2(largest)) - 8, clamped to byte 0 (OCP
    Microscaling 1.0, section 6.3); codes are rounded to even and saturate. A block with a NaN or infinity gets 255.
    """

    @flyc.kernel
    def quantize_mxfp8_kernel(x: fx.Tensor, out: fx.Tensor, scales: fx.Tensor, items: fx.Int32) -> None:
        item = fx.block_idx.x * THREADS + fx.thread_idx.x
        values = load_items(bounded(pointer(x), items * 16, 8), item, fx.BFloat16, 8).to(fx.Float32)
        largest = fx.Int32(0)
        for i in range_constexpr(8):
            largest = fx.max(largest, values[i].bitcast(fx.Int32) & 0x7FFFFFFF)
        exponent = fn.coop.warp_max(largest, width=4) >> 23
        shared_byte = fx.max(exponent - E4M3_EMAX, fx.Int32(0))
        factor = ((fx.Int32(254) - shared_byte) << 23).bitcast(fx.Float32)
        codes = []
        for i in range_constexpr(8):
            codes.append(fx.max(fx.min(values[i] * factor, fx.Float32(E4M3_MAX)), fx.Float32(-E4M3_MAX)))
        words = [fn.cvt_pk_fp8_f32(*codes[4 * w : 4 * w + 4]) for w in range(2)]
        packed = fx.Vector.from_elements(words, fx.Int32)
        store_items(bounded(pointer(out, fx.Int32), items * 8, 2), item, packed, fx.Int32, 2)
        block, part = split(item, 4)
        byte = (exponent == 255).select(fx.Int32(SCALE_NAN), shared_byte)
        if (part == 0) & (item < items):
            (pointer(scales) + block).store(byte.to(fx.Int8))

    @flyc.jit
    def quantize_mxfp8(
        x: fx.Tensor, out: fx.Tensor, scales: fx.Tensor, items: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        grid = ((items + (THREADS - 1)) // THREADS, 1, 1)
        quantize_mxfp8_kernel(x, out, scales, items).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    return quantize_mxfp8


def matrix_operand(parts: list[Any]) -> Any:
    """Eight Int32 of a matrix operand from one or two Vectors of four; fp4 fills half and leaves zeros."""
    words = [part[i] for part in parts for i in range(4)]
    return fx.Vector.from_elements(words + [fx.Int32(0)] * (8 - len(words)), fx.Int32)


@cache
def build_gemv_mxfp4_mxfp8(k: int, tokens: int, *, bias: bool, fp32: bool) -> Any:
    """Launcher (x, x_scales, blocks, scales, bias, out, n): a workgroup takes 16 rows, its four waves divide `k`.

    x (tokens, k) e4m3 bytes, x_scales (tokens, k/32), blocks (n, k/32, 16), scales (n, k/32) uint8, bias (n) bf16,
    out (tokens, n) fp32 or bf16. Lane l brings row l % 16 of the weights, k = 32 g + (0..31) with g = l // 16, and of
    token l % 16 the values k = 16 g + (0..15) and 64 + 16 g + (0..15): the 8-bit operands of this instruction are laid
    out in two runs (AMD matrix-core guide for CDNA 4). Both scale bytes are those of block g.
    """
    blocks_in_row = k // BLOCK
    steps = -(-k // DEPTH)
    rounds = -(-steps // WAVES)
    dtype = fx.Float32 if fp32 else fx.BFloat16
    with_bias = bias

    def step_product(runs: dict[str, Any], step: Any, acc: Any, worst: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        lane = lane_index()
        row, group = lane % ROWS, lane // ROWS
        block = step * 4 + group
        inside = block < blocks_in_row
        nowhere = fx.Int32(NOWHERE)
        weight = inside.select(row * blocks_in_row + block, nowhere)
        token = (inside & (row < tokens)).select(row * blocks_in_row + block, nowhere)
        # 16-byte items of the activations: two a block; this lane's runs start 16 and 64 + 16 values apart.
        first = step * 8 + group
        here = row < tokens
        halves = []
        for i in range(2):
            item = first + 4 * i
            halves.append((here & (item < 2 * blocks_in_row)).select(row * (2 * blocks_in_row) + item, nowhere))
        a = matrix_operand([load_items(runs["blocks"], weight, fx.Int32, 4, "stream_once")])
        b = matrix_operand([load_items(runs["x"], half, fx.Int32, 4) for half in halves])
        scale_a = fn.u8(load_items(runs["scales"], weight, fx.Uint8, 1, "stream_once")[0])
        scale_b = fn.u8(load_items(runs["x_scales"], token, fx.Uint8, 1)[0])
        acc = fn.mfma_scale_f32_16x16x128_f8f6f4(a, b, acc, scale_a, scale_b, cbsz=FP4, blgp=FP8)
        return acc, (fx.max(worst[0], scale_a), fx.max(worst[1], scale_b))

    @flyc.kernel
    def gemv_mxfp4_mxfp8_kernel(
        x: fx.Tensor,
        x_scales: fx.Tensor,
        blocks: fx.Tensor,
        scales: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
        n: fx.Int32,
    ) -> None:
        wave, lane = wave_index(), lane_index()
        first_row = fx.block_idx.x * ROWS
        left = n - first_row
        rows = (left < ROWS).select(left, fx.Int32(ROWS))
        before = fx.Int64(first_row) * blocks_in_row
        runs = {
            "blocks": bounded(pointer(blocks, fx.Int32) + before * 4, rows * (blocks_in_row * 16), 4),
            "scales": bounded(pointer(scales, fx.Uint8) + before, rows * blocks_in_row, 1),
            "x": bounded(pointer(x, fx.Int32), tokens * k, 4),
            "x_scales": bounded(pointer(x_scales, fx.Uint8), tokens * blocks_in_row, 1),
        }
        acc = fx.Vector.filled(4, 0.0, fx.Float32)
        worst_row, worst_token = fx.Int32(0), fx.Int32(0)
        if fx.const_expr(rounds <= STATIC_STEPS):
            for r in range_constexpr(rounds):
                acc, (worst_row, worst_token) = step_product(runs, r * WAVES + wave, acc, (worst_row, worst_token))
        else:
            for r in range(rounds, unroll=4):  # type: ignore[call-overload]
                acc, (worst_row, worst_token) = step_product(
                    runs, fx.Int32(r) * WAVES + wave, acc, (worst_row, worst_token)
                )
        # What the instruction makes of scale byte 255 is not relied on: such a row or token becomes NaN here.
        bad_rows, bad_tokens = fn.ballot(worst_row == SCALE_NAN), fn.ballot(worst_token == SCALE_NAN)
        parts = shared(fx.SharedAllocator(), fx.Float32, WAVES, ROWS, ROWS)
        column, group = lane % ROWS, lane // ROWS
        for j in range_constexpr(4):
            row = group * 4 + j
            bad = named(bad_rows, row) | named(bad_tokens, column)
            parts[wave, row, column] = bad.select(fx.Float32(float("nan")), acc[j])
        fx.gpu.barrier()
        token, row = split(fx.thread_idx.x, ROWS)
        if (token < tokens) & (row < rows):
            total = parts[0, row, token]
            for w in range_constexpr(1, WAVES):
                total = total + parts[w, row, token]
            if fx.const_expr(with_bias):
                total = total + (pointer(bias) + (first_row + row)).load().to(fx.Float32)
            (pointer(out) + (token * n + first_row + row)).store(total.to(dtype))

    @flyc.jit
    def gemv_mxfp4_mxfp8(
        x: fx.Tensor,
        x_scales: fx.Tensor,
        blocks: fx.Tensor,
        scales: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
        n: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        grid = ((n + (ROWS - 1)) // ROWS, 1, 1)
        gemv_mxfp4_mxfp8_kernel(x, x_scales, blocks, scales, bias, out, n).launch(
            grid=grid, block=(WAVES * WAVE, 1, 1), stream=stream
        )

    return gemv_mxfp4_mxfp8


def named(mask: Any, number: Any) -> Any:
    """Whether one of the four lanes number, number + 16, + 32, + 48 is set in a mask of 64 lanes."""
    folded = mask | (mask >> 16) | (mask >> 32) | (mask >> 48)
    return ((fx.Int32(folded) >> number) & 1) == 1


def _plan_quantize(operands: Operands, attrs: Attrs) -> list[Launch]:
    x = operands["x"]
    return [Launch(build_quantize_mxfp8(), (x, as_bytes(operands["out"]), operands["scales"], x.numel() // 8))]


def _plan_gemv(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, blocks, bias, out = (operands[name] for name in ("x", "blocks", "bias", "out"))
    fp32 = str(out.dtype) == "torch.float32"
    launcher = build_gemv_mxfp4_mxfp8(x.shape[1], x.shape[0], bias=bias is not None, fp32=fp32)
    x_scales, scales = as_bytes(operands["x_scales"]), as_bytes(operands["scales"])
    args = (as_bytes(x), x_scales, blocks, scales, x_scales if bias is None else bias, out, blocks.shape[0])
    return [Launch(launcher, args)]


quantize_mxfp8 = KernelOp(_plan_quantize)
gemv_mxfp4_mxfp8 = KernelOp(_plan_gemv)
