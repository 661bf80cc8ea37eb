"""One table from our names for how memory is used to what gfx950 instructions carry, through FlyDSL and through Triton.

The buffer instructions' cache field of gfx940 and later is bit 0 = sc0, bit 1 = nt, bit 4 = sc1 (LLVM
`IntrinsicsAMDGPU.td`). FlyDSL's own all-reduce kernel documents bit 1 as sc1, which prints as `nt`: the table is
compiled and read back by a test, entry by entry. Triton's eviction policies change nothing there, only its cache
modifiers do; a load whose address all lanes share becomes a scalar one, which carries no bits (seen with 3.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TritonBits:
    """Triton's cache modifiers of a load and a store, and what they print in buffer and in global instructions."""

    load: str
    store: str
    buffer_isa: tuple[str, ...]
    global_isa: tuple[str, ...]


@dataclass(frozen=True)
class CacheBits:
    """`buffer`: cache field of a buffer copy; `isa`: the suffixes it prints; `scope`: LLVM scope of a pointer access.

    `scope` is None where a pointer access uses no scope (plain or non-temporal), "" for the system. `triton` is None
    where Triton has no load and store of that scope: its atomics take a scope of their own.
    """

    buffer: int
    isa: tuple[str, ...]
    scope: str | None
    why: str
    triton: TritonBits | None = None


TABLE = MappingProxyType(
    {
        "keep": CacheBits(
            0, (), None, "read again soon: activations, norm weights, tables", TritonBits("", "", (), ())
        ),
        "stream_once": CacheBits(
            2,
            ("nt",),
            None,
            "weights: read once per token, must not push out what is reused",
            TritonBits(".cs", ".cs", ("sc0", "nt"), ("nt",)),
        ),
        "workgroup": CacheBits(1, ("sc0",), "workgroup", "seen by the waves of one workgroup"),
        "agent": CacheBits(16, ("sc1",), "agent", "seen by every XCD of one logical device"),
        "system": CacheBits(
            17,
            ("sc0", "sc1"),
            "",
            "seen by the other die and the host: every hand-off between dies",
            TritonBits(".cv", ".wt", ("sc0", "sc1"), ("sc0", "sc1")),
        ),
    }
)
BUFFER_BITS = MappingProxyType({name: bits.buffer for name, bits in TABLE.items()})
