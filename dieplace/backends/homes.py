"""Which runtime device stands for which domain, checked against what the runtime itself sees."""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.backends.runtime import Runtime
from dieplace.errors import PlacementError, StaleMachine
from dieplace.machine import Device, Domain, Machine
from dieplace.policy import OBJECT_BYTES


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one home: `device` is the runtime index that allocates there."""

    nbytes: int
    device: int
    domain: str


class Homes:
    """Domains and devices of a machine by runtime index; the predicted indices are checked by PCI address once."""

    def __init__(self, machine: Machine, runtime: Runtime) -> None:
        self._machine = machine
        self._runtime = runtime
        self._checked: set[int] = set()
        seen = [d for d in machine.devices if d.runtime_index is not None]
        self.domain_of = {int(d.runtime_index or 0): d.domain for d in seen if d.domain is not None}
        self.domain_of_node = {d.kfd_node: d.domain for d in machine.devices if d.kfd_node is not None}
        self.gpu_ids = {int(d.runtime_index or 0): d.gpu_id for d in seen if d.gpu_id is not None}

    def index(self, device: Device) -> int:
        """The runtime index of a device; PlacementError where this process does not see it."""
        if device.runtime_index is None:
            why = device.whys.get("runtime_index", "the visibility variables hide it")
            raise PlacementError(f"{device.id} is not visible to this process: {why}", hint="see: dieplace env")
        self._check(device, device.runtime_index)
        return device.runtime_index

    def device_for(self, domain: str, executing: Device) -> int:
        """The runtime index that allocates in a domain: the executing device's where the domain is its own."""
        if executing.domain == domain:
            return self.index(executing)
        owners = [d for d in self._machine.devices if d.domain == domain]
        for owner in owners:
            if owner.runtime_index is not None:
                return self.index(owner)
        names = ", ".join(d.id for d in owners)
        found = f"its devices ({names}) are hidden from this process" if owners else "no device allocates there"
        raise PlacementError(f"cannot place memory in {domain}: {found}", hint="see: dieplace env", domain=domain)

    def pieces(self, pattern: tuple[str, ...], nbytes: int, executing: Device) -> list[Piece]:
        """`nbytes` over a pattern that repeats by 2 MiB object, neighbours of one home joined."""
        devices = {domain: self.device_for(domain, executing) for domain in pattern}
        if len(devices) == 1:
            return [Piece(nbytes, devices[pattern[0]], pattern[0])]
        found: list[Piece] = []
        for index in range(-(-nbytes // OBJECT_BYTES)):
            domain, size = pattern[index % len(pattern)], min(OBJECT_BYTES, nbytes - index * OBJECT_BYTES)
            if found and found[-1].domain == domain:
                found[-1] = Piece(found[-1].nbytes + size, devices[domain], domain)
            else:
                found.append(Piece(size, devices[domain], domain))
        return found

    def host_domain(self) -> str:
        """The domain that host memory is told as."""
        hosts = [d.id for d in self._machine.domains if d.card is None]
        return hosts[0] if hosts else "host/node0"

    def domain(self, name: str) -> Domain:
        """The machine's domain of that name."""
        return self._machine.domain(name)

    def device(self, name: str) -> Device:
        """The machine's device of that name."""
        return self._machine.device(name)

    def _check(self, device: Device, index: int) -> None:
        if index in self._checked:
            return
        found = self._runtime.bus_id(index) if index < self._runtime.device_count() else "none"
        if found.rsplit(".", 1)[0] != device.bdf.lower().rsplit(".", 1)[0]:
            raise StaleMachine(
                f"{device.id} was expected as device {index} of the runtime at {device.bdf}; the runtime has {found}",
                hint="discover again in this process, with the visibility variables it was started with",
                outcome="stale",
            )
        self._checked.add(index)
