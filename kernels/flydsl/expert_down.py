"""Down projection of the chosen experts with MXFP4 weights, summed by the router's weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.experts import Users, expert_runs, expert_users, slots_support, user_sizes
from dieplace.kernels.flydsl.gemv import as_bytes
from dieplace.kernels.flydsl.rows import (
    BF16_ITEM,
    FP4_BLOCK,
    RowTile,
    activation_run,
    dot_mxfp4,
    finished_rows,
    walk_rows,
)
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    flyc,
    fx,
    pointer,
    range_constexpr,
    shared,
    split,
    wave_index,
)


@flyc.jit
def store_parts(
    tile: RowTile, users: Users, sums: list[Any], first_row: Any, rows: int, bias: Any, weights: Any, parts: Any
) -> None:
    """weight * (sum + bias) of each user into `parts` (slots, rows of the workgroup): a slot is written once."""
    for total, row, user, valid in finished_rows(tile, sums, first_row, fx.Int32(rows)):
        slot = users.slot(user)
        if valid & (user < users.count):
            value = total
            if fx.const_expr(bias is not None):
                value = value + (pointer(bias) + (fx.Int64(users.expert) * rows + fx.Int64(row))).load().to(fx.Float32)
            parts[slot, row - first_row] = (pointer(weights) + slot).load() * value


@cache
def build_expert_down(
    inner: int, hidden: int, tokens: int, chosen: int, *, bias: bool, fp32: bool, rows: int = 4, waves: int = 4
) -> Any:
    """Launcher (x, ids, weights, blocks, scales, bias, out): a workgroup takes a few rows, its waves divide the slots.

    x (tokens, chosen, inner) bf16, ids, weights (tokens, chosen), blocks (experts, hidden, inner/32, 16), scales
    (experts, hidden, inner/32) uint8, bias (experts, hidden) bf16, out (tokens, hidden) fp32 or bf16. The sum over the
    choices is fp32 in the order of the choices, rounded once.
    """
    slots = tokens * chosen
    waves = min(waves, slots)
    items = inner // FP4_BLOCK
    sizes = [(least, RowTile(items, most, items, rows, 1)) for least, most in user_sizes(tokens)]
    wave_rows = sizes[0][1].wave_rows
    dtype = fx.Float32 if fp32 else fx.BFloat16
    with_bias = bias

    @flyc.kernel
    def expert_down_kernel(
        x: fx.Tensor,
        ids: fx.Tensor,
        weights: fx.Tensor,
        blocks: fx.Tensor,
        scales: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
    ) -> None:
        wave = wave_index()
        first_row = fx.block_idx.x * wave_rows
        lds = fx.SharedAllocator()
        parts = shared(lds, fx.Float32, slots, wave_rows)
        table = shared(lds, fx.Int32, waves, tokens)
        for step in range(-(-slots // waves), unroll=1):  # type: ignore[call-overload]
            slot = fx.Int32(step) * waves + wave
            here = (slot < slots).select(slot, fx.Int32(0))
            users = expert_users(ids, slots, here, tokens, table, wave)
            for least, tile in sizes:
                if users.owner & (slot < slots) & (users.count >= least) & (users.count <= tile.tokens):
                    x_rows = [user * (inner // BF16_ITEM) for user in users.slots[: tile.tokens]]
                    x_run = activation_run(x, slots * inner, x_rows)
                    runs = expert_runs(tile, blocks, scales, users.expert, hidden, first_row, x_run)
                    sums = walk_rows(tile, runs, [fx.Float32(0.0) for _ in range(tile.tokens * rows)], dot_mxfp4)
                    store_parts(tile, users, sums, first_row, hidden, bias if with_bias else None, weights, parts)
        fx.gpu.barrier()
        for step in range_constexpr(-(-tokens * wave_rows // (waves * WAVE))):
            token, local = split(fx.thread_idx.x + step * (waves * WAVE), wave_rows)
            if (token < tokens) & (first_row + local < hidden):
                total = parts[token * chosen, local]
                for j in range_constexpr(1, chosen):
                    total = total + parts[token * chosen + j, local]
                (pointer(out) + (token * hidden + first_row + local)).store(total.to(dtype))

    @flyc.jit
    def expert_down(
        x: fx.Tensor,
        ids: fx.Tensor,
        weights: fx.Tensor,
        blocks: fx.Tensor,
        scales: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
        stream: fx.Stream = STREAM,
    ) -> None:
        expert_down_kernel(x, ids, weights, blocks, scales, bias, out).launch(
            grid=(-(-hidden // wave_rows), 1, 1), block=(waves * WAVE, 1, 1), stream=stream
        )

    return expert_down


def _plan_down(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, ids, bias, out = operands["x"], operands["ids"], operands["bias"], operands["out"]
    fp32 = str(out.dtype) == "torch.float32"
    launcher = build_expert_down(x.shape[2], out.shape[1], *ids.shape, bias=bias is not None, fp32=fp32)
    matrix = (operands["blocks"], as_bytes(operands["scales"]))
    args = (x, ids, operands["weights"], *matrix, x if bias is None else bias, out)
    return [Launch(launcher, args)]


expert_down = KernelOp(_plan_down, slots_support)
