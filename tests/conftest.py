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

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 4 << 30  # Docker gives a container 64 MiB unless told otherwise


def _memory_holds_the_tests() -> bool:
    """Whether the file system in memory is large enough, and programs and libraries in it may be run."""
    if not os.access(_MEMORY, os.W_OK | os.X_OK):
        return False
    seen = os.statvfs(_MEMORY)
    return seen.f_bavail * seen.f_frsize >= _ENOUGH_BYTES and not seen.f_flag & os.ST_NOEXEC


# An emulated node of 64 devices is 6,000 small files: made in 0.2 s of CPU in memory, in 4 s on an ext4 disk.
if not {"PYTEST_DEBUG_TEMPROOT", "TMPDIR"} & set(os.environ) and _memory_holds_the_tests():
    os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)


@pytest.fixture
def memory_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder in memory where there is one: emulated nodes write hundreds of small files an event."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("node")
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="dieplace-test-") as folder:
        yield Path(folder)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A temporary folder that is not in memory, for tests that mount over `/dev` and so over `/dev/shm`."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="dieplace-test-") as folder:
        yield Path(folder)


# Tensors here are small; several threads each only get in one another's way on a busy machine. Read when torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
