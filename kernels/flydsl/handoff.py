"""Hand-offs between shards: values that carry their tag in one 64-bit word.

A packed word (tag in the high half, fp32 bits in the low half) is one 64-bit store and needs no ordering: monotonic,
system scope (`sc0 sc1`). A release would write back the whole L2 for every message. The mailbox belongs in the memory
of the consumer's die: the producer writes across, nobody polls across. Every wait has a limit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.arrival import require_arrival as require_arrival
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
MASK = 0x7FFFFFFF  # tags and counted values are 31 bits and wrap


@flyc.jit
def counted_value(value: Any, epoch: Any, counted: bool) -> Any:
    """The value itself, or how many steps this device has counted plus the value."""
    if fx.const_expr(counted):
        return (pointer(epoch).load() + value) & MASK
    return value


@flyc.jit
def patience_of(record: Any, spin_limit: Any, recording: bool) -> Any:
    """Polls of this wait: one where an earlier wait gave up, so that a step that failed ends after one limit."""
    if fx.const_expr(recording):
        once = (spin_limit < 1).select(spin_limit, fx.Int32(1))
        return (pointer(record).load() == 0).select(spin_limit, once)
    return spin_limit


@cache
def build_handoff_put(counted: bool = False) -> Any:
    """Launcher (x, mailbox, epoch, n, tag): word i becomes tag << 32 | bits of x[i]. x fp32, mailbox int64, both (n).

    `epoch` (1) int32 is counted on from where `counted`, else anything.
    """

    @flyc.kernel
    def handoff_put_kernel(x: fx.Tensor, mailbox: fx.Tensor, epoch: fx.Tensor, n: fx.Int32, tag: fx.Int32) -> None:
        i = fx.block_idx.x * THREADS + fx.thread_idx.x
        if i < n:
            bits = (pointer(x) + i).load().bitcast(fx.Int32)
            word = (fx.Int64(counted_value(tag, epoch, counted)) << 32) | (fx.Int64(bits) & 0xFFFFFFFF)
            fx.generic_store(pointer(mailbox) + i, word, memory_order=MONOTONIC)

    @flyc.jit
    def handoff_put(
        x: fx.Tensor, mailbox: fx.Tensor, epoch: fx.Tensor, n: fx.Int32, tag: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        grid = ((n + (THREADS - 1)) // THREADS, 1, 1)
        handoff_put_kernel(x, mailbox, epoch, n, tag).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    return handoff_put


@flyc.jit
def add_status(
    status: Any, record: Any, failed: Any, place: Any, seen: Any, expected: Any, waves: int, recording: bool
) -> None:
    """status[0] += words that failed, status[1] += what the last of them (largest `place`) held. Ends in a barrier.

    Where `recording`, the first wait that gave up is noted in `record`: index + 1, expected, last read, block.
    """
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
        if fx.const_expr(recording):
            note = pointer(record)
            if (total > 0) & (note.load() == 0):
                note.store(best + 1)
                (note + 1).store(expected)
                (note + 2).store(held)
                (note + 3).store(fx.block_idx.x)


@cache
def build_handoff_sum(*, residual: str, fp32: bool, counted: bool = False, recording: bool = False) -> Any:
    """Launcher (own, mailbox, residual, out, status, record, epoch, n, tag, spin_limit): out = own + sent (+ residual).

    own fp32, mailbox int64, residual bf16 ("" for none), out fp32 or bf16, all (n), summed in fp32; status (2), record
    (4) and epoch (1) int32. A word whose tag has not come after `spin_limit` polls counts as one time-out, adds 0, and
    its tag is reported.
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
        record: fx.Tensor,
        epoch: fx.Tensor,
        n: fx.Int32,
        tag: fx.Int32,
        spin_limit: fx.Int32,
    ) -> None:
        expected, patience = counted_value(tag, epoch, counted), patience_of(record, spin_limit, recording)
        failed, place, seen = fx.Int32(0), fx.Int32(-1), fx.Int32(0)
        for step in range((n + (threads - 1)) // threads, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * threads + fx.thread_idx.x
            if i < n:
                word, found, left = fx.Int64(0), fx.Int32(0), patience
                while (found != expected) & (left > 0):
                    word = fx.generic_load(pointer(mailbox) + i, memory_order=MONOTONIC)
                    found = fx.Int32(word >> 32)
                    left = left - 1
                    if found != expected:
                        fn.sleep(1)
                arrived = found == expected
                sent = arrived.select(fx.Int32(word).bitcast(fx.Float32), fx.Float32(0.0))
                total = (pointer(own) + i).load() + sent
                if fx.const_expr(kind != ""):
                    total = total + (pointer(residual) + i).load().to(fx.Float32)
                (pointer(out) + i).store(total.to(dtype))
                failed = failed + arrived.select(fx.Int32(0), fx.Int32(1))
                place = arrived.select(place, i)
                seen = arrived.select(seen, found)
        add_status(status, record, failed, place, seen, expected, SUM_WAVES, recording)

    @flyc.jit
    def handoff_sum(
        own: fx.Tensor,
        mailbox: fx.Tensor,
        residual: fx.Tensor,
        out: fx.Tensor,
        status: fx.Tensor,
        record: fx.Tensor,
        epoch: fx.Tensor,
        n: fx.Int32,
        tag: fx.Int32,
        spin_limit: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        handoff_sum_kernel(own, mailbox, residual, out, status, record, epoch, n, tag, spin_limit).launch(
            grid=(1, 1, 1), block=(threads, 1, 1), stream=stream
        )

    return handoff_sum


def _plan_put(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, epoch = operands["x"], operands.get("epoch")
    tensors = (x, operands["mailbox"], x if epoch is None else epoch)
    return [Launch(build_handoff_put(epoch is not None), (*tensors, x.numel(), int(attrs["tag"])))]


def _plan_sum(operands: Operands, attrs: Attrs) -> list[Launch]:
    own, residual, out = operands["own"], operands["residual"], operands["out"]
    launcher = build_handoff_sum(
        residual="" if residual is None else "bf16", fp32=str(out.dtype) == "torch.float32", **optional_parts(operands)
    )
    tensors = (own, operands["mailbox"], own if residual is None else residual, out, *bookkeeping(operands))
    return [Launch(launcher, (*tensors, own.numel(), int(attrs["tag"]), int(attrs["spin_limit"])))]


def optional_parts(operands: Operands) -> dict[str, bool]:
    """Which of the optional operands a wait was given."""
    return {"counted": operands.get("epoch") is not None, "recording": operands.get("record") is not None}


def bookkeeping(operands: Operands) -> tuple[Any, Any, Any]:
    """status, record and epoch; status stands in for what was not given and is not read as such."""
    status, record, epoch = (operands.get(name) for name in ("status", "record", "epoch"))
    return status, status if record is None else record, status if epoch is None else epoch


handoff_put = KernelOp(_plan_put)
handoff_sum = KernelOp(_plan_sum)
