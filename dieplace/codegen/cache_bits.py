"""One table from our names for how memory is used to what gfx950 instructions carry.

The buffer instructions' cache field of gfx940 and later is bit 0 = sc0, bit 1 = nt, bit 4 = sc1 (LLVM
`IntrinsicsAMDGPU.td`). FlyDSL's own all-reduce kernel documents bit 1 as sc1, which prints as `nt`: the table is
compiled and read back by a test, entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class CacheBits:
    """`buffer`: cache field of a buffer copy; `isa`: the suffixes it prints; `scope`: LLVM scope of a pointer access.

    `scope` is None where a pointer access uses no scope (plain or non-temporal), "" for the system.
    """

    buffer: int
    isa: tuple[str, ...]
    scope: str | None
    why: str


TABLE = MappingProxyType(
    {
        "keep": CacheBits(0, (), None, "read again soon: activations, norm weights, tables"),
        "stream_once": CacheBits(2, ("nt",), None, "weights: read once per token, must not push out what is reused"),
        "workgroup": CacheBits(1, ("sc0",), "workgroup", "seen by the waves of one workgroup"),
        "agent": CacheBits(16, ("sc1",), "agent", "seen by every XCD of one logical device"),
        "system": CacheBits(17, ("sc0", "sc1"), "", "seen by the other die and the host: every hand-off between dies"),
    }
)
BUFFER_BITS = MappingProxyType({name: bits.buffer for name, bits in TABLE.items()})
