"""Dependent loads in Triton: a pointer chase over a buffer of its own, and a walk over any buffer without changing it.

Both read a cycle counter and a constant-rate clock around loads that wait for one another. On NVIDIA these are %clock64
and %globaltimer (PTX ISA, special registers); on AMD s_memtime and s_memrealtime, whose answers arrive like those of
scalar loads and are waited for with lgkmcnt(0) (LLVM AMDGPUUsage, memory model). Under Triton's interpreter there are
no clocks: ticks come out as 0, and what is left is the order of the loads, which tests check.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

LINE_BYTES = 128  # what one miss brings; every hop goes to another line
LINE_WORDS: tl.constexpr = tl.constexpr(LINE_BYTES // 4)
OUT_FIELDS = ("index", "cycles", "nanoseconds")
NO_CLOCKS, PTX, GFX9 = 0, 1, 2  # what `CLOCKS` of the kernels may be
_PTX, _GFX9 = tl.constexpr(PTX), tl.constexpr(GFX9)
# s_memrealtime counts at 100 MHz on MI200 and MI300 (HIP programming guide, wall_clock64 and its rate attribute); no
# public source gives the rate of an MI355X, so runs compare it with the device's own events (`rate_error`).
NS_A_REALTIME_TICK: tl.constexpr = tl.constexpr(10)


def clock_kind() -> int:
    """Which clocks the kernels read on the target that Triton compiles for now."""
    if knobs.runtime.interpret:
        return NO_CLOCKS
    return GFX9 if driver.active.get_current_target().backend == "hip" else PTX


@triton.jit
def _ticks(value, CLOCKS: tl.constexpr):
    """Cycles, ns and `value` itself: the clocks are read when `value` is there, and what uses it comes after them."""
    if CLOCKS == _PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $3, -2147483648; @p trap; mov.u64 $0, %clock64;"
            " mov.u64 $1, %globaltimer; mov.b32 $2, $3; }",
            "=l,=l,=r,r",
            [value],
            dtype=(tl.int64, tl.int64, tl.int32),
            is_pure=False,
            pack=1,
        )
    elif CLOCKS == _GFX9:
        # One block with its waits: loads before it are done, and both clocks have answered before anything after it.
        cycles, ticks, value = tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n s_memtime $0\n s_memrealtime $1\n s_waitcnt lgkmcnt(0)\n v_mov_b32 $2, $3",
            "=&s,=&s,=&v,v",
            [value],
            dtype=(tl.int64, tl.int64, tl.int32),
            is_pure=False,
            pack=1,
        )
        return cycles, ticks * NS_A_REALTIME_TICK, value
    else:
        nothing = (value * 0).to(tl.int64)
        return nothing, nothing, value


@triton.jit
def _keep(out, row, index, cycles, nanoseconds):
    tl.store(out + row * 3, index.to(tl.int64))
    tl.store(out + row * 3 + 1, cycles)
    tl.store(out + row * 3 + 2, nanoseconds)


@triton.jit(do_not_specialize=["start", "hops"])
def _chase(following, out, start, hops, CLOCKS: tl.constexpr):
    index = tl.load(following + start, cache_modifier=".cg")  # not timed: translations and the first line
    cycles, nanoseconds, index = _ticks(index, CLOCKS)
    for _ in range(1, hops):
        index = tl.load(following + index, cache_modifier=".cg")
    cycles_after, nanoseconds_after, index = _ticks(index, CLOCKS)
    _keep(out, 0, index, cycles_after - cycles, nanoseconds_after - nanoseconds)


@triton.jit(do_not_specialize=["hops", "nothing", "first"])
def _walk(words, out, hops, nothing, first, WINDOW_WORDS: tl.constexpr, LINES: tl.constexpr, CLOCKS: tl.constexpr):
    # Full period modulo a power of two: odd increment, multiplier 1 modulo 4 (Hull and Dobell 1962).
    base = words + tl.program_id(0).to(tl.int64) * WINDOW_WORDS
    line = first & (LINES - 1)
    line = (line * 1664525 + 1013904223 + (tl.load(base + line * LINE_WORDS, cache_modifier=".cg") & nothing)) & (
        LINES - 1
    )
    cycles, nanoseconds, line = _ticks(line + nothing, CLOCKS)
    for _ in range(1, hops):
        # `nothing` is 0, which the compiler cannot know: the next address waits for this load.
        found = tl.load(base + line * LINE_WORDS, cache_modifier=".cg") & nothing
        line = (line * 1664525 + 1013904223 + found) & (LINES - 1)
    # Plus `nothing`: of a masked number the compiler would know that the comparison in the clock's way is never true.
    cycles_after, nanoseconds_after, line = _ticks(line + nothing, CLOCKS)
    _keep(out, tl.program_id(0), line, cycles_after - cycles, nanoseconds_after - nanoseconds)


def chain(nbytes: int, device: Any, *, seed: int) -> torch.Tensor:
    """int32 words of a buffer of `nbytes` in which one closed path visits every 128-byte line once, in random order."""
    lines = nbytes // LINE_BYTES
    on_cpu = torch.device(device).type == "cpu"
    generator = torch.Generator("cpu" if on_cpu else device).manual_seed(seed)
    order = torch.randperm(lines, generator=generator, device=device, dtype=torch.int64)
    following = torch.zeros(lines, LINE_BYTES // 4, dtype=torch.int32, device=device)
    following[order, 0] = (order.roll(-1) * (LINE_BYTES // 4)).int()
    return following.view(-1)


def chase(following: torch.Tensor, out: torch.Tensor, *, start: int, hops: int, device: int | None) -> None:
    """Follow `hops` links from word `start`, executed by `device` of torch.cuda, wherever `following` lies.

    out (3) int64: the index reached, cycles and ns of the last `hops - 1` loads (0 without clocks).
    """
    with _executing(device):
        _chase[(1,)](following, out, start, hops, CLOCKS=clock_kind(), num_warps=1, num_stages=1)


def walk(
    words: torch.Tensor, out: torch.Tensor, *, window_bytes: int, hops: int, device: int | None, first: int = 0
) -> int:
    """Dependent loads in every whole window of `words` (int32), one program a window; returns how many windows.

    Works on any contents and changes nothing. `window_bytes` is a power of two; out (windows, 3) int64 as in `chase`,
    for `hops - 1` loads each. Address arithmetic adds some ten cycles a hop: compare with walks of known memory only.
    """
    lines = window_bytes // LINE_BYTES
    if lines < 1 or lines & (lines - 1):
        raise ValueError(f"a window of {window_bytes} bytes is no power of two of {LINE_BYTES}-byte lines")
    windows = words.numel() * 4 // window_bytes
    with _executing(device):
        _walk[(windows,)](
            words, out, hops, 0, first, WINDOW_WORDS=window_bytes // 4, LINES=lines, CLOCKS=clock_kind(), num_warps=1,
            num_stages=1,
        )  # fmt: skip
    return windows


def _executing(device: int | None) -> Any:
    from contextlib import nullcontext

    return nullcontext() if device is None else torch.cuda.device(device)
