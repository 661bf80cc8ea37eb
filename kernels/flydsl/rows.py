"""Dot products of weight rows with 1 to 8 activations: how rows are laid over lanes, in bf16 and in MXFP4.

A wave owns `rows` x (64 / `lanes`) consecutive rows. Each group of `lanes` lanes walks one row at a time, 16 bytes a
lane and step (8 bf16 weights, or one block of 32 MXFP4 weights), for `rows` rows at once, so that an activation is
loaded and widened once for all of them. Rows and activations are bounded runs: a lane past the end of a row, and a row
past the end of the matrix, read zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.kernels.flydsl.tiles import (
    NOWHERE,
    bounded,
    choose_lanes,
    flyc,
    fold,
    fx,
    gather_sums,
    load_items,
    pair,
    pairs,
    pointer,
    wave_index,
    zero_pairs,
)

ITEM_BYTES = 16
BF16_ITEM = 8  # weights in 16 bytes
FP4_BLOCK = 32  # weights in 16 bytes: one e8m0 scale
STATIC_STEPS = 8  # steps that are written out; longer rows loop over chunks
FEW_TOKENS = 2  # with more, every row loops step by step: registers go to sums instead of loads in flight
AHEAD_TOKENS = 4  # up to here the next activations are loaded before the present ones are used


@dataclass(frozen=True)
class RowTile:
    """How rows of `items` 16-byte items, `stride_items` apart in memory, are laid over a workgroup."""

    items: int
    tokens: int
    stride_items: int
    rows: int = 4
    waves: int = 4
    lanes: int = 0

    def __post_init__(self) -> None:
        if not self.lanes:
            object.__setattr__(self, "lanes", choose_lanes(self.items))

    @property
    def groups(self) -> int:
        """Rows that a wave reads side by side."""
        return 64 // self.lanes

    @property
    def wave_rows(self) -> int:
        """Consecutive rows of one wave."""
        return self.rows * self.groups

    @property
    def block_rows(self) -> int:
        """Consecutive rows of one workgroup."""
        return self.wave_rows * self.waves

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.waves * 64

    @property
    def full_steps(self) -> int:
        """Steps in which every lane has an item."""
        return self.items // self.lanes

    @property
    def chunk(self) -> int:
        """Steps whose weight loads are in flight together: what fits beside the sums of `tokens` in 256 registers."""
        return 4 if self.tokens <= FEW_TOKENS else 1

    @property
    def chunks(self) -> int:
        """Run-time loop iterations of `chunk` steps; 0 when all steps are written out."""
        if self.tokens > FEW_TOKENS:
            return -(-self.items // self.lanes)
        return self.full_steps // self.chunk if self.full_steps > STATIC_STEPS else 0

    @property
    def tail(self) -> range:
        """The steps after the loop, written out; the last may be partly filled."""
        return range(self.chunks * self.chunk, -(-self.items // self.lanes))


@dataclass(frozen=True)
class Run:
    """A bounded run of memory and the offsets, in items, of the rows that are read from it.

    The offsets are added to the lane's index, not passed as the load's scalar offset: LLVM says that one is left out of
    the bounds check, and AMD's ISA guides take it off the limit.
    """

    items: Any
    offsets: list[Any]


@dataclass(frozen=True)
class RowRuns:
    """The memory of a wave's rows: weights (and scales) with an offset a row step, activations with one a token."""

    weights: Run
    scales: Run | None
    x: Run
    group: Any
    sub: Any


def activation_run(x: Any, elements: int, offsets: list[Any]) -> Run:
    """bf16 activations: `elements` in all, one offset (in items) a token."""
    return Run(bounded(pointer(x), elements * 2, BF16_ITEM), offsets)


def row_run(tile: RowTile, start: Any, first_row: Any, row_count: Any, unit_bytes: int, items: int) -> Run:
    """The rows of a wave; an item is `items` elements of `start`, together `unit_bytes` bytes.

    The run ends with the last row of the matrix, so that rows past it read zeros without a branch.
    """
    here = start + fx.Int64(first_row) * (tile.stride_items * items)
    left = row_count - first_row
    row_bytes = tile.stride_items * unit_bytes
    # Two selects: a minimum of a maximum would leave the scalar unit (v_med3_i32).
    partial = (left > 0).select(left * row_bytes, fx.Int32(0))
    nbytes = (left >= tile.wave_rows).select(fx.Int32(tile.wave_rows * row_bytes), partial)
    return Run(bounded(here, nbytes, items), [r * tile.groups * tile.stride_items for r in range(tile.rows)])


def lane_place(tile: RowTile) -> tuple[Any, Any]:
    """(group, lane in the group)."""
    lane = fx.thread_idx.x % 64
    return lane // tile.lanes, lane % tile.lanes


def lane_items(tile: RowTile, runs: RowRuns, step: Any, full: bool) -> tuple[Any, Any]:
    """(item of the weights, item of the activations) of a lane; a lane past its row is sent past both runs."""
    x = runs.sub + step * tile.lanes
    weight = runs.group * tile.stride_items + x
    if full:
        return weight, x
    inside = x < tile.items
    return inside.select(weight, fx.Int32(NOWHERE)), inside.select(x, fx.Int32(NOWHERE // 8))


def is_full(tile: RowTile, step: int) -> bool:
    """Whether every lane has an item in `step`."""
    return step < tile.full_steps


def load_rows(run: Run, item: Any, dtype: Any, items: int, name: str = "keep") -> list[Any]:
    """One item of each of a run's rows."""
    return [load_items(run.items, item + offset, dtype, items, name) for offset in run.offsets]


def dot_bf16(tile: RowTile, runs: RowRuns, sums: list[Any], steps: list[tuple[Any, bool]]) -> list[Any]:
    """Add the products of `steps` to the packed sums, ordered [token][row]; the weight loads come first."""
    places = [lane_items(tile, runs, s, full) for s, full in steps]
    weights = [load_rows(runs.weights, w, fx.BFloat16, BF16_ITEM, "stream_once") for w, _ in places]
    x = [load_rows(runs.x, i, fx.BFloat16, BF16_ITEM) for _, i in places]
    fn.sched_barrier()
    out = list(sums)
    for w_step, x_step in zip(weights, x, strict=True):
        wide = [pairs(w.to(fx.Float32)) for w in w_step]
        for t, xt in enumerate(x_step):
            for j, xp in enumerate(pairs(xt.to(fx.Float32))):
                for r in range(tile.rows):
                    out[t * tile.rows + r] = fx.fma(wide[r][j], xp, out[t * tile.rows + r])
    return out


def dot_mxfp4(tile: RowTile, runs: RowRuns, sums: list[Any], steps: list[tuple[Any, bool]]) -> list[Any]:
    """Add the products of `steps` to the Float32 sums, ordered [token][row].

    The convert runs with scale 1 and the block's sum is multiplied by its scale in fp32, because what the convert makes
    of scale bytes 0 and 255 is not documented: here 0 is 2^-127 and 255 gives NaN whatever the weights are.
    """
    assert runs.scales is not None
    places = [lane_items(tile, runs, s, full) for s, full in steps]
    weights = [load_rows(runs.weights, w, fx.Int32, 4, "stream_once") for w, _ in places]
    bytes_ = [load_rows(runs.scales, w, fx.Uint8, 1, "stream_once") for w, _ in places]
    fn.sched_barrier()
    out = list(sums)
    for (_, block), w_step, s_step in zip(places, weights, bytes_, strict=True):
        part = block_products(tile, runs, w_step, block)
        scale = [e8m0_scale(fn.u8(s[0])) for s in s_step]
        for i, p in enumerate(part):
            out[i] = fx.fma(fold(p), scale[i % tile.rows], out[i])
    return out


def e8m0_scale(byte: Any) -> Any:
    """2^(byte - 127) as Float32; 0 is the denormal 2^-127, 255 is NaN (OCP Microscaling Formats 1.0, section 5.4.1).

    Three instructions and no compare (which the compiler would turn into sub-dword forms): 255 shifted into the
    exponent field is infinity, and infinity * 0 + infinity is NaN.
    """
    power = fx.max(byte << 23, fx.Int32(0x00400000)).bitcast(fx.Float32)
    return fx.fma(power, fx.Float32(0.0), power)


def block_products(tile: RowTile, runs: RowRuns, weights: list[Any], block: Any) -> list[Any]:
    """Packed sums of one unscaled block of 32 weights with its activations, ordered [token][row]."""
    part = zero_pairs(tile.tokens * tile.rows)
    one = fx.Float32(1.0)
    ahead = load_rows(runs.x, block * 4, fx.BFloat16, BF16_ITEM)
    for d in range(4):
        here = ahead
        if d < 3 and tile.tokens <= AHEAD_TOKENS:
            ahead = load_rows(runs.x, block * 4 + (d + 1), fx.BFloat16, BF16_ITEM)
        if tile.tokens > FEW_TOKENS:
            fn.sched_barrier()  # without it all four loads of every token are moved up, and 8 tokens spill
        if d and tile.tokens > AHEAD_TOKENS:
            here = load_rows(runs.x, block * 4 + d, fx.BFloat16, BF16_ITEM)
        wide = [[fn.cvt_scalef32_pk_f32_fp4(w[d], one, p) for p in range(4)] for w in weights]
        for t, xs in enumerate(here):
            if tile.tokens > AHEAD_TOKENS:
                fn.sched_barrier()  # or every token is widened first
            for p, xp in enumerate(pairs(xs.to(fx.Float32))):
                for r in range(tile.rows):
                    i = t * tile.rows + r
                    part[i] = fx.fma(pair(wide[r][p][0], wide[r][p][1]), xp, part[i])
    return part


@flyc.jit
def walk_rows(tile: RowTile, runs: RowRuns, sums: list[Any], dot: Any) -> list[Any]:
    """The sums of a wave's rows over all steps: `dot` is `dot_bf16` or `dot_mxfp4`."""
    for iteration in range(tile.chunks, unroll=1):  # type: ignore[call-overload]
        sums = dot(tile, runs, sums, chunk_steps(tile, fx.Int32(iteration)))
    for steps in tail_steps(tile):
        sums = dot(tile, runs, sums, steps)
    return sums


def chunk_steps(tile: RowTile, iteration: Any) -> list[tuple[Any, bool]]:
    """The steps of one loop iteration; with many tokens the loop takes the partly filled last step too."""
    return [(iteration * tile.chunk + i, tile.tokens <= FEW_TOKENS) for i in range(tile.chunk)]


def tail_steps(tile: RowTile) -> list[list[tuple[Any, bool]]]:
    """The steps after the loop, in chunks."""
    steps = [(s, is_full(tile, s)) for s in tile.tail]
    return [steps[i : i + tile.chunk] for i in range(0, len(steps), tile.chunk)]


def wave_first_row(tile: RowTile) -> Any:
    """The first row of this wave, uniform over its lanes."""
    return fx.block_idx.x * tile.block_rows + wave_index() * tile.wave_rows


def finished_rows(tile: RowTile, sums: list[Any], first_row: Any, rows: Any) -> list[tuple[Any, Any, Any, Any]]:
    """The finished sums of a wave, ordered [token][row], as (sum, row, token, whether this lane has one)."""
    batches, group = gather_sums(sums, tile.lanes)
    out = []
    for total, index in batches:
        row = first_row + (index % tile.rows) * tile.groups + group
        out.append((total, row, index // tile.rows, (index < len(sums)) & (row < rows)))
    return out
