"""When MXFP4 rows go to NVIDIA's matrix units, and with which blocks; the kernels are in `mx_kernels`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from dieplace.kernels.triton.launch import INTERPRETED
from dieplace.kernels.triton.overlap import overlap_options

LARGEST_WIDTH = 4096  # the ring and x of wider rows leave no room for a second program
FROM_ROWS = 65536  # so many rows fill the card with programs that go through many of them each
_GLUON_FROM = (3, 6)  # Gluon is experimental: its names were tried with Triton 3.6 and 3.9


def fits(x: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether one token's activations `x` (T, ...) and rows of these scales are a case for `mx_kernels`."""
    aligned = x.data_ptr() % 16 == 0 and scales.data_ptr() % 4 == 0
    return x.shape[0] == 1 and scales.shape[-1] * 32 <= LARGEST_WIDTH and aligned and _able(x.device)


@cache
def _able(device: torch.device) -> bool:
    if INTERPRETED or torch.version.hip is not None or device.type != "cuda":
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= _GLUON_FROM and torch.cuda.get_device_capability(device) >= (9, 0)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def gemv(
    x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    overlap: bool,
) -> None:  # fmt: skip
    """out (1, N) of `gemv_mxfp4`."""
    from dieplace.kernels.triton import mx_kernels

    rows, width = blocks.shape[0], blocks.shape[1] * 32
    operands = (_words(x), _words(blocks), _bytes(scales), out if bias is None else bias, out, rows)
    common: dict[str, Any] = {"K": width, "W": 1, "HAS_BIAS": bias is not None, "num_warps": 1}
    common |= overlap_options(overlap)
    if rows >= FROM_ROWS:
        pairs = 32
        mx_kernels.gemv_long[(triton.cdiv(rows, 2 * pairs),)](*operands, pairs, SLOTS=2, **common)
    else:
        mx_kernels.gemv[(triton.cdiv(rows, 2),)](*operands, U=1, **common)


def gate_up(
    x: torch.Tensor, ids: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor,
    out: torch.Tensor, alpha: float, limit: float, overlap: bool,
) -> None:  # fmt: skip
    """out (1, k, I) of `expert_gate_up`; the ids of one token are distinct."""
    from dieplace.kernels.triton import mx_kernels

    chosen, inner = out.shape[1:]
    pairs = 2
    mx_kernels.gate_up[(triton.cdiv(inner, pairs), chosen)](
        _words(x), ids, _words(blocks), _bytes(scales), bias, out, alpha, limit, H=x.shape[1], INNER=inner, U=pairs,
        W=1, num_warps=1, **overlap_options(overlap),
    )  # fmt: skip


def down(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor, overlap: bool,
) -> None:  # fmt: skip
    """out (1, H) of `expert_down`: a warp for each chosen expert."""
    from dieplace.kernels.triton import mx_kernels

    chosen, inner = x.shape[1:]
    warps, rows, pairs = triton.next_power_of_2(chosen), out.shape[1], 2
    mx_kernels.down[(triton.cdiv(rows, 2 * pairs),)](
        _words(x), ids, weights, _words(blocks), _bytes(scales), out if bias is None else bias, out, H=rows,
        INNER=inner, C=chosen, U=pairs, W=warps, HAS_BIAS=bias is not None, num_warps=warps,
        **overlap_options(overlap),
    )  # fmt: skip
