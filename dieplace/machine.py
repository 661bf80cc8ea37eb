"""What there is: an immutable snapshot of a node, its cards, logical devices, memory domains and links.

Plain data only. `Machine` adds the questions; verbs that change things (`plan`, `allocate`, ...) are thin calls
into `partition.py` and `memory.py` through the snapshot's session, which is never serialised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import NoSuchDevice, StaleMachine, Unsupported, UsageError
from dieplace.modes import Mode
from dieplace.whole_file import write_whole

if TYPE_CHECKING:
    from dieplace.backends.base import Backend
    from dieplace.kvcache import KVCache
    from dieplace.memory import Buffer
    from dieplace.partition.plan import Plan
    from dieplace.policy import Policy
    from dieplace.syncflags import SyncFlags

SCHEMA = "dieplace/machine/1"


@dataclass(frozen=True)
class Figure:
    """A number with its origin: `measured`, `reported` (a driver said so) or `modelled`; None needs a why."""

    value: float | None
    origin: str
    source: str = ""
    why: str | None = None


@dataclass(frozen=True)
class Card:
    """One physical GPU package; the key is (PCI domain, bus, device), never an index or a UUID."""

    id: str  # gpuN in BDF order
    bdf: str  # dddd:bb:dd.0
    part: str | None  # "MI355X", or None with part_why
    device_id: int | None
    xccs: int | None
    cus: int | None
    hbm_bytes: int | None
    mode: Mode | None
    dies: int | None  # IODs with memory of their own; None where not read
    stacks_per_die: int | None = None
    unique_id: str | None = None
    uuid: str | None = None
    numa_node: int | None = None
    hive: str | None = None
    gfx: str | None = None
    whys: dict[str, str] = field(default_factory=dict)  # field name -> why it is None


@dataclass(frozen=True)
class Domain:
    """Memory with one locality: `gpuN/memK` spanning `dies` of one card, or `host/nodeK`."""

    id: str
    card: str | None
    dies: tuple[int, ...]
    total_bytes: int | None
    numa_node: int | None = None
    aliases: tuple[str, ...] = ()
    whys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """A logical device, `gpuN/pM`: something that launches kernels."""

    id: str
    card: str
    partition: int
    bdf: str
    xccs: int | None
    cus: int | None
    memory_limit_bytes: int | None
    domain: str | None  # the domain its default allocations go to
    whole_card: bool
    local_guaranteed: bool  # the domain spans exactly the device's own die(s)
    dies: tuple[int, ...] = ()
    kfd_node: int | None = None
    gpu_id: int | None = None
    render_node: str | None = None  # /dev/dri/renderD128
    numa_node: int | None = None
    runtime_index: int | None = None  # predicted HIP or CUDA index under the visibility variables
    unique_id: str | None = None
    aliases: tuple[str, ...] = ()
    whys: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """`gpu0/p1: 4 XCDs, 128 CUs, memory gpu0/mem1 (154.6 GB)`; what is unknown is left out."""
        size = "" if self.memory_limit_bytes is None else f" ({self.memory_limit_bytes / 1e9:,.1f} GB)"
        facts = [
            "" if self.xccs is None else f"{self.xccs} XCD{'' if self.xccs == 1 else 's'}",
            "" if self.cus is None else f"{self.cus} CUs",
            "" if self.domain is None else f"memory {self.domain}{size}",
        ]
        return f"{self.id}: {', '.join(filter(None, facts)) or 'nothing known'}"

    def local(self, *, role: str, strict: bool = False) -> AbstractContextManager[Any]:
        """Inside, torch allocations of this thread land in this device's own domain."""
        from dieplace.policy import Policy

        return self.placing(Policy.local(strict=strict), role=role)

    def peer(self, *, role: str) -> AbstractContextManager[Any]:
        """The deliberate misplacement: the same, in the peer's domain; this device goes on executing."""
        from dieplace.policy import Policy

        return self.placing(Policy.peer(), role=role)

    def kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, tokens: int, **options: Any) -> KVCache:
        """A KV cache on this device's die; see `dieplace.kvcache.KVCache` for `dtype`, `page_tokens`, `policy`."""
        from dieplace.kvcache import KVCache

        owner = self._owner()
        return KVCache(owner, self, layers=layers, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, **options)

    def sync_flags(self, count: int, **options: Any) -> SyncFlags:
        """Flags on this device's die, one 128-byte line each; see `dieplace.syncflags.SyncFlags`."""
        from dieplace.syncflags import SyncFlags

        return SyncFlags(self._owner(), self, count, **options)

    def placing(self, policy: Policy | str, *, role: str) -> AbstractContextManager[Any]:
        """Inside, torch allocations of this thread land where the policy says."""
        from dieplace.memory import placing

        return placing(self._owner(), self, policy, role=role)

    def _owner(self) -> Machine:
        machine = getattr(self, "_machine", None)
        if machine is None:
            raise UsageError(f"device {self.id} belongs to no machine", hint='take it from machine.device("gpu0/p0")')
        owner: Machine = machine
        return owner


@dataclass(frozen=True)
class Link:
    """From one device to another, or to a host domain, as the driver reports it; directions are separate links."""

    initiator: str
    target: str
    kind: str  # "same-card", "xgmi", "pcie", "nvlink", "unknown"
    weight: int | None
    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True)
class Machine:
    """Immutable snapshot of a node plus an unserialised session with its backend.

    `source` is `live`, `emulated` or `replayed`. `stamp` is (boot id, KFD generation id) at discovery:
    `check_fresh()` raises StaleMachine when the node has changed since, whoever changed it.
    """

    source: str
    backend: str
    cards: tuple[Card, ...]
    devices: tuple[Device, ...]
    domains: tuple[Domain, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()  # told plainly: missing nodes, unreadable files, unset variables applied
    stamp: tuple[str | None, str | None] = (None, None)
    host: dict[str, Any] = field(default_factory=dict)
    session: Backend | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Devices of a machine know it, so that `device.local(role=)` needs no second argument. Not a field: it is no
        # part of equality, printing or JSON.
        object.__setattr__(self, "devices", tuple(_bound(device, self) for device in self.devices))

    def __str__(self) -> str:
        """The node in one line, then a line a device; `repr` and `to_json` have every field."""
        modes = dict.fromkeys(str(card.mode) if card.mode else "mode unknown" for card in self.cards)
        parts = " and ".join(dict.fromkeys(card.part or "card of unknown part" for card in self.cards))
        what = f"{len(self.cards)} x {parts} in {', '.join(modes)}" if self.cards else "no cards"
        head = f"{self.source} node" + ("" if self.backend == self.source else f" ({self.backend})")
        return "\n".join([f"{head}: {what}", *(f"  {d}" for d in self.devices)])

    def allocate(
        self,
        size: int | Sequence[int],
        *,
        device: Device | str,
        policy: Policy | str = "local",
        role: str,
        dtype: str = "uint8",
        name: str = "",
        memory_class: str | None = None,
        movable: bool = False,
    ) -> Buffer:
        """One placed buffer; see `dieplace.memory.allocate`."""
        from dieplace.memory import allocate

        return allocate(
            self,
            size,
            device=device,
            policy=policy,
            role=role,
            dtype=dtype,
            name=name,
            memory_class=memory_class,
            movable=movable,
        )

    def card(self, name: str) -> Card:
        """The card called `gpuN`; NoSuchDevice lists what there is."""
        return _find(self.cards, name, "card")

    def device(self, name: str) -> Device:
        """The logical device called `gpuN/pM`, or by an alias such as `gpuN`."""
        return _find(self.devices, name, "device")

    def domain(self, name: str) -> Domain:
        """The domain called `gpuN/memK`, `gpuN/dieK` or `host/nodeK`."""
        return _find(self.domains, name, "domain")

    def devices_of(self, card: str) -> tuple[Device, ...]:
        """The logical devices of one card, in partition order."""
        return tuple(d for d in self.devices if d.card == card)

    def domains_of(self, card: str) -> tuple[Domain, ...]:
        """The memory domains of one card, in range order."""
        return tuple(d for d in self.domains if d.card == card)

    def require_session(self, verb: str) -> Backend:
        """The backend session, after a freshness check; a loaded or replayed snapshot raises Unsupported."""
        if self.session is None:
            raise Unsupported(
                f"cannot {verb}: this machine was loaded from a file or recording, there is nothing to act on",
                hint="discover a live or emulated machine",
            )
        self.check_fresh()
        return self.session

    def plan(
        self, mode: str | Mode | Mapping[str, str | Mode], cards: Sequence[str] | str | None = None, **options: Any
    ) -> Plan:
        """Steps to another partition mode on `cards` (all by default); changes nothing. See `partition.plan`."""
        from dieplace.partition import plan

        return plan(self, mode, cards, **options)

    def concurrent(self, *, seed: int | None = None) -> AbstractContextManager[Any]:
        """Inside, launches on several emulated devices are queued; they run together, sharing memory, when it ends.

        `seed` fixes the interleaving and reproduces a failure. On real devices streams do this: Unsupported.
        """
        session = self.require_session("launch together")
        together = getattr(session, "concurrent", None)
        if together is None:
            raise Unsupported(
                f"the {self.backend} backend does not schedule launches itself",
                hint="use streams, or --backend emulated",
            )
        context: AbstractContextManager[Any] = together(seed=seed)
        return context

    def check_fresh(self) -> None:
        """Raise StaleMachine when boot id or KFD generation id differ from those at discovery."""
        if self.session is None:
            return
        now = self.session.stamp()
        if now != self.stamp:
            raise StaleMachine(
                f"the node changed since it was discovered (stamp was {self.stamp}, is {now})",
                hint="call dieplace.discover() again and use the new Machine",
                outcome="stale",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data under the versioned schema; the session is left out."""
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "session"}
        plain = json.loads(json.dumps(body, default=_plain, allow_nan=False))
        for card, data in zip(self.cards, plain["cards"], strict=True):
            data["mode"] = str(card.mode) if card.mode else None
        return {"schema": SCHEMA, **plain}

    def save(self, path: str | Path) -> None:
        """Write the snapshot as versioned JSON."""
        write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", hint="name another file")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Machine:
        """Rebuild a snapshot; its source becomes `replayed` and it has no session."""
        from dieplace.machine_file import machine_from_json

        return machine_from_json(data)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a snapshot written by `save`; it answers questions and raises Unsupported for the rest."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        return cls.from_json(data)


def _bound(device: Device, machine: Machine) -> Device:
    bound = replace(device)
    object.__setattr__(bound, "_machine", machine)
    return bound


def _find(items: tuple[Any, ...], name: str, what: str) -> Any:
    for item in items:
        if item.id == name or name in getattr(item, "aliases", ()):
            return item
    known = [item.id for item in items]
    shown = ", ".join(known[:8]) + (f", ... {known[-1]}" if len(known) > 8 else "")
    raise NoSuchDevice(
        f"no {what} {name!r} on this machine", hint=f"there is {shown or 'none'}", asked=name, known=known
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mode):
        return str(value)
    return asdict(value)
