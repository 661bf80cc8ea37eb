"""torch allocations in a chosen domain: one `torch.cuda.MemPool` for each device, role and pattern of domains.

The device's own domain needs a plain pool only: the driver keeps a device's allocations in its own range. Every other
home has a pool whose allocator makes a virtual range over objects of the home, mapped for the executing device, so that
tensors keep the executing device's index. Pools are routed by thread: what other threads allocate, autograd's among
them, is not placed, and the audit says so.

The allocator's two functions are Python ones, called with torch's allocator lock held. They run where a pool grows or
shrinks, not for each tensor.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dieplace.backends.accounting import Accounted, Counters, attribute
from dieplace.backends.base import Allocation
from dieplace.errors import DieplaceError, DomainFull, Unsupported
from dieplace.machine import Device

if TYPE_CHECKING:
    from dieplace.backends.device_memory import DeviceMemory

_Alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
# torch keeps raw pointers to a pool's allocator and functions after the pool is gone (pytorch PR 171962): never freed.
_forever: list[Any] = []
UNCOUNTED = Accounted({}, True, "nothing", "torch made the segment outside a placing context")
_all_pools: weakref.WeakSet[Pools] = weakref.WeakSet()


class Pools:
    """The torch pools of one DeviceMemory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._pools: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._accounted: dict[int, Accounted] = {}  # by address of a torch segment
        self._segments: tuple[Any, dict[int, Allocation]] = (None, {})
        self._failed: DieplaceError | None = None
        _all_pools.add(self)

    @contextmanager
    def placing(self, pattern: tuple[str, ...], device: Device, role: str) -> Iterator[None]:
        """Route this thread's allocations on `device`; the thread's current device is put back afterwards."""
        import torch

        index = self._memory.homes.index(device)
        with torch.cuda.device(index):
            pool = self._pool(pattern, device, role)
            before, held = self._memory.counters(), _segments_of(pool)
            try:
                with torch.cuda.use_mem_pool(pool, index):
                    yield
            except torch.OutOfMemoryError as error:
                raise self._full(error, pattern, index) from error
            finally:
                self._account(pool, index, before, held)

    def _account(self, pool: Any, index: int, before: Counters, held: dict[int, int]) -> None:
        """The counters against what the pool has grown by, for the segments it has now and had not before."""
        fresh = {address: nbytes for address, nbytes in _segments_of(pool).items() if address not in held}
        if fresh:
            found = attribute(before, self._memory.counters(), {index: sum(fresh.values())})
            self._accounted.update(dict.fromkeys(fresh, found))

    def find(self, address: int) -> Allocation | None:
        """The segment of a plain pool that covers an address; ranges of other pools are found as allocations."""
        segments = self._plain_segments()
        for start, allocation in segments.items():
            if start <= address < start + allocation.nbytes:
                return allocation
        return None

    def trim(self) -> None:
        """Let go of the pools that no tensor uses: their memory goes back to the driver."""
        for key in [key for key, pool in self._pools.items() if not _in_use(pool)]:
            del self._pools[key]
        self._segments = (None, {})

    def held(self) -> list[Any]:
        """The torch pools there are."""
        return list(self._pools.values())

    def _pool(self, pattern: tuple[str, ...], device: Device, role: str) -> Any:
        """With the device current: torch binds a pool to the device that is current when it is made."""
        import torch

        key = (device.id, role, pattern)
        if key not in self._pools:
            own = pattern == (device.domain,)
            self._pools[key] = torch.cuda.MemPool() if own else self._far_pool(pattern, device, role)
        return self._pools[key]

    def _far_pool(self, pattern: tuple[str, ...], device: Device, role: str) -> Any:
        import torch

        make = getattr(torch._C, "_cuda_customAllocator", None)
        if make is None:
            raise Unsupported("this torch has no pools with an allocator of one's own", hint="use torch 2.7 or later")
        memory, domains = self._memory, [self._memory.homes.domain(name) for name in pattern]
        held: dict[int, Allocation] = {}

        @_Alloc
        def take(nbytes: int, index: int, stream: Any) -> int | None:
            try:
                made = memory.allocate(domains, nbytes, "coarse", device=device, role=role, movable=True, retry=False)
            except DieplaceError as error:
                self._failed = error
                return None
            held[made.address] = made
            address: int = made.address
            return address

        @_Free
        def give(address: int, nbytes: int, index: int, stream: Any) -> None:
            memory.free(held.pop(address))

        allocator = make(ctypes.cast(take, ctypes.c_void_p).value, ctypes.cast(give, ctypes.c_void_p).value)
        _forever.append((take, give, allocator))
        return torch.cuda.MemPool(allocator)

    def _full(self, error: Exception, pattern: tuple[str, ...], index: int) -> DieplaceError:
        failed, self._failed = self._failed, None
        if failed is not None:
            return failed
        free, total = self._memory.runtime.memory_info(index)
        return DomainFull(
            f"torch could not allocate in {pattern[0]}: {str(error).splitlines()[0]}",
            hint="free something there or place less",
            asked_bytes=None,
            asked_bytes_why="torch tells it in words only",
            free_bytes=free,
            total_bytes=total,
            domain=pattern[0],
        )

    def _plain_segments(self) -> dict[int, Allocation]:
        """Segments of the plain pools by address; read anew only where torch has made or freed a segment since."""
        if not self._pools:
            return {}
        import torch

        indices = sorted({self._memory.homes.index(self._memory.homes.device(key[0])) for key in self._pools})
        stats = [torch.cuda.memory_stats(index) for index in indices]
        now = [(s.get("segment.all.allocated"), s.get("segment.all.freed")) for s in stats]
        if self._segments[0] != now:
            found: dict[int, Allocation] = {}
            for (name, role, pattern), pool in self._pools.items():
                device = self._memory.homes.device(name)
                if pattern == (device.domain,):
                    for address, nbytes in _segments_of(pool).items():
                        accounted = self._accounted.get(address, UNCOUNTED)
                        found[address] = self._memory.adopt(address, nbytes, device, role, accounted)
            self._segments = (now, found)
        return self._segments[1]


def _segments_of(pool: Any) -> dict[int, int]:
    """Bytes of each segment by address."""
    return {int(segment["address"]): int(segment["total_size"]) for segment in pool.snapshot()}


def _in_use(pool: Any) -> bool:
    return any(segment["allocated_size"] or segment["active_size"] for segment in pool.snapshot())


def capturing_now() -> bool:
    """Whether this thread's current stream captures a graph; torch is not loaded to ask."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def empty_torch_cache() -> None:
    """Have torch give unused cached memory back, where it is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@atexit.register
def _let_go() -> None:
    """Pools call Python functions to free: those without tensors go now, the others stay past the end of Python."""
    for pools in list(_all_pools):
        pools.trim()
        for pool in pools.held():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
