"""AMD Instinct: discovery from sysfs and KFD; partitioning and memory are in the modules beside this one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.backends.amd import topology
from dieplace.backends.amd.cards import drm_cards
from dieplace.backends.amd.kfd import read_topology
from dieplace.backends.availability import Availability
from dieplace.record_folder import anything_on_record
from dieplace.sysfs import Sysfs

if TYPE_CHECKING:
    from dieplace.backends.base import Holders
    from dieplace.backends.device_memory import DeviceMemory
    from dieplace.machine import Card, Machine
    from dieplace.modes import Mode


class AmdBackend:
    """The live node, or a tree under `root` (then its machine is `replayed` and cannot be acted on).

    `sysfs` injects all reads; `environ` is where the visibility variables are looked up. `hip_library` is a
    libamdhip64 to use instead of the one that this process or torch brings.
    """

    name = "amd"
    groups = frozenset({"always", "partitioning", "memory", "execution"})
    source = "live"

    def __init__(
        self,
        *,
        root: str | Path = "/",
        sysfs: Sysfs | None = None,
        environ: Mapping[str, str] | None = None,
        hip_library: str | None = None,
    ) -> None:
        self._hip_library = hip_library
        self._device_memory: tuple[tuple[str | None, str | None], DeviceMemory] | None = None
        self._sysfs = sysfs if sysfs is not None else Sysfs(root)
        self.environ = os.environ if environ is None else environ
        if type(self) is AmdBackend and self._sysfs.root != Path("/"):
            self.source = "replayed"

    @property
    def sysfs(self) -> Sysfs:
        """Where all reads of /sys, /proc and /dev go."""
        return self._sysfs

    def probe(self) -> Availability:
        """Yes when KFD lists a GPU, or the driver shows a card that can be partitioned."""
        if not self.sysfs.exists("/sys/class/kfd/kfd/topology/nodes"):
            loaded = self.sysfs.exists("/sys/module/amdgpu")
            if not (loaded and drm_cards(self.sysfs)):
                reason = "the amdgpu driver is loaded but has no KFD" if loaded else "the amdgpu driver is not loaded"
                return Availability(False, f"{reason} (no /sys/class/kfd)", "load it: modprobe amdgpu")
        kfd = read_topology(self.sysfs, links=False)
        cards = drm_cards(self.sysfs)
        if not kfd.gpus and not cards:
            why = f"; {kfd.notes[0]}" if kfd.notes else ""
            return Availability(False, f"KFD lists no GPU{why}", "is the card visible in lspci?")
        version = self.sysfs.read_or_none("/sys/module/amdgpu/version")
        return Availability(True, f"KFD lists {len(kfd.gpus)} GPUs", None, {"amdgpu": version} if version else {})

    def snapshot(self, *, links: bool = True) -> Machine:
        """The node now; `links=False` leaves the links out, which is quicker."""
        machine = topology.snapshot(
            self.sysfs,
            environ=self.environ,
            source=self.source,
            backend=self.name,
            session=None if self.source == "replayed" else self,
            links=links,
        )
        return machine if self.source == "replayed" else replace(machine, notes=(*machine.notes, *self._standing()))

    def _standing(self) -> tuple[str, ...]:
        """What earlier partition switches left behind, which every command must say."""
        if not anything_on_record(self._emulated_folder()):
            return ()
        from dieplace.partition import session_methods

        return session_methods.notes(self)

    def _emulated_folder(self) -> Path | None:
        return None

    def stamp(self) -> tuple[str | None, str | None]:
        """(boot id, KFD generation id)."""
        return topology.stamp(self.sysfs)

    def switching(self) -> str | None:
        """A sentence where a partition switch of this node is running now, else None."""
        if not anything_on_record(self._emulated_folder()):
            return None
        from dieplace.partition import session_methods

        return session_methods.switching(self)

    @property
    def memory(self) -> Any:
        """HIP memory of the machine as it is now, opened on first use; Unsupported where HIP cannot be opened."""
        stamp = self.stamp()
        if self._device_memory is None or self._device_memory[0] != stamp:
            from dieplace.backends.amd.memory import hip_memory

            made = hip_memory(self.snapshot(links=False), self.sysfs, library=self._hip_library)
            self._device_memory = (stamp, made)
        return self._device_memory[1]

    @property
    def execution(self) -> Any:
        """Launches and times through torch; Unsupported where torch is not built for ROCm or Triton is absent."""
        from dieplace.backends.torch_execution import TorchExecution

        return TorchExecution(self.name, lambda device: self.memory.homes.index(device))

    def partition_control(self, rocm_path: str | None = None) -> Any:
        """What carries out partition changes on this node."""
        from dieplace.backends.amd.control import live_control

        return live_control(self.sysfs, rocm_path=rocm_path)

    def modes(self, card: Card) -> tuple[Mode, ...]:
        """The modes that the driver offers for a card."""
        from dieplace.partition import session_methods

        return session_methods.modes(self, card)

    def mode(self, card: Card) -> Mode | None:
        """The card's mode now."""
        from dieplace.partition import session_methods

        return session_methods.mode(self, card)

    def set_mode(self, card: Card, mode: Mode) -> None:
        """Switch one card, verified."""
        from dieplace.partition import session_methods

        session_methods.set_mode(self, card, mode)

    def holders(self, card: Card | None = None) -> Holders:
        """Who keeps a card, or the node, busy."""
        from dieplace.partition import session_methods

        return session_methods.holders(self, card)
