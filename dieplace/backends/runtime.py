"""What the memory group asks of a vendor runtime: about twenty calls, in plain numbers, on AMD (HIP) and NVIDIA alike.

Devices are runtime indices, addresses and handles are integers, sizes are bytes. A call that fails raises
RuntimeFailed with the vendor's code and name; nothing is retried here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dieplace.errors import BackendError


class RuntimeFailed(BackendError):
    """A runtime call failed; `facts` has call, code and name."""


class RuntimeOutOfMemory(RuntimeFailed):
    """The runtime had no memory for it."""


class RuntimeInCapture(RuntimeFailed):
    """The runtime refuses the call while a stream captures a graph."""


@dataclass(frozen=True)
class Pointer:
    """What the runtime's books say of an address: `kind` is `device`, `host`, `managed` or `unknown`."""

    kind: str
    device: int | None


@dataclass(frozen=True)
class Owner:
    """Who owns an address by the layer below the runtime.

    `node` is the KFD node number; `is_device` False is host memory; `grain` is `coarse`, `fine`, `extended` (the
    scope that reaches other devices) or `unknown`.
    """

    node: int
    is_device: bool
    grain: str


class Runtime(Protocol):
    """One open runtime. `tensor_kind` is the DLPack device type of its tensors (dlpack.h: CUDA 2, ROCm 10)."""

    name: str
    tensor_kind: int

    def device_count(self) -> int: ...
    def bus_id(self, device: int) -> str: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...  # free, total
    def malloc(self, device: int, nbytes: int) -> int: ...
    def malloc_uncached(self, device: int, nbytes: int) -> int: ...
    def free(self, device: int, address: int) -> None: ...
    def synchronize(self, device: int) -> None: ...
    def copy(self, device: int, target: int, source: int, nbytes: int) -> None: ...
    def granularity(self, device: int) -> int: ...
    def reserve(self, nbytes: int, alignment: int) -> int: ...
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def create(self, device: int, nbytes: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def map(self, address: int, nbytes: int, handle: int) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...
    def set_access(self, address: int, nbytes: int, devices: tuple[int, ...]) -> None: ...
    def pointer(self, address: int) -> Pointer: ...
    def owner(self, address: int) -> Owner | None: ...  # None: this runtime has no layer below that tells
    def can_access_peer(self, device: int, peer: int) -> bool: ...
    def enable_peer_access(self, device: int, peer: int) -> None: ...  # a second time is no error
    def ipc_export(self, device: int, address: int) -> bytes: ...
    def ipc_open(self, device: int, handle: bytes) -> int: ...
    def ipc_close(self, device: int, address: int) -> None: ...
