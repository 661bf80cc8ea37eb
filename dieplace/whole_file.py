"""Files as a whole: written so that a reader, after a kill or on a full disk too, sees the old one or the new; read
with a limit to what is taken in."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dieplace.errors import DieplaceError, Unsupported, UsageError

# Where an answer or a file goes has no room for it: `dieplace list > file` on a full disk.
DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_whole(
    path: str | Path, text: str, *, hint: str = "name another folder with --out", folders: bool = False
) -> Path:
    """Replace a file by `text` (temporary file, fsync, rename); its path. `folders` makes those that are missing.

    A link stays a link, and what is no file (/dev/null, a pipe) is written to: it is never put out of the way. Half of
    a surrogate pair, which a run file or the words of a command can hold and UTF-8 cannot, is written as its escape.
    Unsupported where there is no room, UsageError where the path cannot be written.
    """
    target = Path(path)
    data = text.encode("utf-8", "backslashreplace")
    try:
        real = Path(os.path.realpath(target))
        if real.exists() and not real.is_file():
            real.write_bytes(data)
        else:
            if folders:
                real.parent.mkdir(parents=True, exist_ok=True)
            _replace(real, data)
    except OSError as error:
        raise _told(target, error, hint) from error
    return target


def read_json(path: Path, *, most_bytes: int, kind: str, hint: str | None = None) -> Any:
    """The one JSON value of a file; UsageError for anything else (missing, binary, huge, a loop of links).

    `kind` is what the file should be, told of one that is too large; `hint` goes with one that is no JSON.
    """
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if len(text) > most_bytes:
        raise UsageError(f"{path} is larger than {most_bytes >> 20} MiB, which no {kind} is")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=hint) from error


def _replace(target: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:60]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _told(target: Path, error: OSError, hint: str) -> DieplaceError:
    if error.errno in DISK_TROUBLE:
        return Unsupported(f"cannot write {target}: {error.strerror}", hint="make room, or write elsewhere")
    return UsageError(f"cannot write {target}: {error.strerror}", hint=hint)
