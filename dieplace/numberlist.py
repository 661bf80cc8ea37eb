"""The kernel's list format for CPU and NUMA node numbers: `0-3,8`."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NUMBER = 1 << 16
_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9})(?:/(\d{1,9}))?)?)?$", re.ASCII)


def parse(text: str) -> tuple[int, ...]:
    """Numbers named by `0-3,8` in ascending order; empty text is none; ValueError for anything else.

    `0-10:2/4` (from each group of four the first two) is read too: `bitmap_parselist` of the kernel.
    """
    found: set[int] = set()
    for item in filter(None, (part.strip() for part in text.strip().split(","))):
        match = _ITEM.match(item)
        if match is None:
            raise ValueError(f"{item!r} is not a number or a range")
        low, high = int(match[1]), int(match[2] or match[1])
        used = int(match[3] or 1)
        group = int(match[4] or used)
        if not low <= high < MAX_NUMBER or not 0 < used <= group:
            raise ValueError(f"{item!r} is not a range of numbers below {MAX_NUMBER}")
        found.update(n for n in range(low, high + 1) if (n - low) % group < used)
    return tuple(sorted(found))


def show(numbers: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
