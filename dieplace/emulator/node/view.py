"""The tree as a process on the node would see it: errors that plain files cannot give, and writes that act.

Plain files give no EPERM while a card is in reset and no EACCES to a virtual user, so this Sysfs adds them; a write
to a mode file, by whatever path leads there, becomes the driver's event.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.sysfs import Sysfs

from .driver import starting
from .entries import RENDER_BASE, SLOTS_PER_CARD, driven_cards, kfd_gpu_nodes, live_partitions, minor
from .state import NodeState

if TYPE_CHECKING:
    from .node import Node

MODE_FILES = ("current_compute_partition", "current_memory_partition")
EVENTS = {
    "current_compute_partition": "write_compute",
    "current_memory_partition": "write_memory",
    "compute_partition_config/xcp_config": "write_config",
    "compute_partition_mem_alloc_mode": "write_alloc_mode",
}
_BDF_FILE = re.compile(r"/([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/(.+)$")
_KFD_NODE = re.compile(r"/kfd/topology/nodes/(\d+)/.")
_PROC = re.compile(r"^/proc/(\d+)(/|$)")


class NodeSysfs(Sysfs):
    """Reads with the errors of a real node; `uid` 0 is root, `hidden_cards` are outside the viewer's device cgroup."""

    def __init__(
        self,
        node: Node,
        *,
        uid: int | None = None,
        hidden_cards: tuple[int, ...] = (),
        faults: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(node.directory, faults=faults)
        self.node = node
        self._uid = uid
        self.hidden_cards = hidden_cards

    @property
    def uid(self) -> int:
        """The virtual user: the one given, else the node's own."""
        return self.node.state.uid if self._uid is None else self._uid

    def exists(self, name: str) -> bool:
        """Whether the path can be seen; neither a reset nor missing read permission hides a file."""
        self.node.refresh()
        try:
            super()._check(name)
            self._may_pass(name)
            return self.path(name).exists()
        except OSError:
            return False

    def write(self, name: str, text: str) -> None:
        """Write a value; on a mode file this is the driver's event, with the errno the driver gives."""
        super()._check(name)
        self.node.refresh()
        self._may_open(name, want=os.W_OK)
        found = self._card_file(name)
        event = EVENTS.get(found.group(2)) if found else None
        if found is None or event is None:
            super().write(name, text)
        else:
            self.node.fire(event, found.group(1), text, path=name)

    def openable(self, name: str) -> None:
        """Raise the OSError that opening a device node read-write would give; open nothing."""
        super()._check(name)
        self.node.refresh()
        self._may_open(name, want=os.R_OK)
        self._may_open(name, want=os.W_OK)
        _check_render_node(self.node, name, self.hidden_cards)

    def _check(self, name: str) -> None:
        super()._check(name)
        self.node.refresh()
        state = self.node.state
        for fault in state.faults:
            if fault.step == "read" and fault.error is not None and fnmatchcase(name, fault.path or ""):
                self.node.take_fault("read")
                raise _failure(fault.error, name)
        if self.uid != 0:  # root reads whatever there is
            self._may_open(name, want=os.R_OK)
        if name.endswith(MODE_FILES):
            self._check_card(state, name)
        node = _KFD_NODE.search(name) if self.hidden_cards else None
        if node and _kfd_card(state, int(node.group(1))) in self.hidden_cards:
            raise _failure(errno.EPERM, name)

    def _check_card(self, state: NodeState, name: str) -> None:
        found = self._card_file(name)
        card = state.index(found.group(1)) if found else None
        if card is not None and (state.cards[card].in_reset or starting(state.cards[card], self.node.clock())):
            raise _failure(errno.EPERM, name)

    def _may_pass(self, name: str) -> None:
        if self.uid == 0:
            return
        parent = self.path(name).parent
        if parent.exists() and not self._bits(name, parent) & 1:
            raise _failure(errno.EACCES, name)

    def _may_open(self, name: str, want: int) -> None:
        self._may_pass(name)
        path = self.path(name)
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            if not path.exists():
                return  # only its text can be wanted; a read fails by itself
            path = path.resolve()
        bits = self._bits(name, path)
        if want == os.W_OK and not stat.S_IMODE(path.stat().st_mode) & 0o222:
            raise _failure(errno.EACCES, name)  # kernfs refuses even root where no write bit is set
        if self.uid != 0 and not bits & (2 if want == os.W_OK else 4):
            raise _failure(errno.EACCES, name)

    def _bits(self, name: str, path: Path) -> int:
        """The three permission bits that count for the virtual user; `/proc/<pid>` is its process's own."""
        mode = stat.S_IMODE(path.stat().st_mode)
        inside = _PROC.match(name)
        owner = 0
        if inside:
            owner = next((p.uid for p in self.node.state.processes if p.pid == int(inside.group(1))), 0)
        return mode >> 6 & 7 if owner == self.uid else mode & 7

    def _card_file(self, name: str) -> re.Match[str] | None:
        """The card's address and the file's name below it; links are followed where the path is not that plain."""
        found = _BDF_FILE.search(name)
        return found if found and found.group(2) in EVENTS else _BDF_FILE.search(os.path.realpath(self.path(name)))


def _kfd_card(state: NodeState, node: int) -> int | None:
    gpus = kfd_gpu_nodes(state)
    index = node - state.style.cpu_nodes
    return gpus[index][0] if 0 <= index < len(gpus) else None


def _check_render_node(node: Node, name: str, hidden_cards: tuple[int, ...]) -> None:
    state = node.state
    found = re.search(r"/renderD(\d+)$", name)
    slot = int(found.group(1)) - RENDER_BASE - state.style.other_render if found else -1
    if slot < 0:
        return
    for card in driven_cards(state)[slot // SLOTS_PER_CARD : slot // SLOTS_PER_CARD + 1]:
        if not state.shown(card):
            continue
        for p in range(SLOTS_PER_CARD):
            if found and minor(state, card, p).render == int(found.group(1)):
                if card in hidden_cards:
                    raise _failure(errno.EPERM, name)
                if p not in live_partitions(state, card):
                    node.note(f"renderD{found.group(1)} partition {p} not valid!")
                    raise _failure(errno.ENOENT, name)


def _failure(code: int, name: str) -> OSError:
    return OSError(code, os.strerror(code), name)
