"""Buffers between processes: `buffer.export()` in one, `import_buffer` in another.

What travels is plain data that pickles. The exporter keeps the buffer alive for as long as anyone uses it: the driver
does not count across processes. Within a process an import is counted, and closed once, after its last user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dieplace.errors import StaleMachine, Unsupported, UsageError
from dieplace.policy import Policy, resolve

if TYPE_CHECKING:
    from dieplace.machine import Device, Machine
    from dieplace.memory import Buffer


@dataclass(frozen=True)
class Exported:
    """One exported buffer: the driver's 64-byte handle and what the importer needs to know."""

    handle: bytes
    nbytes: int
    domain: str
    memory_class: str
    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    backend: str
    stamp: tuple[str | None, str | None]


def import_buffer(machine: Machine, exported: Exported, *, device: Device | str) -> Buffer:
    """The exported memory as a buffer of this process, for `device` to use.

    Raises StaleMachine where the export is from before a reboot or a mode change, Unsupported where the backend
    cannot import, BackendError where the driver refuses.
    """
    from dieplace.memory import Buffer
    from dieplace.sessions import memory_session

    if not isinstance(exported, Exported):
        raise UsageError(f"a {type(exported).__name__} is no exported buffer", hint="give what buffer.export() gave")
    session = memory_session(machine, "import a buffer")
    if exported.backend != machine.backend or not hasattr(session, "import_handle"):
        raise Unsupported(f"the {machine.backend} backend cannot import a buffer of the {exported.backend} backend")
    if exported.stamp != machine.stamp:
        raise StaleMachine(
            f"the buffer was exported on a machine with stamp {exported.stamp}; this one has {machine.stamp}",
            hint="export it again",
            outcome="stale",
        )
    executing = machine.device(device) if isinstance(device, str) else device
    allocation = session.import_handle(exported, device=executing)
    resolved = resolve(Policy.on(exported.domain), machine, executing)
    return Buffer(machine, session, allocation, resolved, exported.role, exported.name, exported.shape, exported.dtype)
