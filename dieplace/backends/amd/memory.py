"""The memory group of the AMD backend: HIP, the ROCr layer below it, and KFD's counters of this process."""

from __future__ import annotations

from dieplace.backends.accounting import kfd_counters
from dieplace.backends.amd.hip import Hip
from dieplace.backends.amd.hip_library import find_hip
from dieplace.backends.amd.hsa import loaded_hsa
from dieplace.backends.device_memory import DeviceMemory
from dieplace.machine import Machine
from dieplace.sysfs import Sysfs


def hip_memory(machine: Machine, sysfs: Sysfs, *, library: str | None = None) -> DeviceMemory:
    """HIP memory of a live machine; Unsupported where HIP cannot be opened."""
    hip = Hip(library or find_hip())
    hip.hsa = loaded_hsa()  # HIP has loaded it by now
    return DeviceMemory(hip, machine, counters=lambda homes: kfd_counters(sysfs, homes.gpu_ids))
