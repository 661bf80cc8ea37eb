"""The environment in which a program sees exactly the chosen devices, in order, within what the caller left visible.

AMD: `ROCR_VISIBLE_DEVICES` gets indices of ROCr's own walk over KFD (never UUIDs: siblings may share one), and
`HIP_VISIBLE_DEVICES` then counts from 0; `CUDA_VISIBLE_DEVICES`, which HIP reads where its own variable is unset and
some servers compare with it, is brought in line where the caller had set it. NVIDIA: UUIDs, which no order moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.errors import NoSuchDevice, Unsupported
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


def environment(view: View, devices: Sequence[Device]) -> dict[str, str]:
    """What to set so that the program's device 0, 1, ... are `devices`."""
    told = {"DIEPLACE_DEVICE": ",".join(device.id for device in devices)}
    if view.vendor == "nvidia":
        return told | {"CUDA_VISIBLE_DEVICES": ",".join(_uuid(view.machine, device) for device in devices)}
    count = ",".join(str(index) for index in range(len(devices)))
    told |= {
        "ROCR_VISIBLE_DEVICES": ",".join(str(view.walk[device.id]) for device in devices),
        "HIP_VISIBLE_DEVICES": count,
    }
    return told | ({"CUDA_VISIBLE_DEVICES": count} if "CUDA_VISIBLE_DEVICES" in view.environ else {})


def look(backend_name: str | None, node: str | None, environ: Mapping[str, str]) -> View:
    """Discover the machine as `environ`'s variables leave it, and once more without them where there are any."""
    from dieplace.discover import open_backend

    backend: Any = open_backend(backend_name, node=node)
    if not hasattr(backend, "environ"):  # NVIDIA: the driver itself reads this process's variables
        machine: Machine = backend.snapshot(links=False)
        return View(machine, {device.id: index for index, device in enumerate(machine.devices)}, {}, environ)
    backend.environ = environ
    machine = bare = backend.snapshot(links=False)
    if any(name in environ for name in AMD_VARIABLES):
        backend.environ = {}
        bare = backend.snapshot(links=False)
        backend.environ = environ
    walk = {device.id: device.runtime_index for device in bare.devices if device.runtime_index is not None}
    return View(machine, walk, {device.id: device.whys.get("runtime_index", "") for device in bare.devices}, environ)


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
