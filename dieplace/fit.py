"""Does it fit, per die, before anything is loaded: requests against domains and device limits; allocates nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.machine import Machine
from dieplace.policy import OBJECT_BYTES, Policy, expected_bytes, resolve
from dieplace.workload import ROLES

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_KEYS = ("name", "role", "bytes", "device", "policy", "count")


@dataclass(frozen=True)
class Wanted:
    """`count` equal buffers of one role for one device."""

    name: str
    role: str
    nbytes: int
    device: str
    policy: Policy
    count: int = 1


@dataclass(frozen=True)
class DomainFit:
    """What a domain would hold: `asked_bytes` in whole 2 MiB objects, by role; `left_bytes` is negative where too much.

    `total_bytes` None (with `why`) means nobody can say whether it fits.
    """

    domain: str
    total_bytes: int | None
    asked_bytes: int
    by_role: Mapping[str, int]
    why: str | None = None

    @property
    def left_bytes(self) -> int | None:
        return None if self.total_bytes is None else self.total_bytes - self.asked_bytes


@dataclass(frozen=True)
class Fit:
    """All domains and device limits that are touched, and sentences on what does not fit or is not local."""

    domains: tuple[DomainFit, ...]
    devices: tuple[DomainFit, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Yes, no, or None where a size is not known."""
        left = [one.left_bytes for one in (*self.domains, *self.devices)]
        if any(number is not None and number < 0 for number in left):
            return False
        return None if any(one.left_bytes is None for one in self.domains) else True


def plan_fit(machine: Machine, wanted: Sequence[Wanted]) -> Fit:
    """Resolve every request and sum it up, in the order given; PlacementError where a policy means nothing here.

    What spills (`preferred`) takes what the earlier requests left of its domain, and the rest of its peer, as
    allocating does.
    """
    domains: dict[str, dict[str, int]] = {}
    devices: dict[str, dict[str, int]] = {}
    notes: dict[str, None] = {}
    for one in wanted:
        device = machine.device(one.device)
        found = resolve(one.policy, machine, device)
        if found.note:
            notes[found.note] = None
        whole = -(-one.nbytes // OBJECT_BYTES) * OBJECT_BYTES
        parts = {domain: nbytes * one.count for domain, nbytes in expected_bytes(found.pattern, whole).items()}
        if found.spill_to is not None and len(parts) == 1:
            parts = _spilled(machine, domains, found.pattern[0], found.spill_to, whole * one.count)
        for domain, nbytes in parts.items():
            _add(domains, domain, one.role, nbytes)
        _add(devices, device.id, one.role, whole * one.count)
    return Fit(
        tuple(_domain_fit(machine, domain, by_role) for domain, by_role in sorted(domains.items())),
        tuple(_device_fit(machine, device, by_role) for device, by_role in sorted(devices.items())),
        tuple(notes),
    )


def read_spec(path: str | Path) -> tuple[Wanted, ...]:
    """Read a TOML file of `version = 1` and `[[buffers]]` tables; UsageError names the table and key that is wrong.

    Keys: role, bytes (a number, or text such as "31.4 GB"), device (an id or a list of ids, each gets the bytes),
    policy (default "local"), count (default 1), name.
    """
    try:
        with open(path, "rb") as stream:
            data = tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if data.get("version") != 1 or not isinstance(data.get("buffers"), list) or not data["buffers"]:
        raise UsageError(f"{path} is no placement file", hint="it needs version = 1 and [[buffers]] tables")
    return tuple(
        one for number, table in enumerate(data["buffers"], 1) for one in _read_table(table, f"{path}, buffer {number}")
    )


def _read_table(table: Any, where: str) -> list[Wanted]:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table")
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise UsageError(f"{where} has unknown keys {', '.join(unknown)}", hint=f"it takes {', '.join(_KEYS)}")
    role = table.get("role")
    if role not in ROLES:
        raise UsageError(f"{where} has role {role!r}", hint=f"one of {', '.join(ROLES)}")
    devices = table.get("device")
    ids = [devices] if isinstance(devices, str) else devices
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise UsageError(f"{where} names no device", hint='write device = "gpu0/p0" or a list')
    count = table.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"{where} has count {count!r}", hint="a whole number from 1")
    policy = Policy.parse(str(table.get("policy", "local")))
    nbytes = _read_size(table.get("bytes"), where)
    return [Wanted(str(table.get("name", role)), role, nbytes, one, policy, count) for one in ids]


def _read_size(value: Any, where: str) -> int:
    found = None
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and (match := _SIZE.match(value)) and match.group(2) in _UNITS:
        found = round(float(match.group(1)) * _UNITS[match.group(2)])
    if found is None or not 1 <= found < 1 << 62:
        raise UsageError(f"{where} has bytes {value!r}", hint='a whole number, or text such as "31.4 GB" or "144 GiB"')
    return found


def _add(table: dict[str, dict[str, int]], key: str, role: str, nbytes: int) -> None:
    by_role = table.setdefault(key, {})
    by_role[role] = by_role.get(role, 0) + nbytes


def _spilled(
    machine: Machine, asked: Mapping[str, Mapping[str, int]], first: str, second: str, nbytes: int
) -> dict[str, int]:
    """`nbytes` in a domain as far as it has room, the rest in its peer; all in the first where its size is unknown."""
    total = machine.domain(first).total_bytes
    if total is None:
        return {first: nbytes}
    room = total // OBJECT_BYTES * OBJECT_BYTES - sum(asked.get(first, {}).values())
    here = max(0, min(nbytes, room))
    return {domain: part for domain, part in ((first, here), (second, nbytes - here)) if part}


def _domain_fit(machine: Machine, name: str, by_role: Mapping[str, int]) -> DomainFit:
    domain = machine.domain(name)
    why = None if domain.total_bytes is not None else domain.whys.get("total_bytes", "its size could not be read")
    return DomainFit(name, domain.total_bytes, sum(by_role.values()), dict(by_role), why)


def _device_fit(machine: Machine, name: str, by_role: Mapping[str, int]) -> DomainFit:
    limit = machine.device(name).memory_limit_bytes
    why = None if limit is not None else "the driver names no limit"
    return DomainFit(name, limit, sum(by_role.values()), dict(by_role), why)
