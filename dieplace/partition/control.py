"""The one interface through which a switch touches a node, so that the same state machine runs on any of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dieplace.backends.base import Holders
from dieplace.errors import UsageError
from dieplace.partition.facts import NodeFacts

if TYPE_CHECKING:
    from dieplace.partition.store import Store

_UNIT = re.compile(r"[A-Za-z0-9:_@\\][A-Za-z0-9:_.@\\-]{0,240}\.(service|socket|target|timer|path)")

TICK_S = 2.0  # how often a call that blocks is told about
# Called with the seconds that a call has blocked so far, and what is known about it ("pid 812, state D").
Tick = Callable[[float, str], None]

# What an answer can mean. Only `refused`, `denied`, `busy` and `reset` promise that nothing was recorded.
MEANINGS = ("ok", "refused", "denied", "busy", "reset", "broken", "absent", "hung", "unknown")
NOTHING_RECORDED = ("refused", "denied", "busy", "reset")


def silent(elapsed_s: float, what: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Answer:
    """What one mutating call claims. `ok` is a claim to be verified, never a fact.

    `meaning` is one of MEANINGS; `via` names the road (`amdsmi 26.0.2`, `sysfs`, `modprobe`); `code` and `name` are the
    vendor's status or the errno.
    """

    meaning: str
    via: str
    detail: str = ""
    code: int | None = None
    name: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the call claims success."""
        return self.meaning == "ok"

    def __str__(self) -> str:
        status = f"{self.name} ({self.code})" if self.name else (str(self.code) if self.code is not None else "")
        return ": ".join(part for part in (f"{self.via} says {self.meaning}", status, self.detail) if part)


@dataclass(frozen=True)
class Road:
    """How writes will go, and why: named in every plan. `versions` are those of the binding and the library."""

    memory: str
    compute: str
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


class Clock(Protocol):
    """Time that a test can own."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real monotonic clock, in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Limits:
    """Bounds on time and attempts, in seconds; unload 60 and ready 300 follow public reports (20 and 50 s were seen).

    A failed reload is never tried again: repeated ones can hang a host (legacy-rocm-build issue 4469).
    """

    unload_s: float = 60.0
    ready_s: float = 300.0
    poll_s: float = 1.0
    reset_s: float = 30.0
    compute_attempts: int = 3
    retry_s: float = 2.0


class Control(Protocol):
    """A node that can be switched. Reads never raise for a half-loaded driver; writes answer, they do not raise."""

    source: str  # "live" or "emulated"
    clock: Clock
    store: Store

    def pin(self, ids: Mapping[str, str]) -> None:
        """Use these card names (BDF to `gpuN`) from now on."""

    def read(self, *, links: bool = False) -> NodeFacts:
        """The node now; `links` adds the link weights between siblings, which cost many more reads."""

    def holders(self) -> Holders: ...
    def privileged(self) -> bool: ...
    def road(self) -> Road: ...

    def versions(self) -> dict[str, str]:
        """Versions of what takes part, as far as they are known already; asks no library."""

    def memories_of(self, bdf: str, compute: str) -> tuple[str, ...] | None:
        """Memory modes the driver combines with `compute`; writes its selector (never a mode) and puts it back."""

    def set_memory(self, bdf: str, word: str) -> Answer: ...
    def set_compute(self, bdf: str, word: str) -> Answer: ...

    def unload(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer:
        """Unload the driver; descriptors in `keep_open` (the lock) are inherited: an orphaned unload keeps the lock.
        `tick` hears every few seconds that it still runs."""

    def load(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer: ...
    def unit_active(self, unit: str) -> bool | None: ...
    def stop_unit(self, unit: str) -> Answer: ...
    def start_unit(self, unit: str) -> Answer: ...


def check_unit(unit: str) -> str:
    """A systemd unit name, with its suffix; anything else is a UsageError (never an option, never a path)."""
    name = unit if "." in unit else f"{unit}.service"
    if not _UNIT.fullmatch(name):
        raise UsageError(f"{unit!r} is not the name of a systemd unit", hint="for example amd-metrics-exporter.service")
    return name
