"""Head GEMV with the greedy choice: logits in fp32 and the largest of the first `vocab` rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.gemv import token_run
from dieplace.kernels.flydsl.rows import (
    BF16_ITEM,
    RowRuns,
    RowTile,
    dot_bf16,
    finished_rows,
    lane_place,
    row_run,
    walk_rows,
    wave_first_row,
)
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    flyc,
    fold,
    fx,
    lane_index,
    pointer,
    range_constexpr,
    shared,
    wave_index,
    zero_pairs,
)

NO_ROW = 0x7FFFFFFF  # loses every tie
LOWEST = float("-inf")
FINAL_WAVES = 16


def better(value: Any, row: Any, other: Any, other_row: Any) -> tuple[Any, Any]:
    """The larger of two (value, row); the lower row of equal values. Neither value is NaN."""
    take = (other > value) | ((other == value) & (other_row < row))
    return take.select(other, value), take.select(other_row, row)


def wave_best(value: Any, row: Any) -> tuple[Any, Any]:
    """The best (value, row) of a wave, on every lane."""
    top = fn.coop.warp_max(value)
    return top, fn.coop.warp_min((value == top).select(row, fx.Int32(NO_ROW)))


@cache
def build_head(hidden: int, tokens: int, *, rows: int = 4, waves: int = 4) -> Any:
    """Launcher (x, weight, logits, best, best_row, n, vocab): logits, and the best row of each workgroup.

    x (tokens, hidden) bf16, weight (n, hidden) bf16, logits (tokens, n) fp32; best fp32 and best_row int32
    (workgroups, tokens). Rows from `vocab` on are computed and never chosen; a NaN logit is never chosen.
    """
    tile = RowTile(hidden // BF16_ITEM, tokens, hidden // BF16_ITEM, rows, waves)

    @flyc.kernel
    def head_kernel(
        x: fx.Tensor,
        weight: fx.Tensor,
        logits: fx.Tensor,
        best: fx.Tensor,
        best_row: fx.Tensor,
        n: fx.Int32,
        vocab: fx.Int32,
    ) -> None:
        first_row = wave_first_row(tile)
        weights = row_run(tile, pointer(weight), first_row, n, 16, BF16_ITEM)
        runs = RowRuns(weights, None, token_run(x, tokens, hidden), *lane_place(tile))
        sums = [fold(s) for s in walk_rows(tile, runs, zero_pairs(tokens * rows), dot_bf16)]
        tops = [fx.Float32(LOWEST) for _ in range(tokens)]
        top_rows = [fx.Int32(NO_ROW) for _ in range(tokens)]
        for total, row, token, valid in finished_rows(tile, sums, first_row, n):
            if valid:
                (pointer(logits) + (token * n + row)).store(total)
            eligible = valid & (row < vocab) & (total == total)
            for t in range_constexpr(tokens):
                mine = eligible & (token == t)
                tops[t], top_rows[t] = better(
                    tops[t],
                    top_rows[t],
                    mine.select(total, fx.Float32(LOWEST)),
                    mine.select(row, fx.Int32(NO_ROW)),
                )
        lds = fx.SharedAllocator()
        values, numbers = shared(lds, fx.Float32, waves, tokens), shared(lds, fx.Int32, waves, tokens)
        for t in range_constexpr(tokens):
            top, row = wave_best(tops[t], top_rows[t])
            if lane_index() == 0:
                values[wave_index(), t] = top
                numbers[wave_index(), t] = row
        fx.gpu.barrier()
        t = fx.thread_idx.x
        if t < tokens:
            top, row = values[0, t], numbers[0, t]
            for w in range_constexpr(1, waves):
                top, row = better(top, row, values[w, t], numbers[w, t])
            (pointer(best) + (fx.block_idx.x * tokens + t)).store(top)
            (pointer(best_row) + (fx.block_idx.x * tokens + t)).store(row)

    @flyc.jit
    def head(
        x: fx.Tensor,
        weight: fx.Tensor,
        logits: fx.Tensor,
        best: fx.Tensor,
        best_row: fx.Tensor,
        n: fx.Int32,
        vocab: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        grid = ((n + (tile.block_rows - 1)) // tile.block_rows, 1, 1)
        head_kernel(x, weight, logits, best, best_row, n, vocab).launch(
            grid=grid, block=(tile.threads, 1, 1), stream=stream
        )

    return head, tile.block_rows


@cache
def build_choose(tokens: int) -> Any:
    """Launcher (best, best_row, value, token, candidates, offset): one workgroup a token over all candidates.

    Where no candidate is left (every logit NaN) the token is `offset` and the value minus infinity.
    """
    waves = FINAL_WAVES

    @flyc.kernel
    def choose_kernel(
        best: fx.Tensor,
        best_row: fx.Tensor,
        value: fx.Tensor,
        token: fx.Tensor,
        candidates: fx.Int32,
        offset: fx.Int32,
    ) -> None:
        t, thread = fx.block_idx.x, fx.thread_idx.x
        top, row = fx.Float32(LOWEST), fx.Int32(NO_ROW)
        for step in range((candidates + (waves * WAVE - 1)) // (waves * WAVE)):
            i = fx.Int32(step) * (waves * WAVE) + thread
            inside = i < candidates
            place = inside.select(i, fx.Int32(0)) * tokens + t
            other = inside.select((pointer(best) + place).load(), fx.Float32(LOWEST))
            top, row = better(top, row, other, inside.select((pointer(best_row) + place).load(), fx.Int32(NO_ROW)))
        top, row = wave_best(top, row)
        lds = fx.SharedAllocator()
        values, numbers = shared(lds, fx.Float32, waves), shared(lds, fx.Int32, waves)
        if lane_index() == 0:
            values[wave_index()] = top
            numbers[wave_index()] = row
        fx.gpu.barrier()
        if thread == 0:
            for w in range_constexpr(1, waves):
                top, row = better(top, row, values[w], numbers[w])
            (pointer(value) + t).store(top)
            (pointer(token) + t).store((row == NO_ROW).select(fx.Int32(0), row) + offset)

    @flyc.jit
    def choose(
        best: fx.Tensor,
        best_row: fx.Tensor,
        value: fx.Tensor,
        token: fx.Tensor,
        candidates: fx.Int32,
        offset: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        choose_kernel(best, best_row, value, token, candidates, offset).launch(
            grid=(tokens, 1, 1), block=(waves * WAVE, 1, 1), stream=stream
        )

    return choose


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, weight, logits = operands["x"], operands["weight"], operands["logits"]
    tokens, n = logits.shape
    head, block_rows = build_head(x.shape[1], tokens)
    candidates = -(-n // block_rows)
    best = logits.new_empty((candidates, tokens))
    best_row = operands["token"].new_empty((candidates, tokens))
    choose_args = (best, best_row, operands["value"], operands["token"], candidates, int(attrs["offset"]))
    return [
        Launch(head, (x, weight, logits, best, best_row, n, int(attrs["vocab"]))),
        Launch(build_choose(tokens), choose_args),
    ]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    hidden = operands["x"].shape[1]
    return f"rows of {hidden} values are not whole 16-byte items" if hidden % BF16_ITEM else None


head_argmax = KernelOp(_plan, _supports)
