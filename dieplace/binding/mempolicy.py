"""The kernel's NUMA memory calls by number, since libnuma and numactl may both be missing.

`set_mempolicy(2)`, `get_mempolicy(2)`, `mbind(2)` and `move_pages(2)`; numbers from the kernel's syscall tables. Every
function raises OSError with the kernel's errno, ENOSYS where this architecture's numbers are not known here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable, Sequence

DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL = range(5)
MODE_OF = {"preferred": PREFERRED, "membind": BIND, "interleave": INTERLEAVE}
WORD_OF = {mode: word for word, mode in MODE_OF.items()} | {DEFAULT: "default", LOCAL: "local"}
MAX_NODES = 1024  # CONFIG_NODES_SHIFT 10, the largest of any kernel configuration
_MODE_FLAGS = 0xE000  # MPOL_F_STATIC_NODES and its neighbours
_MPOL_MF_MOVE = 2
_CALLS = {  # mbind, set_mempolicy, get_mempolicy, move_pages
    "x86_64": (237, 238, 239, 279),
    "aarch64": (235, 237, 236, 239),
    "ppc64le": (259, 261, 260, 301),
    "riscv64": (235, 237, 236, 239),
}


def set_policy(word: str, nodes: Iterable[int]) -> None:
    """Set this thread's policy (inherited by children and kept over exec): membind, preferred or interleave."""
    _call(1, ctypes.c_int(MODE_OF[word]), _mask(nodes), ctypes.c_ulong(MAX_NODES + 1))


def set_default() -> None:
    """Back to the kernel's default policy."""
    _call(1, ctypes.c_int(DEFAULT), None, ctypes.c_ulong(0))


def get_policy() -> tuple[str, tuple[int, ...]]:
    """This thread's policy word and nodes."""
    mode, mask = ctypes.c_int(), _mask(())
    _call(2, ctypes.byref(mode), mask, ctypes.c_ulong(MAX_NODES + 1), None, ctypes.c_ulong(0))
    nodes = tuple(n for n in range(MAX_NODES) if mask[n // 64] >> (n % 64) & 1)
    return WORD_OF.get(mode.value & ~_MODE_FLAGS, str(mode.value)), nodes


def bind_range(address: int, nbytes: int, word: str, nodes: Iterable[int]) -> None:
    """Set the policy of a page-aligned range, and move pages of it that are elsewhere."""
    _call(0, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(MODE_OF[word]), _mask(nodes),
          ctypes.c_ulong(MAX_NODES + 1), ctypes.c_uint(_MPOL_MF_MOVE))  # fmt: skip


def page_status(addresses: Sequence[int], pid: int = 0) -> list[int]:
    """Node of each page, or a negative errno: -ENOENT not backed yet, -EFAULT not mapped or the zero page."""
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    _call(3, ctypes.c_int(pid), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0))
    return list(status)


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_uint64]:
    mask = (ctypes.c_uint64 * (MAX_NODES // 64 + 1))()
    for node in nodes:
        if not 0 <= node < MAX_NODES:
            raise OSError(errno.EINVAL, f"no node can have the number {node}")
        mask[node // 64] |= 1 << (node % 64)
    return mask


def _call(which: int, *arguments: object) -> int:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"the NUMA calls of {platform.machine()} are not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(numbers[which]), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
