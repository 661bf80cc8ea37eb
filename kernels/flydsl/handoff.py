"""Hand-offs between shards: values that carry their tag in one 64-bit word, and flags that publish other memory.

A packed word (tag in the high half, fp32 bits in the low half) is one 64-bit store and needs no ordering: monotonic,
system scope (`sc0 sc1`). A release would write back the whole L2 for every message. Flags do publish other memory:
release (`buffer_wbl2 sc0 sc1`, wait, store), and after the wait an acquire (`buffer_inv sc0 sc1`). The mailbox or flag
belongs in the memory of the consumer's die: the producer writes across, nobody polls across. Every wait has a limit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.errors import KernelFault
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    flyc,
    fx,
    lane_index,
    pointer,
    range_constexpr,
    shared,
    wave_index,
)

THREADS = 256
SUM_WAVES = 16  # one workgroup, so that the last word that failed is known without a second launch
MONOTONIC = fn.AtomicOrdering.Monotonic


@cache
def build_handoff_put() -> Any:
    """Launcher (x, mailbox, n, tag): word i becomes tag << 32 | bits of x[i]. x fp32, mailbox int64, both (n)."""

    @flyc.kernel
    def handoff_put_kernel(x: fx.Tensor, mailbox: fx.Tensor, n: fx.Int32, tag: fx.Int32) -> None:
        i = fx.block_idx.x * THREADS + fx.thread_idx.x
        if i < n:
            bits = (pointer(x) + i).load().bitcast(fx.Int32)
            word = (fx.Int64(tag) << 32) | (fx.Int64(bits) & 0xFFFFFFFF)
            fx.generic_store(pointer(mailbox) + i, word, memory_order=MONOTONIC)

    @flyc.jit
    def handoff_put(x: fx.Tensor, mailbox: fx.Tensor, n: fx.Int32, tag: fx.Int32, stream: fx.Stream = STREAM) -> None:
        grid = ((n + (THREADS - 1)) // THREADS, 1, 1)
        handoff_put_kernel(x, mailbox, n, tag).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    return handoff_put


@flyc.jit
def add_status(status: Any, failed: Any, place: Any, seen: Any, waves: int) -> None:
    """status[0] += words that failed, status[1] += what the last of them (largest `place`) held. Ends in a barrier."""
    lds = fx.SharedAllocator()
    counts, places = shared(lds, fx.Int32, waves), shared(lds, fx.Int32, waves)
    values = shared(lds, fx.Int32, waves)
    count, last = fn.coop.warp_sum(failed), fn.coop.warp_max(place)
    value = fn.coop.warp_sum(((place == last) & (failed > 0)).select(seen, fx.Int32(0)))
    if lane_index() == 0:
        counts[wave_index()] = count
        places[wave_index()] = last
        values[wave_index()] = value
    fx.gpu.barrier()
    if fx.thread_idx.x == 0:
        total, best, held = fx.Int32(0), fx.Int32(-1), fx.Int32(0)
        for w in range_constexpr(waves):
            total = total + counts[w]
            later = places[w] > best
            best = later.select(places[w], best)
            held = later.select(values[w], held)
        cell = pointer(status)
        cell.store(cell.load() + total)
        (cell + 1).store((cell + 1).load() + held)


@cache
def build_handoff_sum(*, residual: str, fp32: bool) -> Any:
    """Launcher (own, mailbox, residual, out, status, n, tag, spin_limit): out = own + sent (+ residual), fp32 sums.

    own fp32, mailbox int64, residual bf16 ("" for none), out fp32 or bf16, all (n); status (2) int32 in place. A word
    whose tag has not come after `spin_limit` polls counts as one time-out, adds 0, and its tag is reported.
    """
    dtype = fx.Float32 if fp32 else fx.BFloat16
    kind = residual
    threads = SUM_WAVES * WAVE

    @flyc.kernel
    def handoff_sum_kernel(
        own: fx.Tensor,
        mailbox: fx.Tensor,
        residual: fx.Tensor,
        out: fx.Tensor,
        status: fx.Tensor,
        n: fx.Int32,
        tag: fx.Int32,
        spin_limit: fx.Int32,
    ) -> None:
        failed, place, seen = fx.Int32(0), fx.Int32(-1), fx.Int32(0)
        for step in range((n + (threads - 1)) // threads, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * threads + fx.thread_idx.x
            if i < n:
                word, found, left = fx.Int64(0), fx.Int32(0), spin_limit
                while (found != tag) & (left > 0):
                    word = fx.generic_load(pointer(mailbox) + i, memory_order=MONOTONIC)
                    found = fx.Int32(word >> 32)
                    left = left - 1
                    if found != tag:
                        fn.sleep(1)
                arrived = found == tag
                sent = arrived.select(fx.Int32(word).bitcast(fx.Float32), fx.Float32(0.0))
                total = (pointer(own) + i).load() + sent
                if fx.const_expr(kind != ""):
                    total = total + (pointer(residual) + i).load().to(fx.Float32)
                (pointer(out) + i).store(total.to(dtype))
                failed = failed + arrived.select(fx.Int32(0), fx.Int32(1))
                place = arrived.select(place, i)
                seen = arrived.select(seen, found)
        add_status(status, failed, place, seen, SUM_WAVES)

    @flyc.jit
    def handoff_sum(
        own: fx.Tensor,
        mailbox: fx.Tensor,
        residual: fx.Tensor,
        out: fx.Tensor,
        status: fx.Tensor,
        n: fx.Int32,
        tag: fx.Int32,
        spin_limit: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        handoff_sum_kernel(own, mailbox, residual, out, status, n, tag, spin_limit).launch(
            grid=(1, 1, 1), block=(threads, 1, 1), stream=stream
        )

    return handoff_sum


@cache
def build_flag_set() -> Any:
    """Launcher (flag, count, stride, value): everything this device wrote before is visible to who sees the value."""

    @flyc.kernel
    def flag_set_kernel(flag: fx.Tensor, count: fx.Int32, stride: fx.Int32, value: fx.Int32) -> None:
        fx.memory_fence(ordering=fn.AtomicOrdering.Release)
        for step in range((count + (WAVE - 1)) // WAVE, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * WAVE + fx.thread_idx.x
            if i < count:
                fx.generic_store(pointer(flag) + i * stride, value, memory_order=MONOTONIC)

    @flyc.jit
    def flag_set(
        flag: fx.Tensor, count: fx.Int32, stride: fx.Int32, value: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        flag_set_kernel(flag, count, stride, value).launch(grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return flag_set


@cache
def build_flag_wait() -> Any:
    """Launcher (flag, status, count, stride, value, spin_limit): one wave, a lane a flag, an acquire at the end."""

    @flyc.kernel
    def flag_wait_kernel(
        flag: fx.Tensor, status: fx.Tensor, count: fx.Int32, stride: fx.Int32, value: fx.Int32, spin_limit: fx.Int32
    ) -> None:
        failed, place, seen = fx.Int32(0), fx.Int32(-1), fx.Int32(0)
        for step in range((count + (WAVE - 1)) // WAVE, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * WAVE + fx.thread_idx.x
            if i < count:
                found, left, polled = fx.Int32(0), spin_limit, fx.Int32(0)
                while ((found != value) | (polled == 0)) & (left > 0):
                    found = fx.generic_load(pointer(flag) + i * stride, memory_order=MONOTONIC)
                    polled = fx.Int32(1)
                    left = left - 1
                    if found != value:
                        fn.sleep(1)
                arrived = (found == value) & (polled == 1)
                failed = failed + arrived.select(fx.Int32(0), fx.Int32(1))
                place = arrived.select(place, i)
                seen = arrived.select(seen, found)
        fx.memory_fence(ordering=fn.AtomicOrdering.Acquire)
        add_status(status, failed, place, seen, 1)

    @flyc.jit
    def flag_wait(
        flag: fx.Tensor,
        status: fx.Tensor,
        count: fx.Int32,
        stride: fx.Int32,
        value: fx.Int32,
        spin_limit: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        flag_wait_kernel(flag, status, count, stride, value, spin_limit).launch(
            grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream
        )

    return flag_wait


def require_arrival(status: Any, *, flag: str, expected: int, waiter: str) -> None:
    """KernelFault when a wait gave up: names the flag, what was expected, what was read last and who waited."""
    failed, seen = (int(v) for v in status.tolist())
    if failed:
        raise KernelFault(
            f"{waiter} waited for {flag} to hold {expected}: {failed} never did, the last one held {seen}",
            hint="the producer was not launched, or its store is not visible to this die",
            flag=flag,
            expected=expected,
            last_read=seen,
            timeouts=failed,
            waiter=waiter,
        )


def _plan_put(operands: Operands, attrs: Attrs) -> list[Launch]:
    x = operands["x"]
    return [Launch(build_handoff_put(), (x, operands["mailbox"], x.numel(), int(attrs["tag"])))]


def _plan_sum(operands: Operands, attrs: Attrs) -> list[Launch]:
    own, residual, out = operands["own"], operands["residual"], operands["out"]
    launcher = build_handoff_sum(residual="" if residual is None else "bf16", fp32=str(out.dtype) == "torch.float32")
    tensors = (own, operands["mailbox"], own if residual is None else residual, out, operands["status"])
    return [Launch(launcher, (*tensors, own.numel(), int(attrs["tag"]), int(attrs["spin_limit"])))]


def flag_lines(flag: Any) -> Any:
    """Flags with a stride of their own as the plain run of memory that they lie in (FlyDSL wants one unit stride)."""
    count, stride = flag.numel(), flag.stride(0)
    return flag.as_strided(((count - 1) * stride + 1,), (1,))


def _plan_set(operands: Operands, attrs: Attrs) -> list[Launch]:
    flag = operands["flag"]
    return [Launch(build_flag_set(), (flag_lines(flag), flag.numel(), flag.stride(0), int(attrs["value"])))]


def _plan_wait(operands: Operands, attrs: Attrs) -> list[Launch]:
    flag, status = operands["flag"], operands["status"]
    numbers = (flag.numel(), flag.stride(0), int(attrs["value"]), int(attrs["spin_limit"]))
    return [Launch(build_flag_wait(), (flag_lines(flag), status, *numbers))]


handoff_put = KernelOp(_plan_put)
handoff_sum = KernelOp(_plan_sum)
flag_set = KernelOp(_plan_set)
flag_wait = KernelOp(_plan_wait)
