"""Clocks, power and temperature of an NVIDIA GPU through NVML, read and never set."""

from __future__ import annotations

import ctypes

from dieplace.backends.nvidia.nvml import Nvml, NvmlError
from dieplace.backends.readings import Reading

# nvml.h: nvmlClockType_t and nvmlTemperatureSensors_t.
CLOCK_SM, CLOCK_MEMORY, SENSOR_GPU = 1, 2, 0


class Telemetry(Nvml):
    """An open NVML session that reads conditions."""

    def __enter__(self) -> Telemetry:
        super().__enter__()
        return self

    def driver_version(self) -> str:
        """The driver's version."""
        return self.version()

    def readings(self) -> tuple[Reading, ...]:
        """Every GPU in BDF order."""
        return tuple(self._reading(gpu.index, gpu.bdf) for gpu in self.gpus())

    def _reading(self, index: int, bdf: str) -> Reading:
        handle = self._handle(index)
        milliwatts = self._number("nvmlDeviceGetPowerUsage", handle)
        return Reading(
            bdf=bdf,
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", handle, CLOCK_SM),
            sm_clock_max_mhz=self._number("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM),
            memory_clock_mhz=self._number("nvmlDeviceGetClockInfo", handle, CLOCK_MEMORY),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._number("nvmlDeviceGetTemperature", handle, SENSOR_GPU),
            throttle_reasons=self._number("nvmlDeviceGetCurrentClocksThrottleReasons", handle, wide=True),
        )

    def _number(self, call: str, *arguments: object, wide: bool = False) -> int | None:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        return int(value.value) if self._call(call, *arguments, ctypes.byref(value), optional=True) else None


def read_all() -> tuple[str | None, tuple[Reading, ...], str | None]:
    """(driver version, readings, None), or (None, (), why) where NVML does not answer."""
    try:
        with Telemetry() as nvml:
            return nvml.driver_version(), nvml.readings(), None
    except NvmlError as error:
        return None, (), str(error)
