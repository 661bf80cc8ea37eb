"""The host alone: its NUMA nodes as domains. Used only when named; there is no accelerator and no logical device."""

from __future__ import annotations

from pathlib import Path

from dieplace.backends.base import Availability
from dieplace.hostnodes import host_domains
from dieplace.machine import Domain, Machine
from dieplace.sysfs import Sysfs


class CpuBackend:
    """Host NUMA nodes read from `/sys/devices/system/node` under `root`."""

    name = "cpu"
    groups = frozenset({"always"})

    def __init__(self, *, root: str | Path = "/", sysfs: Sysfs | None = None) -> None:
        self.sysfs = sysfs if sysfs is not None else Sysfs(root)

    def probe(self) -> Availability:
        """Always yes: every host has memory."""
        count = len(host_domains(self.sysfs))
        return Availability(True, f"{count} NUMA nodes" if count else "a host that shows no NUMA nodes")

    def snapshot(self, *, links: bool = True) -> Machine:
        """The host's domains; a kernel without NUMA files gives one `host/node0` with its size unknown."""
        domains = host_domains(self.sysfs)
        notes: tuple[str, ...] = ()
        if not domains:
            notes = ("the kernel shows no NUMA nodes: the host is taken as one",)
            domains = (Domain("host/node0", None, (), None, 0, (), {"total_bytes": "no NUMA files to read"}),)
        live = self.sysfs.root == Path("/")
        return Machine(
            source="live" if live else "replayed",
            backend=self.name,
            cards=(),
            devices=(),
            domains=domains,
            links=(),
            notes=notes,
            stamp=self.stamp(),
            host={"kernel": self.sysfs.read_or_none("/proc/sys/kernel/osrelease")},
            session=self if live else None,
        )

    def stamp(self) -> tuple[str | None, str | None]:
        """(boot id, None): the host has no KFD generation."""
        return (self.sysfs.read_or_none("/proc/sys/kernel/random/boot_id"), None)
