"""Pointer chase: one lane, each load's address is what the load before it returned; a hop takes one latency."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.cache_bits import TABLE
from dieplace.codegen.flydsl_names import STREAM, flyc, fx, pointer
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands

OUT_FIELDS = ("index", "shader_ticks", "constant_ticks", "xcc_id")


def load_next(address: Any, name: str) -> Any:
    """The Int32 at an address, with the cache bits of `name` in `cache_bits.TABLE`."""
    scope = TABLE[name].scope
    if scope is None:
        return fx.generic_load(address, nontemporal=name == "stream_once")
    return fx.generic_load(address, memory_order=fn.AtomicOrdering.Monotonic, syncscope=scope or None)


@cache
def build_chase(name: str = "keep") -> Any:
    """Launcher (following, out, start, hops): following (n) int32 holds the index of the next element.

    out (4) int64: the index after `hops` hops, s_memtime ticks, s_memrealtime ticks, XCC_ID. The clocks are read with
    no load under way: only loads that something waits for are timed. The first hop is not timed.
    """

    @flyc.kernel
    def chase_kernel(following: fx.Tensor, out: fx.Tensor, start: fx.Int32, hops: fx.Int32) -> None:
        if fx.thread_idx.x == 0:
            base = pointer(following)
            index = load_next(base + start, name)
            fn.waitcnt_vmem()
            before, before_constant = fn.memtime(), fn.memrealtime()
            for _ in range(hops - 1, unroll=1):  # type: ignore[call-overload]
                index = load_next(base + index, name)
                fn.waitcnt_vmem()
            after, after_constant = fn.memtime(), fn.memrealtime()
            cell = pointer(out)
            cell.store(fx.Int64(index))
            (cell + 1).store(after - before)
            (cell + 2).store(after_constant - before_constant)
            (cell + 3).store(fx.Int64(fn.xcc_id()))

    @flyc.jit
    def chase(
        following: fx.Tensor, out: fx.Tensor, start: fx.Int32, hops: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        chase_kernel(following, out, start, hops).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return chase


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    launcher = build_chase(attrs.get("cache", "keep"))
    start, hops = int(attrs.get("start", 0)), int(attrs["hops"])
    return [Launch(launcher, (operands["following"], operands["out"], start, hops))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    if attrs.get("cache", "keep") not in TABLE:
        return f"cache {attrs['cache']!r} is none of {', '.join(TABLE)}"
    return None if int(attrs["hops"]) >= 2 else "a chase takes at least two hops: the first one is not timed"


probe_chase = KernelOp(_plan, _supports)
