"""A node seen through a file: a saved machine, a run, a recording (`dieplace env --record`), a folder tree or a bundle.

Used only when named. The answers are those of the recorded node; nothing can be acted on.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.availability import Availability
from dieplace.errors import UsageError
from dieplace.machine import SCHEMA as MACHINE_SCHEMA
from dieplace.machine import Machine
from dieplace.recording import RecordedSysfs, load_recording
from dieplace.run import SCHEMA as RUN_SCHEMA
from dieplace.sysfs import Sysfs
from dieplace.whole_file import read_json

BUNDLE_SCHEMA = "dieplace/first-light/1"  # of bundle.json in a bundle of `bench run first-light`
LIMIT_BYTES = 256 << 20  # a CPX node with all links is about 2 MB; beyond this it is no recording


class ReplayedBackend:
    """`node` names the file or folder; visibility variables are those of the recording, none for a folder."""

    name = "replayed"
    groups = frozenset({"always"})

    def __init__(self, node: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self.path = Path(node) if node is not None else None
        self.environ = environ

    def probe(self) -> Availability:
        """Yes when there is a file or folder to read; whether it can be understood is seen in `snapshot`."""
        if self.path is None:
            return Availability(False, "no recording was named", "name one: --backend replayed --node FILE")
        try:
            found = self.path.exists()
        except OSError:
            found = False
        if not found:
            return Availability(False, f"there is no {self.path}", "record a node with: dieplace env --record FILE")
        return Availability(True, f"a recording in {self.path}")

    def snapshot(self, *, links: bool = True) -> Machine:
        """The recorded machine; UsageError for a file that is neither a machine nor a recording."""
        if self.path is None:
            raise UsageError("no recording was named", hint="name one: --backend replayed --node FILE")
        path = self.path
        if path.is_dir():
            found = _file_in(path)
            if found is None:
                return self._through(Sysfs(path), self.environ or {}, links)
            path = found
        data = _read(path)
        if isinstance(data, dict) and data.get("schema") == RUN_SCHEMA:
            data = data.get("machine")  # a run file holds the machine that it was taken on
        if isinstance(data, dict) and data.get("schema") == MACHINE_SCHEMA:
            return replace(Machine.from_json(data), backend=self.name)
        recording = load_recording(data, str(path))
        environ = recording.environ if self.environ is None else self.environ
        return self._through(RecordedSysfs(recording), environ, links)

    def stamp(self) -> tuple[str | None, str | None]:
        """A recording does not change."""
        return (None, None)

    def _through(self, sysfs: Sysfs, environ: Mapping[str, str], links: bool) -> Machine:
        reader = AmdBackend(sysfs=sysfs, environ=environ)
        reader.source = "replayed"
        answer = reader.probe()
        if not answer.available:
            # The hint of a live node (load the driver) would be of another machine than the one recorded.
            raise UsageError(
                f"{self.path} holds no AMD node as it was recorded: {answer.reason}",
                hint="name a file of `dieplace env --record FILE`, a run file, a saved machine or a first-light bundle",
            )
        return replace(reader.snapshot(links=links), backend=self.name)


def _file_in(folder: Path) -> Path | None:
    """The file that a folder stands for, that of a bundle or the only run; None for a copy of a node's /sys and /proc.

    UsageError where several files lie there.
    """
    if (folder / "bundle.json").is_file():
        return first_tree(folder)
    inside = sorted(path.name for path in folder.glob("*.json"))
    if (folder / "sys").is_dir() or not inside:
        return None
    if len(inside) == 1:
        return folder / inside[0]
    names = ", ".join(inside[:3]) + (" ..." if len(inside) > 3 else "")
    raise UsageError(
        f"{folder} is a folder of JSON files ({names}), not one node",
        hint=f"name one file: --backend replayed --node {shlex.quote(str(folder / inside[0]))}",
        found=inside,
    )


def first_tree(bundle: Path) -> Path:
    """The recording of the state in which a first light found its node; name another file of its tree/ for others."""
    data = _read(bundle / "bundle.json")
    known = isinstance(data, dict) and data.get("schema") == BUNDLE_SCHEMA and isinstance(data.get("trees"), dict)
    name = data["trees"].get(data.get("start")) if known else None
    if not isinstance(name, str) or not re.fullmatch(r"tree/[A-Za-z0-9._-]+\.json", name):
        raise UsageError(f"{bundle} names no recorded tree", hint="name one of the files in its folder tree/")
    return bundle / name


def _read(path: Path) -> Any:
    hint = "it is written by: dieplace env --record FILE"
    return read_json(path, most_bytes=LIMIT_BYTES, kind="recording", hint=hint)
