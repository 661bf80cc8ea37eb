"""Compiled kernels on disk, one JSON file for each key, in a folder that is always named.

An entry carries a digest of its body and the format's number: a torn, foreign or edited file is a miss, never a wrong
kernel. Several processes may share the folder; an entry is written aside and renamed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.codegen.metadata import read_kernels

if TYPE_CHECKING:
    from dieplace.codegen.flydsl import Compiled

FORMAT = 2
_TEXTS = ("isa", "llvm_ir", "host_module", "device_module")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/dieplace/flydsl`, by default under `~/.cache` (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "dieplace" / "flydsl"


class CompileCache:
    """The entries of one folder; a folder that cannot be written is a cache that never hits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, *, link: bool) -> Compiled | None:
        """The entry for `key`, or None; with `link`, an entry without HSACO is None too."""
        try:
            entry = json.loads((self.folder / f"{key}.json").read_bytes())
            body = base64.b64decode(entry["body"], validate=True)
            if entry["format"] != FORMAT or hashlib.sha256(body).hexdigest() != entry["sha256"]:
                return None
            compiled = _decode(json.loads(zlib.decompress(body)))
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        return None if compiled.key != key or (link and compiled.hsaco is None) else compiled

    def put(self, compiled: Compiled) -> None:
        """Write one entry; a full or read-only disk is no error, the result is already in memory."""
        body = zlib.compress(json.dumps(_encode(compiled)).encode())
        entry = {"format": FORMAT, "sha256": hashlib.sha256(body).hexdigest(), "body": base64.b64encode(body).decode()}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump(entry, file)
            os.replace(name, self.folder / f"{compiled.key}.json")


def _encode(compiled: Compiled) -> dict[str, Any]:
    plain = ("name", "arch", "code_hash", "key", "hsaco_why", "compiler_output", "seconds", *_TEXTS)
    hsaco = base64.b64encode(compiled.hsaco).decode() if compiled.hsaco else None
    return {**{name: getattr(compiled, name) for name in plain}, "hsaco": hsaco}


def _decode(data: dict[str, Any]) -> Compiled:
    from dieplace.codegen.flydsl import Compiled

    hsaco = base64.b64decode(data.pop("hsaco")) if data["hsaco"] else data.pop("hsaco")
    compiled = Compiled(**data, hsaco=hsaco, kernels=read_kernels(data["isa"]), from_cache=True)
    return replace(compiled)
