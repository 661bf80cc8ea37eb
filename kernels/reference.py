"""What a float64 reference returns, and the pieces that all of them share.

The references are plain torch on the host, split by kind: `reference_norm`, `reference_attention`, `reference_linear`,
`reference_moe`, `reference_handoff`. Each takes (operands, attrs) of a checked call and returns `Expected` per output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dieplace.kernels.quantize import mxfp4_dequantize

Operands = Mapping[str, Any]
Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The exact value (float64, or integers) and the sum of magnitudes that fp32 accumulation errors scale with."""

    value: Tensor
    magnitude: Tensor | None = None

    @property
    def size(self) -> Tensor:
        """The sum of magnitudes; that of the value itself where nothing was summed."""
        return self.value.abs() if self.magnitude is None else self.magnitude


def wide(tensor: Tensor) -> Tensor:
    """float64 on the host."""
    return tensor.to("cpu", torch.float64)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Expected:
    """x (T, K), weight (N, K), bias (N), all float64 -> (T, N) and its magnitudes."""
    value, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        value, magnitude = value + bias, magnitude + bias.abs()
    return Expected(value, magnitude)


def mx_weight(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 blocks and scales to a float64 weight."""
    return mxfp4_dequantize(blocks.cpu(), scales.cpu())


def round_bf16(value: Tensor) -> Tensor:
    """float64 rounded once to bf16 and back; torch's own conversion from float64 may round twice (through fp32)."""
    mantissa, exponent = torch.frexp(value)
    # 8 significant bits; below 2^-126 the spacing is 2^-133, as bf16 keeps denormals.
    step = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(min=-125) - 8)
    rounded = torch.round(value / step) * step
    largest = torch.finfo(torch.bfloat16).max
    rounded = torch.where(rounded.abs() > largest, torch.copysign(torch.full_like(value, torch.inf), value), rounded)
    return torch.where(torch.isfinite(value), rounded, value)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """An expected value as an output of `dtype`, rounded once."""
    if dtype == torch.bfloat16 and value.dtype == torch.float64:
        value = round_bf16(value)
    return value.to(dtype)
