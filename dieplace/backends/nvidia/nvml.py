"""The few calls of NVIDIA's management library that discovery needs, through ctypes, without a Python binding.

NVML (libnvidia-ml.so.1) lists every GPU of the host; the driver library (libcuda.so.1) adds the SM count and the index
that the process will see under CUDA_VISIBLE_DEVICES. Both come with the driver; neither makes a context.
Names and constants: nvml.h and cuda.h of the CUDA toolkit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

NVML_SUCCESS = 0
P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
FIELD_NVLINK_SPEED_MB_PER_S = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
MAX_NVLINKS = 18
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: CUDA_VISIBLE_DEVICES hides all


class NvmlError(Exception):
    """A library is missing or a call failed; the text names the call and the library's own words."""


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Value(ctypes.Union):
    _fields_ = (("u32", ctypes.c_uint), ("u64", ctypes.c_ulonglong), ("double", ctypes.c_double))


class _Field(ctypes.Structure):
    _fields_ = (
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", _Value),
    )


@dataclass(frozen=True)
class Gpu:
    """One physical GPU: `bdf` as dddd:bb:dd.0, `nvlinks` active links, `nvlink_mb_per_s` each way a link."""

    index: int
    bdf: str
    name: str
    uuid: str | None
    pci_device_id: int
    memory_bytes: int | None
    nvlinks: int
    nvlink_mb_per_s: int | None


@dataclass(frozen=True)
class Seen:
    """What the CUDA driver shows to this process: index by BDF and SM count by BDF."""

    index: dict[str, int]
    sms: dict[str, int]


class Nvml:
    """An open NVML session; use as a context manager."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError("the NVIDIA driver library libnvidia-ml.so.1 is not on this host") from error

    def __enter__(self) -> Nvml:
        self._call("nvmlInit_v2")
        return self

    def __exit__(self, *_: object) -> None:
        self.library.nvmlShutdown()

    def version(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(81)
        self._call("nvmlSystemGetDriverVersion", text, 81)
        return text.value.decode("ascii", "replace")

    def gpus(self) -> list[Gpu]:
        """Every GPU, in BDF order."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return sorted((self._gpu(index) for index in range(count.value)), key=lambda gpu: gpu.bdf)

    def joined_by_nvlink(self, one: int, other: int) -> bool | None:
        """Whether two GPUs (NVML indices) reach each other over NVLink; None where the driver does not say."""
        status = ctypes.c_int(-1)
        try:
            self._call(
                "nvmlDeviceGetP2PStatus", self._handle(one), self._handle(other), P2P_NVLINK, ctypes.byref(status)
            )
        except NvmlError:
            return None
        return status.value == 0

    def _gpu(self, index: int) -> Gpu:
        handle, pci, memory = self._handle(index), _Pci(), _Memory()
        self._call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        total = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory), optional=True)
        links = [link for link in range(MAX_NVLINKS) if self._link_active(handle, link)]
        return Gpu(
            index=index,
            bdf=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
            name=self._text("nvmlDeviceGetName", handle) or "NVIDIA GPU",
            uuid=self._text("nvmlDeviceGetUUID", handle),
            pci_device_id=pci.pci_device_id >> 16,
            memory_bytes=int(memory.total) if total else None,
            nvlinks=len(links),
            nvlink_mb_per_s=self._link_speed(handle) if links else None,
        )

    def _link_active(self, handle: ctypes.c_void_p, link: int) -> bool:
        state = ctypes.c_int()
        found = self._call("nvmlDeviceGetNvLinkState", handle, link, ctypes.byref(state), optional=True)
        return found and state.value == 1

    def _link_speed(self, handle: ctypes.c_void_p) -> int | None:
        field = _Field(field_id=FIELD_NVLINK_SPEED_MB_PER_S)
        found = self._call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(field), optional=True)
        return int(field.value.u32) or None if found and field.status == NVML_SUCCESS else None

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def _text(self, call: str, handle: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(96)
        return text.value.decode("ascii", "replace") if self._call(call, handle, text, 96, optional=True) else None

    def _call(self, name: str, *arguments: object, optional: bool = False) -> bool:
        function = getattr(self.library, name, None)
        status = function(*arguments) if function is not None else -1
        if status != NVML_SUCCESS and not optional:
            self.library.nvmlErrorString.restype = ctypes.c_char_p
            words = self.library.nvmlErrorString(status) if status > 0 else b"the library has no such call"
            raise NvmlError(f"{name} failed: {words.decode('ascii', 'replace')} ({status})")
        return bool(status == NVML_SUCCESS)


def cuda_view() -> Seen | str:
    """Index and SM count of each GPU as this process sees it, or why the driver does not say."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is not on this host"
    status = library.cuInit(0)
    if status == NO_DEVICE:
        return Seen({}, {})
    if status != 0:
        return f"cuInit failed ({status})"
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    seen = Seen({}, {})
    for index in range(count.value):
        device, sms, bus = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
        failed = library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetPCIBusId(bus, 32, device)
        if failed:
            continue
        bdf = bus.value.decode("ascii", "replace").lower()
        seen.index[bdf] = index
        if library.cuDeviceGetAttribute(ctypes.byref(sms), SM_COUNT, device) == 0:
            seen.sms[bdf] = sms.value
    return seen
