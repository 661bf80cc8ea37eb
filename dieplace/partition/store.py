"""The folder where a switch remembers what must survive it: owned by one user, never followed through a link, fsynced.

`/var/lib/dieplace/partition` for the live node (anybody may read it, only root writes it), the XDG state folder (one
private sub-folder a node) for emulated ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dieplace.errors import Busy, NotAllowed, Unsupported
from dieplace.partition.control import Clock
from dieplace.record_folder import LIVE_DIRECTORY as LIVE_DIRECTORY
from dieplace.record_folder import emulated_directory as emulated_directory

_POLL_S = 0.2


class Store:
    """Small JSON files in one folder. Reading never creates anything; writing is write, fsync, rename, fsync.

    `owner` is the only user whose files are trusted (None: whoever runs this); `shared` lets everybody read.
    """

    def __init__(self, directory: Path, *, owner: int | None = None, shared: bool = False) -> None:
        self.directory = directory
        self.owner = os.geteuid() if owner is None else owner
        self.shared = shared

    def read(self, name: str) -> dict[str, Any] | None:
        """The stored value, or None where there is none; anything unexpected in its place raises Unsupported."""
        try:
            folder = self._open_folder(create=False)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise NotAllowed(
                f"cannot read the record of earlier switches in {self.directory}", hint="run the command as root"
            ) from error
        try:
            return self._read_in(folder, name)
        finally:
            os.close(folder)

    def _read_in(self, folder: int, name: str) -> dict[str, Any] | None:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._strange(f"{self.directory / name} cannot be opened ({error.strerror})") from error
        with open(descriptor, "rb") as file:
            self._check(os.fstat(descriptor), self.directory / name, stat.S_ISREG)
            try:
                value = json.loads(file.read(1 << 24), parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise self._strange(f"{self.directory / name} is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise self._strange(f"{self.directory / name} is not a JSON object")
        return value

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a file so that after a power cut it holds the old or the new value, whole; Unsupported on failure."""
        with self._told("write"):
            self._write(name, value)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        folder = self._open_folder(create=True)
        scratch = f".{name}.{os.getpid()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(scratch, flags, 0o644 if self.shared else 0o600, dir_fd=folder), "wb") as file:
                file.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there, and make the deletion last."""
        try:
            folder = self._open_folder(create=False)
        except FileNotFoundError:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def lock(self, wait_s: float, clock: Clock) -> Iterator[int]:
        """The one switch at a time, across processes; Busy names the holder. Yields the descriptor: a child that
        inherits it keeps the lock when this process dies in the middle of an unload."""
        with self._told("lock"):
            folder = self._open_folder(create=True)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open("lock", flags, 0o600, dir_fd=folder)
            finally:
                os.close(folder)
        try:
            self._check(os.fstat(descriptor), self.directory / "lock", stat.S_ISREG)
            self._take(descriptor, wait_s, clock)
            with contextlib.suppress(OSError):  # a full disk: the pid is for others to read, the lock holds without
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether somebody holds the lock, as /proc/locks tells anybody; a probe by flock could make a switch fail."""
        try:
            found = os.stat(self.directory / "lock", follow_symlinks=False)
            held = Path("/proc/locks").read_text()
        except OSError:
            return False
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any(" FLOCK " in line and place in line.split() for line in held.splitlines() if "->" not in line)

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unsupported(
                f"cannot {doing} the record of switches in {self.directory}: {error.strerror}",
                hint="no switch is made without a record to undo it by; free or repair that folder",
            ) from error

    def _take(self, descriptor: int, wait_s: float, clock: Clock) -> None:
        deadline = clock.now() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                left = deadline - clock.now()
                if left > 0:
                    clock.sleep(min(_POLL_S, left))
                    continue
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise Busy(
                f"another partition switch is running (pid {pid}, or a driver reload it left behind)",
                hint="wait for it with --wait SECONDS, or look with 'dieplace partition show'",
                holders=[],
                pid=pid,
            )

    def _open_folder(self, *, create: bool) -> int:
        if create and os.geteuid() != self.owner:
            raise NotAllowed(f"only user {self.owner} may write {self.directory}", hint="run the command as root")
        if create:
            _make(self.directory.parent, 0o755)
            _make(self.directory, 0o755 if self.shared else 0o700)
        try:
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise self._strange(f"{self.directory} cannot be opened as a folder ({error.strerror})") from error
        try:
            self._check(os.fstat(folder), self.directory, stat.S_ISDIR)
            self._check_parent()
        except BaseException:
            os.close(folder)
            raise
        return folder

    def _check_parent(self) -> None:
        # In a folder that others may write, ours could be swapped for another between two calls.
        parent = os.stat(self.directory.parent)
        strangers = self.shared and parent.st_uid not in (0, self.owner)
        if strangers or (parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX):
            raise self._strange(f"{self.directory.parent} may be written by others")

    def _check(self, found: os.stat_result, path: Path, is_kind: Any) -> None:
        if not is_kind(found.st_mode):
            raise self._strange(f"{path} is not of the expected kind")
        if found.st_uid != self.owner:
            raise self._strange(f"{path} belongs to user {found.st_uid}, not to {self.owner}")
        if found.st_mode & 0o022:
            raise self._strange(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o})")

    def _strange(self, found: str) -> Unsupported:
        return Unsupported(
            f"will not trust the record of earlier switches: {found}",
            hint=f"look at {self.directory} as its owner, and move it away if it is not yours",
        )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _make(folder: Path, mode: int) -> None:
    """Create a folder, and those above it, with exactly this mode whatever the umask; leave an existing one alone."""
    if folder.is_dir():
        return
    _make(folder.parent, 0o755)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        os.chmod(folder, mode)
