"""Runs registry ops on the emulator for tests: in plain memory, or on an emulated die with homes and traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dieplace.codegen.flydsl import Compiled, compile_launcher
from dieplace.emulator.execution import LaunchRecord, Session
from dieplace.kernels import registry

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8


def mostly_slow(cases: list[Any], quick: int) -> list[Any]:
    """Parameters of which only the first `quick` are in the quick run: each compiles a kernel of its own."""
    slow = [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases[quick:]
    ]
    return cases[:quick] + slow


def run_op(op: str, operands: dict[str, Tensor | None], **attrs: Any) -> list[LaunchRecord]:
    """Run an op strictly on the FlyDSL kernels; outputs are written in place."""
    with Session(two_die=False) as session:
        assert registry.run(op, operands, attrs, backend="flydsl", strict=True) == "flydsl"
    return session.records


def launches(op: str, operands: dict[str, Tensor | None], **attrs: Any) -> list[Any]:
    """The launches an op would make, checked against the contract."""
    call = registry.check_call(op, operands, attrs)
    kernel: Any = registry.implementation(op, "flydsl")
    return kernel.plan(call.operands, call.attrs)


def compiled(op: str, operands: dict[str, Tensor | None], **attrs: Any) -> list[Compiled]:
    """The compiled launches of an op."""
    return [compile_launcher(launch.launcher, *launch.args) for launch in launches(op, operands, **attrs)]


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 weights in float64, decoded by the format's own table (OCP Microscaling Formats 1.0, tables 6 and 7)."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    pairs = torch.stack((codes[(blocks & 15).long()], codes[(blocks >> 4).long()]), dim=-1).flatten(-2)
    factor = torch.pow(torch.tensor(2.0, dtype=torch.float64), scales.double() - 127)
    factor[scales == 255] = torch.nan
    return (pairs * factor[..., None]).flatten(-2)


def random_mxfp4(rows: tuple[int, ...], k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks (..., k/32, 16) and scales (..., k/32) with factors from 2^-10 to 1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*rows, k // 32, 16), dtype=U8, generator=generator)
    return blocks, torch.randint(117, 128, (*rows, k // 32), dtype=U8, generator=generator)
