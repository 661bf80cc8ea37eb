"""Correctly rounded float32 a * b + c on arrays.

torch's vectorised `addcmul` is one fused multiply-add where the CPU has FMA, which is checked once on operands that a
separate multiply and add gets wrong; elsewhere the product is exact in float64 and the sum is corrected for double
rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dieplace.emulator.isa.state import F32, F64, I64

_TIE, _LOW = np.int64(1 << 28), np.int64((1 << 29) - 1)


def fma_by_float64(a: Any, b: Any, c: Any) -> np.ndarray:
    """The portable form: product exact in float64, sum rounded to odd where it is inexact and lies on a float32 tie."""
    product = np.asarray(a, F32).astype(F64) * np.asarray(b, F32).astype(F64)
    addend = np.asarray(c, F32).astype(F64)
    total = np.asarray(product + addend)
    bits = total.view(I64)
    small = np.abs(total) < 2.0**-125
    risky = (((bits & _LOW) == _TIE) | small) & np.isfinite(total)
    if risky.any():
        total = np.where(risky, _to_odd(product, addend, total), total)
    return total.astype(F32)


def _to_odd(product: np.ndarray, addend: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Where the float64 sum is inexact and even, move it one unit towards the lost part (rounding to odd)."""
    product, addend = np.broadcast_arrays(product, addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (total.view(I64) & 1) == 0
    step = np.where((lost > 0) == (total > 0), 1, -1)
    step = np.where((lost != 0) & even & (total != 0), step, 0)
    return (total.view(I64) + step).view(F64)


def _torch_is_fused() -> bool:
    """Does addcmul round once, for contiguous rows, tails, and broadcast operands alike?"""
    rng = np.random.default_rng(1)
    for n, lanes in ((1, 64), (3, 64), (64, 64)):
        a, b = (rng.standard_normal((n, lanes)).astype(F32) for _ in range(2))
        column = np.ascontiguousarray(a[:, :1])
        for left in (a, column):
            c = -(left * b)
            out = torch.zeros(n, lanes)
            torch.addcmul(torch.from_numpy(c), torch.from_numpy(left), torch.from_numpy(b), out=out)
            if not np.array_equal(out.numpy(), fma_by_float64(left, b, c)):
                return False
    return True


TORCH_IS_FUSED = _torch_is_fused()


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once; operands float32 arrays or scalars that broadcast."""
    if not TORCH_IS_FUSED:
        return fma_by_float64(a, b, c)
    a, b, c = np.broadcast_arrays(a, b, c)
    out = np.empty(a.shape, F32)
    torch.addcmul(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (c, a, b)), out=torch.from_numpy(out))
    return out
