"""The contracts of the probes that the audit and the clock use; their clocks and places have no reference."""

from __future__ import annotations

from dieplace.kernels.registry import IN_PLACE, OUTPUT, REQUIRED, Op, OperandSpec, Tolerance

_EXACT = Tolerance(0.0, 0.0, "values are read and folded or counted, not computed", floor=0.0)
_I32, _I64 = ("int32",), ("int64",)
_REFERENCE = "dieplace.kernels.reference_probe"


def _flag(name: str) -> OperandSpec:
    return OperandSpec(name, "sync_flag", _I32, ("F",), use=IN_PLACE)


PROBES = (
    Op(
        "probe_stream",
        "streaming read: the XOR over `out` is the XOR over `src` after an odd number of passes, else 0",
        (
            OperandSpec("src", "weights", _I32, ("N",)),
            OperandSpec("out", "activation", _I32, ("WORDS",), use=OUTPUT),
        ),
        f"{_REFERENCE}:probe_stream",
        _EXACT,
        attrs={"passes": 1},
        rules=(
            ("N % 4 == 0", "it reads 16 bytes at a time"),
            ("WORDS % 256 == 0", "a word for each lane of a block"),
        ),
    ),
    Op(
        "probe_chase",
        "pointer chase: out = (index after `hops`, s_memtime ticks, s_memrealtime ticks, XCC_ID)",
        (
            OperandSpec("following", "activation", _I32, ("N",)),
            OperandSpec("out", "activation", _I64, ("4",), use=OUTPUT),
        ),
        f"{_REFERENCE}:probe_chase",
        _EXACT,
        attrs={"hops": REQUIRED, "start": 0, "cache": "keep"},
        rules=(("hops >= 2", "the first hop is not timed"), ("start < N", "a chase starts within the table")),
    ),
    Op(
        "probe_ping_pong",
        "two parties over two flags: a row of out = (rounds done, s_memrealtime ticks, last value read, XCC_ID)",
        (_flag("ping"), _flag("pong"), OperandSpec("out", "activation", _I64, ("P", "4"), use=OUTPUT)),
        f"{_REFERENCE}:probe_ping_pong",
        _EXACT,
        attrs={"rounds": REQUIRED, "first": 1, "spin_limit": 1 << 24, "party": 0, "scope": "system"},
        rules=(("P <= 2", "a ping-pong has two parties"), ("rounds > 0", "a round is what is timed")),
    ),
)
