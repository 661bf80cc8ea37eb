"""Streaming read: every byte of a buffer once a pass, four 16-byte non-temporal loads in flight a lane."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen.flydsl_names import STREAM, flyc, fx, pointer, range_constexpr
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands

THREADS = 256
IN_FLIGHT = 4
WORDS = 4  # 32-bit words in one load


def fold(acc: Any, words: Any) -> Any:
    """Exclusive or of four words into `acc`: cheap, and keeps the loads alive."""
    return acc ^ words[0] ^ words[1] ^ words[2] ^ words[3]


def read_once(address: Any) -> Any:
    """Sixteen bytes that are not kept in caches."""
    return fx.generic_load(address, dtype=fx.Int32, count=WORDS, nontemporal=True)


@cache
def build_stream(blocks: int) -> Any:
    """Launcher (src, out, items, passes): `items` 16-byte items of src, int32 out (blocks * 256).

    The exclusive or of `out` is that of all words of `src` for an odd number of passes and 0 for an even one: it shows
    that each byte was read. Addresses are 64-bit, so that a buffer may be larger than 4 GiB.
    """
    lanes = blocks * THREADS

    @flyc.kernel
    def stream_kernel(src: fx.Tensor, out: fx.Tensor, items: fx.Int32, passes: fx.Int32) -> None:
        lane = fx.block_idx.x * THREADS + fx.thread_idx.x
        start = pointer(src, fx.Int128)
        acc = fx.Int32(0)
        rounds = items // (lanes * IN_FLIGHT)
        for _ in range(passes, unroll=1):  # type: ignore[call-overload]
            for r in range(rounds, unroll=1):  # type: ignore[call-overload]
                first = fx.Int64(fx.Int32(r) * (lanes * IN_FLIGHT) + lane)
                loads = []
                for u in range_constexpr(IN_FLIGHT):
                    loads.append(read_once(start + (first + u * lanes)))
                for u in range_constexpr(IN_FLIGHT):
                    acc = fold(acc, loads[u])
            for u in range_constexpr(IN_FLIGHT):
                item = rounds * (lanes * IN_FLIGHT) + u * lanes + lane
                if item < items:
                    acc = fold(acc, read_once(start + fx.Int64(item)))
        (pointer(out) + lane).store(acc)

    @flyc.jit
    def stream(src: fx.Tensor, out: fx.Tensor, items: fx.Int32, passes: fx.Int32, stream: fx.Stream = STREAM) -> None:
        stream_kernel(src, out, items, passes).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return stream


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    src, out = operands["src"], operands["out"]
    launcher = build_stream(out.numel() // THREADS)
    return [Launch(launcher, (src, out, src.numel() // WORDS, int(attrs.get("passes", 1))))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    if operands["src"].numel() % WORDS:
        return f"{operands['src'].numel()} words are not whole 16-byte items"
    return f"out must have a multiple of {THREADS} words" if operands["out"].numel() % THREADS else None


probe_stream = KernelOp(_plan, _supports)
