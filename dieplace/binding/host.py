"""The host as binding sees it: NUMA nodes with CPUs, memory and distances, and what this process may use.

Read from `/sys/devices/system/node` and `/proc` through an injectable Sysfs. Nodes without CPUs (memory of an
accelerator, CXL) and without memory are ordinary here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dieplace import numberlist
from dieplace.sysfs import Sysfs, errno_name

NODES = "/sys/devices/system/node"
CPUS = "/sys/devices/system/cpu"
LOCAL_DISTANCE, UNKNOWN_DISTANCE = 10, 20  # ACPI SLIT: 10 is the node itself


@dataclass(frozen=True)
class HostNode:
    """One NUMA node; `distances` maps other nodes' numbers to the firmware's figure (10 is itself)."""

    number: int
    cpus: tuple[int, ...]
    total_bytes: int | None
    distances: Mapping[int, int] = field(default_factory=dict)

    @property
    def has_memory(self) -> bool:
        """False only where the kernel says that it has none."""
        return self.total_bytes is None or self.total_bytes > 0

    def distance(self, other: int) -> int:
        """Firmware distance to another node; 20 where none can be read."""
        return self.distances.get(other, LOCAL_DISTANCE if other == self.number else UNKNOWN_DISTANCE)


@dataclass(frozen=True)
class Host:
    """NUMA nodes, the CPUs and memory nodes that this process may use, and the hyper-threads of each core."""

    nodes: tuple[HostNode, ...]
    cpus_allowed: tuple[int, ...]
    mems_allowed: tuple[int, ...] | None  # None: not readable, so every node counts as allowed
    siblings: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def node(self, number: int) -> HostNode | None:
        """The node with this number."""
        return next((node for node in self.nodes if node.number == number), None)

    def usable_cpus(self, node: HostNode) -> tuple[int, ...]:
        """CPUs of a node that this process may run on."""
        return tuple(cpu for cpu in node.cpus if cpu in self.cpus_allowed)

    def may_allocate(self, node: HostNode) -> bool:
        """Whether the node has memory and the cpuset allows it."""
        return node.has_memory and (self.mems_allowed is None or node.number in self.mems_allowed)


def read_host(sysfs: Sysfs, *, process: Sysfs | None = None) -> Host:
    """The host of `sysfs`; limits are those of this process, or of `/proc/self/status` of `process` where given.

    A kernel without NUMA files is one node 0 with every allowed CPU.
    """
    allowed, mems, notes = _limits(process)
    nodes, told = read_nodes(sysfs)
    if not nodes:
        nodes = (HostNode(0, allowed, None),)
    return Host(nodes, allowed, mems, siblings_of(sysfs, allowed), (*notes, *told))


def read_nodes(sysfs: Sysfs) -> tuple[tuple[HostNode, ...], tuple[str, ...]]:
    """NUMA nodes in number order, and a sentence for each file that could not be read."""
    notes: list[str] = []
    try:
        numbers = sorted(int(name[4:]) for name in sysfs.names(NODES) if re.fullmatch(r"node[0-9]{1,5}", name))
    except OSError as error:
        return (), (f"{NODES}: {errno_name(error.errno)}; the host is taken as one node",)
    nodes = []
    for number in numbers:
        home = f"{NODES}/node{number}"
        cpus = _list(sysfs, f"{home}/cpulist", notes)
        nodes.append(HostNode(number, cpus, _total_bytes(sysfs, home, notes), _distances(sysfs, home, numbers, notes)))
    return tuple(nodes), tuple(notes)


def status_lists(text: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(Cpus_allowed_list, Mems_allowed_list) of a `/proc/<pid>/status` text; None where a line is missing."""
    found: list[tuple[int, ...] | None] = []
    for name in ("Cpus_allowed_list", "Mems_allowed_list"):
        match = re.search(rf"^{name}:\s*([0-9,-]*)\s*$", text, re.MULTILINE)
        try:
            found.append(numberlist.parse(match[1]) if match else None)
        except ValueError:
            found.append(None)
    return found[0], found[1]


def cpu_quota(sysfs: Sysfs) -> tuple[float | None, str]:
    """CPUs' worth of time that the cgroup grants, and where that was read or why there is no figure.

    A quota is not an affinity: 64 CPUs may be allowed and two be granted (cpython issue 149452). The smallest quota
    between this process's cgroup and the root counts; `cpu.max` of version 2, `cpu.cfs_*` of version 1.
    """
    lines = (sysfs.read_or_none("/proc/self/cgroup") or "0::/").splitlines()
    found: list[tuple[float, str]] = []
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3 or (parts[1] and "cpu" not in parts[1].split(",")):
            continue
        base = "/sys/fs/cgroup" if not parts[1] else "/sys/fs/cgroup/cpu"
        pieces = [piece for piece in parts[2].split("/") if piece and piece != ".."]
        for depth in range(len(pieces), -1, -1):
            found += _quota_of(sysfs, "/".join([base, *pieces[:depth]]), version=1 if parts[1] else 2)
    return min(found) if found else (None, "no cgroup of this process sets a CPU quota")


def _quota_of(sysfs: Sysfs, folder: str, version: int) -> list[tuple[float, str]]:
    if version == 2:
        words = (sysfs.read_or_none(f"{folder}/cpu.max") or "").split()
        name = f"{folder}/cpu.max"
    else:
        name = f"{folder}/cpu.cfs_quota_us"
        words = f"{sysfs.read_or_none(name) or ''} {sysfs.read_or_none(f'{folder}/cpu.cfs_period_us') or ''}".split()
    try:
        quota, period = int(words[0]), int(words[1])
    except (IndexError, ValueError):
        return []  # `max`, or no such file
    return [(quota / period, name)] if quota > 0 and period > 0 else []


def _limits(process: Sysfs | None) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[str, ...]]:
    text = (process or Sysfs("/")).read_or_none("/proc/self/status") or ""
    cpus, mems = status_lists(text)
    if process is None or cpus is None:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
    return cpus, mems, () if mems is not None else ("/proc/self/status names no Mems_allowed_list",)


def _list(sysfs: Sysfs, path: str, notes: list[str]) -> tuple[int, ...]:
    try:
        return numberlist.parse(sysfs.read(path))
    except OSError as error:
        notes.append(f"{path}: {errno_name(error.errno)}")
    except ValueError as error:
        notes.append(f"{path}: {error}")
    return ()


def _total_bytes(sysfs: Sysfs, home: str, notes: list[str]) -> int | None:
    text = sysfs.read_or_none(f"{home}/meminfo")
    match = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", text or "")
    if match is None:
        notes.append(f"{home}/meminfo: " + ("not readable" if text is None else "names no MemTotal"))
        return None
    return int(match[1]) * 1024


def _distances(sysfs: Sysfs, home: str, numbers: list[int], notes: list[str]) -> dict[int, int]:
    words = (sysfs.read_or_none(f"{home}/distance") or "").split()
    if len(words) != len(numbers) or not all(re.fullmatch("[0-9]{1,5}", word) for word in words):
        notes.append(f"{home}/distance: not one figure a node; the order of numbers decides")
        return {}
    return dict(zip(numbers, map(int, words), strict=True))


def siblings_of(sysfs: Sysfs, cpus: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The hyper-threads of each CPU's core, itself included."""
    found: dict[int, tuple[int, ...]] = {}
    for cpu in cpus:
        if cpu in found:
            continue
        text = sysfs.read_or_none(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")
        try:
            group = numberlist.parse(text or str(cpu))
        except ValueError:
            group = (cpu,)
        found.update(dict.fromkeys(group or (cpu,), group or (cpu,)))
        found.setdefault(cpu, (cpu,))
    return found
