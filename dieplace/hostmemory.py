"""Host buffers on a chosen NUMA node: bound before the first touch, locked, and registered with a GPU runtime.

A buffer that feeds a die belongs on the CPU node nearest to it; memory that was touched first elsewhere stays there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from types import TracebackType
from typing import Any

from dieplace.binding import mempolicy, plan
from dieplace.binding.host import Host, read_host
from dieplace.errors import NotAllowed, Unsupported, UsageError
from dieplace.machine import Device, Domain
from dieplace.pages import PageCount, range_pages
from dieplace.sysfs import Sysfs, errno_name

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable and hipHostRegisterPortable


class HostBuffer:
    """Page-aligned host memory on one NUMA node; use it as a context manager or call `close`.

    `node` is where it was asked to be, `locked` whether its pages stay in RAM, `registered` whether a GPU runtime knows
    it; `notes` say what could not be done and why.
    """

    def __init__(self, nbytes: int, node: int | None, *, pinned: bool = True, notes: tuple[str, ...] = ()) -> None:
        if nbytes <= 0:
            raise UsageError(f"a host buffer cannot have {nbytes} bytes", hint="ask for one byte or more")
        self.nbytes = nbytes
        self.node = node
        self.notes = notes
        self.locked = self.registered = False
        try:
            self._map = mmap.mmap(-1, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise Unsupported(f"the host cannot map {nbytes:,} bytes: {error}") from error
        self._whole: Any = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._whole)
        try:
            self._bind()
            self._touch()
            if pinned:
                self._lock()
                self._register()
        except BaseException:
            self.close()
            raise

    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self._map)[: self.nbytes]

    def tensor(self, dtype: Any = None) -> Any:
        """A 1-d torch tensor over the bytes (uint8 unless `dtype`); the buffer must outlive it."""
        import torch

        return torch.frombuffer(self._map, dtype=dtype or torch.uint8, count=-1)

    def pages(self) -> PageCount:
        """Where its pages are now, asked of the kernel."""
        return range_pages(self.address, self.nbytes)

    def close(self) -> None:
        """Give the memory back; nothing happens the second time."""
        if self._whole is None:
            return
        if self.registered:
            _cudart().cudaHostUnregister(self.address)
            self.registered = False
        self._whole = None
        self._map.close()

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self) -> None:
        if self.node is None:
            return
        whole_pages = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mempolicy.bind_range(self.address, whole_pages, "membind", (self.node,))
        except OSError as error:
            raise _refused(error, f"host memory cannot be bound to node {self.node} (mbind)") from error

    def _touch(self) -> None:
        for offset in range(0, self.nbytes, mmap.PAGESIZE):
            self._map[offset] = 0

    def _lock(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)):
            self._note(f"mlock: {errno_name(ctypes.get_errno())}: the pages may be swapped (see ulimit -l)")
        else:
            self.locked = True

    def _register(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            self._note("no GPU runtime is in use here, so none was told of the buffer")
            return
        status = _cudart().cudaHostRegister(self.address, self.nbytes, _HOST_REGISTER_PORTABLE)
        self.registered = int(status) == 0
        if not self.registered:
            self._note(f"cudaHostRegister gives {int(status)}")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, text)


def host_buffer(near: Device | Domain | int, nbytes: int, *, pinned: bool = True) -> HostBuffer:
    """A host buffer on the node of a die (`Device`), of a `host/nodeK` domain, or with that number.

    Of a device whose node has no memory the nearest one that has some; on a host with one node no call is made.
    """
    host = read_host(Sysfs("/"))
    node, notes = _node_for(host, near)
    return HostBuffer(nbytes, node, pinned=pinned, notes=notes)


def _node_for(host: Host, near: Device | Domain | int) -> tuple[int | None, tuple[str, ...]]:
    if isinstance(near, Device):
        binding = plan.near(host, near.numa_node, who=near.id)
        return (binding.nodes[0] if binding.nodes else None), (*binding.reasons, *binding.incomplete)
    number = near.numa_node if isinstance(near, Domain) else near
    if isinstance(near, Domain) and (near.card is not None or number is None):
        raise UsageError(f"{near.id} is no host memory", hint="name a host/nodeK domain, or a device")
    node = host.node(number if number is not None else -1)
    if node is None or not node.has_memory:
        known = ", ".join(f"host/node{n.number}" for n in host.nodes if n.has_memory)
        raise Unsupported(f"this host has no memory on node {number}", hint=f"there is {known}")
    if len(host.nodes) == 1:
        return None, ("the host has one NUMA node: no call is made",)
    return node.number, ()


def _refused(error: OSError, what: str) -> Exception:
    kind = NotAllowed if isinstance(error, PermissionError) else Unsupported
    return kind(f"{what}: {errno_name(error.errno)}", hint="a container or cpuset may forbid it")


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()
