"""What every Triton op's host function needs: the operand's own device and stream, and block sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

INTERPRETED: bool = bool(knobs.runtime.interpret)


def targets_amd() -> bool:
    """Whether Triton compiles for an AMD card now; the build of torch does not say: the emulated card is one too."""
    return bool(driver.active.get_current_target().backend == "hip")


def nibble_decode() -> int:
    """How `nibbles.eight` decodes here: 0 plain Triton (interpreter, ROCm), 1 or 2 inline PTX (CUDA)."""
    if INTERPRETED or targets_amd():
        return 0
    return 2 if torch.cuda.get_device_capability() >= (8, 9) else 1


@contextmanager
def on_device_of(tensor: torch.Tensor, stream: Any = None) -> Iterator[None]:
    """Launch on the operand's device and stream, whatever device is current (triton issue 2441)."""
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.device(tensor.device):
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield


def tokens_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(T, T rounded up to a power of two): token blocks are masked, Triton's are powers of two."""
    return tensor.shape[0], triton.next_power_of_2(tensor.shape[0])


def one_device(operands: Mapping[str, torch.Tensor | None]) -> str | None:
    """None when all operands are on one device, else a sentence naming two of them."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in operands.items():
        if tensor is None:
            continue
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            return f"{first[0]} is on {first[1]} and {name} on {tensor.device}: enable peer placement or move one"
    return None


def triton_op(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a host function as an op: operands on two devices are told before any launch, naming both."""
    function.supports = lambda operands, attrs: one_device(operands)  # type: ignore[attr-defined]
    return function
