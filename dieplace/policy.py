"""Where memory should go, relative to a device: values and the pure function that resolves them to domains.

`local` and `peer` speak of the device that executes; `on` and `interleave` name domains. `spill="error"` is the
default: a full domain is an error, never a silent move to another (KFD gives -ENOMEM there too).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dieplace.errors import PlacementError, UsageError
from dieplace.machine import Device, Domain, Machine

OBJECT_BYTES = 2 << 20  # the VMM granularity that memory is placed by
SPILLS = ("error", "peer")
_SHARE = re.compile(r"^interleave-([0-8])/8$")
_WORDS = "local, peer, on:DOMAIN, preferred:DOMAIN, interleave:DOMAIN,DOMAIN or interleave-k/8"


@dataclass(frozen=True)
class Policy:
    """One word on where memory goes; make it with the class methods.

    `kind` is `local`, `peer`, `on`, `interleave` (round robin by 2 MiB object over `domains`) or `share` (of every
    eight consecutive 2 MiB objects, `eighths` lie on the peer, counting from `start`, so that the pattern can go on
    from one buffer of a role to the next).
    """

    kind: str
    domains: tuple[str, ...] = ()
    eighths: int = 0
    start: int = 0
    spill: str = "error"
    strict: bool = False

    def __post_init__(self) -> None:
        if self.spill not in SPILLS:
            raise UsageError(f"spill={self.spill!r} is neither 'error' nor 'peer'")

    @classmethod
    def local(cls, *, strict: bool = False, spill: str = "error") -> Policy:
        """The device's own domain; `strict` refuses a domain that spans more than the device's die (NPS1)."""
        return cls("local", strict=strict, spill=spill)

    @classmethod
    def peer(cls) -> Policy:
        """The other domain of the card: the deliberate misplacement."""
        return cls("peer")

    @classmethod
    def on(cls, domain: str, *, spill: str = "error") -> Policy:
        """One named domain."""
        return cls("on", (domain,), spill=spill)

    @classmethod
    def preferred(cls, domain: str) -> Policy:
        """One named domain, and its peer for what does not fit."""
        return cls.on(domain, spill="peer")

    @classmethod
    def interleave(cls, *domains: str) -> Policy:
        """Round robin over the domains by 2 MiB object."""
        if len(domains) < 2:
            raise UsageError("interleave needs two domains or more", hint="use on(domain) for one")
        return cls("interleave", tuple(domains))

    @classmethod
    def peer_share(cls, eighths: int, *, start: int = 0) -> Policy:
        """interleave-k/8: of every eight consecutive 2 MiB objects, `eighths` on the peer; the first is `start`."""
        if not 0 <= eighths <= 8:
            raise UsageError(f"{eighths}/8 is no share", hint="give 0 to 8 eighths")
        return cls("share", eighths=eighths, start=start % 8)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read what `str(policy)` prints; an unknown word is a UsageError, never a default."""
        word, _, rest = text.strip().partition(":")
        share = _SHARE.match(text.strip())
        if share:
            return cls.peer_share(int(share.group(1)))
        if word in ("local", "peer") and not rest:
            return cls.local() if word == "local" else cls.peer()
        if word in ("on", "preferred") and rest:
            return cls.on(rest) if word == "on" else cls.preferred(rest)
        if word == "interleave" and rest:
            return cls.interleave(*(part.strip() for part in rest.split(",")))
        raise UsageError(f"cannot read {text!r} as a policy", hint=f"write {_WORDS}", asked=text)

    @classmethod
    def of(cls, value: Policy | str) -> Policy:
        """A policy, or the word for one as `parse` reads it."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise UsageError(f"{value!r} is no policy", hint=f"give a Policy, or write {_WORDS}")
        return cls.parse(value)

    def __str__(self) -> str:
        if self.kind == "share":
            return f"interleave-{self.eighths}/8"
        word = "preferred" if self.kind == "on" and self.spill == "peer" else self.kind
        return f"{word}:{','.join(self.domains)}" if self.domains else word


@dataclass(frozen=True)
class Resolved:
    """A policy made concrete for one device.

    `pattern` is the domain ids that repeat over 2 MiB objects. `local_guaranteed`: every byte lies on the executing
    device's own die. `spill_to` is the domain for what does not fit, or None. `note` is told to the user.
    """

    policy: Policy
    device: str
    pattern: tuple[str, ...]
    local_guaranteed: bool
    spill_to: str | None = None
    note: str = ""


def resolve(policy: Policy, machine: Machine, device: Device) -> Resolved:
    """The domains a policy means for a device; PlacementError where it means none, NoSuchDevice for unknown names."""
    if policy.kind == "local":
        return _resolve_local(policy, machine, device)
    if policy.kind == "peer":
        return Resolved(policy, device.id, (peer_domain(machine, device).id,), local_guaranteed=False)
    if policy.kind == "share":
        return _resolve_share(policy, machine, device)
    domains = tuple(machine.domain(name) for name in policy.domains)
    own = device.domain is not None and all(d.id == device.domain for d in domains)
    spill = None
    if policy.spill == "peer":
        spill = _other_domain(machine, domains[0]).id
    pattern = tuple(d.id for d in domains)
    return Resolved(policy, device.id, pattern, own and device.local_guaranteed, spill)


def expected_bytes(pattern: tuple[str, ...], nbytes: int) -> dict[str, int]:
    """Bytes in each domain when a pattern of domain ids repeats over the 2 MiB objects of `nbytes`."""
    whole, rest = divmod(nbytes, OBJECT_BYTES)
    rounds, odd = divmod(whole, len(pattern))
    found: dict[str, int] = {}
    for index, domain in enumerate(pattern):
        objects = rounds + (index < odd)
        found[domain] = found.get(domain, 0) + objects * OBJECT_BYTES + (rest if index == odd else 0)
    return {domain: size for domain, size in found.items() if size}


def expected_slice(pattern: tuple[str, ...], offset_bytes: int, nbytes: int) -> dict[str, int]:
    """As `expected_bytes`, for a slice that begins `offset_bytes` into the allocation."""
    before = expected_bytes(pattern, offset_bytes) if pattern else {}
    upto = expected_bytes(pattern, offset_bytes + nbytes) if pattern else {}
    found = {domain: size - before.get(domain, 0) for domain, size in upto.items()}
    return {domain: size for domain, size in found.items() if size}


def peer_domain(machine: Machine, device: Device) -> Domain:
    """The one other domain of the device's card; for two NVIDIA GPUs the other GPU's."""
    return _other_domain(machine, machine.domain(_own(device)))


def _resolve_local(policy: Policy, machine: Machine, device: Device) -> Resolved:
    domain = machine.domain(_own(device))
    if policy.strict and not device.local_guaranteed:
        raise PlacementError(
            f"local(strict=True) on {device.id}: its memory {domain.id} spans dies {_dies(domain)}, so nothing keeps a"
            " page on one die",
            hint="switch the card to a mode with one memory range a die: dieplace partition set DPX/NPS2",
            device=device.id,
            domain=domain.id,
        )
    note = "" if device.local_guaranteed else f"{domain.id} spans dies {_dies(domain)}: pages fall on any of them"
    spill = _other_domain(machine, domain).id if policy.spill == "peer" else None
    return Resolved(policy, device.id, (domain.id,), device.local_guaranteed, spill, note)


def _resolve_share(policy: Policy, machine: Machine, device: Device) -> Resolved:
    own, peer = _own(device), peer_domain(machine, device).id
    # Spread evenly, so that no stretch of the operand is all near or all far.
    numbers = range(policy.start, policy.start + 8)
    pattern = tuple(peer if (i * policy.eighths) % 8 < policy.eighths else own for i in numbers)
    return Resolved(policy, device.id, pattern, local_guaranteed=device.local_guaranteed and policy.eighths == 0)


def _own(device: Device) -> str:
    if device.domain is None:
        why = device.whys.get("domain", "discovery could not tell")
        raise PlacementError(f"{device.id} has no known memory domain: {why}", hint="name one with on(DOMAIN)")
    return device.domain


def _other_domain(machine: Machine, domain: Domain) -> Domain:
    others = [d for d in machine.domains if d.card == domain.card and d.id != domain.id]
    if machine.backend == "nvidia" and domain.card is not None:
        # Each GPU is a card with one domain; the peer is the other GPU where there are exactly two.
        others = [d for d in machine.domains if d.card is not None and d.id != domain.id]
    if len(others) == 1:
        return others[0]
    where = "machine" if machine.backend == "nvidia" or domain.card is None else "card"
    found = (
        f"the {where} has several others: {', '.join(d.id for d in others)}"
        if others
        else (f"it is the only memory domain of the {where}")
    )
    raise PlacementError(
        f"no single peer of {domain.id}: {found}",
        hint="name the domain with on(DOMAIN)"
        if others
        else "a peer takes a second GPU"
        if machine.backend == "nvidia"
        else "switch to a mode with two memory ranges, such as DPX/NPS2",
        domain=domain.id,
        others=[d.id for d in others],
    )


def _dies(domain: Domain) -> str:
    return " and ".join(str(d) for d in domain.dies) or "unknown"
