"""Triton kernels on the emulated card: compiled for gfx950 by Triton's AMD back end, executed from their assembly.

    with triton_kernels():
        gemv_mxfp4(operands, attrs)         # CPU tensors; a second opinion on the FlyDSL kernel of the same name

    with triton_kernels(), Session(device=p0, memory=hbm) as session:
        ...
    session.records

Launches run one after the other, in the session that is open or on the device of their operands. Only the kernels'
code is Triton's own: packing of arguments and the order of launches are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dieplace.codegen import host_runtime
from dieplace.codegen.host_runtime import HostLaunch
from dieplace.codegen.triton_host import launching
from dieplace.emulator.execution import launch_call


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Inside, every Triton launch of this process runs on the emulated card; Unsupported under Triton's interpreter."""
    with launching(_run):
        yield


def _run(tensors: Mapping[str, Any], launch: HostLaunch) -> None:
    launch_call(tensors, lambda: host_runtime.note(launch))
