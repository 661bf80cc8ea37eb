"""GEMV for 1 to 8 tokens with bf16 or MXFP4 weights: out[t] = W x[t] + bias, sums in fp32, one rounding."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.rows import (
    BF16_ITEM,
    FP4_BLOCK,
    RowRuns,
    RowTile,
    Run,
    activation_run,
    dot_bf16,
    dot_mxfp4,
    finished_rows,
    lane_place,
    row_run,
    walk_rows,
    wave_first_row,
)
from dieplace.kernels.flydsl.tiles import STREAM, flyc, fold, fx, pointer, zero_pairs


def token_run(x: Any, tokens: int, k: int, stride: int = 0) -> Run:
    """The activations of all tokens, rows `stride` elements apart (0: `k`)."""
    stride = stride or k
    return activation_run(x, (tokens - 1) * stride + k, [t * stride // BF16_ITEM for t in range(tokens)])


@cache
def build_gemv_bf16(
    k: int, tokens: int, *, bias: bool, fp32: bool, stride: int = 0, x_stride: int = 0, rows: int = 4, waves: int = 4
) -> Any:
    """Launcher (weight, x, bias, out, n); `stride` and `x_stride` are row distances in elements (0: `k`).

    weight (n, stride) bf16, x (tokens, x_stride) bf16, bias (n) bf16 (not read without `bias`), out (tokens, n) fp32
    or bf16. `k` a multiple of 8; a row may be at most 2 GiB, the matrix any size.
    """
    tile = RowTile(k // BF16_ITEM, tokens, (stride or k) // BF16_ITEM, rows, waves)
    dtype = fx.Float32 if fp32 else fx.BFloat16
    with_bias = bias

    @flyc.kernel
    def gemv_bf16_kernel(weight: fx.Tensor, x: fx.Tensor, bias: fx.Tensor, out: fx.Tensor, n: fx.Int32) -> None:
        first_row = wave_first_row(tile)
        weights = row_run(tile, pointer(weight), first_row, n, 16, BF16_ITEM)
        runs = RowRuns(weights, None, token_run(x, tokens, k, x_stride), *lane_place(tile))
        sums = walk_rows(tile, runs, zero_pairs(tokens * rows), dot_bf16)
        for total, row, token, valid in finished_rows(tile, [fold(s) for s in sums], first_row, n):
            if valid:
                value = total
                if fx.const_expr(with_bias):
                    value = value + (pointer(bias) + row).load().to(fx.Float32)
                (pointer(out) + (token * n + row)).store(value.to(dtype))

    @flyc.jit
    def gemv_bf16(
        weight: fx.Tensor, x: fx.Tensor, bias: fx.Tensor, out: fx.Tensor, n: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        grid = ((n + (tile.block_rows - 1)) // tile.block_rows, 1, 1)
        gemv_bf16_kernel(weight, x, bias, out, n).launch(grid=grid, block=(tile.threads, 1, 1), stream=stream)

    return gemv_bf16


@cache
def build_gemv_mxfp4(
    k: int, tokens: int, *, bias: bool, fp32: bool, stride: int = 0, x_stride: int = 0, rows: int = 4, waves: int = 4
) -> Any:
    """Launcher (blocks, scales, x, bias, out, n) with MXFP4 weights; strides as in `build_gemv_bf16`.

    blocks (n, stride/32, 16) uint8, low nibble = even element, and e8m0 scales (n, stride/32) uint8, as checkpoints of
    GPT-OSS store them. A block's products are exact and its sum must stay below the largest fp32 before the scale is
    applied, which bf16 activations below 1e36 cannot exceed.
    """
    tile = RowTile(k // FP4_BLOCK, tokens, (stride or k) // FP4_BLOCK, rows, waves)
    dtype = fx.Float32 if fp32 else fx.BFloat16
    with_bias = bias

    @flyc.kernel
    def gemv_mxfp4_kernel(
        blocks: fx.Tensor, scales: fx.Tensor, x: fx.Tensor, bias: fx.Tensor, out: fx.Tensor, n: fx.Int32
    ) -> None:
        first_row = wave_first_row(tile)
        weights = row_run(tile, pointer(blocks, fx.Int32), first_row, n, 16, 4)
        bytes_ = row_run(tile, pointer(scales, fx.Uint8), first_row, n, 1, 1)
        runs = RowRuns(weights, bytes_, token_run(x, tokens, k, x_stride), *lane_place(tile))
        sums = walk_rows(tile, runs, [fx.Float32(0.0) for _ in range(tokens * rows)], dot_mxfp4)
        for total, row, token, valid in finished_rows(tile, sums, first_row, n):
            if valid:
                value = total
                if fx.const_expr(with_bias):
                    value = value + (pointer(bias) + row).load().to(fx.Float32)
                (pointer(out) + (token * n + row)).store(value.to(dtype))

    @flyc.jit
    def gemv_mxfp4(
        blocks: fx.Tensor,
        scales: fx.Tensor,
        x: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
        n: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        grid = ((n + (tile.block_rows - 1)) // tile.block_rows, 1, 1)
        gemv_mxfp4_kernel(blocks, scales, x, bias, out, n).launch(grid=grid, block=(tile.threads, 1, 1), stream=stream)

    return gemv_mxfp4


def _is_fp32(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.float32"


def _plan_bf16(operands: Operands, attrs: Attrs) -> list[Launch]:
    weight, x, bias, out = (operands[name] for name in ("weight", "x", "bias", "out"))
    launcher = build_gemv_bf16(x.shape[1], x.shape[0], bias=bias is not None, fp32=_is_fp32(out))
    return [Launch(launcher, (weight, x, x if bias is None else bias, out, weight.shape[0]))]


def _plan_mxfp4(operands: Operands, attrs: Attrs) -> list[Launch]:
    blocks, x, bias, out = (operands[name] for name in ("blocks", "x", "bias", "out"))
    launcher = build_gemv_mxfp4(x.shape[1], x.shape[0], bias=bias is not None, fp32=_is_fp32(out))
    scales = as_bytes(operands["scales"])
    return [Launch(launcher, (blocks, scales, x, x if bias is None else bias, out, blocks.shape[0]))]


def as_bytes(scales: Any) -> Any:
    """Scales of either dtype that files use (U8, F8_E8M0) as uint8."""
    import torch

    return scales.view(torch.uint8)


gemv_bf16 = KernelOp(_plan_bf16)
gemv_mxfp4 = KernelOp(_plan_mxfp4)
