"""A kernel in which every program reads all of a small buffer and counts the words of each of two patterns.

A program on each core, and so one behind each L2: a line that is stale in any of them is counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 512  # more than the cores of the parts meant here: MI355X 256, H200 132
BLOCK = 4096


@triton.jit
def _count(words, out, first, second, WORDS, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    old = tl.zeros((BLOCK,), tl.int32)
    new = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, WORDS, BLOCK):
        at = start + lane
        inside = at < WORDS
        # Past the first-level cache, which no kernel boundary leaves as it is.
        found = tl.load(words + at, mask=inside, other=0, cache_modifier=".cg")
        old += (inside & (found == first)).to(tl.int32)
        new += (inside & (found == second)).to(tl.int32)
    tl.store(out + tl.program_id(0) * 2, tl.sum(old, axis=0))
    tl.store(out + tl.program_id(0) * 2 + 1, tl.sum(new, axis=0))


def count(words: torch.Tensor, patterns: tuple[int, ...], index: int, *, programs: int = PROGRAMS) -> list[list[int]]:
    """[words equal to the first pattern, to the second] as each program saw them, executed by runtime device `index`.

    Waits for this kernel alone, not for the device: other work of it goes on.
    """
    out = torch.zeros(programs, 2, dtype=torch.int32, device=words.device)
    if words.device.type == "cpu":  # Triton's interpreter
        _count[(programs,)](words, out, patterns[0], patterns[1], words.numel(), BLOCK=BLOCK)
        return [[int(a), int(b)] for a, b in out.tolist()]
    with torch.cuda.device(index):
        _count[(programs,)](words, out, patterns[0], patterns[1], words.numel(), BLOCK=BLOCK, num_warps=8)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        host.copy_(out, non_blocking=True)
        done.record()
        done.synchronize()
    return [[int(a), int(b)] for a, b in host.tolist()]
