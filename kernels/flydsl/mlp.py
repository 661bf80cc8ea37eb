"""Gate and up of a dense MLP in one launch: silu(x gate^T) * (x up^T), bf16 or MXFP4 weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.gemv import as_bytes, token_run
from dieplace.kernels.flydsl.rows import (
    BF16_ITEM,
    FP4_BLOCK,
    RowRuns,
    RowTile,
    dot_bf16,
    dot_mxfp4,
    finished_rows,
    lane_place,
    row_run,
    walk_rows,
    wave_first_row,
)
from dieplace.kernels.flydsl.softmax import sigmoid
from dieplace.kernels.flydsl.tiles import STREAM, flyc, fold, fx, pointer, zero_pairs

ROWS = 4


@flyc.jit
def store_products(halves: list[Any], n: Any, out: Any) -> None:
    """Write the products; the same lane holds the gate and the up sum of a row, as both are laid out alike."""
    for (gate, row, token, valid), (up, _, _, _) in zip(*halves, strict=True):
        if valid:
            (pointer(out) + (token * n + row)).store((gate * sigmoid(gate) * up).to(fx.BFloat16))


@cache
def build_mlp_gate_up(hidden: int, tokens: int, *, waves: int = 4) -> Any:
    """Launcher (x, gate, up, out, n): x (tokens, hidden), gate and up (n, hidden) bf16, out (tokens, n) bf16."""
    tile = RowTile(hidden // BF16_ITEM, tokens, hidden // BF16_ITEM, ROWS, waves)

    @flyc.kernel
    def mlp_gate_up_kernel(x: fx.Tensor, gate: fx.Tensor, up: fx.Tensor, out: fx.Tensor, n: fx.Int32) -> None:
        first_row = wave_first_row(tile)
        halves = []
        for weight in (gate, up):
            weights = row_run(tile, pointer(weight), first_row, n, 16, BF16_ITEM)
            runs = RowRuns(weights, None, token_run(x, tokens, hidden), *lane_place(tile))
            sums = [fold(s) for s in walk_rows(tile, runs, zero_pairs(tokens * ROWS), dot_bf16)]
            halves.append(finished_rows(tile, sums, first_row, n))
        store_products(halves, n, out)

    @flyc.jit
    def mlp_gate_up(
        x: fx.Tensor, gate: fx.Tensor, up: fx.Tensor, out: fx.Tensor, n: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        grid = ((n + (tile.block_rows - 1)) // tile.block_rows, 1, 1)
        mlp_gate_up_kernel(x, gate, up, out, n).launch(grid=grid, block=(tile.threads, 1, 1), stream=stream)

    return mlp_gate_up


@cache
def build_mlp_gate_up_mxfp4(hidden: int, tokens: int, *, waves: int = 4) -> Any:
    """Launcher (x, gate_blocks, gate_scales, up_blocks, up_scales, out, n); weights as in `build_gemv_mxfp4`."""
    tile = RowTile(hidden // FP4_BLOCK, tokens, hidden // FP4_BLOCK, ROWS, waves)

    @flyc.kernel
    def mlp_gate_up_mxfp4_kernel(
        x: fx.Tensor,
        gate_blocks: fx.Tensor,
        gate_scales: fx.Tensor,
        up_blocks: fx.Tensor,
        up_scales: fx.Tensor,
        out: fx.Tensor,
        n: fx.Int32,
    ) -> None:
        first_row = wave_first_row(tile)
        halves = []
        for blocks, scales in ((gate_blocks, gate_scales), (up_blocks, up_scales)):
            weights = row_run(tile, pointer(blocks, fx.Int32), first_row, n, 16, 4)
            bytes_ = row_run(tile, pointer(scales, fx.Uint8), first_row, n, 1, 1)
            runs = RowRuns(weights, bytes_, token_run(x, tokens, hidden), *lane_place(tile))
            sums = walk_rows(tile, runs, [fx.Float32(0.0) for _ in range(tokens * ROWS)], dot_mxfp4)
            # Finished at once: 32 sums of 8 tokens are one register, and the second half has the others to itself.
            halves.append(finished_rows(tile, sums, first_row, n))
        store_products(halves, n, out)

    @flyc.jit
    def mlp_gate_up_mxfp4(
        x: fx.Tensor,
        gate_blocks: fx.Tensor,
        gate_scales: fx.Tensor,
        up_blocks: fx.Tensor,
        up_scales: fx.Tensor,
        out: fx.Tensor,
        n: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        grid = ((n + (tile.block_rows - 1)) // tile.block_rows, 1, 1)
        mlp_gate_up_mxfp4_kernel(x, gate_blocks, gate_scales, up_blocks, up_scales, out, n).launch(
            grid=grid, block=(tile.threads, 1, 1), stream=stream
        )

    return mlp_gate_up_mxfp4


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, gate = operands["x"], operands["gate"]
    launcher = build_mlp_gate_up(x.shape[1], x.shape[0])
    return [Launch(launcher, (x, gate, operands["up"], operands["out"], gate.shape[0]))]


def _plan_mxfp4(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, gate, up = operands["x"], operands["gate_blocks"], operands["up_blocks"]
    gate_scales, up_scales = (as_bytes(operands[name]) for name in ("gate_scales", "up_scales"))
    launcher = build_mlp_gate_up_mxfp4(x.shape[1], x.shape[0])
    return [Launch(launcher, (x, gate, gate_scales, up, up_scales, operands["out"], gate.shape[0]))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    hidden = operands["x"].shape[1]
    return f"rows of {hidden} values are not whole 16-byte items" if hidden % BF16_ITEM else None


mlp_gate_up = KernelOp(_plan, _supports)
mlp_gate_up_mxfp4 = KernelOp(_plan_mxfp4)
