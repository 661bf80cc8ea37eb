"""Merge of attention splits by their log-sums; sinks enter the denominator here, and nowhere else."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.softmax import MINUS_INFINITY, exponential
from dieplace.kernels.flydsl.tiles import STREAM, WAVE, flyc, fx, pointer


@cache
def build_attention_merge(head_dim: int, heads: int, *, sinks: str) -> Any:
    """Launcher (partial, partial_lse, sinks, out, lse, splits, tokens); `sinks` is "", "bf16" or "fp32".

    A sink enters the denominator here and nowhere else, once a head, and has no value. Nothing seen gives zeros.
    """
    threads = -(-head_dim // WAVE) * WAVE
    kind = sinks

    @flyc.kernel
    def attention_merge_kernel(
        partial: fx.Tensor, partial_lse: fx.Tensor, sinks: fx.Tensor, out: fx.Tensor, lse: fx.Tensor, splits: fx.Int32
    ) -> None:
        head, token, d = fx.block_idx.x, fx.block_idx.y, fx.thread_idx.x
        row = token * heads + head
        weights = pointer(partial_lse) + fx.Int64(row) * fx.Int64(splits)
        sink = fx.Float32(MINUS_INFINITY)
        if fx.const_expr(kind != ""):
            sink = (pointer(sinks) + head).load().to(fx.Float32)
        peak = sink
        for s in range(splits):
            peak = fx.max(peak, (weights + fx.Int32(s)).load())
        peak = (peak == MINUS_INFINITY).select(fx.Float32(0.0), peak)
        whole, value = exponential(sink - peak), fx.Float32(0.0)
        for s in range(splits):
            share = exponential((weights + fx.Int32(s)).load() - peak)
            place = (fx.Int64(row) * fx.Int64(splits) + fx.Int64(fx.Int32(s))) * head_dim
            whole = whole + share
            value = (
                value + (pointer(partial) + (place + fx.Int64((d < head_dim).select(d, fx.Int32(0))))).load() * share
            )
        empty = whole == 0.0
        if d < head_dim:
            result = empty.select(fx.Float32(0.0), value / whole)
            (pointer(out) + (row * head_dim + d)).store(result.to(fx.BFloat16))
        if d == 0:
            total = peak + fx.log(whole, fastmath="fast")
            (pointer(lse) + row).store(empty.select(fx.Float32(MINUS_INFINITY), total))

    @flyc.jit
    def attention_merge(
        partial: fx.Tensor,
        partial_lse: fx.Tensor,
        sinks: fx.Tensor,
        out: fx.Tensor,
        lse: fx.Tensor,
        splits: fx.Int32,
        tokens: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        attention_merge_kernel(partial, partial_lse, sinks, out, lse, splits).launch(
            grid=(heads, tokens, 1), block=(threads, 1, 1), stream=stream
        )

    return attention_merge


def _plan_merge(operands: Operands, attrs: Attrs) -> list[Launch]:
    partial, sinks = operands["partial"], operands["sinks"]
    tokens, heads, splits, head_dim = partial.shape
    kind = "" if sinks is None else "fp32" if str(sinks.dtype) == "torch.float32" else "bf16"
    launcher = build_attention_merge(head_dim, heads, sinks=kind)
    lse = operands["partial_lse"]
    args = (partial, lse, lse if sinks is None else sinks, operands["out"], operands["lse"], splits, tokens)
    return [Launch(launcher, args)]


attention_merge = KernelOp(_plan_merge)
