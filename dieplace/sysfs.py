"""The one way dieplace reads `/sys`, `/proc` and `/dev`, under a movable root and with injectable failures.

Paths are absolute as on a real host; `root` is put in front. `faults` maps an absolute path (or a prefix ending
in `/*`) to an errno, so that EPERM or EACCES can be tested as root.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path


class Sysfs:
    """Reads and writes files under `root`; every method raises OSError with the real errno."""

    def __init__(self, root: str | Path = "/", *, faults: Mapping[str, int] | None = None) -> None:
        self.root = Path(root)
        self._prefix = str(self.root).rstrip(
            "/"
        )  # plain text: a node has thousands of files, and Path objects are slow
        self.faults: dict[str, int] = dict(faults or {})

    def path(self, name: str) -> Path:
        """The host path behind absolute path `name`."""
        return self.root / name.lstrip("/")

    def read(self, name: str, limit_bytes: int = 1 << 16) -> str:
        """Text of a file, stripped of the trailing newline; undecodable bytes are replaced."""
        self._check(name)
        # O_NONBLOCK: in a broken or hostile recording the name may be a pipe, whose plain open would never return.
        descriptor = os.open(self._host(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = b""
            while len(text) < limit_bytes and (part := os.read(descriptor, limit_bytes - len(text))):
                text += part
        finally:
            os.close(descriptor)
        return text.decode("utf-8", "replace").rstrip("\n")

    def read_or_none(self, name: str) -> str | None:
        """Text of a file, or None where it cannot be read."""
        try:
            return self.read(name)
        except (OSError, ValueError):
            return None

    def write(self, name: str, text: str) -> None:
        """Write a value with one write call, as sysfs demands."""
        self._check(name)
        descriptor = os.open(self._host(name), os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def names(self, name: str) -> list[str]:
        """Sorted names in a folder."""
        self._check(name)
        return sorted(os.listdir(self._host(name)))

    def exists(self, name: str) -> bool:
        """Whether the path can be seen; False on any error."""
        try:
            self._check(name)
            return os.path.exists(self._host(name))
        except OSError:
            return False

    def openable(self, name: str) -> None:
        """Open a device node for reading and writing as the ROCm runtime does, and close it again."""
        self._check(name)
        os.close(os.open(self._host(name), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def readlink(self, name: str) -> str:
        """The text of a symbolic link."""
        self._check(name)
        return os.readlink(self._host(name))

    def _host(self, name: str) -> str:
        return f"{self._prefix}/{name.lstrip('/')}"

    def _check(self, name: str) -> None:
        for pattern, code in self.faults.items():
            if name == pattern or (pattern.endswith("/*") and name.startswith(pattern[:-1])):
                raise OSError(code, os.strerror(code), name)


def errno_name(code: int | None) -> str:
    """`EPERM` for 1; the number as text where it has no name."""
    return errno.errorcode.get(code or 0, str(code))
