"""Flag visibility: one writer raises a flag round by round, readers stamp the moment they see it and acknowledge.

The twin of the FlyDSL op. Writer and readers are programs of one launch, or of launches on two devices at once. The
writer polls all acknowledgements at the same time, so that the number of readers adds what the memory adds, and not a
loop's length. Stamps are of each launch's own device, ns of %globaltimer (PTX ISA) or ticks of s_memrealtime (CDNA
ISA): those of two GPUs must never be subtracted; from one stamp of the writer to its next is a whole round trip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton.handoff import handoff_op, poll, poll_one, uses_ptx
from dieplace.kernels.triton.launch import INTERPRETED, on_device_of, targets_amd

Operands = Mapping[str, torch.Tensor | None]
LINE_WORDS: tl.constexpr = tl.constexpr(32)
NO_CLOCK, CUDA_CLOCK, HIP_CLOCK = 0, 1, 2


@triton.jit
def _now(CLOCK: tl.constexpr):
    if CLOCK == 1:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    elif CLOCK == 2:
        return tl.inline_asm_elementwise(
            "s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=&s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.zeros((), tl.int64)


@triton.jit
def _where(CLOCK: tl.constexpr):
    if CLOCK == 1:
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    elif CLOCK == 2:
        return tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.zeros((), tl.int32)


@triton.jit
def _raise(address, value, PTX: tl.constexpr):
    """A relaxed system-scope store of one int32; all lanes of the one warp store the same."""
    if PTX:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
            "=&r,l,r",
            [address.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(address, value, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["first", "rounds", "pitch", "readers", "spin_limit", "first_party"])
def _visibility(
    flag, acks, stamps, place, first, rounds, pitch, readers, spin_limit, first_party, LANES: tl.constexpr,
    CLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    party = first_party + tl.program_id(0)
    tl.store(place + party, _where(CLOCK))
    row = stamps + party * pitch
    lane = tl.arange(0, LANES)
    done, left = 0, spin_limit
    while (done < rounds) & (left > 0):
        value = first + done
        if party == 0:
            tl.store(row + done, _now(CLOCK))
            _raise(flag, value, PTX)
            pending = lane < readers
            while (tl.sum(pending.to(tl.int32), axis=0) > 0) & (left > 0):
                found = poll(acks + lane * LINE_WORDS, pending, PTX)
                pending = pending & (found != value)
                left -= 1
        else:
            seen = value - 1
            while (seen != value) & (left > 0):
                seen = poll_one(flag, PTX)
                left -= 1
            if seen == value:
                tl.store(row + done, _now(CLOCK))
            _raise(acks + (party - 1) * LINE_WORDS, seen, PTX)
        done += 1


@handoff_op
def flag_visibility(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None) -> None:
    """Rounds first, first + 1, ... of `parties` parties from `party` on; 0 parties means all that there are."""
    flag, acks, stamps, place = (operands[name] for name in ("flag", "acks", "stamps", "xcc"))
    assert flag is not None and acks is not None and stamps is not None and place is not None
    readers, rounds = stamps.shape[0] - 1, stamps.shape[1]
    party, first, limit = int(attrs["party"]), int(attrs["first"]), int(attrs["spin_limit"])
    parties = int(attrs["parties"]) or readers + 1 - party

    def launch(row: torch.Tensor, first: int, rounds: int, awaited: int, party: int, parties: int) -> None:
        _visibility[(parties,)](
            flag, acks, row, place, first, rounds, stamps.shape[1], awaited, limit, party,
            LANES=max(2, triton.next_power_of_2(readers)), CLOCK=clock(), PTX=uses_ptx(), num_warps=1,
        )  # fmt: skip

    with on_device_of(stamps, stream):
        if not INTERPRETED:
            launch(stamps, first, rounds, readers, party, parties)
            return
        # The interpreter runs programs one after the other: each round is taken apart, and the writer waits for none.
        for done in range(rounds):
            row = stamps.view(-1)[done:]
            if party == 0:
                launch(row, first + done, 1, 0, 0, 1)
            if party + parties > 1:
                launch(row, first + done, 1, 0, max(party, 1), party + parties - max(party, 1))


def clock() -> int:
    """Which nanosecond or constant-rate timer a kernel reads here."""
    if INTERPRETED:
        return NO_CLOCK
    return HIP_CLOCK if targets_amd() else CUDA_CLOCK
