"""Where host pages are: of a range by `move_pages(2)`, of a whole process by `/proc/<pid>/numa_maps`.

Both are the kernel's own account (evidence `accounted`). `numa_maps` is read, never parsed into more than it says: a
page shared by two mappings counts in both, and pages not backed yet count nowhere.
"""

from __future__ import annotations

import errno
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dieplace.binding import mempolicy
from dieplace.errors import NotAllowed, Unsupported, UsageError
from dieplace.sysfs import Sysfs, errno_name

_BATCH = 1 << 14
_LIMIT_BYTES = 64 << 20
_NODE = re.compile(r"N(\d{1,5})=(\d{1,15})")


@dataclass(frozen=True)
class PageCount:
    """Bytes by NUMA node, and bytes that have no page yet (`absent_bytes`) or could not be asked (`unknown_bytes`)."""

    bytes_by_node: dict[int, int] = field(default_factory=dict)
    absent_bytes: int = 0
    unknown_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that are backed by a page of a known node."""
        return sum(self.bytes_by_node.values())

    def outside(self, *nodes: int) -> int:
        """Bytes on any other node than these."""
        return sum(count for node, count in self.bytes_by_node.items() if node not in nodes)


@dataclass(frozen=True)
class Mapping:
    """One line of numa_maps: start address, policy as the kernel prints it, what is mapped, and its pages."""

    address: int
    policy: str
    what: str  # a file's path, "heap", "stack", "huge" or "anonymous"
    pages: PageCount


def range_pages(address: int, nbytes: int, *, pid: int = 0) -> PageCount:
    """Where each page of [address, address + nbytes) is; pid 0 is this process.

    NotAllowed (another's process), Unsupported (no such call, no such process). Huge pages answer for each small one.
    """
    if nbytes <= 0:
        raise UsageError(f"a range of {nbytes} bytes has no pages")
    size = mmap.PAGESIZE
    first, last = address // size * size, -(-(address + nbytes) // size) * size
    by_node: dict[int, int] = {}
    absent = unknown = 0
    for start in range(first, last, _BATCH * size):
        pages = list(range(start, min(start + _BATCH * size, last), size))
        for status in _ask(pages, pid):
            if status >= 0:
                by_node[status] = by_node.get(status, 0) + size
            elif status in (-errno.ENOENT, -errno.EFAULT):  # not touched, or the shared zero page
                absent += size
            else:
                unknown += size
    return PageCount(by_node, absent, unknown)


def process_pages(pid: int | str = "self", sysfs: Sysfs | None = None) -> tuple[Mapping, ...]:
    """Every mapping of a process; NotAllowed for another's process, Unsupported where the kernel has no numa_maps."""
    path = f"/proc/{pid}/numa_maps"
    try:
        text = (sysfs or Sysfs("/")).read(path, _LIMIT_BYTES)
    except PermissionError as error:
        raise NotAllowed(f"{path} is not yours to read", hint="run as that user, or as root") from error
    except OSError as error:
        what = "there is no such process, or this kernel has no NUMA support"
        raise Unsupported(f"{path}: {errno_name(error.errno)}: {what}") from error
    return tuple(_mappings(text))


def total(mappings: tuple[Mapping, ...]) -> PageCount:
    """All of them together."""
    by_node: dict[int, int] = {}
    for mapping in mappings:
        for node, count in mapping.pages.bytes_by_node.items():
            by_node[node] = by_node.get(node, 0) + count
    return PageCount(dict(sorted(by_node.items())))


def _ask(pages: list[int], pid: int) -> list[int]:
    try:
        return mempolicy.page_status(pages, pid)
    except PermissionError as error:
        raise NotAllowed(
            f"the pages of process {pid} are not yours to ask about", hint="run as that user, or as root"
        ) from error
    except OSError as error:
        raise Unsupported(f"move_pages: {errno_name(error.errno)}", hint="a container may forbid the call") from error


def _mappings(text: str) -> Iterator[Mapping]:
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch("[0-9a-f]{1,16}", words[0]):
            continue
        size = next(
            (int(w[18:]) for w in words if re.fullmatch(r"kernelpagesize_kB=\d{1,9}", w)), mmap.PAGESIZE // 1024
        )
        by_node: dict[int, int] = {}
        for word in words[2:]:
            if match := _NODE.fullmatch(word):
                by_node[int(match[1])] = by_node.get(int(match[1]), 0) + int(match[2]) * size * 1024
        yield Mapping(int(words[0], 16), words[1], _what(words[2:]), PageCount(by_node))


def _what(words: list[str]) -> str:
    for word in words:
        if word.startswith("file="):
            return word[5:]
        if word in ("heap", "stack", "huge"):
            return word
    return "anonymous"
