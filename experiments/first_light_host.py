"""The three kinds of host that first light runs on, and what each can do for the questions; one class a kind.

On a live AMD node everything that opens a device file happens in a process of its own: whoever once opened /dev/kfd
stays a user of it until it exits, and would keep the driver from unloading.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dieplace.backends.base import require
from dieplace.errors import BackendError, UsageError
from dieplace.experiments.first_light_child import command_of, talk
from dieplace.experiments.first_light_questions import NotAsked
from dieplace.sysfs import Sysfs

if TYPE_CHECKING:
    from dieplace.machine import Machine
    from dieplace.partition.control import Control
    from dieplace.partition.facts import NodeFacts

NOBODY = 65534  # the overflow user, whom no file is opened up for
HOLD_BYTES = 64 << 20
_LIMIT_S = 60.0
_INIT_LIMIT_S = 20.0  # a switch waits meanwhile, and AMD's library can hang in init (rocm-systems PR 6462)
# Library 24.7 loops over 2^32 card numbers in init while /sys/class/drm has no card, which is just then so.
_FIRST_LIBRARY_TO_ASK = 26
_OPEN = "import sys; f = open(sys.argv[1], 'r+b', buffering=0); print('open', flush=True); sys.stdin.read()"
_CAT = "/bin/cat"  # our own Python may lie where nobody else may look


class Host(Protocol):
    """What a question may ask of the host it runs on."""

    backend: str
    origin: str
    node: str | None  # the emulated node's folder, for processes that ask there
    control: Control | None
    sysfs: Sysfs | None
    why_no_modes: str

    def machine(self) -> Machine: ...
    def tree(self) -> dict[str, Any]: ...
    def drm_client(self, facts: NodeFacts, card: str) -> AbstractContextManager[str]: ...
    def kfd_user(self) -> AbstractContextManager[int]: ...
    def read_as_stranger(self, path: str) -> tuple[str, str]: ...
    def library(self, op: str) -> Mapping[str, Any]: ...
    def init_while_away(self) -> Mapping[str, Any]: ...


def host_for(backend: str, *, node: str | None = None, rocm_path: str | None = None) -> Host:
    """The host of a backend; UsageError for one without questions here, NoBackend where it is not there."""
    from dieplace.discover import open_backend

    if backend not in ("amd", "emulated", "nvidia"):
        raise UsageError(f"first-light has no questions for the {backend} backend", hint="amd, emulated or nvidia")
    session = open_backend(backend, node=node)
    if backend == "emulated":
        return EmulatedHost(session)
    return AmdHost(session, rocm_path) if backend == "amd" else NvidiaHost(session)


class AmdHost:
    """A live node with AMD cards."""

    backend, origin, why_no_modes = "amd", "measured", ""
    node: str | None = None

    def __init__(self, session: Any, rocm_path: str | None = None) -> None:
        from dieplace.backends.amd.smi import Smi, check_rocm_path

        self.session = session
        self.sysfs: Sysfs | None = session.sysfs
        self.control: Control | None = require(session, "partitioning").partition_control(rocm_path)
        checked = check_rocm_path(rocm_path) if rocm_path else None
        self.smi, self.smi_while_away = Smi(checked, _LIMIT_S), Smi(checked, _INIT_LIMIT_S)

    def machine(self) -> Machine:
        """The node now, from files alone."""
        found: Machine = self.session.snapshot()
        return found

    def tree(self) -> dict[str, Any]:
        """What discovery reads, ids replaced."""
        from dieplace.recording import record

        return record(self.session.sysfs, self.session.environ, versions())

    @contextmanager
    def drm_client(self, facts: NodeFacts, card: str) -> Iterator[str]:
        """A process that has the card's first render node open and nothing else."""
        node = f"/dev/dri/renderD{facts.card(card).devices[0].render_minor}"
        with _held([sys.executable, "-I", "-c", _OPEN, str(self.session.sysfs.path(node))]) as process:
            yield f"pid {process.pid} with {node} open"

    @contextmanager
    def kfd_user(self) -> Iterator[int]:
        """A process that holds memory of the first device."""
        with _held(command_of({"do": "hold", "backend": "amd", "nbytes": HOLD_BYTES})) as process:
            yield process.pid

    def read_as_stranger(self, path: str) -> tuple[str, str]:
        """(text, who read it): as nobody where we are root, else as ourselves; raises OSError where it is refused."""
        if os.geteuid() != 0:
            return self.session.sysfs.read(path), f"user {os.geteuid()}, to whom the process belongs"
        return _read_as(NOBODY, str(self.session.sysfs.path(path))), f"user {NOBODY}"

    def library(self, op: str) -> Mapping[str, Any]:
        """AMD's library asked in a child; NotAsked where it is not there, or known to hang."""
        found = self.smi.ask(op)
        if not found["ok"] and found.get("stage") == "import":
            from dieplace.backends.amd.smi import what_to_install

            raise NotAsked(f"AMD's library cannot be used: {what_to_install(dict(found))}")
        return found

    def init_while_away(self) -> Mapping[str, Any]:
        """`amdsmi_init` while the driver is unloaded, with a short limit; or why it is not asked."""
        asked = self.smi.ask("versions")
        version = str(asked.get("versions", {}).get("library", ""))
        if not asked["ok"]:
            return {"not_asked": f"AMD's library cannot be used: {asked.get('text')}"}
        if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < _FIRST_LIBRARY_TO_ASK:
            return {"not_asked": f"library {version or 'of unknown version'} may loop for hours while there is no card"}
        return self.smi_while_away.ask("init")


class EmulatedHost:
    """An emulated node: the same control, the emulator's processes and users. Its answers say nothing of hardware."""

    backend, origin, why_no_modes = "emulated", "emulated", ""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.sysfs: Sysfs | None = session.sysfs
        self.node: str | None = str(session.node.directory)
        self.control: Control | None = require(session, "partitioning").partition_control(None)

    def machine(self) -> Machine:
        """The node now."""
        found: Machine = self.session.snapshot()
        return found

    def tree(self) -> dict[str, Any]:
        """What discovery reads, ids replaced."""
        from dieplace.recording import record

        return record(self.session.node.sysfs(), {}, versions())

    @contextmanager
    def drm_client(self, facts: NodeFacts, card: str) -> Iterator[str]:
        """An emulated process with one render node open and no KFD."""
        node = self.session.node
        partition = facts.card(card).devices[0].partition
        pid = node.start_process("display", kfd=False, render=(f"{card}/p{partition}",))
        try:
            yield f"emulated pid {pid} with the render node of {card}/p{partition} open"
        finally:
            node.end_process(pid)

    @contextmanager
    def kfd_user(self) -> Iterator[int]:
        """An emulated process in KFD."""
        node = self.session.node
        pid = node.start_process("decode", vram_bytes=HOLD_BYTES)
        try:
            yield pid
        finally:
            node.end_process(pid)

    def read_as_stranger(self, path: str) -> tuple[str, str]:
        """As the emulated user nobody."""
        return self.session.node.sysfs(uid=NOBODY).read(path), f"emulated user {NOBODY}"

    def library(self, op: str) -> Mapping[str, Any]:
        """Never: it reads the host's own files."""
        raise NotAsked("AMD's library reads the host's own /sys, so it is never asked about an emulated node")

    def init_while_away(self) -> Mapping[str, Any]:
        """Never, as `library`."""
        return {"not_asked": "AMD's library reads the host's own /sys, so it is never asked about an emulated node"}


class NvidiaHost:
    """Two NVIDIA GPUs in the place of two dies."""

    backend, origin = "nvidia", "measured"
    node: str | None = None
    control: Control | None = None
    sysfs: Sysfs | None = None
    why_no_modes = "NVIDIA GPUs are left in the mode they are in"

    def __init__(self, session: Any) -> None:
        self.session = session

    def machine(self) -> Machine:
        """The node now; CUDA is not started in this process."""
        found: Machine = self.session.snapshot(ask_cuda=False)
        return found

    def tree(self) -> dict[str, Any]:
        """The machine itself, without what tells one card of a model from another."""
        from dieplace.experiments.torch_rig import without_serials

        return without_serials(self.machine().to_json())

    def drm_client(self, facts: NodeFacts, card: str) -> AbstractContextManager[str]:
        """There is none."""
        raise NotAsked(self.why_no_modes)

    def kfd_user(self) -> AbstractContextManager[int]:
        """There is none."""
        raise NotAsked(self.why_no_modes)

    def read_as_stranger(self, path: str) -> tuple[str, str]:
        """There is none."""
        raise NotAsked(self.why_no_modes)

    def library(self, op: str) -> Mapping[str, Any]:
        """There is none."""
        raise NotAsked(self.why_no_modes)

    def init_while_away(self) -> Mapping[str, Any]:
        """There is none."""
        return {"not_asked": self.why_no_modes}


def versions() -> dict[str, str | None]:
    """Versions of what takes part, from package metadata."""
    found: dict[str, str | None] = {}
    for name in ("dieplace", "torch", "triton", "flydsl", "amdsmi"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@contextmanager
def _held(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that says one line when it is ready and ends when its input is closed."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True
    )
    try:
        first = next(iter(talk(process, _LIMIT_S)), "")
        if not first:
            raise BackendError(f"a helper process did not become ready ({Path(command[0]).name})")
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _read_as(user: int, path: str) -> str:
    done = subprocess.run(
        [_CAT, "--", path], user=user, group=user, extra_groups=[], cwd="/", env={"LC_ALL": "C"}, capture_output=True,
        text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.strip() or "no message"
        if "Permission denied" in said:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        raise BackendError(f"reading {path} as user {user} failed: {said}")
    return done.stdout
