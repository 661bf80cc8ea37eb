"""Decode attention of one sequence: online softmax over splits of a paged or contiguous cache.

A KV head has T x group queries (T rows of a verify round, the query heads of its group). A workgroup takes one KV head,
one split and up to 64 of its queries; its waves divide the queries (at most four a wave, so that nothing spills) and,
where waves are left over, the keys. A wave reads 64 / (head_dim / 8) keys a step, 16 bytes a lane.

Splits: the keys that any row sees, [min(lengths - window), max(lengths)), are cut into `splits` runs of equal length
(the last may be shorter or empty). Sinks are not seen here: they join once, in the merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.norm import head_supports
from dieplace.kernels.flydsl.softmax import LOWEST, MINUS_INFINITY, absorb, exponential
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    bounded,
    flyc,
    fold,
    fx,
    lane_index,
    load_items,
    load_vector,
    pairs,
    pointer,
    range_constexpr,
    shared,
    split,
    uniform_load,
    wave_index,
    zero_pairs,
)

ITEM = 8
QUERIES_A_WAVE = 4
MAX_WAVES = 8  # 512 threads leave 256 registers a lane
KEY_STEPS = 2  # keys a lane group has in flight


@dataclass(frozen=True)
class AttentionTile:
    """How the queries of one KV head are laid over a workgroup."""

    head_dim: int
    kv_heads: int
    group: int
    tokens: int
    window: int
    page: int  # tokens a page; 0: one page holds the sequence

    @property
    def queries(self) -> int:
        """Queries that share one KV head."""
        return self.tokens * self.group

    @property
    def query_waves(self) -> int:
        """Waves that divide the queries."""
        return min(-(-self.queries // self.wave_queries), MAX_WAVES)

    @property
    def wave_queries(self) -> int:
        """Queries of one wave: 1, 2 or 4."""
        return min(1 << (self.queries - 1).bit_length(), QUERIES_A_WAVE)

    @property
    def key_waves(self) -> int:
        """Waves that divide the keys among them."""
        return max(1, 4 // self.query_waves)

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        return self.query_waves * self.key_waves

    @property
    def block_queries(self) -> int:
        """Queries of one workgroup."""
        return self.query_waves * self.wave_queries

    @property
    def key_lanes(self) -> int:
        """Lanes that share one key."""
        return self.head_dim // ITEM

    @property
    def keys(self) -> int:
        """Keys that a wave reads in one load."""
        return WAVE // self.key_lanes


def visible_range(tile: AttentionTile, lengths: Any, token: Any) -> tuple[Any, Any]:
    """(first, end) of the keys that row `token` sees: max(0, length - window) <= j < length."""
    end = uniform_load(pointer(lengths) + token)
    if not tile.window:
        return fx.Int32(0), end
    return fx.max(end - tile.window, fx.Int32(0)), end


def split_range(tile: AttentionTile, lengths: Any, index: Any, splits: Any) -> tuple[Any, Any]:
    """(first, end) of the keys of split `index`, over the keys that any row sees."""
    ranges = [visible_range(tile, lengths, t) for t in range(tile.tokens)]
    first, end = ranges[0]
    for low, high in ranges[1:]:
        first, end = fx.min(first, low), fx.max(end, high)
    length = fx.Int32(fx.Uint32(end - first + splits - 1) // fx.Uint32(splits))
    start = first + index * length
    return start, fx.min(start + length, end)


def key_item(tile: AttentionTile, page_table: Any, key: Any, head: Any, part: Any) -> Any:
    """Index (64-bit, in 16-byte items) of a lane's share of a key's row in the cache."""
    row = fx.Int64(key)
    if tile.page:
        place, offset = split(key, tile.page)
        row = fx.Int64((pointer(page_table) + place).load()) * tile.page + fx.Int64(offset)
    return (row * tile.kv_heads + fx.Int64(head)) * tile.key_lanes + fx.Int64(part)


def scores(query: list[Any], keys: list[Any], lanes: int) -> list[Any]:
    """Dot products of one query with the lane's keys, the same on all lanes that share a key."""
    out = []
    for key in keys:
        total = zero_pairs(1)[0]
        for q, k in zip(query, key, strict=True):
            total = fx.fma(q, k, total)
        out.append(fn.coop.warp_sum(fold(total), width=lanes))
    return out


def across(value: Any, tile: AttentionTile, combine: Any) -> Any:
    """`value` combined over the key streams of a wave (lanes that hold the same part of different keys)."""
    distance = tile.key_lanes
    while distance < WAVE:
        value = combine(value, fx.shuffle_xor(value, distance, WAVE))
        distance *= 2
    return value


def add(a: Any, b: Any) -> Any:
    """The sum of two values."""
    return a + b


@cache
def build_attention_split(
    head_dim: int, kv_heads: int, group: int, tokens: int, *, window: int = 0, page: int = 0
) -> Any:
    """Launcher (q, k_cache, v_cache, page_table, lengths, partial, partial_lse, scale, splits).

    q (tokens, kv_heads * group, head_dim) bf16; caches (pages, page, kv_heads, head_dim) bf16 (`page` 0: one page);
    page_table, lengths int32; partial (tokens, heads, splits, head_dim) and partial_lse (tokens, heads, splits) fp32.
    Scores stay in natural units until a maximum is subtracted: scaled by log2(e) first, scores near 2e5 would lose 1 %.
    """
    tile = AttentionTile(head_dim, kv_heads, group, tokens, window, page)
    heads = kv_heads * group
    mine, lanes = tile.wave_queries, tile.key_lanes
    stride = tile.key_waves * tile.keys * KEY_STEPS
    # Where several waves read the same keys they come out of L1 or L2 and must stay there; else they are read once.
    once = tile.query_waves == 1 and tile.queries <= tile.block_queries

    @flyc.kernel
    def attention_split_kernel(
        q: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        page_table: fx.Tensor,
        lengths: fx.Tensor,
        partial: fx.Tensor,
        partial_lse: fx.Tensor,
        scale: fx.Float32,
        splits: fx.Int32,
    ) -> None:
        head, index = fx.block_idx.x, fx.block_idx.y
        wave = wave_index()
        query_wave, key_wave = wave // tile.key_waves, wave % tile.key_waves
        part, stream = lane_index() % lanes, lane_index() // lanes
        first_query = fx.block_idx.z * tile.block_queries + query_wave * mine
        start, end = split_range(tile, lengths, index, splits)
        queries, limits, states = [], [], []
        for j in range_constexpr(mine):
            token, member = split(first_query + j, group)
            real = first_query + j < tile.queries
            row = fx.Int64(real.select(token * heads + head * group + member, fx.Int32(0)))
            run = bounded(pointer(q, offset=row * head_dim), real.select(fx.Int32(head_dim * 2), fx.Int32(0)), ITEM)
            queries.append(pairs(load_items(run, part, fx.BFloat16, ITEM).to(fx.Float32) * scale))
            limits.append(visible_range(tile, lengths, real.select(token, fx.Int32(0))))
            states.append((fx.Float32(LOWEST), fx.Float32(0.0), zero_pairs(ITEM // 2)))
        top = [s[0] for s in states]
        total = [s[1] for s in states]
        out = [o for s in states for o in s[2]]
        first_key = start + key_wave * (tile.keys * KEY_STEPS) + stream
        rounds = (end - (start + key_wave * (tile.keys * KEY_STEPS)) + (stride - 1)) // stride
        k_items = pointer(k_cache, fx.Int128)
        v_items = pointer(v_cache, fx.Int128)
        for it in range(rounds, unroll=1):  # type: ignore[call-overload]
            keys, values, places = [], [], []
            for u in range_constexpr(KEY_STEPS):
                key = first_key + fx.Int32(it) * stride + u * tile.keys
                places.append(key)
                item = key_item(tile, page_table, (key < end).select(key, start), head, part)
                keys.append(pairs(load_vector(k_items + item, once).to(fx.Float32)))
                values.append(pairs(load_vector(v_items + item, once).to(fx.Float32)))
            for j in range_constexpr(mine):
                found = scores(queries[j], keys, lanes)
                for u in range_constexpr(KEY_STEPS):
                    seen = places[u] < end
                    if fx.const_expr(tokens > 1):
                        seen = seen & (places[u] >= limits[j][0]) & (places[u] < limits[j][1])
                    found[u] = seen.select(found[u], fx.Float32(MINUS_INFINITY))
                packed = out[j * 4 : j * 4 + 4]
                top[j], total[j], packed = absorb((top[j], total[j], packed), found, values)
                for i in range_constexpr(4):
                    out[j * 4 + i] = packed[i]
        lds = fx.SharedAllocator()
        tops, totals = shared(lds, fx.Float32, tile.waves, mine), shared(lds, fx.Float32, tile.waves, mine)
        sums = shared(lds, fx.Float32, tile.waves, mine, head_dim)
        for j in range_constexpr(mine):
            peak = across(top[j], tile, fx.max)
            share = exponential(top[j] - peak)
            whole = across(total[j] * share, tile, add)
            row = [across(out[j * 4 + i // 2][i % 2] * share, tile, add) for i in range(ITEM)]
            if stream == 0:
                for i in range_constexpr(ITEM):
                    sums[wave, j, part * ITEM + i] = row[i]
                if part == 0:
                    tops[wave, j] = peak
                    totals[wave, j] = whole
        fx.gpu.barrier()
        for step in range_constexpr(-(-tile.block_queries * head_dim // (tile.waves * WAVE))):
            base_slot, base_d = split((wave + step * tile.waves) * WAVE, head_dim)  # the same on all lanes
            slot, d = base_slot + lane_index() // head_dim, base_d + lane_index() % head_dim
            query = fx.block_idx.z * tile.block_queries + slot
            if (slot < tile.block_queries) & (query < tile.queries):
                base, j = (slot // mine) * tile.key_waves, slot % mine
                peak = tops[base, j]
                for w in range_constexpr(1, tile.key_waves):
                    peak = fx.max(peak, tops[base + w, j])
                whole, value = fx.Float32(0.0), fx.Float32(0.0)
                for w in range_constexpr(tile.key_waves):
                    share = exponential(tops[base + w, j] - peak)
                    whole = whole + totals[base + w, j] * share
                    value = value + sums[base + w, j, d] * share
                empty = whole == 0.0
                token, member = split(query, group)
                place = fx.Int64((token * heads + head * group + member) * splits + index)
                (pointer(partial) + (place * head_dim + fx.Int64(d))).store(
                    empty.select(fx.Float32(0.0), value / whole)
                )
                if d == 0:
                    lse = peak + fx.log(whole, fastmath="fast")
                    (pointer(partial_lse) + place).store(empty.select(fx.Float32(MINUS_INFINITY), lse))

    @flyc.jit
    def attention_split(
        q: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        page_table: fx.Tensor,
        lengths: fx.Tensor,
        partial: fx.Tensor,
        partial_lse: fx.Tensor,
        scale: fx.Float32,
        splits: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        attention_split_kernel(q, k_cache, v_cache, page_table, lengths, partial, partial_lse, scale, splits).launch(
            grid=(kv_heads, splits, -(-tile.queries // tile.block_queries)),
            block=(tile.waves * WAVE, 1, 1),
            stream=stream,
        )

    return attention_split


def _plan_split(operands: Operands, attrs: Attrs) -> list[Launch]:
    names = ("q", "k_cache", "v_cache", "page_table", "lengths", "partial", "partial_lse")
    q, cache_ = operands["q"], operands["k_cache"]
    _pages, page, kv_heads, head_dim = cache_.shape
    launcher = build_attention_split(
        head_dim,
        kv_heads,
        q.shape[1] // kv_heads,
        q.shape[0],
        window=attrs["window"],
        page=0 if _contiguous(operands) else page,
    )
    return [Launch(launcher, (*(operands[n] for n in names), float(attrs["scale"]), operands["partial"].shape[2]))]


def _contiguous(operands: Operands) -> bool:
    """One page only: its number in the table can but be 0, and keys are rows of it."""
    return operands["k_cache"].shape[0] == 1


def _split_supports(operands: Operands, attrs: Attrs) -> str | None:
    return head_supports(operands, {"head_dim": operands["q"].shape[2]})


attention_split = KernelOp(_plan_split, _split_supports)
