"""What hands saw on devices: plain data for the questions to judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Uncached:
    """What an uncached request gave: the runtime's word, the layer below it, and latency beside plain memory."""

    kind: str
    is_device: bool | None
    grain: str | None
    latency_over_plain: float | None
    latency_why: str | None = None


@dataclass(frozen=True)
class Rounds:
    """A flag raised round by round: how many rounds each reader saw, and ns from one of the writer's stamps to its
    next (empty where there is no clock). `places` are the XCDs or SMs that read."""

    asked: int
    seen: tuple[int, ...]
    round_ns: tuple[float, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Remapped:
    """Words of the old and of the new memory that kernels read after a remap, by every program; `busy` tells whether
    other work of the device ran all the while."""

    words: int
    programs: int
    old: int
    new: int
    before: int  # words of the old memory read before the remap: all of them, else nothing was cached
    busy: bool


@dataclass(frozen=True)
class Filled:
    """Bytes that one device was given in its own domain before it was full, and the domain's size."""

    got_bytes: int
    domain_bytes: int | None
    ended: str
