"""Tests see the installed package only: the checkout leaves the path.

`python -m pytest` puts the checkout first on the path, where its folder `kernels/` looks to `transformers` like the
Hugging Face package of that name, so that its import fails.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != _CHECKOUT]


@pytest.fixture
def memory_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder in memory where there is one: emulated nodes write hundreds of small files an event."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("node")
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield Path(folder)


# Tensors here are small; several threads each only get in one another's way on a busy machine. Read when torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
