"""From a request (devices, CPUs, host memory) to what each started process gets: environment and binding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dieplace import numberlist
from dieplace.binding import plan
from dieplace.binding.host import Host, read_host, read_nodes, siblings_of
from dieplace.binding.plan import Binding
from dieplace.binding.ranks import require_rank
from dieplace.binding.visibility import View, chosen_devices, environment, look
from dieplace.errors import UsageError
from dieplace.machine import Device, Machine
from dieplace.sysfs import Sysfs

NOT_THIS_MACHINE = "the emulated node's CPUs and memory are not this machine's: this part is not carried out"


@dataclass(frozen=True)
class Request:
    """What `exec` was asked for; `devices` None means no GPU backend is asked, ("all",) every visible device."""

    devices: tuple[str, ...] | None = None
    per_device: bool = False
    by_rank: bool = False
    keep_visible: bool = False
    visible_by: str = "rocr"
    cpus: str | None = None
    cpunodes: str | None = None
    policy: str | None = None
    nodes: str | None = None
    backend: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class Prepared:
    """One process to start: `added` to its environment, `planned` as shown, `binding` as carried out here."""

    label: str
    devices: tuple[Device, ...]
    added: dict[str, str]
    planned: Binding
    binding: Binding
    vendor: str = "none"
    source: str | None = None

    def notes(self) -> tuple[str, ...]:
        """Sentences that explain the plan, what cannot be had last."""
        return (*self.planned.reasons, *self.planned.incomplete)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--print`."""
        cpus = self.planned.cpus
        return {
            "devices": [{"id": d.id, "index": i, "bdf": d.bdf} for i, d in enumerate(self.devices)],
            "environment": self.added,
            "cpus": None if cpus is None else numberlist.show(cpus),
            "memory_policy": self.planned.policy,
            "memory_nodes": list(self.planned.nodes),
            "notes": list(self.notes()),
        }


def prepare(request: Request, environ: Mapping[str, str]) -> tuple[Prepared, ...]:
    """Decide everything; changes nothing. Errors are typed, and name both sides of a contradiction."""
    if request.per_device and request.by_rank:
        raise UsageError("--per-device starts the processes itself; --by-rank is for those a launcher started")
    if request.keep_visible and not (request.per_device or request.by_rank):
        raise UsageError(
            "--keep-visible goes with --per-device or --by-rank: one program sees the devices that it was given",
            hint="name the devices it shall see: --device gpu0",
        )
    host = read_host(Sysfs("/"))
    wish = plan.asked(host, cpus=request.cpus, cpunodes=request.cpunodes, policy=request.policy, nodes=request.nodes)
    if request.devices is None:
        if wish == Binding():
            raise UsageError("there is nothing to bind", hint="name --device, CPUs or host memory: dieplace exec -h")
        return (Prepared("host", (), {}, wish, wish),)
    view = look(request.backend, request.node, environ)
    devices = chosen_devices(view, request.devices)
    if request.per_device:
        return tuple(_one(view, devices, i, host, wish, request, environ) for i in range(len(devices)))
    if request.by_rank:
        return (_one(view, devices, require_rank(environ, len(devices)), host, wish, request, environ),)
    return (_together(view, devices, wish, request.visible_by),)


def device_binding(view: View, devices: Sequence[Device], index: int) -> Binding:
    """CPUs and memory near one device; its part of the CPUs where others of `devices` share its NUMA node."""
    host, chosen = host_of(view.machine), devices[index]
    binding = plan.near(host, chosen.numa_node, who=chosen.id)
    sharing = [device for device in devices if device.numa_node == chosen.numa_node]
    return plan.share(host, binding, sharing.index(chosen), len(sharing))


def host_of(machine: Machine) -> Host:
    """This host; of an emulated machine the emulated one, where everything is allowed."""
    if machine.source != "emulated":
        return read_host(Sysfs("/"))
    sysfs: Sysfs = getattr(machine.session, "sysfs")  # noqa: B009 - the emulated backend's own
    nodes, notes = read_nodes(sysfs)
    every = tuple(sorted(cpu for node in nodes for cpu in node.cpus))
    return Host(nodes, every, None, siblings_of(sysfs, every), notes)


def _one(
    view: View, devices: tuple[Device, ...], index: int, host: Host, wish: Binding, request: Request,
    environ: Mapping[str, str],
) -> Prepared:  # fmt: skip
    shown = devices if request.keep_visible else devices[index : index + 1]
    added = (
        environment(view, shown, by=request.visible_by) | {"DIEPLACE_DEVICE": devices[index].id} | _emulated_words(view)
    )
    if request.per_device:
        added |= _rank_words(index, len(devices), environ)
    near = device_binding(view, devices, index)
    if wish.cpus is not None:
        wish = plan.share(host, wish, index, len(devices)) if request.per_device or request.by_rank else wish
    return _prepared(view, devices[index].id, shown, added, near, wish)


def _together(view: View, devices: tuple[Device, ...], wish: Binding, by: str) -> Prepared:
    """One program for several devices: the CPUs of all their nodes, memory near the first or over all of them."""
    seen = host_of(view.machine)
    near = [plan.near(seen, number, who=device.id) for number, device in _first_of_each_node(devices).items()]
    cpus = sorted({cpu for item in near for cpu in item.cpus or ()})
    nodes = sorted({node for item in near for node in item.nodes})
    joined = Binding(
        tuple(cpus) or None,
        None if not nodes else "preferred" if len(nodes) == 1 else "interleave",
        tuple(nodes),
        tuple(dict.fromkeys(text for item in near for text in item.reasons)),
        tuple(dict.fromkeys(text for item in near for text in item.incomplete)),
    )
    return _prepared(
        view, devices[0].id, devices, environment(view, devices, by=by) | _emulated_words(view), joined, wish
    )


def _first_of_each_node(devices: tuple[Device, ...]) -> dict[int | None, Device]:
    found: dict[int | None, Device] = {}
    for device in devices:
        found.setdefault(device.numa_node, device)
    return found


def _prepared(
    view: View, label: str, devices: tuple[Device, ...], added: dict[str, str], near: Binding, wish: Binding
) -> Prepared:
    planned = plan.merged(near, wish)
    emulated = view.machine.source == "emulated"
    if emulated:
        # What was asked for by number means this machine; what is near an emulated device does not exist here.
        binding = wish
        if (near.cpus is not None and wish.cpus is None) or (near.policy is not None and wish.policy is None):
            planned = replace(planned, reasons=(*planned.reasons, NOT_THIS_MACHINE))
    else:
        binding = planned
    vendor = "none" if emulated else view.vendor
    return Prepared(label, devices, added, planned, binding, vendor, view.machine.source)


def _emulated_words(view: View) -> dict[str, str]:
    if view.machine.source != "emulated":
        return {}
    node = getattr(view.machine.session, "node", None)
    place = getattr(node, "directory", None)
    return {"DIEPLACE_BACKEND": "emulated"} | ({"DIEPLACE_NODE": str(place.absolute())} if place is not None else {})


def _rank_words(index: int, count: int, environ: Mapping[str, str]) -> dict[str, str]:
    words = {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(count)}
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        words |= {"RANK": str(index), "WORLD_SIZE": str(count)}
    return words
