"""Host pages and buffers against the kernel's own accounts: smaps, VmLck, numa_maps, move_pages."""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.backends.base import require
from dieplace.backends.cpu import CpuBackend
from dieplace.binding import mempolicy
from dieplace.errors import NotAllowed, Unsupported, UsageError
from dieplace.hostmemory import HostBuffer, host_buffer
from dieplace.machine import Domain
from dieplace.pages import process_pages, range_pages, total
from dieplace.sysfs import Sysfs

# Lines in the form of Documentation/filesystems/proc.rst and of a two-socket host with huge pages.
NUMA_MAPS = """\
00400000 default file=/usr/local/bin/app mapped=1 active=0 N3=1 kernelpagesize_kB=4
3206000000 default file=/lib64/ld-2.12.so mapped=26 mapmax=6 N0=24 N3=2 kernelpagesize_kB=4
7f1200000000 bind:1 huge anon=12 dirty=12 N1=12 kernelpagesize_kB=2048
7f3400000000 prefer=relative:0 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4
7fff00000000 default stack anon=5 dirty=5 N0=5 kernelpagesize_kB=4
garbage
"""


def test_numa_maps_of_a_two_socket_host(tmp_path: Path) -> None:
    (tmp_path / "proc/77").mkdir(parents=True)
    (tmp_path / "proc/77/numa_maps").write_text(NUMA_MAPS)
    mappings = process_pages(77, Sysfs(tmp_path))
    assert [(m.what, m.policy) for m in mappings] == [
        ("/usr/local/bin/app", "default"), ("/lib64/ld-2.12.so", "default"), ("huge", "bind:1"),
        ("anonymous", "prefer=relative:0"), ("stack", "default"),
    ]  # fmt: skip
    assert total(mappings).bytes_by_node == {0: 30 * 4096, 1: 12 * 2 * 2**20 + 2 * 4096, 3: 3 * 4096}
    assert total(mappings).outside(1, 3) == 30 * 4096


def test_a_process_adds_up_to_its_resident_set() -> None:
    """smaps_rollup counts the same pages in another way; the process moves a little between the two reads."""
    try:
        found = total(process_pages()).total_bytes
    except Unsupported:
        pytest.skip("this kernel has no numa_maps")
    match = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match is not None
    resident = int(match[1]) * 1024
    assert 0.9 * resident < found < 1.1 * resident


def test_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert total(process_pages(child.pid)).total_bytes > 1 << 20
        child.kill()
    with pytest.raises(Unsupported):
        process_pages(child.pid)


def test_errors_are_typed(tmp_path: Path) -> None:
    with pytest.raises(NotAllowed):
        process_pages(1, Sysfs(tmp_path, faults={"/proc/1/numa_maps": 13}))
    with pytest.raises(UsageError):
        range_pages(0, 0)
    with pytest.raises(UsageError):
        HostBuffer(0, None)
    with pytest.raises(Unsupported):
        HostBuffer(1 << 62, None)


def test_untouched_memory_has_no_page() -> None:
    import ctypes

    size = 64 * mmap.PAGESIZE
    with mmap.mmap(-1, size) as memory:
        whole = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(whole)
        memory[: 16 * mmap.PAGESIZE] = b"x" * 16 * mmap.PAGESIZE
        count = range_pages(address, size)
        assert (count.total_bytes, count.absent_bytes) == (16 * mmap.PAGESIZE, 48 * mmap.PAGESIZE)
        del whole


def test_a_pinned_buffer_is_locked_and_placed() -> None:
    before = _locked_kib()
    with host_buffer(0, 1 << 20) as buffer:
        assert buffer.pages().total_bytes == 1 << 20 and buffer.pages().absent_bytes == 0
        if buffer.locked:
            assert _locked_kib() - before == 1024  # VmLck, the kernel's count
        else:
            assert any("mlock" in note for note in buffer.notes)
        buffer.view()[:5] = b"hello"
        assert bytes(buffer.view()[:5]) == b"hello"
    assert _locked_kib() == before
    buffer.close()


def _locked_kib() -> int:
    match = re.search(r"^VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def test_binding_comes_before_the_first_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two nodes shown, mbind is called for the whole range while no page of it exists yet."""
    seen: list[tuple[int, int]] = []

    def record(address: int, nbytes: int, word: str, nodes: tuple[int, ...]) -> None:
        assert (word, nodes) == ("membind", (0,))
        seen.append((range_pages(address, nbytes).absent_bytes, nbytes))

    monkeypatch.setattr(mempolicy, "bind_range", record)
    HostBuffer(5 * mmap.PAGESIZE - 1, 0, pinned=False).close()
    assert seen == [(5 * mmap.PAGESIZE, 5 * mmap.PAGESIZE)]

    def refuse(*_: object) -> None:
        raise OSError(1, os.strerror(1))

    monkeypatch.setattr(mempolicy, "bind_range", refuse)
    with pytest.raises(NotAllowed, match="mbind"):
        HostBuffer(4096, 0)


def test_the_backends_memory_group() -> None:
    backend = CpuBackend()
    assert require(backend, "memory") is backend
    domain = backend.snapshot().domains[0]
    allocations = [backend.allocate(domain, size) for size in (1, 1 << 16, 3 * mmap.PAGESIZE + 1)]
    location = backend.locate(allocations)
    assert location.evidence == "accounted"
    assert location.bytes_by_domain == {domain.id: mmap.PAGESIZE + (1 << 16) + 4 * mmap.PAGESIZE}
    for allocation in allocations:
        backend.free(allocation)
        backend.free(allocation)
    with pytest.raises(UsageError):
        backend.allocate(domain, 1, "coarse")
    with pytest.raises(Unsupported, match="node 99"):
        backend.allocate(Domain("host/node99", None, (), None, 99), 1)
    with pytest.raises(UsageError, match="no host memory"):
        backend.allocate(Domain("gpu0/mem0", "gpu0", (0,), 1), 1)


def test_a_tensor_over_the_buffer() -> None:
    torch = pytest.importorskip("torch")
    with host_buffer(0, 4096, pinned=False) as buffer:
        tensor = buffer.tensor(torch.float32)
        tensor.fill_(1.5)
        assert tensor.shape == (1024,) and tensor.data_ptr() == buffer.address
        assert bytes(buffer.view()[:4]) == b"\x00\x00\xc0\x3f"
        del tensor
