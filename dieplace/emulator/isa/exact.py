"""Arithmetic that numpy cannot round once: float64 fused multiply-add through exact rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def fma64_scalar(a: float, b: float, c: float) -> float:
    """a * b + c rounded once to float64; IEEE results for infinities, NaNs and zeros."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product = math.copysign(0.0, a) * math.copysign(1.0, b)
        return product + c if a == 0 or b == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Elementwise `fma64_scalar` on equal shapes."""
    flat = [
        fma64_scalar(*values) for values in zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)
    ]
    return np.array(flat, np.float64).reshape(a.shape)
