"""Turns a logical device of a machine into what the interpreter runs on: physical XCDs, CUs, and the XCC_ID they read.

Partition k of a card holds XCDs k*n to k*n + n - 1, and XCDs 0-3 are on die 0 of an MI355X, as its driver numbers them;
on a node the XCDs of card c count from 8c and its dies from 2c.
Whether a partition's XCC_ID register reads physical or partition-relative ids is not documented, so it is a setting.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dieplace.emulator.isa import LogicalDevice
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.machine import Device

XCDS = 8  # of one card
DIES = 2
CUS_PER_XCD = 32  # active on MI355X (AMD CDNA 4 white paper)
_NAME = re.compile(r"gpu(\d+)(/p(\d+))?")


def logical_device(device: Device | LogicalDevice | str, *, physical_xcc_id: bool = False) -> LogicalDevice:
    """The emulated device for a machine's `Device`, or for a name: `gpu0` is a whole card, `gpu0/pK` half of one.

    UsageError for a name of another form; Device fields that are unknown take MI355X's values.
    """
    if isinstance(device, LogicalDevice):
        return device
    if isinstance(device, str):
        match = _NAME.fullmatch(device)
        if match is None:
            raise UsageError(
                f"no logical device {device!r}", hint="gpu0 for a whole card, gpu0/p0 or gpu0/p1 for a half"
            )
        card = int(match.group(1))
        if match.group(3) is None:
            return _part(device, card, 0, XCDS, CUS_PER_XCD, False)
        return _part(device, card, int(match.group(3)), XCDS // DIES, CUS_PER_XCD, physical_xcc_id)
    xccs = device.xccs or (XCDS if device.whole_card else XCDS // 2)
    cus = device.cus // xccs if device.cus else CUS_PER_XCD
    return _part(device.id, int(device.card.removeprefix("gpu")), device.partition, xccs, cus, physical_xcc_id)


def _part(name: str, card: int, partition: int, xccs: int, cus: int, physical: bool) -> LogicalDevice:
    first = partition * xccs
    if first + xccs > XCDS:
        raise UsageError(
            f"{name} would need XCDs {first} to {first + xccs - 1}, the card has {XCDS}",
            hint="pass the machine's device, which knows its XCDs",
        )
    xcds = tuple(range(card * XCDS + first, card * XCDS + first + xccs))
    return LogicalDevice(name, xcds, cus, first if physical else 0)
