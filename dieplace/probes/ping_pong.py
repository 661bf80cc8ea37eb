"""Ping-pong of two parties over two flags: the time of a round is two one-way visibilities.

`ping` is written by party 0 and read by party 1, `pong` the other way round; each belongs in the memory of the die that
reads it. Both parties may be workgroups of one launch (grid 2) or launches on two devices (one party each).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.cache_bits import TABLE
from dieplace.codegen.flydsl_names import STREAM, flyc, fx, pointer
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands

OUT_FIELDS = ("rounds", "constant_ticks", "last_read", "xcc_id")
SCOPES = ("system", "agent")
MONOTONIC = fn.AtomicOrdering.Monotonic


@cache
def build_ping_pong(scope: str = "system") -> Any:
    """Launcher (ping, pong, out, first, rounds, spin_limit, first_party, parties).

    ping, pong int32; out (parties, 4) int64: rounds done, s_memrealtime ticks, the last value read, XCC_ID. Round r
    sends the value first + r, so that flags need no reset between launches. A party whose partner stays away polls at
    most `spin_limit` times in all and ends.
    """
    where = TABLE[scope].scope or None

    @flyc.kernel
    def ping_pong_kernel(
        ping: fx.Tensor,
        pong: fx.Tensor,
        out: fx.Tensor,
        first: fx.Int32,
        rounds: fx.Int32,
        spin_limit: fx.Int32,
        first_party: fx.Int32,
    ) -> None:
        party = first_party + fx.block_idx.x
        if fx.thread_idx.x == 0:
            leads = party == 0
            done, left, found = fx.Int32(0), spin_limit, fx.Int32(0)
            before = fn.memrealtime()
            while (done < rounds) & (left > 0):
                value = first + done
                if leads:
                    fx.generic_store(pointer(ping), value, memory_order=MONOTONIC, syncscope=where)
                found = value - 1
                while (found != value) & (left > 0):
                    if leads:
                        found = fx.generic_load(pointer(pong), memory_order=MONOTONIC, syncscope=where)
                    else:
                        found = fx.generic_load(pointer(ping), memory_order=MONOTONIC, syncscope=where)
                    left = left - 1
                if found == value:
                    if party != 0:
                        fx.generic_store(pointer(pong), value, memory_order=MONOTONIC, syncscope=where)
                    done = done + 1
            after = fn.memrealtime()
            cell = pointer(out) + fx.block_idx.x * 4
            cell.store(fx.Int64(done))
            (cell + 1).store(after - before)
            (cell + 2).store(fx.Int64(found))
            (cell + 3).store(fx.Int64(fn.xcc_id()))

    @flyc.jit
    def ping_pong(
        ping: fx.Tensor,
        pong: fx.Tensor,
        out: fx.Tensor,
        first: fx.Int32,
        rounds: fx.Int32,
        spin_limit: fx.Int32,
        first_party: fx.Int32,
        parties: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        ping_pong_kernel(ping, pong, out, first, rounds, spin_limit, first_party).launch(
            grid=(parties, 1, 1), block=(64, 1, 1), stream=stream
        )

    return ping_pong


def _plan(operands: Operands, attrs: Attrs) -> list[Launch]:
    launcher = build_ping_pong(attrs.get("scope", "system"))
    out = operands["out"]
    numbers = (attrs.get("first", 1), attrs["rounds"], attrs.get("spin_limit", 1 << 24), attrs.get("party", 0))
    args = (operands["ping"], operands["pong"], out, *(int(n) for n in numbers), out.numel() // 4)
    return [Launch(launcher, args)]


def _supports(operands: Operands, attrs: Attrs) -> str | None:
    scope = attrs.get("scope", "system")
    return None if scope in SCOPES else f"scope {scope!r} is none of {', '.join(SCOPES)}"


probe_ping_pong = KernelOp(_plan, _supports)
