"""One live allocation of a device runtime, and where its bytes are by all that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dieplace.backends.accounting import Accounted
from dieplace.backends.base import Location
from dieplace.backends.homes import Homes, Piece
from dieplace.policy import OBJECT_BYTES

if TYPE_CHECKING:
    from dieplace.backends.runtime import Owner
    from dieplace.backends.vmm import Range
    from dieplace.machine import Device


@dataclass(eq=False)
class Held:
    """`kind` is `plain` (malloc), `uncached`, `range` (VMM) or `import` (another process's).

    `users` counts the owner and every live tensor; at 0 the memory goes back. `executing` and `home` are runtime
    indices; `pattern`, `role` and `device` are what was asked.
    """

    address: int
    nbytes: int
    kind: str
    executing: int
    home: int
    pieces: list[Piece]
    accounted: Accounted
    role: str
    device: str
    pattern: tuple[str, ...]
    range: Range | None = None
    import_handle: bytes | None = None
    users: int = 1
    owner: Owner | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def wanted(cls, homes: Homes, pattern: tuple[str, ...], nbytes: int, device: Device, role: str) -> Held:
        """What is asked, before there is memory: address 0."""
        pieces, executing = homes.pieces(pattern, nbytes, device), homes.index(device)
        nothing = Accounted({}, True, "nothing", "there is no memory yet")
        return cls(0, nbytes, "plain", executing, pieces[0].device, pieces, nothing, role, device.id, pattern)

    @property
    def memory_class(self) -> str:
        return "uncached" if self.kind == "uncached" else "coarse"

    @property
    def devices(self) -> tuple[int, ...]:
        """Every runtime device that may still use it."""
        return tuple(dict.fromkeys((self.executing, self.home, *(piece.device for piece in self.pieces))))


def asked_bytes(pieces: Sequence[Piece]) -> dict[int, int]:
    """Bytes by runtime device that pieces take, in whole objects."""
    found: dict[int, int] = {}
    for piece in pieces:
        found[piece.device] = found.get(piece.device, 0) + -(-piece.nbytes // OBJECT_BYTES) * OBJECT_BYTES
    return found


def grown_bytes(before: Sequence[Piece], after: Sequence[Piece]) -> dict[int, int]:
    """Bytes by runtime device that a move adds, where it adds any."""
    old = asked_bytes(before)
    grown = {device: nbytes - old.get(device, 0) for device, nbytes in asked_bytes(after).items()}
    return {device: nbytes for device, nbytes in grown.items() if nbytes > 0}


def locate(held: Held, homes: Homes, offset: int, nbytes: int) -> Location:
    """Bytes of a slice by domain; `accounted` where the driver's counters bear it out, else `declared` and why."""
    wanted = _clip(held.pieces, offset, nbytes)
    notes = list(held.notes)
    by_owner = _owner_domain(held, homes)
    if by_owner is not None and by_owner not in wanted:
        notes.append(f"the layer below the runtime says {by_owner}")
        return Location({by_owner: nbytes}, "accounted", "; ".join(notes))
    if held.accounted.why is not None:
        return Location(wanted, "declared", "; ".join([*notes, held.accounted.why]))
    if held.accounted.agrees:
        return Location(wanted, "accounted", "; ".join([*notes, held.accounted.source]))
    if (offset, nbytes) != (0, held.nbytes):
        notes.append("the allocator spilled part of the whole; which part is not known")
        return Location(wanted, "declared", "; ".join(notes))
    notes.append(f"{held.accounted.source}: not where it was asked")
    return Location(_by_counters(held, homes), "accounted", "; ".join(notes))


def _clip(pieces: list[Piece], offset: int, nbytes: int) -> dict[str, int]:
    found: dict[str, int] = {}
    start = 0
    for piece in pieces:
        inside = min(start + piece.nbytes, offset + nbytes) - max(start, offset)
        if inside > 0:
            found[piece.domain] = found.get(piece.domain, 0) + inside
        start += piece.nbytes
    return found


def _by_counters(held: Held, homes: Homes) -> dict[str, int]:
    """The counters tell whole objects; what the last object has beyond the request is taken from the largest share."""
    found: dict[str, int] = {}
    for device, nbytes in held.accounted.bytes_by_device.items():
        domain = homes.domain_of.get(device) or f"device {device}"
        found[domain] = found.get(domain, 0) + nbytes
    largest = max(found, key=lambda domain: found[domain])
    found[largest] -= sum(found.values()) - held.nbytes
    return found


def _owner_domain(held: Held, homes: Homes) -> str | None:
    if held.owner is None or held.range is not None:
        return None
    if not held.owner.is_device:
        return homes.host_domain()
    return homes.domain_of_node.get(held.owner.node)
