"""Clocks, power and temperature of an NVIDIA GPU through NVML, read and never set."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

from dieplace.backends.nvidia.nvml import Nvml, NvmlError

# nvml.h: nvmlClockType_t and nvmlTemperatureSensors_t.
CLOCK_SM, CLOCK_MEMORY, SENSOR_GPU = 1, 2, 0


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None where the driver does not say. `throttle_reasons` is NVML's bit mask."""

    bdf: str
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: int | None

    @property
    def clock_share(self) -> float | None:
        """SM clock over its maximum."""
        if self.sm_clock_mhz is None or not self.sm_clock_max_mhz:
            return None
        return self.sm_clock_mhz / self.sm_clock_max_mhz

    def to_json(self) -> dict[str, Any]:
        """Plain data; an unknown number has its why beside it."""
        body = asdict(self)
        return body | {f"{key}_why": "the driver does not say" for key, value in body.items() if value is None}


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
