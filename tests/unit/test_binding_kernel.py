"""The NUMA system calls against the kernel's own files, and what `/proc` shows after binding."""

import errno
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dieplace.binding import bind, mempolicy
from dieplace.binding.host import status_lists
from dieplace.binding.plan import Binding
from dieplace.errors import NotAllowed, Unsupported


def _child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _can_bind() -> bool:
    try:
        mempolicy.get_policy()
    except OSError:
        return False
    return True


needs_calls = pytest.mark.skipif(not _can_bind(), reason="this kernel or container has no NUMA calls")


@needs_calls
def test_a_policy_is_set_inherited_and_seen_in_numa_maps() -> None:
    """`/proc/self/numa_maps` prints the policy of each mapping: the kernel's own words for what was set."""
    for word, shown in (("membind", "bind:0"), ("interleave", "interleave:0"), ("preferred", "prefer")):
        seen = _child(f"""
import subprocess, sys
from dieplace.binding import mempolicy
mempolicy.set_policy({word!r}, (0,))
assert mempolicy.get_policy() == ({word!r}, (0,))
print(subprocess.run(["cat", "/proc/self/numa_maps"], capture_output=True, text=True).stdout)
mempolicy.set_default()
assert mempolicy.get_policy()[0] == "default"
""")
        assert f" {shown}" in seen and " default " not in seen.splitlines()[-3]


@needs_calls
def test_a_node_that_is_not_there_is_einval() -> None:
    with pytest.raises(OSError) as caught:
        mempolicy.set_policy("membind", (999,))
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError):
        mempolicy.set_policy("membind", (5000,))


@needs_calls
def test_pages_are_where_the_kernel_says() -> None:
    size = 16 * mmap.PAGESIZE
    with mmap.mmap(-1, size) as memory:
        address = bind_address(memory)
        assert mempolicy.page_status([address]) == [-errno.ENOENT]  # not touched yet
        memory[:size] = b"x" * size
        pages = [address + index * mmap.PAGESIZE for index in range(16)]
        assert mempolicy.page_status(pages) == [0] * 16  # node 0: the only one with memory here, or the first
        mempolicy.bind_range(address, size, "membind", (0,))
        assert mempolicy.page_status(pages) == [0] * 16


def bind_address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_cpus_are_read_back_from_proc() -> None:
    last = max(os.sched_getaffinity(0))
    seen = _child(f"""
from dieplace.binding.bind import carry_out
from dieplace.binding.plan import Binding
bound = carry_out(Binding(({last},)))
assert bound.cpus == ({last},) and not bound.failures, bound
print(open("/proc/self/status").read())
""")
    assert status_lists(seen)[0] == (last,)


def test_every_thread_is_bound() -> None:
    """psutil and sched_setaffinity(0) bind the calling thread only; a worker has others already."""
    seen = _child(f"""
import threading
from pathlib import Path
from dieplace.binding.bind import carry_out
from dieplace.binding.plan import Binding
go = threading.Event()
for _ in range(4): threading.Thread(target=go.wait, daemon=True).start()
bound = carry_out(Binding(({min(os.sched_getaffinity(0))},)), every_thread=True)
texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
lists = [line for text in texts for line in text.splitlines() if "Cpus_allowed_list" in line]
print(len(lists), len(set(lists)), bound.threads_missed)
""")
    assert seen == "5 1 ()"


@needs_calls
def test_threads_whose_memory_policy_was_not_set_are_named() -> None:
    seen = _child("""
import threading
from dieplace.binding.bind import carry_out
from dieplace.binding.plan import Binding
go = threading.Event()
thread = threading.Thread(target=go.wait, daemon=True); thread.start()
bound = carry_out(Binding(None, "preferred", (0,)), every_thread=True)
print(bound.threads_missed == (thread.native_id,), bound.policy, bound.nodes)
""")
    assert seen == "True preferred (0,)"


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EPERM, NotAllowed), (errno.EINVAL, Unsupported), (errno.ENOSYS, Unsupported)]
)
def test_a_refused_call_is_named_and_strict_makes_it_an_error(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def refuse(word: str, nodes: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mempolicy, "set_policy", refuse)
    binding = Binding(None, "membind", (0,))
    bound = bind.carry_out(binding)
    assert len(bound.failures) == 1
    assert bound.failures[0].startswith(f"set_mempolicy: {errno.errorcode[code]}")
    with pytest.raises(kind, match="set_mempolicy"):
        bind.carry_out(binding, strict=True)


def test_cpus_that_the_kernel_cuts_down_are_noticed() -> None:
    """The kernel silently drops CPUs that are not there; reading back must notice."""
    here = tuple(sorted(os.sched_getaffinity(0)))
    held = threading.get_native_id()
    try:
        bound = bind.carry_out(Binding((*here, 4000)))
        assert len(bound.failures) == 1 and "4000" in bound.failures[0]
    finally:
        os.sched_setaffinity(held, here)


def test_status_file_of_a_bare_tree(tmp_path: Path) -> None:
    assert status_lists("") == (None, None)
