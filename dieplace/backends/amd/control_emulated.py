"""Partition control of an emulated node: the same control, with the emulated driver behind the files.

AMD's library is never used here: it reads the host's own `/sys`, so it would act on a real card.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dieplace.backends.amd.control import AmdControl
from dieplace.errors import UsageError
from dieplace.partition.control import Answer, Clock, Tick, silent
from dieplace.partition.store import Store, emulated_directory
from dieplace.sysfs import errno_name

if TYPE_CHECKING:
    from dieplace.emulator.node import Node


class NodeReloader:
    """Unload and load events of the emulated driver. It has no units, and says so."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def unload(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        """The driver's unload: EAGAIN is "in use", an injected ETIMEDOUT a sleep that does not end."""
        return self._event("unload", tick)

    def load(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        """The driver's load."""
        return self._event("load", tick)

    def _event(self, name: str, tick: Tick) -> Answer:
        self.node.on_delay = lambda elapsed_s: tick(elapsed_s, f"emulated {name}")
        try:
            getattr(self.node, name)()
        except OSError as error:
            meaning = {errno.EAGAIN: "busy", errno.EBUSY: "busy", errno.ETIMEDOUT: "hung"}.get(
                error.errno or 0, "unknown"
            )
            return Answer(meaning, f"emulated {name}", error.strerror or "", error.errno, errno_name(error.errno))
        return Answer("ok", f"emulated {name}")

    def unit_active(self, unit: str) -> bool | None:
        """Units do not exist on an emulated node."""
        return None

    def stop_unit(self, unit: str) -> Answer:
        """Never reached through a plan, which refuses units where there is no systemd."""
        return Answer("refused", "emulated node", "it has no systemd units")

    def start_unit(self, unit: str) -> Answer:
        """See `stop_unit`."""
        return Answer("refused", "emulated node", "it has no systemd units")


def emulated_control(node: Node, *, rocm_path: str | None = None, clock: Clock | None = None) -> AmdControl:
    """Control of an emulated node, as its virtual user."""
    if rocm_path is not None:
        raise UsageError("an emulated node has no ROCm", hint="leave --rocm-path out")
    return AmdControl(
        node.sysfs(),
        source="emulated",
        reloader=NodeReloader(node),
        clock=clock,
        uid=node.uid,
        store=Store(emulated_directory(node.directory)),
        road_name="the emulated driver's sysfs",
    )
