"""Taking a device's own memory until it is full, on real and on emulated cards alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dieplace.errors import DomainFull
from dieplace.experiments.first_light_sights import Filled
from dieplace.policy import OBJECT_BYTES


def fill(
    limit_bytes: int | None, piece_bytes: int, take: Callable[[int], Any], give_back: Callable[[Any], None]
) -> Filled:
    """Take ever smaller pieces until the memory, of `limit_bytes` as it says, is full; all of it is given back.

    It ends at 1.1 times the limit at the latest: by then it is known that the limit holds nobody.
    """
    held: list[Any] = []
    got, piece, ended = 0, piece_bytes, "1.1 times its domain was given"
    try:
        while limit_bytes is None or got <= 1.1 * limit_bytes:
            try:
                held.append(take(piece))
            except DomainFull as full:
                ended = full.message
                if piece == OBJECT_BYTES:
                    break
                piece = max(OBJECT_BYTES, piece // 8 // OBJECT_BYTES * OBJECT_BYTES)
                continue
            got += piece
    finally:
        for one in held:
            give_back(one)
    return Filled(got, limit_bytes, ended)
