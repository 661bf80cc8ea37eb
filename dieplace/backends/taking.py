"""Taking memory from a device runtime: one allocation wholly or not at all, counted and checked as it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dieplace.backends import vmm
from dieplace.backends.accounting import attribute
from dieplace.backends.held import Held, asked_bytes
from dieplace.backends.homes import Piece
from dieplace.backends.runtime import RuntimeInCapture, RuntimeOutOfMemory
from dieplace.errors import DomainFull, PlacementError, Unsupported, UsageError
from dieplace.policy import OBJECT_BYTES

if TYPE_CHECKING:
    from dieplace.backends.device_memory import DeviceMemory


@dataclass
class Order:
    """What to take: `plain` by the runtime's malloc, else a range; `name` is told in errors."""

    held: Held
    plain: bool
    uncached: bool
    name: str


def take(memory: DeviceMemory, order: Order) -> None:
    """Fill in the ordered allocation and register it; DomainFull, PlacementError with nothing taken."""
    held = order.held
    if order.plain and len(held.pieces) != 1:
        raise UsageError("uncached memory lies in one domain", hint="use coarse memory for a pattern")
    with memory.lifetimes.locked():
        memory.reach(held.executing, held.pieces, enable=order.plain)
        before = memory.counters()
        try:
            _ask(memory, order)
        except RuntimeOutOfMemory as error:
            raise full(memory, error, held.pieces, f"allocate {order.name}") from error
        except RuntimeInCapture as error:
            raise in_capture() from error
        try:
            held.accounted = attribute(before, memory.counters(), asked_bytes(held.pieces))
            held.owner = memory.runtime.owner(held.address)
            if order.uncached:
                _require_device_memory(memory, order)
        except Exception:
            memory.lifetimes.give_back(held)
            raise
        memory.lifetimes.keep(held)


def take_or_spill(memory: DeviceMemory, order: Order, spill: Piece | None) -> None:
    """As `take`; whole objects that no longer fit the domain go to `spill`, where it is given."""
    held = order.held
    try:
        take(memory, order)
    except DomainFull as error:
        if spill is None or len(held.pieces) != 1:
            raise
        near = min(error.facts["free_bytes"], held.nbytes - 1) // OBJECT_BYTES * OBJECT_BYTES
        far = Piece(held.nbytes - near, spill.device, spill.domain)
        held.pieces = [Piece(near, held.home, held.pieces[0].domain), far] if near else [far]
        take(memory, Order(held, False, False, order.name))


def full(memory: DeviceMemory, error: RuntimeOutOfMemory, pieces: Sequence[Piece], verb: str) -> DomainFull:
    """The runtime's refusal with the numbers of the domain that refused."""
    nbytes = sum(piece.nbytes for piece in pieces)
    device = int(error.facts.get("device", pieces[0].device))
    domain = next(piece.domain for piece in pieces if piece.device == device)
    free, total = memory.runtime.memory_info(device)
    return DomainFull(
        f"cannot {verb}, {nbytes:,} bytes: {domain} has {free:,} of {total:,} bytes free",
        hint="free something there, place less, or allow spill='peer'",
        asked_bytes=nbytes,
        free_bytes=free,
        total_bytes=total,
        domain=domain,
    )


def in_capture() -> PlacementError:
    """What memory asked for inside a capture is told: it would have to outlive its graph."""
    return PlacementError(
        "cannot place memory while a graph is captured: the driver forbids it there",
        hint="allocate before the capture and use the buffer inside",
    )


def _ask(memory: DeviceMemory, order: Order) -> None:
    held, runtime = order.held, memory.runtime
    if order.plain:
        ask = runtime.malloc_uncached if order.uncached else runtime.malloc
        held.kind = "uncached" if order.uncached else "plain"
        held.address = ask(held.home, vmm.whole_objects(held.nbytes))
        return
    if len(held.pieces) > 1 and any(runtime.granularity(piece.device) > OBJECT_BYTES for piece in held.pieces):
        raise Unsupported("objects of this runtime are larger than 2 MiB: a pattern of them cannot be kept")
    held.range = vmm.build(runtime, [(piece.nbytes, piece.device) for piece in held.pieces], (held.executing,))
    held.kind, held.address = "range", held.range.address


def _require_device_memory(memory: DeviceMemory, order: Order) -> None:
    held = order.held
    pointer = memory.runtime.pointer(held.address)
    if pointer.kind == "host" or (held.owner is not None and not held.owner.is_device):
        raise PlacementError(
            f"{order.name}: uncached memory was asked in {held.pieces[0].domain} and came back in host memory",
            hint="a poller on a die would cross PCIe: use another ROCm build",
            domain=held.pieces[0].domain,
        )
    if held.owner is not None and held.owner.grain != "extended":
        held.notes.append(f"asked uncached, the pool is {held.owner.grain}-grained")
