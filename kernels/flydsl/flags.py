"""Flags: they publish other memory, so a release is before the store and an acquire after the wait.

Release (`buffer_wbl2 sc0 sc1`, wait, store), and after the wait an acquire (`buffer_inv sc0 sc1`). The flag belongs in
the memory of the consumer's die: the producer writes across, nobody polls across. Every wait has a limit. A counter in
device memory says which step of a program it is, so that a captured graph has no value baked in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.handoff import (
    MASK,
    MONOTONIC,
    add_status,
    bookkeeping,
    counted_value,
    optional_parts,
    patience_of,
)
from dieplace.kernels.flydsl.tiles import STREAM, WAVE, flyc, fx, pointer


@cache
def build_flag_set(counted: bool = False) -> Any:
    """Launcher (flag, epoch, count, stride, value): who sees the value sees everything this device wrote before."""

    @flyc.kernel
    def flag_set_kernel(flag: fx.Tensor, epoch: fx.Tensor, count: fx.Int32, stride: fx.Int32, value: fx.Int32) -> None:
        expected = counted_value(value, epoch, counted)
        fx.memory_fence(ordering=fn.AtomicOrdering.Release)
        for step in range((count + (WAVE - 1)) // WAVE, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * WAVE + fx.thread_idx.x
            if i < count:
                fx.generic_store(pointer(flag) + i * stride, expected, memory_order=MONOTONIC)

    @flyc.jit
    def flag_set(
        flag: fx.Tensor,
        epoch: fx.Tensor,
        count: fx.Int32,
        stride: fx.Int32,
        value: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        flag_set_kernel(flag, epoch, count, stride, value).launch(grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return flag_set


@cache
def build_flag_wait(counted: bool = False, recording: bool = False) -> Any:
    """Launcher (flag, status, record, epoch, count, stride, value, spin_limit): one wave, a lane a flag, an acquire."""

    @flyc.kernel
    def flag_wait_kernel(
        flag: fx.Tensor,
        status: fx.Tensor,
        record: fx.Tensor,
        epoch: fx.Tensor,
        count: fx.Int32,
        stride: fx.Int32,
        value: fx.Int32,
        spin_limit: fx.Int32,
    ) -> None:
        expected, patience = counted_value(value, epoch, counted), patience_of(record, spin_limit, recording)
        failed, place, seen = fx.Int32(0), fx.Int32(-1), fx.Int32(0)
        for step in range((count + (WAVE - 1)) // WAVE, unroll=1):  # type: ignore[call-overload]
            i = fx.Int32(step) * WAVE + fx.thread_idx.x
            if i < count:
                found, left, polled = fx.Int32(0), patience, fx.Int32(0)
                while ((found != expected) | (polled == 0)) & (left > 0):
                    found = fx.generic_load(pointer(flag) + i * stride, memory_order=MONOTONIC)
                    polled = fx.Int32(1)
                    left = left - 1
                    if found != expected:
                        fn.sleep(1)
                arrived = (found == expected) & (polled == 1)
                failed = failed + arrived.select(fx.Int32(0), fx.Int32(1))
                place = arrived.select(place, i)
                seen = arrived.select(seen, found)
        fx.memory_fence(ordering=fn.AtomicOrdering.Acquire)
        add_status(status, record, failed, place, seen, expected, 1, recording)

    @flyc.jit
    def flag_wait(
        flag: fx.Tensor,
        status: fx.Tensor,
        record: fx.Tensor,
        epoch: fx.Tensor,
        count: fx.Int32,
        stride: fx.Int32,
        value: fx.Int32,
        spin_limit: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        flag_wait_kernel(flag, status, record, epoch, count, stride, value, spin_limit).launch(
            grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream
        )

    return flag_wait


@cache
def build_epoch_next() -> Any:
    """Launcher (epoch, step): the counter goes on by a step, 31 bits."""

    @flyc.kernel
    def epoch_next_kernel(epoch: fx.Tensor, step: fx.Int32) -> None:
        if fx.thread_idx.x == 0:
            cell = pointer(epoch)
            cell.store((cell.load() + step) & MASK)

    @flyc.jit
    def epoch_next(epoch: fx.Tensor, step: fx.Int32, stream: fx.Stream = STREAM) -> None:
        epoch_next_kernel(epoch, step).launch(grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return epoch_next


def flag_lines(flag: Any) -> Any:
    """Flags with a stride of their own as the plain run of memory that they lie in (FlyDSL wants one unit stride)."""
    count, stride = flag.numel(), flag.stride(0)
    return flag.as_strided(((count - 1) * stride + 1,), (1,))


def _plan_set(operands: Operands, attrs: Attrs) -> list[Launch]:
    flag, epoch = operands["flag"], operands.get("epoch")
    lines = flag_lines(flag)
    numbers = (flag.numel(), flag.stride(0), int(attrs["value"]))
    return [Launch(build_flag_set(epoch is not None), (lines, lines if epoch is None else epoch, *numbers))]


def _plan_wait(operands: Operands, attrs: Attrs) -> list[Launch]:
    flag = operands["flag"]
    numbers = (flag.numel(), flag.stride(0), int(attrs["value"]), int(attrs["spin_limit"]))
    return [Launch(build_flag_wait(**optional_parts(operands)), (flag_lines(flag), *bookkeeping(operands), *numbers))]


def _plan_next(operands: Operands, attrs: Attrs) -> list[Launch]:
    return [Launch(build_epoch_next(), (operands["epoch"], int(attrs["step"])))]


flag_set = KernelOp(_plan_set)
flag_wait = KernelOp(_plan_wait)
epoch_next = KernelOp(_plan_next)
