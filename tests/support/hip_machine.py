"""An MI355X machine in DPX/NPS2 whose memory group is the AMD one over the emulated HIP runtime."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stub_hip import Stub

from dieplace.backends.accounting import KFD_PROCESSES, kfd_counters
from dieplace.backends.amd.hip import Hip
from dieplace.backends.amd.hsa import Hsa
from dieplace.backends.device_memory import DeviceMemory
from dieplace.backends.dlpack import CPU
from dieplace.machine import Machine
from dieplace.sysfs import Sysfs


@dataclass
class StubSession:
    """A backend session with nothing but the memory group."""

    stamp_of: tuple[str | None, str | None]
    memory: DeviceMemory
    name: str = "amd"
    groups: frozenset[str] = frozenset({"memory"})

    def stamp(self) -> tuple[str | None, str | None]:
        return self.stamp_of


def hip_machine(
    base: Machine,
    stub: Stub,
    folder: Path,
    *,
    total_bytes: int,
    pid: int,
    with_hsa: bool = True,
    with_counters: bool = True,
    capturing: Callable[[], bool] = lambda: False,
) -> Machine:
    """`base` with the AMD memory group over a freshly reset stub; counters of `pid` lie below `folder`."""
    gc.collect()  # buffers of an earlier test that a traceback kept belong to the stub as it was
    counters = folder / KFD_PROCESSES.lstrip("/") / str(pid)
    counters.mkdir(parents=True, exist_ok=True)
    devices = [(d.bdf, int(d.gpu_id or 0), int(d.kfd_node or 0)) for d in base.devices]
    stub.reset(devices, total_bytes, counters if with_counters else None)
    hip = Hip(str(stub.path), Hsa(str(stub.path)) if with_hsa else None)
    return attach(base, hip, folder, capturing=capturing)


def attach(base: Machine, hip: Hip, folder: Path, *, capturing: Callable[[], bool] = lambda: False) -> Machine:
    """`base` with the memory group over an open runtime. Tensors are CPU ones: the stub's memory is the host's."""
    sysfs = Sysfs(folder)
    memory = DeviceMemory(
        hip,
        base,
        counters=lambda homes: kfd_counters(sysfs, homes.gpu_ids),
        capturing=capturing,
        tensor_place=(CPU, 0),
    )
    session: Any = StubSession(base.stamp, memory)
    return replace(base, backend="amd", session=session)
