"""An emulated node in DPX/NPS2 for a module of tests, in memory where there is any: its files are many and small."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.machine import Machine


@contextmanager
def dpx_machine(cards: int = 1) -> Iterator[Machine]:
    """The machine with a session that allocates and launches; the node is gone afterwards."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield EmulatedBackend(create(Path(folder) / "n", cards=cards, mode="DPX/NPS2"), environ={}).snapshot()
