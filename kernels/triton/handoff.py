"""Hand-offs and flags between devices: the Triton twins of the FlyDSL ops, system scope, every wait bounded.

A packed word (tag in the high half, fp32 bits in the low half) is one relaxed 64-bit store: who sees the tag sees the
value. A flag publishes other memory: release store, relaxed polls (PTX ISA: `ld.volatile` is `ld.relaxed.sys`), then an
acquire. Mailboxes and flags may lie in a peer's memory; a launch goes to the device of the other operands. With `epoch`
the value is counted in device memory, so that a captured graph has no expected value baked in (aiter PR 3928).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.arrival import require_arrival as require_arrival
from dieplace.kernels.triton.launch import INTERPRETED, on_device_of, one_device, targets_amd
from dieplace.kernels.triton.numbers import narrow, widen

Operands = Mapping[str, torch.Tensor | None]
Attrs = Mapping[str, Any]
MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # tags and counted values are 31 bits and wrap
PUT_BLOCK = 256
SUM_BLOCK = 4096  # one program: what the last bad word held is known without a second launch
FLAG_LANES = 32
ACCESSIBLE_ANYWHERE = ("flag", "mailbox", "acks")


@triton.jit
def _counted(value, epoch, COUNTED: tl.constexpr):
    """The value itself, or how many steps this device has counted plus the value."""
    if COUNTED:
        return (tl.load(epoch) + value) & MASK
    else:
        return value


@triton.jit
def poll(address, wanted, PTX: tl.constexpr):
    """One look at each wanted lane's flag or word, at system scope: no cache keeps it, no loop loses it."""
    if PTX:
        return tl.load(address, mask=wanted, other=0, volatile=True)
    else:
        # Triton makes plain buffer loads of volatile ones on AMD (gfx950, 3.9): an atomic that changes nothing is none.
        return tl.atomic_add(address, 0, mask=wanted, sem="relaxed", scope="sys")


@triton.jit
def poll_one(address, PTX: tl.constexpr):
    """`poll` of one word by the whole program."""
    if PTX:
        return tl.load(address, volatile=True)
    else:
        return tl.atomic_add(address, 0, sem="relaxed", scope="sys")


@triton.jit
def _store_word(address, word, inside, PTX: tl.constexpr):
    """A relaxed system-scope 64-bit store of each lane's word."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0; }",
            "=&r,l,l,r",
            [address.to(tl.int64), word, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address, word, mask=inside, cache_modifier=".wt")


@triton.jit
def _publish(address, value, inside, RELEASE: tl.constexpr, PTX: tl.constexpr):
    """A system-scope store of each lane's int32; as a release everything this device wrote before is seen first."""
    if PTX:
        # A store, not an exchange: host memory behind PCIe need not know atomic operations.
        if RELEASE:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
                "=&r,l,r,r",
                [address.to(tl.int64), value, inside.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
                "=&r,l,r,r",
                [address.to(tl.int64), value, inside.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    elif RELEASE:
        tl.atomic_xchg(address, value, mask=inside, sem="release", scope="sys")
    else:
        tl.atomic_xchg(address, value, mask=inside, sem="relaxed", scope="sys")


@triton.jit
def _acquire(address, inside, PTX: tl.constexpr):
    """What is read from here on is at least as new as what the flags published."""
    if PTX:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r,r", [inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_add(address, 0, mask=inside, sem="acquire", scope="sys")


@triton.jit
def _patience(record, spin_limit, RECORD: tl.constexpr):
    """Polls of this wait: one where an earlier wait gave up, so that a step that failed ends after one limit."""
    if RECORD:
        return tl.where(tl.load(record) == 0, spin_limit, tl.minimum(spin_limit, 1))
    else:
        return spin_limit


@triton.jit
def _tell(status, record, failed, place, seen, expected, RECORD: tl.constexpr):
    """status += (time-outs, what the last of them held); the first wait that gave up is noted."""
    tl.store(status, tl.load(status) + failed)
    tl.store(status + 1, tl.load(status + 1) + seen)
    if RECORD:  # noqa: SIM102  (a constexpr and a device value do not mix in one condition)
        if (failed > 0) & (tl.load(record) == 0):
            tl.store(record + 1, expected)
            tl.store(record + 2, seen)
            tl.store(record + 3, tl.program_id(0))
            tl.store(record, place + 1)


@triton.jit(do_not_specialize=["tag", "n"])
def _handoff_put(x, mailbox, epoch, n, tag, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PTX: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    low = tl.load(x + at, mask=inside, other=0.0).to(tl.uint32, bitcast=True).to(tl.int64)
    # A full lane vector: a scalar shifted by the block's type would be 32 bits wide.
    high = tl.zeros((BLOCK,), tl.int64) + _counted(tag, epoch, COUNTED)
    _store_word(mailbox + at, (high << 32) | low, inside, PTX)


@triton.jit(do_not_specialize=["tag", "n", "spin_limit"])
def _handoff_sum(
    own, mailbox, residual, out, status, record, epoch, n, tag, spin_limit, BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr, COUNTED: tl.constexpr, RECORD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    expected, patience = _counted(tag, epoch, COUNTED), _patience(record, spin_limit, RECORD)
    failed, place, seen = 0, -1, 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        word = tl.zeros((BLOCK,), tl.int64)
        pending = inside
        left = patience
        while (tl.sum(pending.to(tl.int32), axis=0) > 0) & (left > 0):
            got = poll(mailbox + at, pending, PTX)
            word = tl.where(pending, got, word)
            pending = pending & ((got >> 32).to(tl.int32) != expected)
            left -= 1
        sent = tl.where(pending, 0, word).to(tl.int32).to(tl.float32, bitcast=True)
        total = tl.load(own + at, mask=inside, other=0.0) + sent
        if RESIDUAL:
            total += widen(tl.load(residual + at, mask=inside, other=0.0))
        tl.store(out + at, narrow(total, out.dtype.element_ty), mask=inside)
        late = tl.max(tl.where(pending, at, -1), axis=0)
        held = tl.sum(tl.where(at == late, (word >> 32).to(tl.int32), 0), axis=0)
        failed += tl.sum(pending.to(tl.int32), axis=0)
        seen = tl.where(late >= 0, held, seen)
        place = tl.maximum(place, late)
    _tell(status, record, failed, place, seen, expected, RECORD)


@triton.jit(do_not_specialize=["count", "stride", "value"])
def _flag_set(flag, epoch, count, stride, value, LANES: tl.constexpr, COUNTED: tl.constexpr, PTX: tl.constexpr):
    expected = _counted(value, epoch, COUNTED)
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        _publish(flag + at * stride, tl.zeros((LANES,), tl.int32) + expected, at < count, True, PTX)


@triton.jit(do_not_specialize=["count", "stride", "value", "spin_limit"])
def _flag_wait(
    flag, status, record, epoch, count, stride, value, spin_limit, LANES: tl.constexpr, COUNTED: tl.constexpr,
    RECORD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    expected, patience = _counted(value, epoch, COUNTED), _patience(record, spin_limit, RECORD)
    failed, place, seen = 0, -1, 0
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        inside = at < count
        found = tl.zeros((LANES,), tl.int32)
        pending = inside
        left = patience
        while (tl.sum(pending.to(tl.int32), axis=0) > 0) & (left > 0):
            got = poll(flag + at * stride, pending, PTX)
            found = tl.where(pending, got, found)
            pending = pending & (got != expected)
            left -= 1
        _acquire(flag + at * stride, inside, PTX)
        late = tl.max(tl.where(pending, at, -1), axis=0)
        held = tl.sum(tl.where(at == late, found, 0), axis=0)
        failed += tl.sum(pending.to(tl.int32), axis=0)
        seen = tl.where(late >= 0, held, seen)
        place = tl.maximum(place, late)
    _tell(status, record, failed, place, seen, expected, RECORD)


@triton.jit(do_not_specialize=["step"])
def _epoch_next(epoch, step):
    # Atomic: two streams that count at the same time must not lose a step, or a tag would be used twice.
    tl.atomic_add(epoch, step, sem="relaxed", scope="gpu")
    tl.atomic_and(epoch, MASK, sem="relaxed", scope="gpu")


def home_of(operands: Operands) -> torch.Tensor:
    """The operand whose device runs the launch: flags and mailboxes may lie elsewhere."""
    own = [t for name, t in operands.items() if t is not None and name not in ACCESSIBLE_ANYWHERE]
    anything = [t for t in operands.values() if t is not None]
    return (own or anything)[0]


def _apart(operands: Operands, attrs: Attrs) -> str | None:
    return one_device({name: t for name, t in operands.items() if name not in ACCESSIBLE_ANYWHERE})


def handoff_op(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a host function as an op whose flags and mailboxes may lie on another device than the rest."""
    function.supports = _apart  # type: ignore[attr-defined]
    return function


def uses_ptx() -> bool:
    """Whether system-scope stores are written as PTX: on CUDA, not under the interpreter or ROCm."""
    return not INTERPRETED and not targets_amd()


@handoff_op
def handoff_put(operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
    """mailbox(N) = tag << 32 | bits of x(N)."""
    x, mailbox, epoch = operands["x"], operands["mailbox"], operands.get("epoch")
    assert x is not None and mailbox is not None
    with on_device_of(home_of(operands), stream):
        _handoff_put[(triton.cdiv(x.numel(), PUT_BLOCK),)](
            x, mailbox, x if epoch is None else epoch, x.numel(), int(attrs["tag"]), BLOCK=PUT_BLOCK,
            COUNTED=epoch is not None, PTX=uses_ptx(), num_warps=4,
        )  # fmt: skip


@handoff_op
def handoff_sum(operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
    """out(N) = own + what the mailbox holds under the tag (+ residual); status += (time-outs, last bad tag)."""
    own, mailbox, residual = operands["own"], operands["mailbox"], operands.get("residual")
    out, status, epoch, record = operands["out"], operands["status"], operands.get("epoch"), operands.get("record")
    assert own is not None and mailbox is not None and out is not None and status is not None
    block = min(SUM_BLOCK, max(FLAG_LANES, triton.next_power_of_2(own.numel())))
    with on_device_of(home_of(operands), stream):
        _handoff_sum[(1,)](
            own, mailbox, own if residual is None else residual, out, status, status if record is None else record,
            status if epoch is None else epoch, own.numel(), int(attrs["tag"]), int(attrs["spin_limit"]), BLOCK=block,
            RESIDUAL=residual is not None, COUNTED=epoch is not None, RECORD=record is not None, PTX=uses_ptx(),
            num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip


@handoff_op
def flag_set(operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
    """Every flag line holds the value, after everything this device wrote before."""
    flag, epoch = operands["flag"], operands.get("epoch")
    assert flag is not None
    with on_device_of(home_of(operands), stream):
        _flag_set[(1,)](
            flag, flag if epoch is None else epoch, flag.numel(), flag.stride(0), int(attrs["value"]),
            LANES=FLAG_LANES, COUNTED=epoch is not None, PTX=uses_ptx(), num_warps=1,
        )  # fmt: skip


@handoff_op
def flag_wait(operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
    """Poll until every flag line holds the value, `spin_limit` polls at most; status += (time-outs, last value)."""
    flag, status, epoch, record = (operands.get(name) for name in ("flag", "status", "epoch", "record"))
    assert flag is not None and status is not None
    with on_device_of(home_of(operands), stream):
        _flag_wait[(1,)](
            flag, status, status if record is None else record, status if epoch is None else epoch, flag.numel(),
            flag.stride(0), int(attrs["value"]), int(attrs["spin_limit"]), LANES=FLAG_LANES,
            COUNTED=epoch is not None, RECORD=record is not None, PTX=uses_ptx(), num_warps=1,
        )  # fmt: skip


@handoff_op
def epoch_next(operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
    """epoch(1) counts one step of the program: += step, 31 bits."""
    epoch = operands["epoch"]
    assert epoch is not None
    with on_device_of(epoch, stream):
        _epoch_next[(1,)](epoch, int(attrs["step"]), num_warps=1)
