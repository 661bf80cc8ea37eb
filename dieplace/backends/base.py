"""The one seam between dieplace and a vendor: read this first.

A backend is one class with the groups of methods it can honour; `groups` names them. Callers ask
`backend.groups`, and `require(backend, group)` raises Unsupported with the backend's own reason otherwise.
Rules: vendor imports only inside their backend; plain data out, never vendor handles; every number carries its
origin (`Figure.origin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dieplace.backends.availability import Availability as Availability
from dieplace.errors import Unsupported

if TYPE_CHECKING:
    from dieplace.machine import Card, Device, Domain, Machine
    from dieplace.modes import Mode
    from dieplace.workload import Workload

GROUPS = ("always", "partitioning", "memory", "execution")


@dataclass(frozen=True)
class Holder:
    """Something that keeps a card busy.

    `kind` is `compute` (attached to KFD: blocks a compute set), `drm` (open render or card node: blocks unload),
    `ghost` (KFD entry with no open descriptor: gone only when the process exits), `module` (a kernel module) or
    `unreadable` (present but not inspectable: the view is incomplete).
    """

    kind: str
    pid: int | None
    name: str | None
    devices: tuple[str, ...] = ()
    vram_bytes: int | None = None
    detail: str = ""
    unit: str | None = None  # the systemd unit it belongs to, where its cgroup says so


@dataclass(frozen=True)
class Holders:
    """Everything found to hold the node, and why the view may be incomplete (empty means complete)."""

    holders: tuple[Holder, ...]
    incomplete: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """One piece of memory: `address` as the executing device sees it, its home domain and class."""

    address: int
    nbytes: int
    domain: str
    memory_class: str  # "coarse", "fine", "uncached", "host"
    token: Any = None  # the backend's own handle, opaque to callers


@dataclass(frozen=True)
class Request:
    """What an allocation was asked to be: role, executing device, and the domain ids that repeat over 2 MiB objects."""

    role: str
    device: str | None
    pattern: tuple[str, ...]


@dataclass(frozen=True)
class Location:
    """Where an allocation's bytes are: bytes per domain, how that is known, and any caveat."""

    bytes_by_domain: dict[str, int]
    evidence: str  # "declared", "accounted" or "probed"
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """Time of one run of a whole workload: samples in ns where measured, or value and range in ns where modelled."""

    origin: str  # "measured" or "modelled"
    samples_ns: tuple[float, ...] = ()
    value_ns: float | None = None
    range_ns: tuple[float, float] | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """always: everyone has these."""

    name: str
    groups: frozenset[str]

    def probe(self) -> Availability: ...
    def snapshot(self, *, links: bool = True) -> Machine: ...  # links=False may leave the links out
    def stamp(self) -> tuple[str | None, str | None]: ...


class Partitioning(Protocol):
    """amd, emulated."""

    def modes(self, card: Card) -> tuple[Mode, ...]: ...
    def mode(self, card: Card) -> Mode | None: ...
    def set_mode(self, card: Card, mode: Mode) -> None: ...
    def holders(self, card: Card | None = None) -> Holders: ...


class MemoryBackend(Protocol):
    """amd, nvidia, cpu, emulated: what `backend.memory` is where the backend has the group `memory`.

    It is the memory of the machine as it is now; what was allocated before a mode change stays with the object of
    its time. `domain` may be a pattern of domains that repeats over 2 MiB objects.
    `free_later` is `free` for finalizers. `move` keeps the address. `find` and `request` serve the audit. Inside
    `placing` what torch allocates on this thread lands in the domain. `movable` memory can be moved; what is not may be
    refused by `move`. A backend that can look inside a domain also has `bytes_by_die(allocation)`; one that knows
    memory which nobody placed has `unplaced(address, nbytes)`; one that shares between processes has `export` and
    `import_handle`.
    """

    def allocate(
        self,
        domain: Domain | Sequence[Domain],
        nbytes: int,
        memory_class: str,
        *,
        device: Device,
        role: str = "activation",
        name: str = "",
        spill_to: Domain | None = None,
        movable: bool = False,
    ) -> Allocation: ...
    def free(self, allocation: Allocation) -> None: ...
    def free_later(self, allocation: Allocation) -> None: ...
    def move(self, allocation: Allocation, domain: Domain | Sequence[Domain]) -> Allocation: ...
    def locate(self, allocations: Sequence[Allocation]) -> Location: ...
    def find(self, address: int) -> Allocation | None: ...
    def request(self, allocation: Allocation) -> Request: ...
    def tensor(self, allocation: Allocation, dtype: Any, shape: Sequence[int], offset_bytes: int = 0) -> Any: ...
    def torch_device(self, device: Device) -> str: ...
    def placing(
        self, domain: Domain | Sequence[Domain], *, device: Device, role: str
    ) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Prepared:
    """A workload made ready on one device; `work` is the backend's own (a captured graph, or the launches)."""

    workload: Workload
    device: Device
    work: Any = field(repr=False)


class Execution(Protocol):
    """amd, nvidia, emulated: what `backend.execution` is where the backend has the group `execution`.

    What runs is a workload whose stages have launches. `prepare` is apart from `launch` and `time` because an
    experiment times one thing many times while the memory behind its pointers moves: the same captured graph, hence the
    same binary and the same addresses, must run in every arm. `graph=False` is for work that cannot be captured, such
    as a copy between two devices. `time` takes one sample of each of what it is given, all started before any is waited
    for; `flush` runs before and outside the timed region. A device's samples are `measured`; on the emulated backend
    the clock's value with its range is `modelled`.
    """

    def prepare(self, workload: Workload, device: Device, *, graph: bool = True) -> Prepared: ...
    def launch(self, prepared: Prepared) -> None: ...  # starts it and does not wait
    def synchronize(self, device: Device) -> None: ...
    def time(self, *prepared: Prepared, flush: Callable[[], None] | None = None) -> tuple[Timing, ...]: ...


_INSTEAD = {
    "replayed": "a recording answers questions only: go to the machine it was made on, or name --backend emulated",
    "cpu": "name a backend with devices: --backend amd, nvidia or emulated",
}


def require(backend: Backend, group: str) -> Any:
    """The backend itself when it has `group`; Unsupported with its reason otherwise."""
    if group in backend.groups:
        return backend
    raise Unsupported(
        f"the {backend.name} backend has no {group}",
        hint=_INSTEAD.get(backend.name) or f"a backend that has it is emulated; {backend.name} has {_listed(backend)}",
        backend=backend.name,
        group=group,
    )


def _listed(backend: Backend) -> str:
    return " and ".join(sorted(backend.groups - {"always"})) or "discovery alone"
