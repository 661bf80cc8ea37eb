"""Experts with MXFP4 weights: who shares one, and gate and up with clamped SwiGLU (down: `expert_down.py`).

A *slot* is one (token, choice) pair; there are tokens x k of them, at most 64, so that one wave holds all ids. The
first slot that names an expert owns it: its workgroup (or wave) reads the expert's weights once for every slot that
names it, so that several tokens read the union of their experts. Code for 1, 2 and 8 slots of one expert is compiled
in and chosen by a scalar branch: a batch of 8 tokens rarely sends more than two to one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.gemv import as_bytes
from dieplace.kernels.flydsl.rows import (
    BF16_ITEM,
    FP4_BLOCK,
    RowRuns,
    RowTile,
    Run,
    activation_run,
    dot_mxfp4,
    finished_rows,
    lane_place,
    row_run,
    walk_rows,
    wave_first_row,
)
from dieplace.kernels.flydsl.softmax import clamped_swiglu
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    bounded,
    flyc,
    fx,
    lane_index,
    load_items,
    pick,
    pointer,
    range_constexpr,
    shared,
    split,
    uniform_load,
    wave_index,
)

MAX_SLOTS = WAVE


@dataclass(frozen=True)
class Users:
    """The slots that name one expert: whether the asking slot owns it, how many there are, their numbers.

    `slots` are scalars for addresses; `table` is a row of LDS with the same numbers, for lanes that finish a sum:
    scalar registers for both, over the whole dot product, would be too many.
    """

    expert: Any
    owner: Any
    count: Any
    slots: list[Any]
    table: Any
    wave: Any

    def slot(self, user: Any) -> Any:
        """The slot of a lane's user. Called outside run-time branches: FlyDSL would carry `self` through them."""
        return self.table[self.wave, (user < len(self.slots)).select(user, fx.Int32(0))]


@flyc.jit
def expert_users(ids: Any, slots: int, slot: Any, most: int, table: Any, wave: Any) -> Users:
    """Who shares the expert of `slot`, at most `most`. A number past the last user repeats the last one.

    Slots of one expert go in groups of `most`, owned by their first; a router names an expert at most once a token, so
    that there is one group, but ids that repeat within a token are served too. `table` (waves, most) int32 in LDS: each
    wave writes and reads its own row.
    """
    lane = lane_index()
    expert = uniform_load(pointer(ids) + slot)
    named = load_items(bounded(pointer(ids), slots * 4, 1), lane, fx.Int32, 1)[0]
    same = fn.ballot((named == expert) & (lane < slots))
    before = same & ((fx.Int64(1) << fx.Int64(slot)) - 1)
    owner = split(fn.bit_count(before), most)[1] == 0
    left = same ^ before
    count = fx.min(fn.bit_count(left), fx.Int32(most))
    found, last = [], slot
    for _ in range_constexpr(most):
        last = (left == 0).select(last, fn.first_bit(left))
        found.append(last)
        left = left & (left - 1)
    if lane < most:
        table[wave, lane] = pick(lane, found)
    return Users(expert, owner, count, found, table, wave)


def user_sizes(tokens: int) -> list[tuple[int, int]]:
    """(least, most) users for each compiled size, up to `tokens`."""
    sizes, least = [], 1
    for most in (1, 2, 8):
        if least <= tokens:
            sizes.append((least, min(most, tokens)))
        least = most + 1
    return sizes


def expert_runs(tile: RowTile, blocks: Any, scales: Any, expert: Any, rows: int, first_row: Any, x: Run) -> RowRuns:
    """The runs of a wave's rows in one expert's matrix of `rows` rows."""
    before = fx.Int64(expert) * (rows * tile.stride_items)
    weights = row_run(tile, pointer(blocks, fx.Int32) + before * 4, first_row, fx.Int32(rows), 16, 4)
    bytes_ = row_run(tile, pointer(scales, fx.Uint8) + before, first_row, fx.Int32(rows), 1, 1)
    return RowRuns(weights, bytes_, x, *lane_place(tile))


def up_of_gate(tile: RowTile, value: Any) -> Any:
    """On a lane that holds an even row of interleaved gate and up rows: the odd row that follows it.

    Where they are follows from `gather_sums`: with groups the next group of lanes has it, else the next row step, which
    the exchanges of a full wave leave 32 lanes away.
    """
    return fx.shuffle_xor(value, 16 if tile.lanes == 16 else 32, WAVE)


@flyc.jit
def store_activations(
    tile: RowTile, users: Users, sums: list[Any], first_row: Any, rows: int, bias: Any, out: Any, activation: Callable
) -> None:
    """Finish the sums of gate and up rows, apply the activation, write each user's row of `out` (slots, rows / 2)."""
    for total, row, user, valid in finished_rows(tile, sums, first_row, fx.Int32(rows)):
        place = fx.Int64(users.expert) * rows + fx.Int64((row < rows).select(row, fx.Int32(0)))
        total = total + (pointer(bias) + place).load().to(fx.Float32)
        up = up_of_gate(tile, total)
        slot = users.slot(user)
        if valid & (row % 2 == 0) & (user < users.count):
            target = slot * (rows // 2) + row // 2
            (pointer(out) + target).store(activation(total, up).to(fx.BFloat16))


@cache
def build_expert_gate_up(
    hidden: int, inner: int, tokens: int, chosen: int, *, alpha: float, limit: float, rows: int = 4, waves: int = 4
) -> Any:
    """Launcher (x, ids, blocks, scales, bias, out): a workgroup takes rows of one slot's expert, if the slot owns it.

    x (tokens, hidden) bf16, ids (tokens, chosen) int32, blocks (experts, 2 inner, hidden/32, 16) and scales
    (experts, 2 inner, hidden/32) uint8 with rows gate, up, gate, up, ...; bias (experts, 2 inner) bf16;
    out (tokens, chosen, inner) bf16.
    """
    slots = tokens * chosen
    sizes = [
        (least, RowTile(hidden // FP4_BLOCK, most, hidden // FP4_BLOCK, rows, waves))
        for least, most in user_sizes(tokens)
    ]
    matrix_rows = 2 * inner
    activation = partial(clamped_swiglu, alpha=alpha, limit=limit)
    block_rows, threads = sizes[0][1].block_rows, sizes[0][1].threads

    @flyc.kernel
    def expert_gate_up_kernel(
        x: fx.Tensor, ids: fx.Tensor, blocks: fx.Tensor, scales: fx.Tensor, bias: fx.Tensor, out: fx.Tensor
    ) -> None:
        table = shared(fx.SharedAllocator(), fx.Int32, waves, tokens)
        users = expert_users(ids, slots, fx.block_idx.y, tokens, table, wave_index())
        for least, tile in sizes:
            if users.owner & (users.count >= least) & (users.count <= tile.tokens):
                first_row = wave_first_row(tile)
                x_rows = [split(slot, chosen)[0] * (hidden // BF16_ITEM) for slot in users.slots[: tile.tokens]]
                x_run = activation_run(x, tokens * hidden, x_rows)
                runs = expert_runs(tile, blocks, scales, users.expert, matrix_rows, first_row, x_run)
                sums = walk_rows(tile, runs, [fx.Float32(0.0) for _ in range(tile.tokens * rows)], dot_mxfp4)
                store_activations(tile, users, sums, first_row, matrix_rows, bias, out, activation)

    @flyc.jit
    def expert_gate_up(
        x: fx.Tensor,
        ids: fx.Tensor,
        blocks: fx.Tensor,
        scales: fx.Tensor,
        bias: fx.Tensor,
        out: fx.Tensor,
        stream: fx.Stream = STREAM,
    ) -> None:
        expert_gate_up_kernel(x, ids, blocks, scales, bias, out).launch(
            grid=(-(-matrix_rows // block_rows), slots, 1), block=(threads, 1, 1), stream=stream
        )

    return expert_gate_up


def _plan_gate_up(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, ids, out = operands["x"], operands["ids"], operands["out"]
    launcher = build_expert_gate_up(
        x.shape[1], out.shape[2], *ids.shape, alpha=float(attrs["alpha"]), limit=float(attrs["limit"])
    )
    args = (x, ids, operands["blocks"], as_bytes(operands["scales"]), operands["bias"], out)
    return [Launch(launcher, args)]


def slots_support(operands: Operands, attrs: Attrs) -> str | None:
    """Why the ids do not fit one wave, or None."""
    slots = operands["ids"].numel()
    return None if slots <= MAX_SLOTS else f"{slots} chosen experts do not fit the {MAX_SLOTS} lanes of a wave"


expert_gate_up = KernelOp(_plan_gate_up, slots_support)
