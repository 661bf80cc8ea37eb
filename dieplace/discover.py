"""Choosing a backend and taking a snapshot of the machine; the only module that imports backends, lazily.

Automatic choice is amd, then nvidia. cpu, emulated and replayed are used only when named: a machine that is not
the real one is never reached by fallback.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import NoBackend, UsageError

if TYPE_CHECKING:
    from dieplace.backends.availability import Availability
    from dieplace.backends.base import Backend
    from dieplace.machine import Machine

BACKENDS: dict[str, str] = {
    "amd": "dieplace.backends.amd.backend:AmdBackend",
    "nvidia": "dieplace.backends.nvidia.backend:NvidiaBackend",
    "cpu": "dieplace.backends.cpu:CpuBackend",
    "emulated": "dieplace.backends.emulated:EmulatedBackend",
    "replayed": "dieplace.backends.replayed:ReplayedBackend",
}
AUTOMATIC = ("amd", "nvidia")


def discover(backend: str | None = None, *, node: str | Path | None = None, root: str | Path = "/") -> Machine:
    """Snapshot of this node, or of the node that `backend` and `node` name.

    `backend` is one of BACKENDS, else the variable DIEPLACE_BACKEND, else the first of amd and nvidia whose probe
    says yes. `node` is the emulated node's folder, or the recording that `replayed` reads. `root` is put in front
    of /sys, /proc and /dev for the amd and cpu backends. NoBackend lists each probe's reason.
    """
    return open_backend(backend, node=node, root=root).snapshot()


def discover_devices(backend: str | None = None, *, node: str | Path | None = None, root: str | Path = "/") -> Machine:
    """As `discover`, without the links where the backend can leave them out: they are most of the files to read."""
    return open_backend(backend, node=node, root=root).snapshot(links=False)


def open_backend(backend: str | None = None, *, node: str | Path | None = None, root: str | Path = "/") -> Backend:
    """The chosen backend itself, after its probe said yes."""
    name = backend or os.environ.get("DIEPLACE_BACKEND") or None
    if name is not None:
        chosen = make_backend(name, node=node, root=root)
        answer = chosen.probe()
        if not answer.available:
            raise NoBackend(
                f"the {name} backend cannot be used here: {answer.reason}",
                hint=answer.hint or "run: dieplace doctor",
                reasons={name: answer.reason},
            )
        return chosen
    if node is not None:
        raise backend_missing(node)
    return _first_available(root)


def backend_missing(node: str | Path) -> UsageError:
    """The error for a node that is named without its backend: a switch meant for it would reach the live machine."""
    return UsageError(
        f"a node was named by --node or DIEPLACE_NODE ({node}), and no backend that reads it",
        hint='name it too: --backend emulated, or replayed for a recording (from Python backend="emulated")',
        asked=str(node),
    )


def make_backend(name: str, *, node: str | Path | None = None, root: str | Path = "/") -> Backend:
    """The backend called `name`, not probed yet; UsageError for an unknown name."""
    if name not in BACKENDS:
        raise UsageError(f"there is no backend {name!r}", hint=f"use one of {', '.join(BACKENDS)}", asked=name)
    module_name, attribute = BACKENDS[name].split(":")
    kind: Any = getattr(importlib.import_module(module_name), attribute)
    made: Backend = kind(node=node) if name in ("emulated", "replayed") else kind(root=root)
    return made


def probes(*, node: str | Path | None = None, root: str | Path = "/") -> dict[str, Availability]:
    """Every backend's answer to "can you be used here", in the order of choice."""
    return {name: make_backend(name, node=node, root=root).probe() for name in BACKENDS}


def _first_available(root: str | Path) -> Backend:
    reasons: dict[str, str] = {}
    for name in AUTOMATIC:
        backend = make_backend(name, root=root)
        answer = backend.probe()
        if answer.available:
            return backend
        reasons[name] = answer.reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise NoBackend(
        f"no accelerator was found ({told})",
        hint="name another backend: --backend emulated (an MI355X node made of files), cpu, or replayed;"
        ' from Python dieplace.discover(backend="emulated")',
        reasons=reasons,
    )
