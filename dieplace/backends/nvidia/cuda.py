"""The CUDA driver as the memory group needs it: typed calls by ctypes, in plain numbers.

The driver's library comes with the driver, so that no second runtime is opened beside torch's; memory is shared with
torch through each device's primary context. Names, layouts and numbers: cuda.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dieplace.backends.dlpack import CUDA
from dieplace.backends.runtime import Owner, Pointer, RuntimeFailed, RuntimeInCapture, RuntimeOutOfMemory
from dieplace.errors import Unsupported

SUCCESS, OUT_OF_MEMORY, PEER_ALREADY_ENABLED = 0, 2, 704
IN_CAPTURE = frozenset(range(900, 908))  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and its neighbours
ALLOCATION_PINNED = LOCATION_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
ACCESS_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
GRANULARITY_RECOMMENDED = 1
IPC_LAZY_PEER_ACCESS = 1
MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL = 2, 8, 9  # CUpointer_attribute
MEMORY_KINDS = {1: "host", 2: "device", 4: "managed"}  # CUmemorytype

_Address, _Size, _Int = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", _Int), ("id", _Int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp; the last eight bytes are its allocFlags."""

    _fields_ = (
        ("type", _Int),
        ("requested_handle_types", _Int),
        ("location", Location),
        ("win32_handle", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", _Int))


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


_Out = ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_Out,),
    "cuDeviceGet": (_Out, _Int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Out, _Int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_Out,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (ctypes.c_void_p, ctypes.c_uint),
    "cuDeviceCanAccessPeer": (_Out, _Int, _Int),
    "cuMemGetInfo_v2": (_Out, _Out),
    "cuMemAlloc_v2": (_Out, _Size),
    "cuMemFree_v2": (_Address,),
    "cuMemcpy": (_Address, _Address, _Size),
    "cuMemGetAllocationGranularity": (_Out, _Out, _Int),
    "cuMemAddressReserve": (_Out, _Size, _Size, _Address, ctypes.c_uint64),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemCreate": (_Out, _Size, _Out, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemMap": (_Address, _Size, _Size, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (_Address, _Size),
    "cuMemSetAccess": (_Address, _Size, _Out, _Size),
    "cuPointerGetAttribute": (_Out, _Int, _Address),
    "cuIpcGetMemHandle": (_Out, _Address),
    "cuIpcOpenMemHandle_v2": (_Out, IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
}


class Cuda:
    """One open libcuda; contexts are the primary ones, made on first use and kept."""

    name = "cuda"
    tensor_kind = CUDA

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
            self._functions = {name: self._function(name) for name in SIGNATURES}
        except (OSError, AttributeError) as error:
            raise Unsupported(f"the CUDA driver cannot be used: {error}", hint="install the NVIDIA driver") from error
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0)

    def device_count(self) -> int:
        """Devices this process sees."""
        return self._int("cuDeviceGetCount")

    def bus_id(self, device: int) -> str:
        """dddd:bb:dd.f in lower case."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._int("cuDeviceGet", device))
        return text.value.decode("ascii", "replace").lower()

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of a device."""
        free, total = _Size(), _Size()
        with self._on(device):
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def malloc(self, device: int, nbytes: int) -> int:
        """Memory of a device."""
        with self._on(device):
            return self._number("cuMemAlloc_v2", nbytes)

    def malloc_uncached(self, device: int, nbytes: int) -> int:
        """The same as `malloc`: a peer's system-scope loads are answered at the home's L2 here, never stale."""
        return self.malloc(device, nbytes)

    def free(self, device: int, address: int) -> None:
        """Give back what `malloc` gave."""
        with self._on(device):
            self._call("cuMemFree_v2", address)

    def synchronize(self, device: int) -> None:
        """Wait for everything on a device."""
        with self._on(device):
            self._call("cuCtxSynchronize")

    def copy(self, device: int, target: int, source: int, nbytes: int) -> None:
        """Copy on a device that may access both; waits."""
        with self._on(device):
            self._call("cuMemcpy", target, source, nbytes)
            self._call("cuCtxSynchronize")  # between devices the call may return before the copy is done

    def granularity(self, device: int) -> int:
        """What an object's size must be a multiple of: 2 MiB on the parts seen."""
        size, properties = _Size(), _properties(device)
        option = GRANULARITY_RECOMMENDED
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), option)
        return size.value

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Virtual addresses without memory."""
        return self._number("cuMemAddressReserve", nbytes, alignment, 0, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a reserved range back; nothing may be mapped in it."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, device: int, nbytes: int) -> int:
        """One physical object on a device."""
        properties = _properties(device)
        with self._on(device):
            return self._number("cuMemCreate", nbytes, ctypes.byref(properties), 0)

    def release(self, handle: int) -> None:
        """Give an object back, once it is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole object."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one mapping, with its own address and size."""
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, devices: tuple[int, ...]) -> None:
        """Let devices read and write a mapped range."""
        wanted = (AccessDescription * len(devices))()
        for entry, device in zip(wanted, devices, strict=True):
            entry.location.type, entry.location.id = LOCATION_DEVICE, device
            entry.flags = ACCESS_READ_WRITE
        self._call("cuMemSetAccess", address, nbytes, wanted, len(devices))

    def pointer(self, address: int) -> Pointer:
        """What the driver's books say; an address it does not know is `unknown`."""
        try:
            kind = MEMORY_KINDS.get(self._attribute(address, MEMORY_TYPE, ctypes.c_uint), "unknown")
            managed = self._attribute(address, IS_MANAGED, ctypes.c_uint)
            device = self._attribute(address, DEVICE_ORDINAL, _Int)
        except RuntimeFailed:
            return Pointer("unknown", None)
        kind = "managed" if managed else kind
        return Pointer(kind, device if kind in ("device", "managed") else None)

    def owner(self, address: int) -> Owner | None:
        """None: the CUDA driver has no layer below it that tells."""
        return None

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can be given memory of `peer`."""
        found = _Int()
        one, other = self._int("cuDeviceGet", device), self._int("cuDeviceGet", peer)
        self._call("cuDeviceCanAccessPeer", ctypes.byref(found), one, other)
        return bool(found.value)

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let kernels on `device` use memory that `peer` gives by `malloc`; that it was so already is success."""
        other = self._context(peer)
        with self._on(device):
            try:
                self._call("cuCtxEnablePeerAccess", other, 0)
            except RuntimeFailed as error:
                if error.facts["code"] != PEER_ALREADY_ENABLED:
                    raise

    def ipc_export(self, device: int, address: int) -> bytes:
        """64 bytes by which another process opens the allocation."""
        handle = IpcHandle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def ipc_open(self, device: int, handle: bytes) -> int:
        """The address here of another process's allocation."""
        with self._on(device):
            found = IpcHandle.from_buffer_copy(handle)
            return self._number("cuIpcOpenMemHandle_v2", found, IPC_LAZY_PEER_ACCESS)

    def ipc_close(self, device: int, address: int) -> None:
        """Undo one `ipc_open`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", address)

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """The calling thread's current context is the caller's own: it is put back."""
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            self._contexts[device] = self._number("cuDevicePrimaryCtxRetain", self._int("cuDeviceGet", device))
        return self._contexts[device]

    def _attribute(self, address: int, which: int, kind: Any) -> int:
        found = kind()
        self._call("cuPointerGetAttribute", ctypes.byref(found), which, address)
        return int(found.value)

    def _number(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_uint64()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _int(self, name: str, *arguments: Any) -> int:
        found = _Int()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _function(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = SIGNATURES[name], _Int
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code == SUCCESS:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        word = (text.value or b"unknown").decode("ascii", "replace")
        kind = RuntimeOutOfMemory if code == OUT_OF_MEMORY else RuntimeFailed
        kind = RuntimeInCapture if code in IN_CAPTURE else kind
        raise kind(f"{name} failed: {word} ({code})", call=name, code=code, name=word)


def _properties(device: int) -> AllocationProperties:
    """Pinned memory of one device, not exportable."""
    found = AllocationProperties(type=ALLOCATION_PINNED)
    found.location.type, found.location.id = LOCATION_DEVICE, device
    return found
