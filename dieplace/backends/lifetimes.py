"""When placed memory goes back: after its last user, after the devices have been synchronised, never in a capture.

Finalizers may run at any point of any thread, so they only queue; whoever holds the lock next, or the finalizer itself
where nobody does, gives back what has no user left. A forked child gives nothing back: the memory is its parent's.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dieplace.backends import vmm
from dieplace.backends.held import Held
from dieplace.backends.runtime import Runtime, RuntimeInCapture
from dieplace.errors import UsageError


class Lifetimes:
    """The live allocations of one runtime, by address."""

    def __init__(self, runtime: Runtime, capturing: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._capturing = capturing
        self._pid = os.getpid()
        self._lock = threading.Lock()  # not reentrant: a finalizer inside a locked call must queue
        self._addresses: list[int] = []
        self._live: dict[int, Held] = {}
        self._dropped: deque[Held] = deque()  # one entry for each user that is gone
        self._waiting: list[Held] = []  # without users; a capture forbade giving them back

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One call at a time; first gives back what can be. UsageError in a forked child."""
        if os.getpid() != self._pid:
            raise UsageError(
                "device memory cannot be used in a process forked after it was first used",
                hint="start workers with the spawn method, or discover in the worker first",
            )
        with self._lock:
            self._drain()
            yield
        self._drain_if_free()

    def keep(self, held: Held) -> None:
        """Register a new allocation; with the lock held."""
        insort(self._addresses, held.address)
        self._live[held.address] = held

    def share(self, held: Held) -> None:
        """One more user."""
        with self._lock:
            held.users += 1

    def drop(self, held: Held) -> None:
        """One user is gone; never waits."""
        self._dropped.append(held)
        self._drain_if_free()

    def at(self, address: int) -> Held | None:
        """The live allocation that covers an address."""
        index = bisect_right(self._addresses, address) - 1
        held = self._live.get(self._addresses[index]) if index >= 0 else None
        return held if held is not None and address < held.address + held.nbytes else None

    def live(self) -> list[Held]:
        """All live allocations, in address order."""
        return [self._live[address] for address in list(self._addresses)]

    def _drain_if_free(self) -> None:
        if os.getpid() != self._pid or not (self._dropped or self._waiting):
            return
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        waiting, self._waiting = self._waiting, []
        for held in waiting:
            self.give_back(held)
        while self._dropped:
            held = self._dropped.popleft()
            held.users -= 1
            if held.users == 0:
                self._addresses.remove(held.address)
                del self._live[held.address]
                self.give_back(held)

    def give_back(self, held: Held) -> None:
        """Free an allocation that nobody uses, now or after the capture; with the lock held."""
        if self._capturing():
            self._waiting.append(held)
            return
        try:
            for device in held.devices:
                self._runtime.synchronize(device)
            if held.range is not None:
                vmm.close(held.range)
            elif held.import_handle is not None:
                self._runtime.ipc_close(held.executing, held.address)
            else:
                self._runtime.free(held.home, held.address)
        except RuntimeInCapture:  # of another thread
            self._waiting.append(held)
