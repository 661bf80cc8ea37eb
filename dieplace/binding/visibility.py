"""The environment in which a program sees exactly the chosen devices, in order, within what the caller left visible.

AMD: `ROCR_VISIBLE_DEVICES` gets indices of ROCr's own walk over KFD (never UUIDs: siblings may share one), and
`HIP_VISIBLE_DEVICES` then counts from 0; `CUDA_VISIBLE_DEVICES`, which HIP reads where its own variable is unset and
some servers compare with it, is brought in line where the caller had set it. NVIDIA: UUIDs, which no order moves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dieplace.errors import BackendError, Busy, NoSuchDevice, Unsupported
from dieplace.machine import Device, Machine

AMD_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)


@dataclass(frozen=True)
class View:
    """A machine under the caller's visibility variables, and each device's place in the runtime's bare walk."""

    machine: Machine
    walk: Mapping[str, int]  # device id -> index with no variable set; missing: the runtime cannot open it
    walk_whys: Mapping[str, str]
    environ: Mapping[str, str]
    after_rocr: Mapping[str, int] = field(default_factory=dict)  # index with the caller's ROCR_VISIBLE_DEVICES alone

    @property
    def vendor(self) -> str:
        """`amd` or `nvidia`, by the machine's backend."""
        return "nvidia" if self.machine.backend == "nvidia" else "amd"

    @property
    def inherited(self) -> dict[str, str]:
        """The visibility variables that the caller set."""
        names = NVIDIA_VARIABLES if self.vendor == "nvidia" else AMD_VARIABLES
        return {name: self.environ[name] for name in names if name in self.environ}


def chosen_devices(view: View, names: Sequence[str] | None) -> tuple[Device, ...]:
    """The devices called `gpuN/pM` (or `gpuN`: every one of that card), or all visible ones, in order.

    Unsupported, naming both sides, where the caller's variables or a device file hide one of them.
    """
    if names is None or list(names) == ["all"]:
        found = [device for device in view.machine.devices if device.runtime_index is not None]
        if not found:
            raise (
                _hidden(view, view.machine.devices[:1], "no device at all")
                if view.inherited
                else NoSuchDevice("no device of this machine can be opened", hint="run: dieplace doctor")
            )
        return tuple(sorted(found, key=lambda device: device.runtime_index or 0))
    devices = [device for name in names for device in _by_name(view.machine, name)]
    for device in devices:
        if devices.count(device) > 1:
            raise Unsupported(f"{device.id} is named twice", hint="name each device once")
        if device.id not in view.walk:
            why = view.walk_whys.get(device.id, "its render node cannot be opened")
            raise Unsupported(
                f"{device.id} was asked for, and no program can use it: {why}", hint="run: dieplace doctor"
            )
        if device.runtime_index is None:
            raise _hidden(view, [device], device.id)
    return tuple(devices)


def environment(view: View, devices: Sequence[Device], *, by: str = "rocr") -> dict[str, str]:
    """What to set so that the program's device 0, 1, ... are `devices`.

    `by="hip"` leaves ROCR_VISIBLE_DEVICES as the caller had it and chooses with HIP's variable alone: Ray from 2.45 on
    refuses to start where ROCR's is set (ray PR 51104). ROCr then still opens every device.
    """
    told = {"DIEPLACE_DEVICE": ",".join(device.id for device in devices)}
    if view.vendor == "nvidia":
        return told | {"CUDA_VISIBLE_DEVICES": ",".join(_uuid(view.machine, device) for device in devices)}
    if by == "hip":
        hip = ",".join(str(view.after_rocr[device.id]) for device in devices)
    else:
        told["ROCR_VISIBLE_DEVICES"] = ",".join(str(view.walk[device.id]) for device in devices)
        hip = ",".join(str(index) for index in range(len(devices)))
    told["HIP_VISIBLE_DEVICES"] = hip
    return told | ({"CUDA_VISIBLE_DEVICES": hip} if "CUDA_VISIBLE_DEVICES" in view.environ else {})


def refuse_during_switch(backend_name: str | None, node: str | None, environ: Mapping[str, str]) -> None:
    """Busy, with the advice to try again, while the node's partition mode is being switched: a program started now
    would get EINVAL from /dev/kfd (legacy-rocm-build issue 5379), or stand in the way of the driver's unload."""
    from dieplace.discover import make_backend

    name = backend_name or environ.get("DIEPLACE_BACKEND") or "amd"
    switching = getattr(make_backend(name, node=node), "switching", None)
    why = switching() if switching is not None else None
    if why is not None:
        raise Busy(why, hint="start it again when the switch has ended: 'dieplace partition show' tells", holders=[])


def look(backend_name: str | None, node: str | None, environ: Mapping[str, str]) -> View:
    """Discover the machine as `environ`'s variables leave it, and once more without them where there are any."""
    from dieplace.discover import open_backend

    backend: Any = open_backend(backend_name, node=node)
    if backend.name == "nvidia":
        return _nvidia_view(backend.snapshot(links=False, ask_cuda=False), environ)
    if not hasattr(backend, "environ"):
        return View(backend.snapshot(links=False), {}, {}, environ)
    machine = _snapshot(backend, environ)
    bare = _snapshot(backend, {}) if any(name in environ for name in AMD_VARIABLES) else machine
    rocr = {name: environ[name] for name in AMD_VARIABLES[:1] if name in environ}
    after_rocr = _snapshot(backend, rocr) if rocr else bare
    backend.environ = environ
    whys = {device.id: device.whys.get("runtime_index", "") for device in bare.devices}
    return View(machine, _indices(bare), whys, environ, _indices(after_rocr))


def _snapshot(backend: Any, environ: Mapping[str, str]) -> Machine:
    backend.environ = environ
    machine: Machine = backend.snapshot(links=False)
    return machine


def _indices(machine: Machine) -> dict[str, int]:
    return {device.id: device.runtime_index for device in machine.devices if device.runtime_index is not None}


def _nvidia_view(machine: Machine, environ: Mapping[str, str]) -> View:
    """CUDA must not start in this process, or it would never look at what we set; a child says what is visible."""
    order = [device.bdf for device in machine.devices]
    if environ.get("CUDA_VISIBLE_DEVICES") is not None:
        order = _visible_to_cuda(environ)
    index = {bdf: place for place, bdf in enumerate(order)}
    devices = tuple(replace(device, runtime_index=index.get(device.bdf)) for device in machine.devices)
    walk = {device.id: place for place, device in enumerate(devices)}
    return View(replace(machine, devices=devices), walk, {}, environ)


def _visible_to_cuda(environ: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-m", "dieplace.binding.readback", "nvidia"]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=120, check=True)
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BackendError(f"the CUDA driver cannot be asked: {error}", hint="see: nvidia-smi") from error
    if answer["devices"] is None:
        raise BackendError(f"the CUDA driver cannot be asked: {answer['devices_why']}", hint="see: nvidia-smi")
    return [str(device["bdf"]) for device in answer["devices"]]


def _by_name(machine: Machine, name: str) -> tuple[Device, ...]:
    if any(card.id == name for card in machine.cards):
        devices = machine.devices_of(name)
        if devices:
            return devices
    return (machine.device(name),)


def _hidden(view: View, devices: Sequence[Device], what: str) -> Unsupported:
    shown = ", ".join(f"{name}={value!r}" for name, value in view.inherited.items()) or "the visibility variables"
    visible = [device.id for device in view.machine.devices if device.runtime_index is not None]
    places = ", ".join(f"{d.id} is index {view.walk[d.id]} of the whole node" for d in devices if d.id in view.walk)
    return Unsupported(
        f"{what} was asked for, and {shown} hides it ({places or 'nothing is left'})",
        hint=f"visible are {', '.join(visible) or 'none'}: unset or change the variable, or name one of these",
        asked=[device.id for device in devices],
        inherited=view.inherited,
        visible=visible,
    )


def _uuid(machine: Machine, device: Device) -> str:
    uuid = machine.card(device.card).uuid
    if not uuid:
        raise Unsupported(f"the driver names no UUID for {device.id}", hint="run: dieplace doctor")
    return uuid
