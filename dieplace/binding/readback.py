"""Run as a child with the program's environment and binding: print what HIP or CUDA and the kernel then show, as JSON.

Talks to the runtime's C interface by ctypes, so that no framework is needed and none is fooled. HIP's PCI bus id
carries the partition as its function (`dddd:bb:dd.p`), which is the only way to tell sibling dies apart.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sys
from typing import Any

from dieplace.binding.bind import read_back
from dieplace.binding.host import status_lists
from dieplace.sysfs import Sysfs, errno_name

HIP_MULTIPROCESSORS = 63  # hipDeviceAttributeMultiprocessorCount, ROCm 6 and 7 (hip_runtime_api.h)
CUDA_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
HIP_LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so")
CUDA_LIBRARIES = ("libcuda.so.1",)


def main(vendor: str) -> None:
    """Print one JSON object: `devices` (or null with `devices_why`), CPU and memory lists, memory policy."""
    cpus, mems = status_lists(Sysfs("/").read_or_none("/proc/self/status") or "")
    _, policy, nodes = read_back()
    answer: dict[str, Any] = {"cpus": cpus, "mems": mems, "policy": policy, "nodes": nodes}
    try:
        answer["devices"] = {"amd": hip_devices, "nvidia": cuda_devices}[vendor]() if vendor != "none" else None
        if vendor == "none":
            answer["devices_why"] = "no GPU runtime is asked"
    except OSError as error:
        answer |= {"devices": None, "devices_why": str(error)}
    if vendor == "amd" and not answer["devices"] and (trouble := kfd_trouble(Sysfs("/"))):
        answer["devices_why"] = f"{answer.get('devices_why', 'HIP lists no device')}; {trouble}"
    sys.stdout.write(json.dumps(answer))


def kfd_trouble(sysfs: Sysfs) -> str | None:
    """Why HIP may have found nothing: /dev/kfd cannot be opened. Asked in a child only, since whoever opens it once
    stays a user of KFD until it ends."""
    try:
        sysfs.openable("/dev/kfd")
    except OSError as error:
        if error.errno == errno.EINVAL:
            return (
                "opening /dev/kfd gives EINVAL, as it does while a partition switch holds KFD's lock: try again in "
                "a few seconds, and see 'dieplace partition show' if it stays"
            )
        return f"/dev/kfd cannot be opened ({errno_name(error.errno)})"
    return None


def hip_devices() -> list[dict[str, Any]]:
    """What HIP enumerates, in its order; OSError where the library is missing or says no."""
    hip = _library(HIP_LIBRARIES)
    count = ctypes.c_int()
    status = hip.hipGetDeviceCount(ctypes.byref(count))
    if status == 100:  # hipErrorNoDevice
        return []
    _check("hipGetDeviceCount", status)
    return [_hip_device(hip, index) for index in range(count.value)]


def _hip_device(hip: ctypes.CDLL, index: int) -> dict[str, Any]:
    text, value, total = ctypes.create_string_buffer(64), ctypes.c_int(), ctypes.c_size_t()
    _check("hipDeviceGetPCIBusId", hip.hipDeviceGetPCIBusId(text, 64, index))
    _check("hipDeviceGetAttribute", hip.hipDeviceGetAttribute(ctypes.byref(value), HIP_MULTIPROCESSORS, index))
    _check("hipDeviceTotalMem", hip.hipDeviceTotalMem(ctypes.byref(total), index))
    return {"bdf": text.value.decode().lower(), "cus": value.value, "bytes": total.value}


def cuda_devices() -> list[dict[str, Any]]:
    """What the CUDA driver enumerates, in its order; OSError where the library is missing or says no."""
    cuda = _library(CUDA_LIBRARIES)
    status = cuda.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        return []
    _check("cuInit", status)
    count = ctypes.c_int()
    _check("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    return [_cuda_device(cuda, index) for index in range(count.value)]


def _cuda_device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, value, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    text = ctypes.create_string_buffer(64)
    _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
    _check("cuDeviceGetPCIBusId", cuda.cuDeviceGetPCIBusId(text, 64, device))
    _check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(ctypes.byref(value), CUDA_MULTIPROCESSORS, device))
    _check("cuDeviceTotalMem", cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    return {"bdf": text.value.decode().lower(), "cus": value.value, "bytes": total.value}


def _library(names: tuple[str, ...]) -> ctypes.CDLL:
    errors = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise OSError(errors[0])


def _check(call: str, status: int) -> None:
    if status:
        raise OSError(f"{call} gives {status}")


if __name__ == "__main__":
    main(sys.argv[1])
