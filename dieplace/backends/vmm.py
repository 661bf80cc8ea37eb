"""One virtual range over physical objects of chosen devices: built, moved and undone as a whole, on HIP and CUDA alike.

Every mapping is undone by its own unmap with the same address and size, and released only after it (one unmap for
several maps left the range unfreeable: ROCR-Runtime issues 257 and 285). Whole 2 MiB objects: the granularity that
runtimes report is the page size on some ROCm builds and 2 MiB on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dieplace.backends.runtime import Runtime, RuntimeFailed, RuntimeOutOfMemory
from dieplace.errors import BackendError
from dieplace.policy import OBJECT_BYTES


@dataclass(frozen=True)
class Part:
    """One physical object in the range: `nbytes` at `offset`, on runtime device `device`."""

    offset: int
    nbytes: int
    device: int
    handle: int


@dataclass
class Range:
    """A reserved range and what is mapped into it; `access` are the runtime devices that may use it."""

    runtime: Runtime
    address: int
    nbytes: int
    access: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


def whole_objects(nbytes: int, granularity: int = OBJECT_BYTES) -> int:
    """`nbytes` rounded up to whole objects of 2 MiB, or of the granularity where that is larger."""
    unit = max(OBJECT_BYTES, granularity)
    return -(-nbytes // unit) * unit


def build(runtime: Runtime, wanted: Sequence[tuple[int, int]], access: Sequence[int]) -> Range:
    """A range whose parts are (bytes, device), in order, each rounded up to whole objects.

    What fails undoes everything: RuntimeOutOfMemory where a device is full, BackendError otherwise. Access is granted
    to `access` and to each part's own device.
    """
    devices = tuple(dict.fromkeys((*access, *(device for _, device in wanted))))
    unit = max(OBJECT_BYTES, *(runtime.granularity(device) for _, device in wanted))
    sizes = [whole_objects(nbytes, unit) for nbytes, _ in wanted]
    made = Range(runtime, runtime.reserve(sum(sizes), unit), sum(sizes), devices)
    try:
        _fill(made, [(size, device) for size, (_, device) in zip(sizes, wanted, strict=True)])
    except RuntimeFailed:
        close(made)
        raise
    return made


def close(held: Range) -> None:
    """Unmap each part, release each object, free the range; goes on past a failure and raises the first at the end."""
    runtime, parts, held.parts = held.runtime, held.parts, []
    steps: list[Callable[[], None]] = [
        partial(runtime.unmap, held.address + part.offset, part.nbytes) for part in parts
    ]
    steps += [partial(runtime.release, part.handle) for part in parts]
    steps.append(partial(runtime.unreserve, held.address, held.nbytes))
    failed: RuntimeFailed | None = None
    for step in steps:
        try:
            step()
        except RuntimeFailed as error:
            failed = failed or error
    if failed is not None:
        raise failed


def move(held: Range, wanted: Sequence[tuple[int, int]], *, on_device: int) -> None:
    """Give the range other homes under the same addresses, contents kept; a failure leaves the old homes in place.

    `wanted` is (bytes, device) in order and adds up to the range. The new objects are made and filled, by a copy on
    `on_device`, before the first old one is unmapped. Nothing may use the range meanwhile: the caller has synchronised.
    """
    fresh = build(held.runtime, wanted, held.access)
    old, new, before = list(held.parts), list(fresh.parts), held.access
    try:
        if fresh.nbytes != held.nbytes:
            raise BackendError(f"{fresh.nbytes} bytes cannot take the place of {held.nbytes}")
        held.runtime.copy(on_device, fresh.address, held.address, held.nbytes)
        held.runtime.synchronize(on_device)
        _unmap_all(held)
        _unmap_all(fresh)
        held.access = fresh.access
        _map(held, new)
    except BackendError:
        _restore(held, old, before)
        _discard(fresh, new)
        raise
    _discard(fresh, old)


def _fill(made: Range, wanted: Sequence[tuple[int, int]]) -> None:
    offset = 0
    for nbytes, device in wanted:
        try:
            handle = made.runtime.create(device, nbytes)
        except RuntimeOutOfMemory as error:
            error.facts["device"] = device
            raise
        part = Part(offset, nbytes, device, handle)
        try:
            made.runtime.map(made.address + offset, nbytes, handle)
        except RuntimeFailed:
            made.runtime.release(handle)
            raise
        made.parts.append(part)
        _grant(made, part)
        offset += nbytes


def _grant(held: Range, part: Part) -> None:
    """Access to one part. Some builds answer "invalid value" for a part that is not the first in its range, for some
    sizes (rocm-systems issues 2516 and 2667): then once more over everything mapped so far, from the base."""
    try:
        held.runtime.set_access(held.address + part.offset, part.nbytes, held.access)
    except RuntimeOutOfMemory:
        raise
    except RuntimeFailed:
        if part.offset == 0:
            raise
        held.runtime.set_access(held.address, part.offset + part.nbytes, held.access)


def _map(held: Range, parts: Sequence[Part]) -> None:
    for part in parts:
        held.runtime.map(held.address + part.offset, part.nbytes, part.handle)
        held.parts.append(part)
        _grant(held, part)


def _unmap_all(held: Range) -> None:
    while held.parts:
        part = held.parts[-1]
        held.runtime.unmap(held.address + part.offset, part.nbytes)
        held.parts.pop()


def _restore(held: Range, old: Sequence[Part], access: tuple[int, ...]) -> None:
    for part in [part for part in held.parts if part not in old]:
        held.runtime.unmap(held.address + part.offset, part.nbytes)
        held.parts.remove(part)
    held.access = access
    _map(held, [part for part in old if part not in held.parts])
    held.parts.sort(key=lambda part: part.offset)


def _discard(scratch: Range, objects: Sequence[Part]) -> None:
    """Give back the scratch range and these objects, which are mapped nowhere else."""
    _unmap_all(scratch)
    for part in objects:
        scratch.runtime.release(part.handle)
    scratch.runtime.unreserve(scratch.address, scratch.nbytes)
