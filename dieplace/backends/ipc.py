"""Export and import of plain allocations between processes, with a count for each import of this process.

A handle is opened once however often it is imported: a second view closing it pulled the memory from under the first
(mscclpp PR 819). Ranges (VMM) are refused before any call: HIP accepts some and cannot open them (ROCm/clr issue 265).
Every plain allocation is whole 2 MiB objects, since other sizes fail to export on some builds (hip issue 2257).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dieplace.backends.accounting import Accounted
from dieplace.backends.base import Allocation
from dieplace.backends.held import Held
from dieplace.backends.homes import Piece
from dieplace.errors import Unsupported

if TYPE_CHECKING:
    from dieplace.backends.device_memory import DeviceMemory
    from dieplace.machine import Device
    from dieplace.sharing import Exported

IMPORTED = Accounted({}, True, "import", "imported: the exporting process can account for it")


def export_handle(memory: DeviceMemory, allocation: Allocation) -> bytes:
    """The driver's handle of a plain allocation; Unsupported for a range or for an import."""
    held: Held = allocation.token
    if held.range is not None:
        raise Unsupported(
            "memory that can change its home (VMM) cannot be exported",
            hint="allocate it in the device's own domain, without movable=True",
        )
    if held.import_handle is not None:
        raise Unsupported("an imported buffer cannot be exported again", hint="export it where it was allocated")
    with memory.lifetimes.locked():
        return memory.runtime.ipc_export(held.home, held.address)


def import_handle(memory: DeviceMemory, exported: Exported, device: Device) -> Held:
    """The import of a handle, shared with an earlier import of the same handle."""
    executing = memory.homes.index(device)
    home = memory.homes.device_for(exported.domain, device)
    pieces = [Piece(exported.nbytes, home, exported.domain)]
    with memory.lifetimes.locked():
        for held in memory.lifetimes.live():
            if held.import_handle == exported.handle and held.executing == executing:
                held.users += 1
                return held
        memory.reach(executing, pieces, enable=True)
        address = memory.runtime.ipc_open(executing, exported.handle)
        kind = "uncached" if exported.memory_class == "uncached" else "plain"
        held = Held(address, exported.nbytes, kind, executing, home, pieces, IMPORTED, "", "", ())
        held.role, held.device, held.pattern = exported.role, device.id, (exported.domain,)
        held.import_handle = exported.handle
        held.owner = memory.runtime.owner(address)
        memory.lifetimes.keep(held)
        return held
