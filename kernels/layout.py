"""Weight layouts with a name: a prepared tensor says how it is arranged, and a kernel says what it takes.

`checkpoint` is the order of the Hugging Face file and the default of every plain tensor. Preparing is explicit, is done
once, and has a way back that is byte-equal to the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dieplace.errors import UsageError
from dieplace.kernels.quantize import PAD_SCALE

CHECKPOINT = "checkpoint"
PADDED_GROUPS = 8  # `padded_*` rows are whole multiples of 8 MXFP4 groups (256 values): 2880 becomes 3072


@dataclass(frozen=True)
class Laid:
    """A tensor and the name of its layout; `checkpoint_shape` is what `restore` gives back."""

    tensor: Tensor
    layout: str = CHECKPOINT
    checkpoint_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How to arrange a checkpoint tensor, and how to undo it; both are pure functions of the tensor."""

    name: str
    summary: str
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, tuple[int, ...]], Tensor]


def as_laid(tensor: Tensor | Laid) -> Laid:
    """A plain tensor counts as `checkpoint`."""
    return tensor if isinstance(tensor, Laid) else Laid(tensor, CHECKPOINT, tuple(tensor.shape))


def prepare(tensor: Tensor | Laid, layout: str) -> Laid:
    """The tensor in `layout`; UsageError for an unknown name or a tensor that was prepared before."""
    laid = as_laid(tensor)
    if laid.layout != CHECKPOINT:
        raise UsageError(
            f"the tensor is already laid out as {laid.layout}; preparing it as {layout} would arrange it twice",
            hint="restore() it first, or start from the checkpoint",
        )
    if layout == CHECKPOINT:
        return laid
    if layout not in LAYOUTS:
        raise UsageError(f"no layout is called {layout!r}", hint=f"one of {CHECKPOINT}, {', '.join(LAYOUTS)}")
    arranged = LAYOUTS[layout].forward(laid.tensor).contiguous()
    return Laid(arranged, layout, tuple(laid.tensor.shape))


def restore(laid: Laid) -> Tensor:
    """The checkpoint tensor again, byte for byte."""
    if laid.layout == CHECKPOINT:
        return laid.tensor
    return LAYOUTS[laid.layout].back(laid.tensor, laid.checkpoint_shape).contiguous()


def require_layout(operand: str, given: Tensor | Laid, wanted: str) -> Tensor:
    """The plain tensor when its layout is the one the kernel takes, else UsageError before any launch."""
    laid = as_laid(given)
    if laid.layout != wanted:
        raise UsageError(
            f"operand {operand} is laid out as {laid.layout}, the kernel takes {wanted}",
            hint=f"prepare(restore(tensor), {wanted!r})",
            operand=operand,
        )
    return laid.tensor


def _split_rows(tensor: Tensor) -> Tensor:
    """(E, 2I, ...) rows g0,u0,g1,u1,... to g0,g1,...,u0,u1,..."""
    _need(tensor.ndim >= 2 and tensor.shape[1] % 2 == 0, tensor, "an even number of gate and up rows")
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)


def _interleave_rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    gate, up = tensor.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).reshape(shape)


def _padder(axis: int, fill: int) -> Callable[[Tensor], Tensor]:
    def pad(tensor: Tensor) -> Tensor:
        missing = -tensor.shape[axis] % PADDED_GROUPS
        shape = list(tensor.shape)
        shape[axis] = missing
        return torch.cat((tensor, torch.full(shape, fill, dtype=tensor.dtype)), dim=axis)

    return pad


def _cutter(axis: int) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    return lambda tensor, shape: tensor.narrow(axis, 0, shape[axis])


def _need(condition: bool, tensor: Tensor, what: str) -> None:
    if not condition:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} cannot be laid out so: it needs {what}")


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("split_gate_up", "all gate rows, then all up rows", _split_rows, _interleave_rows),
        Layout("padded_blocks", "MXFP4 groups padded to 8, pad nibbles 0", _padder(-2, 0), _cutter(-2)),
        Layout("padded_scales", "MXFP4 scales padded to 8, pad byte 127", _padder(-1, PAD_SCALE), _cutter(-1)),
    )
}
