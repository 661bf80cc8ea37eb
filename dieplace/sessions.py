"""What hands out placed memory in this process, so that an audit can ask who owns an address."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from dieplace.backends.base import Allocation, Backend, Location, require
from dieplace.machine import Machine

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
_sessions_lock = threading.Lock()


def memory_session(machine: Machine, verb: str) -> Any:
    """The memory group of the machine's backend, after a freshness check; Unsupported otherwise."""
    backend: Backend = machine.require_session(verb)
    session = require(backend, "memory").memory
    with _sessions_lock:
        _sessions.add(session)
    return session


def find_owner(address: int) -> tuple[Any, Allocation] | None:
    """The session and allocation that cover an address, among all sessions of this process; None for host memory."""
    with _sessions_lock:
        sessions = list(_sessions)
    for session in sessions:
        allocation = session.find(address)
        if allocation is not None:
            return session, allocation
    return None


def unplaced(address: int, nbytes: int) -> Location | None:
    """Where a device says memory is that nobody placed; None where no session knows the address."""
    with _sessions_lock:
        sessions = list(_sessions)
    for session in sessions:
        look = getattr(session, "unplaced", None)
        found: Location | None = look(address, nbytes) if look else None
        if found is not None:
            return found
    return None
