"""Adversarial values for checking kernels, and outputs that show what was not written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One call: a label that names what is special, operands with outputs allocated and poisoned, attributes."""

    label: str
    operands: dict[str, Tensor | None]
    attrs: dict[str, Any]


VALUES = ("normal", "large", "denormal", "equal", "zero", "alternating")


def values(kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of `kind`: what arithmetic gets wrong first."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    made = {
        "normal": normal,
        "large": normal * 2.0**40,
        "denormal": normal * 2.0**-130,
        "equal": torch.full(shape, 0.75),
        "zero": torch.zeros(shape),
        "alternating": torch.ones(shape) * (1 - 2 * (torch.arange(shape[-1]) % 2)) * (1 + 2.0**-6 * normal),
    }
    return made[kind].to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
    """An output that shows what was not written: NaN, or the largest integer."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)
