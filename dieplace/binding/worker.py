"""`bind_this_process`: what a worker calls first, under fork, spawn or forkserver, torchrun, Slurm or MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from dieplace.binding.bind import Bound, carry_out
from dieplace.binding.plan import Binding
from dieplace.binding.prepare import NOT_THIS_MACHINE, device_binding
from dieplace.binding.ranks import require_rank
from dieplace.binding.visibility import chosen_devices, environment, look, refuse_during_switch
from dieplace.errors import UsageError
from dieplace.machine import Device


def bind_this_process(
    device: str | Device | None = None,
    *,
    among: Sequence[str] | None = None,
    strict: bool = False,
    backend: str | None = None,
    node: str | None = None,
) -> Bound:
    """Make this process see one device, and sit on the CPUs and the memory of its NUMA node; call it first.

    Without `device` the local rank (torchrun, Slurm, MPI) picks one of `among` (all visible devices without it), and
    ranks whose devices share a NUMA node get disjoint cores. Sets this process's visibility variables, the CPUs of
    all its threads and this thread's memory policy; what could not be done is in the answer, an error with `strict`.
    UsageError where the runtime has started already: it would not look again.
    """
    _refuse_started()
    refuse_during_switch(backend, node, os.environ)
    view = look(backend, node, os.environ)
    if device is None:
        devices = chosen_devices(view, among)
        index = require_rank(os.environ, len(devices))
    else:
        devices = chosen_devices(view, [device.id if isinstance(device, Device) else device])
        if len(devices) != 1:
            raise UsageError(f"{device!r} names {len(devices)} devices", hint=f"name one, such as {devices[0].id}")
        index = 0
    words = environment(view, devices[index : index + 1])
    binding = device_binding(view, devices, index)
    if view.machine.source == "emulated":
        binding = Binding(incomplete=(NOT_THIS_MACHINE,))
    bound = carry_out(binding, strict=strict, every_thread=True)
    os.environ.update(words)
    return replace(bound, environment=words)


def _refuse_started() -> None:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise UsageError(
            "the GPU runtime of this process has started, and would not look at the visibility variables again",
            hint="call bind_this_process before anything touches a device",
        )
