"""An emulated node of an experiment's own: temporary, in the mode that a block needs, and never the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dieplace.machine import Machine

PART = "MI355X"
MEMORY = "/dev/shm"
FIRST_MODE = "SPX/NPS1"  # what an MI355X starts in


@contextmanager
def private_node(mode: str, *, cards: int = 1) -> Iterator[Machine]:
    """A fresh node of one MI355X, switched to `mode` by the code that switches real ones; gone on leaving.

    Modes that AMD does not list as supported (DPX/NPS1) are allowed here: nothing real can be lost.
    """
    from dieplace.backends.emulated import EmulatedBackend
    from dieplace.emulator.node import create
    from dieplace.partition import apply, plan
    from dieplace.partition.store import emulated_directory

    # A node is hundreds of small files, written anew at each event: in memory where there is such a place.
    place = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="dieplace-node-", dir=place) as folder:
        where = Path(folder) / "node"
        try:
            machine = EmulatedBackend(create(where, part=PART, cards=cards, mode=FIRST_MODE)).snapshot()
            if mode != FIRST_MODE:
                machine = apply(plan(machine, mode, allow_unvalidated=True))
            yield machine
        finally:
            # The journal of a node that is gone is of no use to anybody.
            shutil.rmtree(emulated_directory(where), ignore_errors=True)
