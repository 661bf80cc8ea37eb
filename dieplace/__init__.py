"""dieplace: partition multi-die accelerators, place memory on a die, and measure what misplacing it costs.

    import dieplace as dp
    machine = dp.discover()
    die0 = machine.device("gpu0/p0")

Importing this package is light: names other than `discover` are loaded when they are first used, and no vendor
library or torch is imported before something needs it.
"""

from __future__ import annotations

import importlib
from typing import Any

# Eager, because a module of the same name exists: a later `import dieplace.discover` would replace a lazy function.
from dieplace.discover import discover as discover

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "bind_this_process": "dieplace.binding.worker",
    "ApplyFailed": "dieplace.errors",
    "BackendError": "dieplace.errors",
    "Busy": "dieplace.errors",
    "CannotRun": "dieplace.errors",
    "CheckFailed": "dieplace.errors",
    "CompileError": "dieplace.errors",
    "Declined": "dieplace.errors",
    "DieplaceError": "dieplace.errors",
    "DomainFull": "dieplace.errors",
    "Incomparable": "dieplace.errors",
    "KernelFault": "dieplace.errors",
    "LaunchFailed": "dieplace.errors",
    "Misplaced": "dieplace.errors",
    "NoBackend": "dieplace.errors",
    "NoSuchDevice": "dieplace.errors",
    "NoSuchMode": "dieplace.errors",
    "NotAllowed": "dieplace.errors",
    "NotFound": "dieplace.errors",
    "NotVerified": "dieplace.errors",
    "Pending": "dieplace.errors",
    "PlacementError": "dieplace.errors",
    "RolledBack": "dieplace.errors",
    "StaleMachine": "dieplace.errors",
    "Unsupported": "dieplace.errors",
    "UsageError": "dieplace.errors",
    "KVCache": "dieplace.kvcache",
    "load_safetensors": "dieplace.loading",
    "Card": "dieplace.machine",
    "Device": "dieplace.machine",
    "Domain": "dieplace.machine",
    "Figure": "dieplace.machine",
    "Link": "dieplace.machine",
    "Machine": "dieplace.machine",
    "Buffer": "dieplace.memory",
    "place": "dieplace.memory",
    "Mode": "dieplace.modes",
    "apply": "dieplace.partition",
    "Blast": "dieplace.partition",
    "partitioned": "dieplace.partition",
    "Plan": "dieplace.partition",
    "restore": "dieplace.partition",
    "Policy": "dieplace.policy",
    "audit": "dieplace.residency",
    "Residency": "dieplace.residency",
    "Run": "dieplace.run",
    "import_buffer": "dieplace.sharing",
    "SyncFlags": "dieplace.syncflags",
    "Handoff": "dieplace.workload",
    "Operand": "dieplace.workload",
    "Stage": "dieplace.workload",
    "Workload": "dieplace.workload",
}
__all__ = sorted([*_EXPORTS, "__version__", "discover"])


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dieplace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
