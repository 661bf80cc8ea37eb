"""Launches that start before the one in front of them has ended, so that its end hides their beginning.

Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
griddepcontrol; sm_90 and newer; a captured graph keeps it). An op called with `overlap=True` tells the next launch that
it may begin, asks for its weights, and waits for the launch before it to end; only then does it touch what that one may
have written. The caller promises that no launch still under way on the stream writes a weight, a table, a length, a
page or an older row of the cache: true inside a decode step, not of weights that were filled a moment ago.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import INTERPRETED

LET_NEXT_START = "griddepcontrol.launch_dependents; // $0"
WAIT_FOR_PREVIOUS = "griddepcontrol.wait; // $0"
_NEXT, _PREVIOUS = tl.constexpr(LET_NEXT_START), tl.constexpr(WAIT_FOR_PREVIOUS)


def overlap_options(asked: bool) -> dict[str, Any]:
    """Keywords of a launch that overlaps if asked to; where the device cannot, it waits as launches do."""
    able = asked and not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next launch may begin once every program of this one has said so or ended."""
    if OVERLAP:
        tl.inline_asm_elementwise(_NEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Until the launch before this one has ended and what it wrote can be read; every program must pass here."""
    if OVERLAP:
        tl.inline_asm_elementwise(_PREVIOUS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
