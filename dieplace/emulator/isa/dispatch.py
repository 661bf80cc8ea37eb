"""Workgroups of one launch: which are resident, who waits at a barrier, who comes next.

Workgroup w goes to XCD w mod n of the device, as the hardware deals them; a workgroup waits in its XCD's queue until a
slot there is free.
"""

from __future__ import annotations

import numpy as np

from dieplace.emulator.isa.execute import GroupCache
from dieplace.emulator.isa.memory import MemoryPort
from dieplace.emulator.isa.residency import resident_workgroups
from dieplace.emulator.isa.state import Launch, LaunchState


class Dispatch:
    """Resident waves of one launch and the queues behind them."""

    def __init__(self, launch: Launch, index: int, memory: MemoryPort, share: float) -> None:
        slots = min(launch.workgroups, resident_workgroups(launch, share))
        self.launch = launch
        self.st = st = LaunchState(launch, index, slots, memory)
        self.groups = GroupCache(st)
        self.per = st.waves_per_workgroup
        self.live = np.zeros(slots, np.int64)
        self.arrived = np.zeros(slots, np.int64)
        self.waiting = np.full(st.waves, -1, np.int64)
        self.xcds = len(launch.device.xcds)
        self.next = list(range(self.xcds))
        self.left = launch.workgroups

    @property
    def finished(self) -> bool:
        """Every workgroup has ended."""
        return self.left == 0

    def fill(self, slots: np.ndarray) -> np.ndarray:
        """Start queued workgroups in free slots; returns the wave slots that begin."""
        taken, ids = [], []
        for position in range(self.xcds):
            free = slots[slots % self.xcds == position]
            queued = max(0, -(-(self.launch.workgroups - self.next[position]) // self.xcds))
            count = min(len(free), queued)
            taken.append(free[:count])
            ids.append(self.next[position] + self.xcds * np.arange(count))
            self.next[position] += self.xcds * count
        chosen, workgroups = np.concatenate(taken), np.concatenate(ids)
        if not len(chosen):
            return chosen
        order = np.argsort(chosen)
        chosen, workgroups = chosen[order], workgroups[order]
        self.live[chosen] = self.per
        self.arrived[chosen] = 0
        return self.st.start(chosen, workgroups)

    def end(self, waves: np.ndarray) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Waves end: returns newly started waves, and (block, waves) that a barrier lets go because of it."""
        slots = self.st.slot[waves]
        self.live -= np.bincount(slots, minlength=self.st.slots)
        touched = np.unique(slots)
        dead = touched[self.live[touched] == 0]
        self.left -= len(dead)
        begun = self.fill(dead) if len(dead) else dead
        alive = touched[(self.live[touched] > 0) & (self.arrived[touched] == self.live[touched])]
        return begun, self.release(alive)

    def arrive(self, waves: np.ndarray, block: int) -> list[tuple[int, np.ndarray]]:
        """Waves reach a barrier and would go on at `block`; returns the (block, waves) that it lets go."""
        self.waiting[waves] = block
        slots = self.st.slot[waves]
        self.arrived += np.bincount(slots, minlength=self.st.slots)
        touched = np.unique(slots)
        return self.release(touched[self.arrived[touched] == self.live[touched]])

    def release(self, slots: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Let the waves of complete barriers go on."""
        if not len(slots):
            return []
        self.arrived[slots] = 0
        waves = (slots[:, None] * self.per + np.arange(self.per)).reshape(-1)
        waves = waves[self.waiting[waves] >= 0]
        blocks = self.waiting[waves]
        self.waiting[waves] = -1
        return [(int(block), waves[blocks == block]) for block in np.unique(blocks)]

    def at_barrier(self) -> np.ndarray:
        """Wave slots that wait at a barrier."""
        return np.nonzero(self.waiting >= 0)[0]
