"""Streams in Triton: read every byte of a buffer once, and copy one buffer to another, executed by a named device.

The operands may lie in a peer's memory: a launch follows `device`, not the tensors. Data used once is evicted first: by
policy on NVIDIA, by the cache modifier of `stream_once` on AMD, where policies change nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

from dieplace.codegen.cache_bits import TABLE

READ_TILE = {"BLOCK": 2048, "STEPS": 4, "num_warps": 4}
# The fastest of eight tiles for a 1 GiB copy on an H200: 4,198 GB/s read and written; the slowest had 4,035.
COPY_TILE = {"BLOCK": 1024, "STEPS": 1, "num_warps": 4}


@triton.jit
def _read(words, out, WORDS, BLOCK: tl.constexpr, STEPS: tl.constexpr, ONCE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        total = total ^ tl.load(
            words + at, mask=at < WORDS, other=0, eviction_policy="evict_first", cache_modifier=ONCE
        )
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


@triton.jit
def _copy(source, target, WORDS, BLOCK: tl.constexpr, STEPS: tl.constexpr, ONCE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    for step in tl.static_range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(source + at, mask=at < WORDS, other=0, eviction_policy="evict_first", cache_modifier=ONCE)
        tl.store(target + at, found, mask=at < WORDS, eviction_policy="evict_first", cache_modifier=ONCE)


def read(words: torch.Tensor, out: torch.Tensor, *, device: int | None, tile: dict[str, Any] = READ_TILE) -> int:
    """Read int32 `words` once; out[i] is the exclusive-or of program i's part. Returns the number of programs."""
    programs = programs_for(words.numel(), tile)
    with _executing(device):
        _read[(programs,)](words, out, words.numel(), ONCE=used_once(), **tile)
    return programs


def copy(source: torch.Tensor, target: torch.Tensor, *, device: int | None, tile: dict[str, Any] = COPY_TILE) -> None:
    """target = source, int32 words of equal number."""
    if source.numel() != target.numel():
        raise ValueError(f"{source.numel()} words do not fit {target.numel()}")
    with _executing(device):
        _copy[(programs_for(source.numel(), tile),)](source, target, source.numel(), ONCE=used_once(), **tile)


def used_once() -> str:
    """The cache modifier of data used once, on the target that Triton compiles for now."""
    if knobs.runtime.interpret or driver.active.get_current_target().backend != "hip":
        return ""
    bits = TABLE["stream_once"].triton
    assert bits is not None
    return bits.load


def programs_for(words: int, tile: dict[str, Any] = READ_TILE) -> int:
    """How many programs cover `words`: the length `out` of a read must have."""
    return -(-words // (tile["BLOCK"] * tile["STEPS"]))


def _executing(device: int | None) -> Any:
    return nullcontext() if device is None else torch.cuda.device(device)
