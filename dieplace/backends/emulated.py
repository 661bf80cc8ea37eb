"""The emulated node: the same AMD discovery and control over a tree of files, with its own memory and execution.

Used only when named. The tree persists between commands in the XDG state folder, or in the folder that `node` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.base import Availability

if TYPE_CHECKING:
    from dieplace.emulator.memory import EmulatedMemory
    from dieplace.emulator.node import Node

_MEMORY_METHODS = frozenset(
    ("allocate", "free", "free_later", "move", "locate", "find", "request", "tensor", "placing", "bytes_by_die")
)


class EmulatedBackend(AmdBackend):
    """An emulated node; `node` is its folder or an open Node, made on first use where it is not there yet."""

    name = "emulated"
    groups = frozenset({"always", "partitioning", "memory"})
    source = "emulated"

    def __init__(self, node: str | Path | Node | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        from dieplace.emulator.node import open_or_create

        opened: Any = open_or_create(node) if node is None or isinstance(node, (str, Path)) else node
        self.node: Node = opened
        self._memory: EmulatedMemory | None = None
        self._memory_stamp: tuple[str | None, str | None] = (None, None)
        super().__init__(sysfs=opened.sysfs(), environ=environ)

    def probe(self) -> Availability:
        """Always yes: the node is made of files, and an empty one (driver unloaded) is still a node."""
        return Availability(True, f"an emulated node in {self.node.directory}")

    @property
    def memory(self) -> EmulatedMemory:
        """The emulated HBM of the node as it is now; a mode change starts it afresh, as it ends every process."""
        if self._memory is None or self._memory_stamp != self.stamp():
            from dieplace.emulator.memory import EmulatedMemory

            self._memory, self._memory_stamp = EmulatedMemory(self.snapshot()), self.stamp()
        return self._memory

    def __getattr__(self, name: str) -> Any:
        # The memory group of the seam, all of it, is the emulated HBM's.
        if name in _MEMORY_METHODS:
            return getattr(self.memory, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def partition_control(self, rocm_path: str | None = None) -> Any:
        """The AMD control over the emulated driver."""
        from dieplace.backends.amd.control_emulated import emulated_control

        return emulated_control(self.node, rocm_path=rocm_path)
