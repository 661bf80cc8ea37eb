"""Where the bytes of an allocation went, by the driver's own counters read just before and just after it.

Pointer attributes only echo what was asked. The counters move where memory was really taken, so they show an allocator
that spilled and said nothing (ROCm/amdgpu issue 186: 40 of 93 GiB on the neighbour).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dieplace.sysfs import Sysfs, errno_name

if TYPE_CHECKING:
    from dieplace.backends.runtime import Runtime

KFD_PROCESSES = "/sys/class/kfd/kfd/proc"
# Runtimes take a little beside what was asked: page tables, a signal. Below this nothing was placed elsewhere.
SLACK_BYTES = 2 << 20


@dataclass(frozen=True)
class Counters:
    """Bytes in use by runtime device, or `why` they cannot be read; `source` names them."""

    used: Mapping[int, int]
    source: str
    why: str | None = None


@dataclass(frozen=True)
class Accounted:
    """Bytes by runtime device, `agrees` with what was asked; `why` is set where the counters say nothing."""

    bytes_by_device: Mapping[int, int]
    agrees: bool
    source: str
    why: str | None = None


def kfd_counters(sysfs: Sysfs, gpu_ids: Mapping[int, int]) -> Callable[[], Counters]:
    """Reads `vram_<gpu_id>` of this process; `gpu_ids` maps runtime devices to KFD ids."""

    def read() -> Counters:
        used: dict[int, int] = {}
        for device, gpu_id in gpu_ids.items():
            path = f"{KFD_PROCESSES}/{os.getpid()}/vram_{gpu_id}"
            try:
                text = sysfs.read(path).strip()
            except OSError as error:
                return Counters({}, "KFD", f"{path}: {errno_name(error.errno)}")
            if not text.isdigit():
                return Counters({}, "KFD", f"{path} holds no number")
            used[device] = int(text)
        return Counters(used, "KFD counters of this process")

    return read


def card_counters(runtime: Runtime, devices: tuple[int, ...]) -> Callable[[], Counters]:
    """Reads each device's free memory from the driver; other processes on the device disturb it."""

    def read() -> Counters:
        info = {device: runtime.memory_info(device) for device in devices}
        return Counters({device: total - free for device, (free, total) in info.items()}, "the driver's free memory")

    return read


def attribute(before: Counters, after: Counters, asked: Mapping[int, int]) -> Accounted:
    """Which device took the bytes that were `asked`, by device, from two readings of the counters.

    A device that took less than asked has a shortfall, and the devices that took more than asked have it, largest
    first. A shortfall that nobody took means that the counters say nothing of this allocation.
    """
    why = before.why or after.why
    if why is not None:
        return Accounted(dict(asked), True, before.source, why)
    grown = {device: after.used[device] - before.used.get(device, 0) for device in after.used}
    found = {device: min(nbytes, max(0, grown.get(device, 0))) for device, nbytes in asked.items()}
    missing = sum(asked.values()) - sum(found.values())
    surplus = {device: grown[device] - asked.get(device, 0) for device in grown}
    for device in sorted(surplus, key=lambda d: -surplus[d]):
        taken = min(missing, surplus[device])
        if taken > SLACK_BYTES or (taken > 0 and taken == missing):
            found[device] = found.get(device, 0) + taken
            missing -= taken
    if missing:
        return Accounted(dict(asked), True, after.source, f"{after.source} did not move by what was taken")
    found = {device: nbytes for device, nbytes in found.items() if nbytes}
    return Accounted(found, found == {d: n for d, n in asked.items() if n}, after.source)
