"""Recording what discovery reads, with pseudonyms for ids, and reading it back: a bug report becomes a replayed test.

A recording is one JSON value `dieplace/recording/1`: for each absolute path the text, the names, the link text, or the
errno that reading gave. Ids (unique_id, hive_id, boot id, serials, UUIDs) are replaced by small numbers, the same for
the same id wherever and in whichever notation it stands, so that what was equal stays equal.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dieplace.errors import UsageError
from dieplace.sysfs import Sysfs

SCHEMA = "dieplace/recording/1"
KINDS = ("read", "names", "readlink", "exists", "openable")
_ID_LINES = re.compile(r"^(unique_id|hive_id) ([0-9]+)$", re.MULTILINE)
_HEX_FILES = re.compile(r"/(unique_id|serial_number|fru_id)$")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_UUID = re.compile(r"GPU-[0-9a-fA-F]*")


@dataclass(frozen=True)
class Recording:
    """Answers by kind and path: text, list of names, link text, bool, or None; an integer errno is in `errors`."""

    answers: Mapping[str, Mapping[str, Any]]
    errors: Mapping[str, Mapping[str, str]]
    environ: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)


class RecordingSysfs(Sysfs):
    """Passes every call to `inner` and keeps its answer."""

    def __init__(self, inner: Sysfs) -> None:
        super().__init__(inner.root)
        self.inner = inner
        self.answers: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.errors: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}

    def read(self, name: str, limit_bytes: int = 1 << 16) -> str:
        """As Sysfs.read."""
        return str(self._keep("read", name, lambda: self.inner.read(name, limit_bytes)))

    def names(self, name: str) -> list[str]:
        """As Sysfs.names."""
        return list(self._keep("names", name, lambda: self.inner.names(name)))

    def readlink(self, name: str) -> str:
        """As Sysfs.readlink."""
        return str(self._keep("readlink", name, lambda: self.inner.readlink(name)))

    def exists(self, name: str) -> bool:
        """As Sysfs.exists."""
        return bool(self._keep("exists", name, lambda: self.inner.exists(name)))

    def openable(self, name: str) -> None:
        """As Sysfs.openable."""
        self._keep("openable", name, lambda: self.inner.openable(name))

    def _keep(self, kind: str, name: str, call: Any) -> Any:
        try:
            value = call()
        except OSError as error:
            self.errors[kind][name] = errno.errorcode.get(error.errno or 0, "EIO")
            raise
        self.answers[kind][name] = value
        return value


class RecordedSysfs(Sysfs):
    """Answers from a recording; what was never asked does not exist."""

    def __init__(self, recording: Recording) -> None:
        super().__init__("/nonexistent")
        self.recording = recording

    def read(self, name: str, limit_bytes: int = 1 << 16) -> str:
        """As Sysfs.read."""
        return str(self._answer("read", name))[:limit_bytes]

    def names(self, name: str) -> list[str]:
        """As Sysfs.names."""
        return list(self._answer("names", name))

    def readlink(self, name: str) -> str:
        """As Sysfs.readlink."""
        return str(self._answer("readlink", name))

    def exists(self, name: str) -> bool:
        """As Sysfs.exists; a path that was read or listed exists too."""
        known = self.recording.answers.get("exists", {})
        if name in known:
            return bool(known[name])
        return any(name in self.recording.answers.get(kind, {}) for kind in ("read", "names", "readlink"))

    def openable(self, name: str) -> None:
        """As Sysfs.openable."""
        self._answer("openable", name)

    def write(self, name: str, text: str) -> None:
        """A recording cannot be written."""
        raise OSError(errno.EROFS, "a recording cannot be written", name)

    def _answer(self, kind: str, name: str) -> Any:
        answers = self.recording.answers.get(kind, {})
        if name in answers:
            return answers[name]
        code = getattr(errno, self.recording.errors.get(kind, {}).get(name, "ENOENT"), errno.EIO)
        raise OSError(code, "as recorded", name)


@dataclass
class Pseudonyms:
    """Real id -> small number, in order of first sight; 0 stays 0 (it means "none")."""

    numbers: dict[int, int] = field(default_factory=dict)

    def of(self, value: int) -> int:
        """The pseudonym of an id."""
        return self.numbers.setdefault(value, len(self.numbers) + 1) if value else 0

    def text(self, path: str, text: str) -> str:
        """A file's text with its ids replaced."""
        if path == _BOOT_ID:
            return f"00000000-0000-0000-0000-{1:012x}"
        if _HEX_FILES.search(path):
            plain = text.strip()
            known = re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}", plain)
            return f"{self.of(int(plain, 16)):016x}" if known else "pseudonym"
        return _ID_LINES.sub(lambda match: f"{match[1]} {self.of(int(match[2]))}", text)

    def uuid_list(self, text: str) -> str:
        """A visibility variable with its `GPU-...` tokens replaced; a prefix becomes the id it stands for, if one."""

        def replace(match: re.Match[str]) -> str:
            token = match[0][4:].lower()
            matches = {number for real, number in self.numbers.items() if f"{real:016x}".startswith(token)}
            return f"GPU-{matches.pop():016x}" if len(matches) == 1 else "GPU-no-single-match"

        return _UUID.sub(replace, text)


def to_data(sysfs: RecordingSysfs, environ: Mapping[str, str], versions: Mapping[str, str | None]) -> dict[str, Any]:
    """The recording as plain data under its schema, ids replaced."""
    names = Pseudonyms()
    reads = {path: names.text(path, str(text)) for path, text in sorted(sysfs.answers["read"].items())}
    answers = {kind: dict(sorted(sysfs.answers[kind].items())) for kind in KINDS}
    answers["read"] = reads
    return {
        "schema": SCHEMA,
        "answers": answers,
        "errors": {kind: dict(sorted(sysfs.errors[kind].items())) for kind in KINDS},
        "environ": {key: names.uuid_list(value) for key, value in environ.items()},
        "versions": dict(versions),
    }


def load_recording(data: Any, name: str) -> Recording:
    """Check the shape of a recording read from JSON; UsageError says what is wrong."""
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if found != SCHEMA:
        raise UsageError(
            f"{name} is neither a recording nor a saved machine: its schema is {found!r}",
            hint=f"expected {SCHEMA} (dieplace env --record FILE) or dieplace/machine/1 (Machine.save)",
        )
    answers, errors = data.get("answers"), data.get("errors", {})
    environ = data.get("environ", {})
    if not (_tables(answers) and _tables(errors) and isinstance(environ, dict) and _well_formed(answers)):
        raise UsageError(f"{name} is a damaged recording: its answers are not tables of paths")
    texts = {str(key): str(value) for key, value in environ.items()}
    return Recording(answers, errors, texts, data.get("versions") or {})


def _tables(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


def _well_formed(answers: dict[str, dict[str, Any]]) -> bool:
    lists = answers.get("names", {}).values()
    texts = [*answers.get("read", {}).values(), *answers.get("readlink", {}).values()]
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists
    )


EXTRA_FILES = (
    "available_compute_partition",
    "available_memory_partition",
    "current_compute_partition",
    "current_memory_partition",
    "compute_partition_mem_alloc_mode",
    "compute_partition_config/supported_xcp_configs",
    "compute_partition_config/supported_nps_configs",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "product_name",
    "vbios_version",
)


def record(sysfs: Sysfs, environ: Mapping[str, str], versions: Mapping[str, str | None]) -> dict[str, Any]:
    """Discover an AMD node once while keeping every answer, and what a mode question would read; as plain data."""
    from dieplace.backends.amd.backend import AmdBackend
    from dieplace.backends.amd.cards import drm_cards
    from dieplace.backends.amd.visibility import VARIABLES

    keeper = RecordingSysfs(sysfs)
    kept = {name: environ[name] for name in VARIABLES if name in environ}
    reader = AmdBackend(sysfs=keeper, environ=kept)
    reader.probe()
    reader.snapshot()
    for base in drm_cards(keeper).values():
        for name in EXTRA_FILES:
            keeper.read_or_none(f"{base}/{name}")
    return to_data(keeper, kept, versions)
