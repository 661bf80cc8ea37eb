"""The host alone: its NUMA nodes as domains. Used only when named; there is no accelerator and no logical device.

Memory is bound to a node before its first touch and located by asking the kernel for each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.backends.availability import Availability
from dieplace.errors import PlacementError, UsageError
from dieplace.hostnodes import host_domains
from dieplace.machine import Device, Domain, Machine
from dieplace.sysfs import Sysfs

if TYPE_CHECKING:
    from dieplace.backends.base import Allocation, Location


class CpuBackend:
    """Host NUMA nodes read from `/sys/devices/system/node` under `root`."""

    name = "cpu"
    groups = frozenset({"always", "memory"})

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

    @property
    def memory(self) -> CpuBackend:
        """The memory group: host buffers need no state beyond themselves."""
        return self

    def allocate(
        self, domain: Domain, nbytes: int, memory_class: str = "host", *, device: Device | None = None
    ) -> Allocation:
        """Host memory on one node; UsageError for another memory class, Unsupported where the node cannot be had."""
        from dieplace.backends.base import Allocation
        from dieplace.hostmemory import host_buffer

        if memory_class != "host":
            raise UsageError(f"host memory has no class {memory_class!r}", hint="its class is host")
        buffer = host_buffer(domain, nbytes, pinned=False)
        return Allocation(buffer.address, nbytes, domain.id, "host", buffer)

    def free(self, allocation: Allocation) -> None:
        """Give host memory back; a second time does nothing."""
        allocation.token.close()

    def locate(self, allocations: Sequence[Allocation]) -> Location:
        """Bytes per `host/nodeK`, asked of the kernel page by page."""
        from dieplace.backends.base import Location
        from dieplace.pages import range_pages

        found: dict[str, int] = {}
        absent = 0
        for allocation in allocations:
            count = range_pages(allocation.address, allocation.nbytes)
            absent += count.absent_bytes
            if count.unknown_bytes:
                raise PlacementError(f"the kernel does not say where {count.unknown_bytes:,} bytes are")
            for node, nbytes in count.bytes_by_node.items():
                found[f"host/node{node}"] = found.get(f"host/node{node}", 0) + nbytes
        note = f"{absent:,} bytes have no page yet" if absent else ""
        return Location(found, "accounted", note)
