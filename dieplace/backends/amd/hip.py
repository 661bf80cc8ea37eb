"""The HIP runtime as the memory group needs it: typed calls by ctypes, in plain numbers.

ctypes and not the `rocm-bindings-hip` package: that one opens the HIP of its own ROCm wheels or of /opt/rocm, so that
beside a torch wheel with its own libamdhip64 it would start a second runtime, whose pointers the first does not know;
its versions follow one ROCm release, while these calls have been stable since ROCm 6. A test compares constants and
layouts with the package, where it is installed: an independent witness.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dieplace.backends.amd import hip_types as t
from dieplace.backends.amd.hsa import Hsa
from dieplace.backends.dlpack import ROCM
from dieplace.backends.runtime import Owner, Pointer, RuntimeFailed, RuntimeInCapture, RuntimeOutOfMemory
from dieplace.errors import Unsupported


class Hip:
    """One open libamdhip64; `hsa` is the layer below it, None where it cannot be opened."""

    name = "hip"
    tensor_kind = ROCM

    def __init__(self, library: str, hsa: Hsa | None = None) -> None:
        try:
            self._library = ctypes.CDLL(library)
            self._functions = {name: self._function(name) for name in t.SIGNATURES}
        except (OSError, AttributeError) as error:
            raise Unsupported(f"the HIP runtime cannot be used: {error}", hint="install ROCm 6 or later") from error
        self._library.hipGetErrorName.restype = ctypes.c_char_p
        self.hsa = hsa
        version = self._int("hipRuntimeGetVersion")
        if version < t.FIRST_VERSION:
            raise Unsupported(f"HIP {version // 10**7} is too old", hint="install ROCm 6 or later", version=version)

    def device_count(self) -> int:
        """Devices this process sees."""
        return self._int("hipGetDeviceCount")

    def bus_id(self, device: int) -> str:
        """dddd:bb:dd.f in lower case; partitions of a card share bus and device."""
        text = ctypes.create_string_buffer(32)
        self._call("hipDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode("ascii", "replace").lower()

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of a device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._on(device):
            self._call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def malloc(self, device: int, nbytes: int) -> int:
        """Coarse-grained memory of a device's own pool."""
        with self._on(device):
            return self._address("hipMalloc", nbytes)

    def malloc_uncached(self, device: int, nbytes: int) -> int:
        """Extended-scope fine-grained memory; some builds gave host memory, which the caller must check."""
        with self._on(device):
            return self._address("hipExtMallocWithFlags", nbytes, t.MALLOC_UNCACHED)

    def free(self, device: int, address: int) -> None:
        """Give back what `malloc` or `malloc_uncached` gave."""
        with self._on(device):
            self._call("hipFree", address)

    def synchronize(self, device: int) -> None:
        """Wait for everything on a device."""
        with self._on(device):
            self._call("hipDeviceSynchronize")

    def copy(self, device: int, target: int, source: int, nbytes: int) -> None:
        """Copy on a device that may access both; waits."""
        with self._on(device):
            self._call("hipMemcpy", target, source, nbytes, t.COPY_DEFAULT)

    def granularity(self, device: int) -> int:
        """What the runtime says an object's size must be a multiple of: 4 KiB on some builds, 2 MiB on others."""
        size, properties = ctypes.c_size_t(), _properties(device)
        option = t.GRANULARITY_RECOMMENDED
        self._call("hipMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), option)
        return size.value

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Virtual addresses without memory."""
        return self._address("hipMemAddressReserve", nbytes, alignment, None, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a reserved range back; nothing may be mapped in it."""
        self._call("hipMemAddressFree", address, nbytes)

    def create(self, device: int, nbytes: int) -> int:
        """One physical object in a device's coarse-grained pool."""
        return self._address("hipMemCreate", nbytes, ctypes.byref(_properties(device)), 0)

    def release(self, handle: int) -> None:
        """Give an object back, once it is mapped nowhere."""
        self._call("hipMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole object."""
        self._call("hipMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one mapping, with its own address and size."""
        self._call("hipMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, devices: tuple[int, ...]) -> None:
        """Let devices read and write a mapped range."""
        wanted = (t.AccessDescription * len(devices))()
        for entry, device in zip(wanted, devices, strict=True):
            entry.location.type, entry.location.id = t.LOCATION_DEVICE, device
            entry.flags = t.ACCESS_READ_WRITE
        self._call("hipMemSetAccess", address, nbytes, wanted, len(devices))

    def pointer(self, address: int) -> Pointer:
        """What HIP's books say; an address it does not know is `unknown`."""
        found = t.PointerAttributes()
        try:
            self._call("hipPointerGetAttributes", ctypes.byref(found), address)
        except RuntimeFailed:
            return Pointer("unknown", None)
        kind = "managed" if found.is_managed else t.MEMORY_KINDS.get(found.type, "unknown")
        return Pointer(kind, found.device if kind in ("device", "managed") else None)

    def owner(self, address: int) -> Owner | None:
        """The KFD node that owns an address, by the ROCr runtime."""
        return self.hsa.owner(address) if self.hsa is not None else None

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can be given memory of `peer`."""
        found = ctypes.c_int()
        self._call("hipDeviceCanAccessPeer", ctypes.byref(found), device, peer)
        return bool(found.value)

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let kernels on `device` use memory that `peer` gives by `malloc`; that it was so already is success."""
        with self._on(device):
            try:
                self._call("hipDeviceEnablePeerAccess", peer, 0)
            except RuntimeFailed as error:
                if error.facts["code"] != t.PEER_ALREADY_ENABLED:
                    raise

    def ipc_export(self, device: int, address: int) -> bytes:
        """64 bytes by which another process opens the allocation."""
        handle = t.IpcHandle()
        with self._on(device):
            self._call("hipIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def ipc_open(self, device: int, handle: bytes) -> int:
        """The address here of another process's allocation."""
        with self._on(device):
            found = t.IpcHandle.from_buffer_copy(handle)
            return self._address("hipIpcOpenMemHandle", found, t.IPC_LAZY_PEER_ACCESS)

    def ipc_close(self, device: int, address: int) -> None:
        """Undo one `ipc_open`."""
        with self._on(device):
            self._call("hipIpcCloseMemHandle", address)

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """The calling thread's current device is the caller's own: it is put back."""
        before = self._int("hipGetDevice")
        if before != device:
            self._call("hipSetDevice", device)
        try:
            yield
        finally:
            if before != device:
                self._call("hipSetDevice", before)

    def _address(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_void_p()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    def _int(self, name: str) -> int:
        found = ctypes.c_int()
        self._call(name, ctypes.byref(found))
        return found.value

    def _function(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = t.SIGNATURES[name], ctypes.c_int
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code == t.SUCCESS:
            return
        word = (self._library.hipGetErrorName(code) or b"unknown").decode("ascii", "replace")
        kind = RuntimeOutOfMemory if code == t.OUT_OF_MEMORY else RuntimeFailed
        kind = RuntimeInCapture if code in t.IN_CAPTURE else kind
        raise kind(f"{name} failed: {word} ({code})", call=name, code=code, name=word)


def _properties(device: int) -> t.AllocationProperties:
    """Pinned memory of one device; all flags 0, the only value that HIP takes."""
    found = t.AllocationProperties(type=t.ALLOCATION_PINNED)
    found.location.type, found.location.id = t.LOCATION_DEVICE, device
    return found
