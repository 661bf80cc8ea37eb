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
    "Card": "dieplace.machine",
    "Device": "dieplace.machine",
    "Domain": "dieplace.machine",
    "Figure": "dieplace.machine",
    "Link": "dieplace.machine",
    "Machine": "dieplace.machine",
    "Mode": "dieplace.modes",
    "Plan": "dieplace.partition.plan",
    "apply": "dieplace.partition",
    "bind_this_process": "dieplace.binding.worker",
    "partitioned": "dieplace.partition",
    "restore": "dieplace.partition",
    "Blast": "dieplace.partition",
    "Plan": "dieplace.partition",
    "apply": "dieplace.partition",
    "bind_this_process": "dieplace.binding.worker",
    "partitioned": "dieplace.partition",
    "restore": "dieplace.partition",
    "Policy": "dieplace.policy",
    "Buffer": "dieplace.memory",
    "KVCache": "dieplace.kvcache",
    "SyncFlags": "dieplace.syncflags",
    "place": "dieplace.memory",
    "Residency": "dieplace.residency",
    "audit": "dieplace.residency",
    "load_safetensors": "dieplace.loading",
    "Run": "dieplace.run",
    "Handoff": "dieplace.workload",
    "Operand": "dieplace.workload",
    "Stage": "dieplace.workload",
    "Workload": "dieplace.workload",
    "ApplyFailed": "dieplace.errors",
    "BackendError": "dieplace.errors",
    "Busy": "dieplace.errors",
    "CheckFailed": "dieplace.errors",
    "CompileError": "dieplace.errors",
    "Declined": "dieplace.errors",
    "DieplaceError": "dieplace.errors",
    "DomainFull": "dieplace.errors",
    "Incomparable": "dieplace.errors",
    "KernelFault": "dieplace.errors",
    "Misplaced": "dieplace.errors",
    "NoBackend": "dieplace.errors",
    "NoSuchDevice": "dieplace.errors",
    "NoSuchMode": "dieplace.errors",
    "NotAllowed": "dieplace.errors",
    "NotVerified": "dieplace.errors",
    "Pending": "dieplace.errors",
    "PlacementError": "dieplace.errors",
    "RolledBack": "dieplace.errors",
    "StaleMachine": "dieplace.errors",
    "Unsupported": "dieplace.errors",
    "UsageError": "dieplace.errors",
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
