"""The streaming read: what a kernel that only loads can reach."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.launch import on_device_of


@triton.jit
def _stream_read(words, out, WORDS, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        total = total ^ tl.load(words + at, mask=at < WORDS, other=0, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def stream_read(words: torch.Tensor, out: torch.Tensor, *, stream: Any = None) -> int:
    """Read int32 `words` once; out[i] is the exclusive-or of program i's part. Returns the number of programs."""
    block, steps = 2048, 4
    programs = triton.cdiv(words.numel(), block * steps)
    with on_device_of(words, stream):
        _stream_read[(programs,)](words, out, words.numel(), BLOCK=block, STEPS=steps, num_warps=4)
    return programs
