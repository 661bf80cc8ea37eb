"""Flag visibility: one writer raises a flag round by round, any number of readers stamp the moment they see it.

Writer and readers may be workgroups of one launch, or launches on two devices. The flag belongs in the memory of the
readers' die, each acknowledgement in that of the writer. Clocks are s_memrealtime, which all XCDs share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.cache_bits import TABLE
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.tiles import STREAM, flyc, fx, pointer

SCOPES = ("system", "agent")
LINE_WORDS = 32  # one 128-byte line a flag or acknowledgement
MONOTONIC = fn.AtomicOrdering.Monotonic


@cache
def build_flag_visibility(scope: str = "system") -> Any:
    """Launcher (flag, acks, stamps, xcc, first, rounds, readers, spin_limit, first_party, parties).

    flag (32) int32, acks (readers * 32) int32, stamps (1 + readers, rounds) int64 with row 0 the writer's, xcc
    (1 + readers) int32. Party 0 is the writer, party p reader p - 1; this launch runs `parties` of them from
    `first_party` on. Round r has the value first + r, so that nothing needs a reset. A party that polled `spin_limit`
    times in vain leaves its remaining stamps as they are.
    """
    where = TABLE[scope].scope or None

    @flyc.kernel
    def flag_visibility_kernel(
        flag: fx.Tensor,
        acks: fx.Tensor,
        stamps: fx.Tensor,
        xcc: fx.Tensor,
        first: fx.Int32,
        rounds: fx.Int32,
        readers: fx.Int32,
        spin_limit: fx.Int32,
        first_party: fx.Int32,
    ) -> None:
        party = first_party + fx.block_idx.x
        if fx.thread_idx.x == 0:
            (pointer(xcc) + party).store(fn.xcc_id())
            row = pointer(stamps) + party * rounds
            done, left = fx.Int32(0), spin_limit
            while (done < rounds) & (left > 0):
                value = first + done
                if party == 0:
                    (row + done).store(fn.memrealtime())
                    fx.generic_store(pointer(flag), value, memory_order=MONOTONIC, syncscope=where)
                    waiting = fx.Int32(0)
                    while (waiting < readers) & (left > 0):
                        ack = pointer(acks) + waiting * LINE_WORDS
                        found = fx.generic_load(ack, memory_order=MONOTONIC, syncscope=where)
                        waiting = (found == value).select(waiting + 1, waiting)
                        left = left - 1
                else:
                    found = value - 1
                    while (found != value) & (left > 0):
                        found = fx.generic_load(pointer(flag), memory_order=MONOTONIC, syncscope=where)
                        left = left - 1
                    if found == value:
                        (row + done).store(fn.memrealtime())
                    ack = pointer(acks) + (party - 1) * LINE_WORDS
                    fx.generic_store(ack, found, memory_order=MONOTONIC, syncscope=where)
                done = done + 1

    @flyc.jit
    def flag_visibility(
        flag: fx.Tensor,
        acks: fx.Tensor,
        stamps: fx.Tensor,
        xcc: fx.Tensor,
        first: fx.Int32,
        rounds: fx.Int32,
        readers: fx.Int32,
        spin_limit: fx.Int32,
        first_party: fx.Int32,
        parties: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        flag_visibility_kernel(flag, acks, stamps, xcc, first, rounds, readers, spin_limit, first_party).launch(
            grid=(parties, 1, 1), block=(64, 1, 1), stream=stream
        )

    return flag_visibility


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    stamps = operands["stamps"]
    readers, rounds = stamps.shape[0] - 1, stamps.shape[1]
    first_party = int(attrs.get("party", 0))
    parties = int(attrs.get("parties", 0)) or readers + 1 - first_party
    numbers = (int(attrs.get("first", 1)), rounds, readers, int(attrs.get("spin_limit", 1 << 24)), first_party, parties)
    names = ("flag", "acks", "stamps", "xcc")
    launcher = build_flag_visibility(attrs.get("scope", "system"))
    return [Launch(launcher, (*(operands[name] for name in names), *numbers))]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    scope = attrs.get("scope", "system")
    return None if scope in SCOPES else f"scope {scope!r} is none of {', '.join(SCOPES)}"


flag_visibility = KernelOp(_plan, _supports)
