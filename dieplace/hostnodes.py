"""CPU NUMA nodes of the host as domains, from `/sys/devices/system/node`."""

from __future__ import annotations

import re

from dieplace.machine import Domain
from dieplace.sysfs import Sysfs, errno_name

NODES = "/sys/devices/system/node"


def host_domains(sysfs: Sysfs) -> tuple[Domain, ...]:
    """One `host/nodeK` a CPU node, in number order; empty where the tree has none."""
    try:
        numbers = sorted(int(name[4:]) for name in sysfs.names(NODES) if re.fullmatch(r"node[0-9]{1,5}", name))
    except OSError:
        return ()
    return tuple(_domain(sysfs, number) for number in numbers)


def _domain(sysfs: Sysfs, number: int) -> Domain:
    name = f"host/node{number}"
    try:
        text = sysfs.read(f"{NODES}/node{number}/meminfo")
    except OSError as error:
        return Domain(name, None, (), None, number, (), {"total_bytes": f"meminfo: {errno_name(error.errno)}"})
    match = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", text)
    if match is None:
        return Domain(name, None, (), None, number, (), {"total_bytes": "meminfo names no MemTotal"})
    return Domain(name, None, (), int(match[1]) * 1024, number)
