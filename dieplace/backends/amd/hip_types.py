"""Structures, constants and signatures of the HIP calls in use: hip_runtime_api.h of ROCm 6 and 7.

`hipMemoryType` counts from 1 for host since ROCm 6; ROCm 5, where it counted from 0, is refused.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_ushort, c_void_p

SUCCESS, OUT_OF_MEMORY = 0, 2
PEER_ALREADY_ENABLED = 704
IN_CAPTURE = (900, 906)  # hipErrorStreamCaptureUnsupported, hipErrorStreamCaptureImplicit
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_RECOMMENDED = 1
MALLOC_UNCACHED = 3
COPY_DEFAULT = 4
IPC_LAZY_PEER_ACCESS = 1
MEMORY_KINDS = {0: "unknown", 1: "host", 2: "device", 3: "managed"}
FIRST_VERSION = 60000000  # ROCm 6.0, as hipRuntimeGetVersion counts: major * 10^7 + minor * 10^5 + patch


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", c_ushort))


class AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_type", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


class PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("device", c_int),
        ("device_pointer", c_void_p),
        ("host_pointer", c_void_p),
        ("is_managed", c_int),
        ("allocation_flags", c_uint),
    )


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


SIGNATURES: dict[str, tuple[object, ...]] = {
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipMalloc": (POINTER(c_void_p), c_size_t),
    "hipExtMallocWithFlags": (POINTER(c_void_p), c_size_t, c_uint),
    "hipFree": (c_void_p,),
    "hipDeviceSynchronize": (),
    "hipMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
    "hipMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "hipMemAddressReserve": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemAddressFree": (c_void_p, c_size_t),
    "hipMemCreate": (POINTER(c_void_p), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "hipMemRelease": (c_void_p,),
    "hipMemMap": (c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemUnmap": (c_void_p, c_size_t),
    "hipMemSetAccess": (c_void_p, c_size_t, POINTER(AccessDescription), c_size_t),
    "hipPointerGetAttributes": (POINTER(PointerAttributes), c_void_p),
    "hipDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "hipDeviceEnablePeerAccess": (c_int, c_uint),
    "hipIpcGetMemHandle": (POINTER(IpcHandle), c_void_p),
    "hipIpcOpenMemHandle": (POINTER(c_void_p), IpcHandle, c_uint),
    "hipIpcCloseMemHandle": (c_void_p,),
}
