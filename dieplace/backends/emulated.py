"""The emulated node: the same AMD discovery and control over a tree of files, with its own memory and execution.

Used only when named. The tree persists between commands in the XDG state folder, or in the folder that `node` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.availability import Availability
from dieplace.errors import DieplaceError
from dieplace.sysfs import Sysfs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dieplace.emulator.emulated_execution import EmulatedExecution
    from dieplace.emulator.execution import LaunchRecord
    from dieplace.emulator.memory import EmulatedMemory
    from dieplace.emulator.node import Node


class EmulatedBackend(AmdBackend):
    """An emulated node; `node` is its folder or an open Node, made on first use where it is not there yet."""

    name = "emulated"
    groups = frozenset({"always", "partitioning", "memory", "execution"})
    source = "emulated"

    def __init__(self, node: str | Path | Node | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self._wanted = node
        self._opened: tuple[Node, Sysfs] | None = None
        self._memory: EmulatedMemory | None = None
        self._memory_stamp: tuple[str | None, str | None] = (None, None)
        super().__init__(environ=environ)

    @property
    def node(self) -> Node:
        """The emulated node itself; opening it makes it where it is not there yet."""
        return self._open()[0]

    @property
    def sysfs(self) -> Sysfs:
        """The node's files, as the emulated driver shows them to its virtual user."""
        return self._open()[1]

    def probe(self) -> Availability:
        """Yes, for the node is made of files, unless its folder is something else; nothing is made yet."""
        from dieplace.emulator.node import default_directory, open_node

        wanted = self._wanted
        if wanted is not None and not isinstance(wanted, (str, Path)):
            return Availability(True, f"an emulated node in {wanted.directory}")
        folder = Path(wanted) if wanted is not None else default_directory()
        try:
            if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
                return Availability(True, f"an emulated node, made in {folder} when it is first used")
            open_node(folder)
        except DieplaceError as error:
            return Availability(False, error.message, error.hint)
        except OSError as error:
            return Availability(False, f"{folder}: {error.strerror}", "name another folder with --node")
        return Availability(True, f"an emulated node in {folder}")

    def _emulated_folder(self) -> Path | None:
        return self.node.directory

    def _open(self) -> tuple[Node, Sysfs]:
        if self._opened is None:
            from dieplace.emulator.node import open_or_create

            wanted = self._wanted
            node = open_or_create(wanted) if wanted is None or isinstance(wanted, (str, Path)) else wanted
            self._opened = (node, node.sysfs())
        return self._opened

    @property
    def memory(self) -> EmulatedMemory:
        """The emulated HBM of the node as it is now; a mode change starts it afresh, as it ends every process."""
        if self._memory is None or self._memory_stamp != self.stamp():
            from dieplace.emulator.memory import EmulatedMemory

            self._memory, self._memory_stamp = EmulatedMemory(self.snapshot()), self.stamp()
        return self._memory

    @property
    def execution(self) -> EmulatedExecution:
        """Launches on the emulated card as it is now; times are the clock's."""
        from dieplace.emulator.emulated_execution import EmulatedExecution

        return EmulatedExecution(self.memory.hbm)

    def concurrent(self, *, seed: int | None = None) -> AbstractContextManager[list[LaunchRecord]]:
        """Launches made inside run together when the block ends; see `dieplace.emulator.execution.concurrent`."""
        from dieplace.emulator.execution import concurrent

        return concurrent(seed=seed)

    def partition_control(self, rocm_path: str | None = None) -> Any:
        """The AMD control over the emulated driver."""
        from dieplace.backends.amd.control_emulated import emulated_control

        return emulated_control(self.node, rocm_path=rocm_path)
