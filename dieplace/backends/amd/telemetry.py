"""Clocks, power and temperature of AMD cards from sysfs: no library, no privilege, read and never set.

Files are those of amdgpu's hwmon folder (kernel documentation, "GPU Power/Thermal Controls and Monitoring"):
freq1_input (compute clock, Hz), freq2_input (memory clock, Hz), power1_average or power1_input (microwatts),
temp1_input (millidegrees); and pp_dpm_sclk, whose lines are `level: MHz`, the current one starred, with level S for
deep sleep. They belong to the physical card: logical devices of one card share them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dieplace.backends.readings import Reading
from dieplace.sysfs import Sysfs

PCI = "/sys/bus/pci/devices"
VERSION = "/sys/module/amdgpu/version"
_LEVEL = re.compile(r"^(\w+):\s*(\d+)\s*MHz", re.M | re.I)


def read_all(sysfs: Sysfs, bdfs: Sequence[str]) -> tuple[str | None, tuple[Reading, ...], str | None]:
    """(driver version, a reading for each card, None), or (None, readings, why) where amdgpu names no version.

    A driver that came with the kernel has no version of its own: the kernel's release stands for it.
    """
    readings = tuple(_reading(sysfs, bdf) for bdf in bdfs)
    version = sysfs.read_or_none(VERSION)
    if version:
        return version, readings, None
    release = sysfs.read_or_none("/proc/sys/kernel/osrelease")
    return (f"kernel {release}", readings, None) if release else (None, readings, "neither amdgpu nor the kernel says")


def _reading(sysfs: Sysfs, bdf: str) -> Reading:
    folder = _hwmon(sysfs, bdf)
    power = _number(sysfs, folder, "power1_average")
    power = _number(sysfs, folder, "power1_input") if power is None else power
    core, memory = _number(sysfs, folder, "freq1_input"), _number(sysfs, folder, "freq2_input")
    celsius = _number(sysfs, folder, "temp1_input")
    return Reading(
        bdf=bdf,
        sm_clock_mhz=None if core is None else round(core / 1e6),
        sm_clock_max_mhz=_highest(sysfs.read_or_none(f"{PCI}/{bdf}/pp_dpm_sclk")),
        memory_clock_mhz=None if memory is None else round(memory / 1e6),
        power_w=None if power is None else power / 1e6,
        temperature_c=None if celsius is None else round(celsius / 1000),
        throttle_reasons=None,
    )


def _hwmon(sysfs: Sysfs, bdf: str) -> str | None:
    try:
        names = sysfs.names(f"{PCI}/{bdf}/hwmon")
    except OSError:
        return None
    return f"{PCI}/{bdf}/hwmon/{names[0]}" if names else None


def _number(sysfs: Sysfs, folder: str | None, name: str) -> int | None:
    text = (sysfs.read_or_none(f"{folder}/{name}") or "").strip() if folder else ""
    return int(text) if text.isascii() and text.isdigit() else None


def _highest(levels: str | None) -> int | None:
    """The clock of the highest numbered level; deep sleep (S) is none."""
    found = [int(mhz) for level, mhz in _LEVEL.findall(levels or "") if level.isdigit()]
    return max(found, default=None)
