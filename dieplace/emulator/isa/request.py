"""What the interpreter hands to a memory port: one memory instruction of one wave group, active lanes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.isa.state import LANES

if TYPE_CHECKING:
    from dieplace.emulator.isa.group import Group
    from dieplace.emulator.isa.parse import Instruction
    from dieplace.emulator.isa.state import LaunchState

EMPTY = np.empty(0, np.int64)


class Request:
    """One memory instruction of one group; elements are the active lanes in (wave, lane) order.

    `address` is int64 [N] in bytes, `size` bytes per element. `waves`, `lanes`, `xcd`, `cu` and `workgroup` are int
    arrays [N] made when asked for. Scalar loads have one element a wave; waits and cache control have no address.
    """

    __slots__ = ("_lanes", "_waves", "address", "group", "inst", "scalar", "size")

    def __init__(
        self, group: Group, inst: Instruction, address: np.ndarray, size: int, scalar: bool = False, places: Any = None
    ) -> None:
        self.group, self.inst, self.address, self.size, self.scalar = group, inst, address, size, scalar
        self._waves: np.ndarray | None = None
        self._lanes: np.ndarray | None = None
        if places is not None:
            self._waves, self._lanes = group.waves[places[0]], places[1]

    @classmethod
    def of_waves(cls, group: Group, inst: Instruction) -> Request:
        """A request without addresses, one element for each wave."""
        return cls(group, inst, EMPTY, 0, scalar=True)

    @property
    def launch(self) -> LaunchState:
        """The launch whose waves ask."""
        return self.group.st

    @property
    def every_lane(self) -> bool:
        """Whether every lane of every wave of the group is an element."""
        return not self.scalar and self.group.full and len(self.address) == self.group.n * LANES

    @property
    def waves(self) -> np.ndarray:
        """Wave slot of each element."""
        if self._waves is None:
            if self.scalar:
                self._waves = self.group.waves
            elif self.group.full:
                self._waves = np.repeat(self.group.waves, LANES)
            else:
                self._waves = self.group.waves[self.group.active[0]]
        return self._waves

    @property
    def lanes(self) -> np.ndarray:
        """Lane of each element; 0 for scalar requests."""
        if self._lanes is None:
            if self.scalar:
                self._lanes = np.zeros(len(self.waves), np.int64)
            elif self.group.full:
                self._lanes = np.tile(np.arange(LANES), self.group.n)
            else:
                self._lanes = self.group.active[1]
        return self._lanes

    @property
    def xcd(self) -> np.ndarray:
        """Physical XCD of each element."""
        return self.launch.xcd[self.waves]

    @property
    def cu(self) -> np.ndarray:
        """CU within the XCD of each element."""
        return self.launch.cu[self.waves]

    @property
    def workgroup(self) -> np.ndarray:
        """Linear workgroup id of each element."""
        return self.launch.workgroup[self.waves]

    def place(self, element: int) -> dict[str, int]:
        """Workgroup, wave in it and lane of one element, for messages."""
        wave = int(self.waves[element])
        return {
            "workgroup": int(self.launch.workgroup[wave]),
            "wave": int(self.launch.wave_in_workgroup[wave]),
            "lane": int(self.lanes[element]),
        }
