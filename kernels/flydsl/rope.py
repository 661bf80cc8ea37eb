"""RoPE by tables and append to the KV cache: one launch, a lane turns and writes eight values (16 bytes) of a head."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.tiles import (
    NOWHERE,
    STREAM,
    bounded,
    flyc,
    fx,
    load_items,
    pointer,
    range_constexpr,
    split,
    store_items,
    uniform_load,
)

THREADS = 256


def item_values(half: int) -> int:
    """Values a lane turns: 8 (16 bytes), or 4 or 2 where the rotated half is not made of eights; 0: it cannot be."""
    return next((n for n in (8, 4, 2) if half % n == 0), 0)


def table_values(table: Any, rows: Any, row: Any, half: int, item: Any) -> list[Any]:
    """The fp32 table values of one item of a row; a row outside the table reads zeros."""
    inside = ((row >= 0) & (row < rows)).select(fx.Int32(half * 4), fx.Int32(0))
    values = item_values(half)
    load = min(values, 4)
    run = bounded(pointer(table, offset=fx.Int64(row) * half), inside, load)
    parts = [load_items(run, item * (values // load) + i, fx.Float32, load) for i in range(values // load)]
    return [part[i] for part in parts for i in range(load)]


@cache
def build_rope_kv_append(q_heads: int, kv_heads: int, head_dim: int, half: int) -> Any:
    """Launcher (qkv, cos, sin, positions, slots, q_out, k_cache, v_cache, table_rows, tokens).

    qkv (tokens, (q_heads + 2 kv_heads) * head_dim) bf16; cos, sin (table_rows, half) fp32, made in float64 on the host
    so that no phase is computed in low precision; positions, slots (tokens) int32; q_out (tokens, q_heads, head_dim);
    caches (slots, kv_heads, head_dim) bf16. A slot of -1 gets a run of no bytes: its stores are dropped.
    """
    values = item_values(half)
    per_head = head_dim // values
    turned = 2 * half // values  # items of a head that turn; the rest is copied
    row_items = (q_heads + 2 * kv_heads) * per_head
    q_items, kv_items = q_heads * per_head, kv_heads * per_head

    @flyc.kernel
    def rope_kv_append_kernel(
        qkv: fx.Tensor,
        cos: fx.Tensor,
        sin: fx.Tensor,
        positions: fx.Tensor,
        slots: fx.Tensor,
        q_out: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        table_rows: fx.Int32,
    ) -> None:
        token = fx.block_idx.y
        item = fx.block_idx.x * THREADS + fx.thread_idx.x
        run = bounded(pointer(qkv, offset=fx.Int64(token) * (row_items * values)), row_items * 2 * values, values)
        position = uniform_load(pointer(positions) + token)
        slot = uniform_load(pointer(slots) + token)
        in_head = split(item, per_head)[1]
        second = in_head >= turned // 2
        turn = (item < q_items + kv_items) & (in_head < turned)
        # What does not turn is multiplied by 1 and gets 0 times a partner that is not read: it passes exactly.
        other = turn.select(second.select(item - turned // 2, item + turned // 2), fx.Int32(NOWHERE))
        phase = second.select(in_head - turned // 2, in_head)
        mine = load_items(run, item, fx.BFloat16, values).to(fx.Float32)
        partner = load_items(run, other, fx.BFloat16, values).to(fx.Float32)
        c = table_values(cos, table_rows, position, half, phase)
        s = table_values(sin, table_rows, position, half, phase)
        results = []
        for i in range_constexpr(values):
            along = turn.select(c[i], fx.Float32(1.0))
            across = turn.select(second.select(s[i], fx.Float32(0.0) - s[i]), fx.Float32(0.0))
            results.append(fx.fma(mine[i], along, partner[i] * across))
        result = fx.Vector.from_elements(results, fx.Float32).to(fx.BFloat16)

        row_bytes = (slot >= 0).select(fx.Int32(kv_items * 2 * values), fx.Int32(0))
        offset = fx.Int64((slot >= 0).select(slot, fx.Int32(0))) * (kv_items * values)
        q_run = bounded(pointer(q_out, offset=fx.Int64(token) * (q_items * values)), q_items * 2 * values, values)
        k_run = bounded(pointer(k_cache, offset=offset), row_bytes, values)
        v_run = bounded(pointer(v_cache, offset=offset), row_bytes, values)
        # Each lane's item lies within one of the three runs and outside the others, which drop it: no branches, for the
        # compiler would merge those into one store with a descriptor per lane.
        store_items(q_run, item, result, fx.BFloat16, values)
        store_items(k_run, item - q_items, result, fx.BFloat16, values)
        store_items(v_run, item - (q_items + kv_items), result, fx.BFloat16, values)

    @flyc.jit
    def rope_kv_append(
        qkv: fx.Tensor,
        cos: fx.Tensor,
        sin: fx.Tensor,
        positions: fx.Tensor,
        slots: fx.Tensor,
        q_out: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        table_rows: fx.Int32,
        tokens: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        rope_kv_append_kernel(qkv, cos, sin, positions, slots, q_out, k_cache, v_cache, table_rows).launch(
            grid=(-(-row_items // THREADS), tokens, 1), block=(THREADS, 1, 1), stream=stream
        )

    return rope_kv_append


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    names = ("qkv", "cos", "sin", "positions", "slots", "q_out", "k_cache", "v_cache")
    qkv, cos = operands["qkv"], operands["cos"]
    launcher = build_rope_kv_append(attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"], cos.shape[1])
    return [Launch(launcher, (*(operands[name] for name in names), cos.shape[0], qkv.shape[0]))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    half = operands["cos"].shape[1]
    if not item_values(half) or attrs["head_dim"] % item_values(half):
        return f"head_dim {attrs['head_dim']} and rotated half {half} do not divide into lanes of 2, 4 or 8 values"
    return None


rope_kv_append = KernelOp(_plan, _supports)
