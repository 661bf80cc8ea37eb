"""Exponentials, the online softmax, and the activations made of them."""

from __future__ import annotations

from typing import Any

from dieplace.kernels.flydsl.tiles import fx

LOG2E = 1.4426950408889634
# Where a running maximum starts. Finite, so that no infinity is subtracted from another, and below every finite score.
LOWEST = -3.4028234663852886e38
MINUS_INFINITY = float("-inf")


def exponential(difference: Any) -> Any:
    """e^difference of a difference that is not positive: one multiply and v_exp_f32."""
    return fx.exp2(difference * LOG2E, fastmath="fast")


def spread_scalar(value: Any) -> Any:
    """A Float32 as both halves of a packed operand."""
    return fx.Vector.from_elements([value, value], fx.Float32)


def absorb(state: tuple[Any, Any, list[Any]], found: list[Any], values: list[Any]) -> tuple[Any, Any, list[Any]]:
    """One step of the online softmax: (maximum, sum, packed output) after scores `found` with their value rows."""
    top, total, out = state
    peak = top
    for s in found:
        peak = fx.max(peak, s)
    keep = exponential(top - peak)
    shares = [exponential(s - peak) for s in found]
    total = total * keep
    for p in shares:
        total = total + p
    out = [o * spread_scalar(keep) for o in out]
    for p, value in zip(shares, values, strict=True):
        out = [fx.fma(v, spread_scalar(p), o) for v, o in zip(value, out, strict=True)]
    return peak, total, out


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) with v_exp_f32 and an exact division."""
    return fx.Float32(1.0) / (fx.exp2(x * (-LOG2E), fastmath="fast") + 1.0)


def clamped_swiglu(gate: Any, up: Any, alpha: float, limit: float) -> Any:
    """(up + 1) * gate * sigmoid(alpha * gate); gate is clamped from above only, up from both sides (GPT-OSS)."""
    gate = fx.min(gate, fx.Float32(limit))
    up = fx.max(fx.min(up, fx.Float32(limit)), fx.Float32(-limit))
    return (up + 1.0) * gate * sigmoid(gate * alpha)
