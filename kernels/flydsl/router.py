"""Top-k of the router's logits: one wave a token, softmax over the chosen, non-finite logits counted."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.softmax import MINUS_INFINITY, exponential
from dieplace.kernels.flydsl.tiles import (
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
    wave_index,
)

NOBODY = 1 << 20  # an index that loses every tie: taken, or not an expert
EXPONENT_BITS = 0x7F800000


def lane_logits(run: Any, experts: int) -> tuple[list[Any], list[Any], Any]:
    """(values, expert numbers, non-finite count) of this lane's experts; NaN becomes minus infinity: it never wins."""
    values, numbers, bad = [], [], fx.Int32(0)
    for j in range(-(-experts // WAVE)):
        expert = lane_index() + j * WAVE
        inside = expert < experts
        value = load_items(run, expert, fx.Float32, 1)[0]
        nonfinite = (value.bitcast(fx.Int32) & EXPONENT_BITS) == EXPONENT_BITS
        bad = bad + (inside & nonfinite).select(fx.Int32(1), fx.Int32(0))
        values.append((inside & (value == value)).select(value, fx.Float32(MINUS_INFINITY)))
        numbers.append(inside.select(expert, fx.Int32(NOBODY)))
    return values, numbers, bad


def take_best(values: list[Any], numbers: list[Any]) -> tuple[Any, Any]:
    """The wave's largest value and the lowest expert number that has it; the winner is struck from the lists."""
    top = values[0]
    for v in values[1:]:
        top = fx.max(top, v)
    best = fn.coop.warp_max(top)
    candidate = fx.Int32(NOBODY)
    for v, n in zip(values, numbers, strict=True):
        candidate = fx.min(candidate, (v == best).select(n, fx.Int32(NOBODY)))
    winner = fn.coop.warp_min(candidate)
    for i, n in enumerate(numbers):
        values[i] = (n == winner).select(fx.Float32(MINUS_INFINITY), values[i])
        numbers[i] = (n == winner).select(fx.Int32(NOBODY), n)
    return best, winner


@cache
def build_router_topk(tokens: int, experts: int, chosen: int) -> Any:
    """Launcher (logits, ids, weights, nonfinite): `chosen` of `experts` (up to 128), ties to the lowest number.

    logits (tokens, experts) fp32, ids (tokens, chosen) int32, weights (tokens, chosen) fp32, nonfinite (1) int32. The
    ids are distinct and below `experts` whatever the logits are; a row of minus infinities gives equal weights.
    """

    @flyc.kernel
    def router_topk_kernel(logits: fx.Tensor, ids: fx.Tensor, weights: fx.Tensor, nonfinite: fx.Tensor) -> None:
        token, lane = wave_index(), lane_index()
        run = bounded(pointer(logits, offset=fx.Int64(token) * experts), experts * 4, 1)
        values, numbers, bad = lane_logits(run, experts)
        mine, number, top = fx.Float32(0.0), fx.Int32(0), fx.Float32(0.0)
        for rank in range_constexpr(chosen):
            best, winner = take_best(values, numbers)
            if fx.const_expr(rank == 0):
                top = best
            mine = (lane == rank).select(best, mine)
            number = (lane == rank).select(winner, number)
        # Equal values have difference 0 even where both are infinite.
        below = (mine == top).select(fx.Float32(0.0), mine - top)
        share = (lane < chosen).select(exponential(below), fx.Float32(0.0))
        weight = share / fn.coop.warp_sum(share)
        if lane < chosen:
            (pointer(ids) + (token * chosen + lane)).store(number)
            (pointer(weights) + (token * chosen + lane)).store(weight)
        counts = shared(fx.SharedAllocator(), fx.Int32, tokens)
        total = fn.coop.warp_sum(bad)
        if lane == 0:
            counts[token] = total
        fx.gpu.barrier()
        if fx.thread_idx.x == 0:
            everywhere = fx.Int32(0)
            for t in range_constexpr(tokens):
                everywhere = everywhere + counts[t]
            pointer(nonfinite).store(everywhere)

    @flyc.jit
    def router_topk(
        logits: fx.Tensor, ids: fx.Tensor, weights: fx.Tensor, nonfinite: fx.Tensor, stream: fx.Stream = STREAM
    ) -> None:
        router_topk_kernel(logits, ids, weights, nonfinite).launch(
            grid=(1, 1, 1), block=(tokens * WAVE, 1, 1), stream=stream
        )

    return router_topk


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    names = ("logits", "ids", "weights", "nonfinite")
    tokens, experts = operands["logits"].shape
    launcher = build_router_topk(tokens, experts, operands["ids"].shape[1])
    return [Launch(launcher, tuple(operands[name] for name in names))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    chosen = operands["ids"].shape[1]
    return None if chosen <= WAVE else f"{chosen} chosen experts do not fit the {WAVE} lanes of a wave"


router_topk = KernelOp(_plan, _supports)
