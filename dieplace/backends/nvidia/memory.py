"""The memory group of the NVIDIA backend: the CUDA driver, and each GPU's own count of free bytes."""

from __future__ import annotations

from dieplace.backends.accounting import card_counters
from dieplace.backends.device_memory import DeviceMemory
from dieplace.backends.nvidia.cuda import Cuda
from dieplace.machine import Machine


def cuda_memory(machine: Machine, *, library: str = "libcuda.so.1") -> DeviceMemory:
    """CUDA memory of a live machine; Unsupported where the driver cannot be opened."""
    cuda = Cuda(library)
    visible = tuple(d.runtime_index for d in machine.devices if d.runtime_index is not None)
    return DeviceMemory(cuda, machine, counters=lambda homes: card_counters(cuda, visible))
