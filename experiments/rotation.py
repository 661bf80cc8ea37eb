"""Cold or warm: how many copies of an operand a measurement must rotate so that its bytes come from memory.

A point is cold where at least twice the last cache is touched between two uses of one buffer; flushing 256 MB, the
usual habit, does not clear the 256 MiB memory-side cache of an MI355X. A warm point cannot enter a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.errors import UsageError

# Last-level cache by part: CDNA 4 white paper (memory-side, 128 MB a die); H200 as its driver reports it.
LAST_CACHE_BYTES = {"MI355X": 256 << 20, "MI350X": 256 << 20, "MI300X": 256 << 20, "H200": 60 << 20}
CACHES_BETWEEN_USES = 2


@dataclass(frozen=True)
class Rotation:
    """`buffers` copies used in turn, `iterations` in all; `cold` with the sentence that says why or why not."""

    buffers: int
    iterations: int
    cold: bool
    words: str


def buffers_needed(operand_bytes: int, cache_bytes: int) -> int:
    """Copies to rotate so that two uses of one are at least two caches apart."""
    if operand_bytes < 1 or cache_bytes < 0:
        raise UsageError(f"an operand of {operand_bytes} bytes and a cache of {cache_bytes} cannot be")
    return max(1, -(-CACHES_BETWEEN_USES * cache_bytes // operand_bytes))


def rotation(operand_bytes: int, cache_bytes: int, iterations: int, *, fixed: bool = False) -> Rotation:
    """Plan a rotation; too few iterations are raised, or, where `fixed`, kept and labelled warm."""
    needed = buffers_needed(operand_bytes, cache_bytes)
    if iterations < needed and fixed:
        between = iterations * operand_bytes
        words = f"warm: {between:,} bytes between two uses, {CACHES_BETWEEN_USES} x {cache_bytes:,} are needed"
        return Rotation(iterations, iterations, False, words)
    rounds = max(iterations, needed)
    return Rotation(
        needed, rounds, True, f"cold: {needed} buffers in turn, {needed * operand_bytes:,} bytes between uses"
    )
