"""Sparse host memory in 2 MiB objects, and the table that says where each of its addresses lives."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dieplace.errors import DomainFull, PlacementError
from dieplace.machine import Domain

OBJECT_BYTES = 2 << 20
PAGE_BYTES = 4096
NOT_HBM = -1
_PAGES_PER_OBJECT = OBJECT_BYTES // PAGE_BYTES
# Python names MAP_NORESERVE only from 3.13 on; 0x4000 is the value of x86-64 and arm64 Linux (asm-generic/mman.h).
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Range:
    """One block for the table: its address, and for each 2 MiB object a domain index and a physical number."""

    block_id: int
    address: int
    nbytes: int
    domain: npt.NDArray[np.int16]
    physical: npt.NDArray[np.int64]


class PageTable:
    """An immutable look-up over ranges; addresses may be arrays of any shape."""

    def __init__(self, ranges: Sequence[Range], domains: Sequence[Domain]) -> None:
        ordered = sorted(ranges, key=lambda one: one.address)
        self._domains = tuple(domains)
        self._starts = np.array([one.address for one in ordered], dtype=np.uint64)
        self._ends = self._starts + np.array([one.nbytes for one in ordered], dtype=np.uint64)
        counts = np.array([len(one.physical) for one in ordered], dtype=np.int64)
        self._first_object = np.concatenate([[0], np.cumsum(counts)])[:-1].astype(np.int64)
        self._domain = np.concatenate([np.empty(0, np.int16), *(one.domain for one in ordered)])
        self._physical = np.concatenate([np.empty(0, np.int64), *(one.physical for one in ordered)])
        self._block_ids = [one.block_id for one in ordered]

    def block_at(self, address: int) -> int | None:
        """Id of the block that covers an address, or None."""
        at = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return self._block_ids[at] if at >= 0 and address < int(self._ends[at]) else None

    def domain_of(self, addresses: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
        """Domain index of each address; NOT_HBM where no block is."""
        known, _, number = self._look_up(addresses)
        home = np.full(known.shape, NOT_HBM, dtype=np.int16)
        home[known] = self._domain[number[known]]
        return home

    def die_of(self, addresses: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Home die of each address on its card; NOT_HBM where no block is."""
        known, offset, number = self._look_up(addresses)
        dies = np.full(known.shape, NOT_HBM, dtype=np.int8)
        home = self._domain[number[known]]
        page = self._physical[number[known]] * _PAGES_PER_OBJECT + (offset[known] % OBJECT_BYTES) // PAGE_BYTES
        found = np.full(home.shape, NOT_HBM, dtype=np.int8)
        for index in np.unique(home):
            here = home == index
            if self._domains[index].dies:
                found[here] = die_of_page(page[here], int(index), self._domains[index].dies)
        dies[known] = found
        return dies

    def _look_up(
        self, addresses: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Whether each address is in a block, its offset there, and its object's number in the flat arrays."""
        asked = np.asarray(addresses).astype(np.uint64)
        if not len(self._starts):
            nothing = np.zeros(asked.shape, dtype=np.int64)
            return nothing.astype(bool), nothing, nothing
        at = np.searchsorted(self._starts, asked, side="right").astype(np.int64) - 1
        known = (at >= 0) & (asked < self._ends[np.maximum(at, 0)])
        at = np.where(known, at, 0)
        offset = np.where(known, asked - self._starts[at], 0).astype(np.int64)
        return known, offset, self._first_object[at] + offset // OBJECT_BYTES


class FreeObjects:
    """The physical 2 MiB objects of each domain that nobody holds; the lowest are given first."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._domains = tuple(domains)
        self._free = [np.ones(int(d.total_bytes or 0) // OBJECT_BYTES, dtype=bool) for d in domains]

    def total(self, index: int) -> int:
        """Objects of a domain."""
        return len(self._free[index])

    def count(self, index: int) -> int:
        """Free objects of a domain."""
        return int(self._free[index].sum())

    def check_room(self, wanted: npt.NDArray[np.int16]) -> None:
        """DomainFull where a domain has fewer free objects than `wanted` (domain index of each object) asks."""
        for index, asked in zip(*np.unique(wanted, return_counts=True), strict=True):
            if asked > self.count(index):
                name = self._domains[index].id
                raise domain_full(
                    name,
                    int(asked) * OBJECT_BYTES,
                    self.count(index) * OBJECT_BYTES,
                    self.total(index) * OBJECT_BYTES,
                    name,
                )

    def take(self, wanted: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
        """Physical numbers for `wanted`, which must have been checked."""
        physical = np.empty(len(wanted), dtype=np.int64)
        for index in np.unique(wanted):
            where = np.flatnonzero(wanted == index)
            chosen = np.flatnonzero(self._free[index])[: len(where)]
            self._free[index][chosen] = False
            physical[where] = chosen
        return physical

    def give(self, domain: npt.NDArray[np.int16], physical: npt.NDArray[np.int64]) -> None:
        """Return objects."""
        for index in np.unique(domain):
            self._free[index][physical[domain == index]] = True


class Lease:
    """What a view holds on to: keeps the mapping, and its end tells the HBM that the view is gone."""

    def __init__(self, backing: npt.NDArray[np.uint8]) -> None:
        self.backing = backing
        self.__array_interface__ = backing.__array_interface__


def sparse_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """A 2 MiB aligned sparse mapping of `nbytes`; the array keeps it alive."""
    try:
        mapping = mmap.mmap(-1, nbytes + OBJECT_BYTES, flags=_MAP_FLAGS)
    except OSError as error:
        raise PlacementError(
            f"the host refused a sparse mapping of {nbytes:,} bytes: {error.strerror}",
            hint="raise the address-space limit (ulimit -v) or set vm.overcommit_memory to 0 or 1",
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)  # one byte touched must not cost 2 MiB of RAM
    whole = np.frombuffer(mapping, dtype=np.uint8)
    skip = -whole.ctypes.data % OBJECT_BYTES
    return whole[skip : skip + nbytes]


def die_of_page(page: npt.NDArray[np.int64], domain: int, dies: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Home dies of a domain's physical pages: one die, or a stable and even hash over several."""
    if len(dies) == 1:
        return np.full(page.shape, dies[0], dtype=np.int8)
    # splitmix64 finaliser: the real hash is not public, only that pages of 4 KiB fall about evenly and stay put.
    mixed = page.astype(np.uint64) + np.uint64(((domain + 1) * 0x9E3779B97F4A7C15) % (1 << 64))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.array(dies, dtype=np.int8)[(mixed % np.uint64(len(dies))).astype(np.int64)]


def domain_full(what: str, asked: int, free: int, total: int, domain: str) -> DomainFull:
    """The error of a domain or limit that has no room."""
    return DomainFull(
        f"cannot allocate {asked:,} bytes in {what}: {free:,} of {total:,} bytes are free",
        hint="free something, place less there, or allow spill='peer'",
        asked_bytes=asked,
        free_bytes=free,
        total_bytes=total,
        domain=domain,
    )
