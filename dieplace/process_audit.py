"""Where the memory of another process is, as far as the driver and the kernel tell: per logical device and host node.

KFD counts a process's bytes per node, so per logical device; where that device's memory is one die, the die follows.
What was *asked* is not known from outside, so nothing here can be called misplaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dieplace.errors import Unsupported
from dieplace.machine import Machine
from dieplace.sysfs import Sysfs, errno_name

KFD_PROCESSES = "/sys/class/kfd/kfd/proc"
_VRAM = re.compile(r"^vram_([0-9]{1,10})$")
_PAGES = re.compile(r"\bN([0-9]{1,5})=([0-9]{1,15})\b")
_PAGE_KB = re.compile(r"\bkernelpagesize_kB=([0-9]{1,8})\b")


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes that a process holds through one logical device; `die` is None, with `why`, where the device spans dies."""

    device: str
    domain: str | None
    die: int | None
    nbytes: int
    why: str | None = None


@dataclass(frozen=True)
class ProcessResidency:
    """One process: bytes per device (evidence `accounted`) and per host node; whys for what could not be read."""

    pid: int
    name: str | None
    devices: tuple[DeviceBytes, ...]
    host_bytes: Mapping[str, int]
    whys: Mapping[str, str]


def processes(sysfs: Sysfs) -> tuple[int, ...]:
    """Process ids that KFD knows, in order; Unsupported where there is no KFD to ask."""
    try:
        return tuple(sorted(int(name) for name in sysfs.names(KFD_PROCESSES) if re.fullmatch("[0-9]{1,10}", name)))
    except OSError as error:
        raise Unsupported(
            f"cannot list the processes of the driver: {KFD_PROCESSES}: {errno_name(error.errno)}",
            hint="is the amdgpu driver loaded?",
        ) from error


def audit_processes(machine: Machine, sysfs: Sysfs) -> tuple[tuple[ProcessResidency, ...], tuple[int, ...]]:
    """Every process that the driver knows, and those that were gone, or shut to us, when they were looked at."""
    found, missed = [], []
    for pid in processes(sysfs):
        try:
            found.append(audit_process(machine, sysfs, pid))
        except Unsupported:  # a process may end at any time, and must not take the others' answer along
            missed.append(pid)
    return tuple(found), tuple(missed)


def audit_process(machine: Machine, sysfs: Sysfs, pid: int) -> ProcessResidency:
    """What one process holds; Unsupported where neither the driver nor /proc knows the process."""
    whys: dict[str, str] = {}
    devices = _device_bytes(machine, sysfs, pid, whys)
    host = _host_bytes(sysfs, pid, whys)
    if "devices" in whys and "host_bytes" in whys:
        gone = not sysfs.exists(f"/proc/{pid}")
        why = f"{whys['devices']}; {whys['host_bytes']}"
        raise Unsupported(
            f"there is no process {pid} on this node" if gone else f"nothing to audit of process {pid}: {why}",
            hint="see: dieplace place audit",
        )
    name = sysfs.read_or_none(f"/proc/{pid}/comm")
    if name is None:
        whys["name"] = f"/proc/{pid}/comm cannot be read"
    return ProcessResidency(pid, name, devices, host, whys)


def _device_bytes(machine: Machine, sysfs: Sysfs, pid: int, whys: dict[str, str]) -> tuple[DeviceBytes, ...]:
    folder = f"{KFD_PROCESSES}/{pid}"
    by_id = {device.gpu_id: device for device in machine.devices if device.gpu_id is not None}
    try:
        names = sysfs.names(folder)
    except OSError as error:
        whys["devices"] = f"{folder}: {errno_name(error.errno)}"
        return ()
    found = []
    for name in names:
        match = _VRAM.match(name)
        if match is None:
            continue
        text = sysfs.read_or_none(f"{folder}/{name}")
        if text is None or not text.strip().isdigit():
            whys[name] = f"{folder}/{name} " + ("cannot be read" if text is None else f"is {text.strip()[:40]!r}")
            continue
        device = by_id.get(int(match.group(1)))
        if device is None:
            found.append(DeviceBytes(f"gpu_id {match.group(1)}", None, None, int(text), "no such device is in view"))
            continue
        die = device.dies[0] if device.local_guaranteed and len(device.dies) == 1 else None
        why = None if die is not None else f"{device.domain} is not the memory of one die"
        found.append(DeviceBytes(device.id, device.domain, die, int(text), why))
    return tuple(sorted(found, key=lambda one: one.device))


def _host_bytes(sysfs: Sysfs, pid: int, whys: dict[str, str]) -> dict[str, int]:
    try:
        text = sysfs.read(f"/proc/{pid}/numa_maps", limit_bytes=1 << 26)
    except OSError as error:
        whys["host_bytes"] = f"/proc/{pid}/numa_maps: {errno_name(error.errno)}"
        return {}
    total: dict[str, int] = {}
    for line in text.splitlines():
        page = _PAGE_KB.search(line)
        for node, pages in _PAGES.findall(line):
            name = f"host/node{int(node)}"
            total[name] = total.get(name, 0) + int(pages) * (int(page.group(1)) if page else 4) * 1024
    return total
