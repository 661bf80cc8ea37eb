"""How the node's state and its tree are kept on disk: one JSON file written whole, a lock, and a tree brought in line.

Nothing here can be left half done: the state is written beside and renamed; the tree is marked with the state's
revision only when it is complete, and whoever next opens the node finishes what a killed process began.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dieplace.errors import UsageError

from .entries import Entries, File, Folder, Link
from .state import NodeState, from_json, to_json

OWN = ".dieplace"
TOPS = ("sys", "proc", "dev", "lib")


def is_node(directory: Path) -> bool:
    """Whether an emulated node lives in this folder."""
    return (directory / OWN / "state.json").is_file()


def read_state(directory: Path) -> NodeState:
    """The state on disk; UsageError where there is none or it cannot be read."""
    path = directory / OWN / "state.json"
    try:
        return from_json(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(
            f"no emulated node in {directory}: {error.strerror}", hint=f"make one: dieplace emulate new {directory}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"the state of the emulated node in {directory} is not JSON: {error}",
            hint=f"make it anew: dieplace emulate new --replace {directory}",
        ) from error


def state_mark(directory: Path) -> tuple[int, int, int]:
    """Changes whenever the state on disk does: inode, time and size."""
    try:
        found = os.stat(f"{directory}/{OWN}/state.json")
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the node alone, across processes; a killed holder lets go."""
    own = directory / OWN
    try:
        own.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(own / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot keep an emulated node in {directory}: {error.strerror}", hint="name another folder with --node"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_state(directory: Path, state: NodeState) -> None:
    """Replace the state in one step; a reader sees the old one or the new one."""
    _replace(directory, directory / OWN / "state.json", json.dumps(to_json(state), allow_nan=False), 0o644)


def tree_is_current(directory: Path, state: NodeState) -> bool:
    """Whether the tree was completed for this revision of the state."""
    try:
        return (directory / OWN / "tree").read_text() == str(state.revision)
    except OSError:
        return False


def write_tree(directory: Path, entries: Entries, revision: int, previous: Entries | None = None) -> None:
    """Bring the tree in line with `entries`: first what is gone goes, then what is new or different comes.

    `previous` is what the tree is known to hold (its mark says so): then only the differences are touched.
    """
    folders = _folders(entries)
    if previous is None:
        for top in TOPS:
            _prune(directory, top, entries, folders)
        changed = entries
        fresh = folders
    else:
        changed = {path: entry for path, entry in entries.items() if previous.get(path) != entry}
        fresh, touched = _remove_difference(directory, previous, entries, folders, changed)
        changed |= {path: entry for path in touched if isinstance(entry := entries.get(path), Folder)}
    for path in sorted(fresh):
        os.makedirs(directory / path, exist_ok=True)
    # Folders last: some end up without write permission, which would stop a real owner who is not root.
    for path, entry in sorted(changed.items(), key=lambda item: isinstance(item[1], Folder)):
        _place(directory, f"{directory}/{path}", entry)
    _replace(directory, directory / OWN / "tree", str(revision), 0o644)


def _remove_difference(
    directory: Path, previous: Entries, entries: Entries, folders: set[str], changed: Entries
) -> tuple[set[str], set[str]]:
    """Remove what only `previous` has; returns the folders to make, and those opened up on the way."""
    before = _folders(previous)
    lost = before - folders
    gone = {path for path in previous if path not in entries and path not in before}
    opened = {path for path in map(_parent, (*gone, *changed, *lost)) if path in before and path in folders}
    for path in opened:
        _open_up(directory / path)
    for path in (*gone, *lost):
        if _parent(path) not in lost:  # else it goes with that folder
            _clear(f"{directory}/{path}", gone=True)
    return folders - before, opened


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _folders(entries: Entries) -> set[str]:
    found: set[str] = set()
    for path, entry in entries.items():
        folder = path if isinstance(entry, Folder) else _parent(path)
        while folder and folder not in found:
            found.add(folder)
            folder = _parent(folder)
    return found


def _prune(directory: Path, path: str, entries: Entries, folders: set[str]) -> None:
    full = directory / path
    if full.is_symlink() or not full.is_dir():
        full.unlink(missing_ok=True)
        return
    _open_up(full)
    for item in list(os.scandir(full)):
        name = f"{path}/{item.name}"
        if item.is_dir(follow_symlinks=False):
            if name in folders:
                _prune(directory, name, entries, folders)
            else:
                _remove_tree(Path(item.path))
        elif name in folders or name not in entries:
            os.unlink(item.path)


def _open_up(folder: Path) -> None:
    # Emulated folders may be 0500, which would stop their real owner too.
    if stat.S_IMODE(os.lstat(folder).st_mode) & 0o700 != 0o700:
        os.chmod(folder, 0o755)


def _remove_tree(folder: Path) -> None:
    for parent, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                _open_up(Path(parent, name))
    _open_up(folder)
    import shutil

    shutil.rmtree(folder)


def _place(directory: Path, full: str, entry: File | Link | Folder) -> None:
    if isinstance(entry, Folder):
        if stat.S_IMODE(os.lstat(full).st_mode) != entry.mode:
            os.chmod(full, entry.mode)
    elif isinstance(entry, Link):
        if not (os.path.islink(full) and os.readlink(full) == entry.text):
            _clear(full)
            os.symlink(entry.text, full)
    elif not _same(full, entry):
        _clear(full)
        _replace(directory, full, entry.text, entry.mode)


def _clear(full: str, gone: bool = False) -> None:
    """Make room for another kind of entry; with `gone` for nothing at all."""
    if os.path.islink(full):
        os.unlink(full)
    elif os.path.isdir(full):
        _remove_tree(Path(full))
    elif gone and os.path.exists(full):
        os.unlink(full)


def _same(full: str, entry: File) -> bool:
    try:
        found = os.lstat(full)
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != entry.mode:
            return False
        text = entry.text.encode()
        if found.st_size != len(text):
            return False
        with open(full, "rb", buffering=0) as file:
            return file.read() == text
    except (OSError, ValueError):
        return False


def _replace(directory: Path, target: str | Path, text: str, mode: int) -> None:
    beside = f"{directory}/{OWN}/new-{os.getpid()}"
    # Not synced: a killed process loses nothing, and a node lost with its host is made anew.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(text.encode())
        while left:
            left = left[os.write(descriptor, left) :]
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    os.replace(beside, target)
