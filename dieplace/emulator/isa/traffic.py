"""Counts what a launch moved: bytes by buffer and role, to the local or the peer die, by cache type.

`requested` bytes are what loads and stores asked for, each lane counted; `distinct` bytes are counted once a launch,
which is what a kernel's contract states and what has to come from HBM when nothing is cached. Local and peer compare
the home die of the bytes with the die of the XCD that asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.isa.hierarchy_map import HOST, PAGE_BYTES, PAGE_LINES, TYPE_NAMES, LineMap

if TYPE_CHECKING:
    from dieplace.emulator.isa.hierarchy_caches import Access

LOCAL, PEER, OTHER = "local", "peer", "host"
_SIDES = (LOCAL, PEER, OTHER)
_WIDE = {4: (np.uint8, 0xF, 2), 8: (np.uint16, 0xF0F, 3), 16: (np.uint32, 0xF0F0F0F, 4)}  # access size: map word


@dataclass(frozen=True)
class Bytes:
    """Distinct and requested bytes in one direction; requested ones split by side and by cache type.

    `distinct_by_die` maps a home die (-1: host memory) to distinct bytes there. `distinct_local` and `distinct_peer`
    are None for a device over several dies, where each byte is local to some of its XCDs.
    """

    distinct: int = 0
    distinct_local: int | None = 0
    distinct_peer: int | None = 0
    requested: int = 0
    requested_by_side: Mapping[str, int] = field(default_factory=dict)
    requested_by_type: Mapping[str, int] = field(default_factory=dict)
    distinct_by_die: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.distinct + other.distinct,
            _add(self.distinct_local, other.distinct_local),
            _add(self.distinct_peer, other.distinct_peer),
            self.requested + other.requested,
            _sum(self.requested_by_side, other.requested_by_side),
            _sum(self.requested_by_type, other.requested_by_type),
            _sum(self.distinct_by_die, other.distinct_by_die),
        )


@dataclass(frozen=True)
class BufferTraffic:
    """What one launch did to one buffer."""

    name: str
    role: str
    memory_class: str
    nbytes: int
    read: Bytes
    written: Bytes


@dataclass(frozen=True)
class Traffic:
    """What one launch moved, buffer by buffer; `dies` are those its device's XCDs lie on."""

    dies: tuple[int, ...]
    buffers: tuple[BufferTraffic, ...]

    def buffer(self, name: str) -> BufferTraffic:
        """One buffer's traffic; KeyError when it was not part of the launch."""
        return next((b for b in self.buffers if b.name == name), None) or _missing(name)

    def by_role(self) -> dict[str, tuple[Bytes, Bytes]]:
        """Role to bytes read and bytes written."""
        return by_role(self.buffers)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def by_role(buffers: Iterable[BufferTraffic]) -> dict[str, tuple[Bytes, Bytes]]:
    """Role to bytes read and bytes written, over any buffers."""
    total: dict[str, tuple[Bytes, Bytes]] = {}
    for b in buffers:
        read, written = total.get(b.role, (Bytes(), Bytes()))
        total[b.role] = (read + b.read, written + b.written)
    return total


class TrafficCounter:
    """Counts for all launches of one run; `result(index)` is one launch's."""

    def __init__(self, line_map: LineMap, xcds_per_die: int) -> None:
        self.map, self._xcds_per_die = line_map, xcds_per_die
        self._touched: dict[tuple[int, int, bool], np.ndarray] = {}
        self._requested: dict[tuple[int, bool], np.ndarray] = {}
        self._dies: dict[int, tuple[int, ...]] = {}
        self._one_home = [len(set(line_map.homes_of(b).tolist())) == 1 for b in range(len(line_map.buffers))]

    def count(self, a: Access, *, written: bool) -> None:
        """Count one load or store."""
        r, place, index = a.request, a.place, a.request.launch.index
        if index not in self._dies:
            self._dies[index] = tuple(sorted({int(x) // self._xcds_per_die for x in r.launch.device.xcds}))
        if (index, written) not in self._requested:
            self._requested[index, written] = np.zeros(len(self.map.buffers) * 12, np.int64)
        requested, dies = self._requested[index, written], self._dies[index]
        alone = place.buffer if isinstance(place.buffer, int) else None
        if alone is not None and self._one_home[alone] and len(dies) == 1:
            requested[self._cell(alone, dies[0])] += len(r.address) * r.size
        else:
            page, die = a.lines // PAGE_LINES, a.xcd // self._xcds_per_die
            home, kind = self.map.page_home[page], self.map.page_type[die, page]
            side = np.where(home == HOST, 2, home != die)
            key = (self.map.buffer_of_page[page] * 3 + side) * 4 + kind
            requested += np.bincount(key, a.counts * r.size, len(requested)).astype(np.int64)
        if alone is not None:
            self._touch(index, alone, written, r.address, r.size)
            return
        for b in np.unique(place.buffer).tolist():
            self._touch(index, b, written, r.address[place.buffer == b], r.size)

    def _cell(self, buffer: int, die: int) -> int:
        """Where bytes of a buffer that has one home are counted, for XCDs of one die."""
        first = self.map.first_page[buffer]
        home, kind = int(self.map.page_home[first]), int(self.map.page_type[die, first])
        return (buffer * 3 + (2 if home == HOST else int(home != die))) * 4 + kind

    def _touch(self, index: int, buffer: int, written: bool, address: np.ndarray, size: int) -> None:
        """Mark bytes as touched: one byte of map for four bytes of buffer, its low bits the bytes; whole pages."""
        key = (index, buffer, written)
        if key not in self._touched:
            self._touched[key] = np.zeros(self.map.pages_of(buffer) * (PAGE_BYTES // 4), np.uint8)
        touched, offset = self._touched[key], address - (self.map.buffers[buffer].address & -PAGE_BYTES)
        low = int(np.bitwise_or.reduce(offset))
        if size in _WIDE and not low & (size - 1):
            wide, value, shift = _WIDE[size]
            touched.view(wide)[offset >> shift] = value
        elif not (low | size) & 3:
            touched[(offset >> 2)[:, None] + np.arange(size >> 2)] = 0xF
        else:
            at = offset[:, None] + np.arange(size)
            np.bitwise_or.at(touched, at >> 2, np.left_shift(np.uint8(1), (at & 3).astype(np.uint8)))

    def result(self, index: int) -> Traffic:
        """One launch's traffic: buffers it touched, in address order."""
        found = []
        for b, buffer in enumerate(self.map.buffers):
            read, written = (self._bytes(index, b, w) for w in (False, True))
            if read.requested or written.requested:
                found.append(BufferTraffic(buffer.name, buffer.role, buffer.memory_class, buffer.nbytes, read, written))
        return Traffic(self._dies.get(index, ()), tuple(found))

    def _bytes(self, index: int, buffer: int, written: bool) -> Bytes:
        table = self._requested.get((index, written))
        if table is None:
            return Bytes()
        mine = table.reshape(-1, 3, 4)[buffer]
        by_die = self._distinct(index, buffer, written)
        dies = self._dies[index]
        one = dies[0] if len(dies) == 1 else None
        return Bytes(
            distinct=sum(by_die.values()),
            distinct_local=None if one is None else by_die.get(one, 0),
            distinct_peer=None if one is None else sum(n for d, n in by_die.items() if d not in (HOST, one)),
            requested=int(mine.sum()),
            requested_by_side={name: int(n) for name, n in zip(_SIDES, mine.sum(axis=1), strict=True) if n},
            requested_by_type={name: int(n) for name, n in zip(TYPE_NAMES, mine.sum(axis=0), strict=True) if n},
            distinct_by_die=by_die,
        )

    def _distinct(self, index: int, buffer: int, written: bool) -> dict[int, int]:
        touched = self._touched.get((index, buffer, written))
        if touched is None:
            return {}
        by_page = np.bitwise_count(touched.view(np.uint64).reshape(-1, PAGE_BYTES // 32)).sum(axis=1, dtype=np.int64)
        first = self.map.first_page[buffer]
        home = self.map.page_home[first : first + len(by_page)].astype(np.int64)
        found = np.bincount(home - HOST, by_page).astype(np.int64)
        return {die + HOST: int(n) for die, n in enumerate(found) if n}


def _sum(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _missing(name: str) -> BufferTraffic:
    raise KeyError(name)
