"""The audit: where bytes *are* against where they were *asked* to be, and how that is known.

Evidence, weakest first: `declared` (the allocator's word), `accounted` (page tables or driver counters), `probed`
(latency). An answer is as strong as its weakest item.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dieplace.errors import Misplaced, UsageError
from dieplace.memory import Buffer
from dieplace.policy import expected_slice
from dieplace.probing import Prober
from dieplace.sessions import find_owner, unplaced

SCHEMA = "dieplace/residency/1"
EVIDENCE = ("declared", "accounted", "probed")
NOT_PLACED = "host/node0"  # a plain CPU tensor: nobody placed it


@dataclass(frozen=True)
class Item:
    """One buffer or tensor of the audit.

    `requested` is the pattern of domain ids asked for, empty where nobody asked. `misplaced_bytes` lie in a domain
    that was not requested; an item that nobody placed is misplaced as a whole. `bytes_by_die` is None where the
    backend cannot look inside a domain.
    """

    name: str
    role: str
    nbytes: int
    requested: tuple[str, ...]
    bytes_by_domain: Mapping[str, int]
    evidence: str
    misplaced_bytes: int
    device: str | None = None
    bytes_by_die: Mapping[int, int] | None = None
    disagreement: str | None = None  # where the driver's word and the probed latency differ

    def to_json(self) -> dict[str, Any]:
        dies = None if self.bytes_by_die is None else {str(die): n for die, n in self.bytes_by_die.items()}
        return {
            "name": self.name,
            "role": self.role,
            "bytes": self.nbytes,
            "requested": list(dict.fromkeys(self.requested)),
            "bytes_by_domain": dict(self.bytes_by_domain),
            "bytes_by_die": dies,
            "evidence": self.evidence,
            "misplaced_bytes": self.misplaced_bytes,
            "device": self.device,
            "disagreement": self.disagreement,
        }


@dataclass(frozen=True)
class Residency:
    """The audit's answer over all items."""

    items: tuple[Item, ...]

    @property
    def evidence(self) -> str | None:
        """The weakest evidence among the items; None for an empty audit."""
        return min((item.evidence for item in self.items), key=EVIDENCE.index, default=None)

    @property
    def misplaced(self) -> tuple[Item, ...]:
        """Items with bytes elsewhere than asked."""
        return tuple(item for item in self.items if item.misplaced_bytes)

    def bytes_by_domain(self, role: str | None = None) -> dict[str, int]:
        """Bytes in each domain, of one role or of all."""
        return _total(item.bytes_by_domain for item in self._of(role))

    def bytes_by_die(self, role: str | None = None) -> dict[int, int] | None:
        """Bytes on each die; None where any item's backend cannot look inside its domain."""
        found = [item.bytes_by_die for item in self._of(role)]
        return None if any(one is None for one in found) else _total(one for one in found if one is not None)

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of each role."""
        return _total({item.role: item.nbytes} for item in self.items)

    def peer_share(self, role: str, local_domain_of: Mapping[str, str]) -> float | None:
        """Share of a role's bytes outside the executing devices' own domains; None where the role has no bytes.

        `local_domain_of` maps a device id to its own domain id.
        """
        items = [item for item in self._of(role) if item.device is not None]
        total = sum(item.nbytes for item in items)
        if not total:
            return None
        own = sum(item.bytes_by_domain.get(local_domain_of[str(item.device)], 0) for item in items)
        return 1 - own / total

    def require_placed(self, evidence: str = "declared") -> Residency:
        """Itself where nothing is misplaced; Misplaced (exit 1) with the list otherwise.

        Also refuses an audit whose evidence is weaker than asked: `declared` alone cannot see an allocator that
        spilled and said nothing (ROCm/amdgpu issue 186).
        """
        if self.items and EVIDENCE.index(str(self.evidence)) < EVIDENCE.index(evidence):
            weak = [item.name for item in self.items if EVIDENCE.index(item.evidence) < EVIDENCE.index(evidence)]
            raise Misplaced(
                f"the audit is only {self.evidence}, {evidence} was asked: {', '.join(weak[:5])}",
                hint="see what the driver's counters say: dieplace doctor",
                weak=weak,
            )
        unsure = [f"{item.name}: {item.disagreement}" for item in self.items if item.disagreement]
        if unsure:
            raise Misplaced(f"the evidence disagrees: {'; '.join(unsure[:5])}", hint="no figure of this is to be told")
        if self.misplaced:
            shown = ", ".join(
                f"{item.name} ({item.misplaced_bytes:,} of {item.nbytes:,} bytes)" for item in self.misplaced[:5]
            )
            more = f" and {len(self.misplaced) - 5} more" if len(self.misplaced) > 5 else ""
            raise Misplaced(
                f"{len(self.misplaced)} of {len(self.items)} items are not where they were asked to be: {shown}{more}",
                hint="see the audit's items for the domains",
                misplaced=[item.to_json() for item in self.misplaced],
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data under the versioned schema."""
        return {
            "schema": SCHEMA,
            "evidence": self.evidence,
            "evidence_why": None if self.items else "nothing was audited",
            "bytes_by_domain": self.bytes_by_domain(),
            "bytes_by_role": self.bytes_by_role(),
            "misplaced_bytes": sum(item.misplaced_bytes for item in self.items),
            "items": [item.to_json() for item in self.items],
        }

    def __str__(self) -> str:
        lines = [f"{'bytes':>16}  domain"]
        lines += [f"{nbytes:>16,}  {domain}" for domain, nbytes in sorted(self.bytes_by_domain().items())]
        lines.append(f"evidence: {self.evidence or 'nothing was audited'}")
        lines += [
            f"misplaced: {item.name}, {item.misplaced_bytes:,} of {item.nbytes:,} bytes"
            f" (asked {', '.join(dict.fromkeys(item.requested)) or 'nothing: not placed'},"
            f" is {', '.join(item.bytes_by_domain)})"
            for item in self.misplaced
        ]
        return "\n".join(lines)

    def _of(self, role: str | None) -> tuple[Item, ...]:
        return tuple(item for item in self.items if role is None or item.role == role)


def audit(*objects: Any, probe: bool = False) -> Residency:
    """Where the bytes of buffers, tensors, modules and collections of them are; storages are counted once.

    `probe` also times the memory itself (evidence `probed`); what is too small for that keeps its weaker evidence.
    Unsupported where the backend has no probe, PlacementError where near and far memory cannot be told apart.
    """
    seen: set[int] = set()
    items: list[Item] = []
    prober = Prober() if probe else None
    try:
        for name, thing in _leaves("", objects):
            found = _audit_one(name, thing, seen, prober)
            if found is not None:
                items.append(found)
    finally:
        if prober is not None:
            prober.close()
    return Residency(tuple(items))


def _leaves(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Buffer) or _is_tensor(thing):
        yield name, thing
    elif callable(getattr(thing, "audited", None)):  # KV caches and flags name their own parts
        yield from _leaves(name, thing.audited())
    elif callable(getattr(thing, "named_parameters", None)) and callable(getattr(thing, "named_buffers", None)):
        yield from ((_join(name, part), t) for part, t in thing.named_parameters(remove_duplicate=True))
        yield from ((_join(name, part), t) for part, t in thing.named_buffers(remove_duplicate=True))
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _leaves(_join(name, str(key)), value)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for index, value in enumerate(thing):
            yield from _leaves(_join(name, str(index)) if len(thing) > 1 else name, value)
    else:
        raise UsageError(
            f"cannot audit a {type(thing).__name__}", hint="give buffers, tensors, modules, or collections of them"
        )


def _audit_one(name: str, thing: Any, seen: set[int], prober: Prober | None) -> Item | None:
    if isinstance(thing, Buffer):
        if thing.address in seen:
            return None
        seen.add(thing.address)
        found = thing.locate()
        item = _item(
            thing.name or name,
            thing.role,
            thing.nbytes,
            thing.requested,
            found.bytes_by_domain,
            found.evidence,
            thing.device,
            thing.bytes_by_die(),
        )
        return _probed(item, prober, *thing.owner(), thing.address)
    storage = thing.untyped_storage()
    if storage.data_ptr() in seen or storage.nbytes() == 0:
        return None
    seen.add(storage.data_ptr())
    owner = find_owner(storage.data_ptr())
    nbytes = int(storage.nbytes())
    if owner is None:
        known = None if thing.device.type == "cpu" else unplaced(storage.data_ptr(), nbytes)
        where = known.bytes_by_domain if known is not None else {NOT_PLACED: nbytes}
        return Item(name, "activation", nbytes, (), where, "declared", nbytes)
    return _probed(_placed_tensor(name, nbytes, storage.data_ptr(), *owner), prober, *owner, storage.data_ptr())


def _probed(item: Item, prober: Prober | None, session: Any, allocation: Any, address: int) -> Item:
    found = prober.look(session, allocation, address, item.nbytes) if prober is not None else None
    if found is None:
        return item
    books = dict(item.bytes_by_domain)
    differs = None if found == books else f"latency says {found}, the driver {books}"
    expected = expected_slice(session.request(allocation).pattern, address - allocation.address, item.nbytes)
    wrong = _misplaced_bytes(expected, found)
    return replace(item, bytes_by_domain=found, evidence="probed", misplaced_bytes=wrong, disagreement=differs)


def _placed_tensor(name: str, nbytes: int, address: int, session: Any, allocation: Any) -> Item:
    request = session.request(allocation)
    location = session.locate([replace(allocation, address=address, nbytes=nbytes)])
    expected = expected_slice(request.pattern, address - allocation.address, nbytes)
    wrong = _misplaced_bytes(expected, location.bytes_by_domain)
    asked = tuple(expected)
    return Item(
        name, request.role, nbytes, asked, location.bytes_by_domain, location.evidence, wrong, request.device, None
    )


def _item(
    name: str,
    role: str,
    nbytes: int,
    requested: tuple[str, ...],
    by_domain: Mapping[str, int],
    evidence: str,
    device: str | None,
    by_die: Mapping[int, int] | None,
) -> Item:
    wrong = _misplaced_bytes(expected_slice(requested, 0, nbytes), by_domain)
    return Item(name, role, nbytes, requested, by_domain, evidence, wrong, device, by_die)


def _misplaced_bytes(expected: Mapping[str, int], found: Mapping[str, int]) -> int:
    return sum(max(0, n - expected.get(domain, 0)) for domain, n in found.items())


def _total(parts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    total: dict[Any, int] = {}
    for part in parts:
        for key, nbytes in part.items():
            total[key] = total.get(key, 0) + nbytes
    return total


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "untyped_storage") and hasattr(thing, "data_ptr")


def _join(prefix: str, part: str) -> str:
    return f"{prefix}.{part}" if prefix else part
