"""Who holds a card: KFD's own process list, together with every process's open device files.

Either alone is blind: KFD does not list DRM-only users, and descriptors do not show a process that attached to KFD and
closed it (legacy-rocm-build issue 4411). psutil is no help, its `open_files()` lists regular files only.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dieplace.backends.base import Holder, Holders
from dieplace.partition.facts import NodeFacts
from dieplace.sysfs import Sysfs, errno_name

KFD_PROCESSES = "/sys/class/kfd/kfd/proc"
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_DRM_NODE = re.compile(r"/dev/dri/((?:renderD|card)[0-9]+)")
_UNIT = re.compile(r"/([A-Za-z0-9:_.@\\-]+\.service)(?:/|$)")


@dataclass
class _View:
    sysfs: Sysfs
    drm: Mapping[str, str | None]  # our DRM nodes to the device they belong to, None for an unused partition slot
    gpus: Mapping[int, str]  # KFD gpu_id to device
    incomplete: list[str] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)


def find_holders(sysfs: Sysfs, facts: NodeFacts) -> Holders:
    """Everything that keeps a card or the driver busy; `incomplete` says what could not be seen."""
    view = _View(sysfs, _drm_nodes(sysfs, facts), _gpu_ids(facts))
    attached = _kfd_processes(view)
    opened = _descriptors(view)
    _check_namespace(view)
    holders = [_holder(view, pid, attached.get(pid), opened.get(pid)) for pid in sorted({*attached, *opened})]
    holders += [
        Holder("module", None, name, detail="a kernel module on top of amdgpu") for name in facts.module_holders
    ]
    if view.unreadable:
        count = len(view.unreadable)
        view.incomplete.append(
            f"{count} process{'es' * (count != 1)} cannot be inspected (first: pid {view.unreadable[0]})"
        )
    return Holders(tuple(h for h in holders if h is not None), tuple(view.incomplete))


def _gpu_ids(facts: NodeFacts) -> dict[int, str]:
    return {d.gpu_id: f"{c.id}/p{d.partition}" for c in facts.cards for d in c.devices if d.gpu_id is not None}


def _drm_nodes(sysfs: Sysfs, facts: NodeFacts) -> dict[str, str | None]:
    """`renderD128` and `card1` to a device id; None for a partition slot that KFD does not list."""
    found: dict[str, str | None] = {}
    by_bdf = {card.bdf: card.id for card in facts.cards}
    try:
        names = sysfs.names("/sys/class/drm")
    except OSError:
        names = []
    for name in names:
        try:
            text = sysfs.readlink(f"/sys/class/drm/{name}")
        except OSError:
            continue
        card = next((card_id for bdf, card_id in by_bdf.items() if f"/{bdf}/" in text), None)
        if card or "amdgpu_xcp" in text:
            found[name] = f"{card}/p0" if card else None
    for facts_card in facts.cards:
        found |= {f"renderD{d.render_minor}": f"{facts_card.id}/p{d.partition}" for d in facts_card.devices}
    return found


def _kfd_processes(view: _View) -> dict[int, tuple[str, ...]]:
    """pid as KFD numbers it (the host's) to the devices it is attached to."""
    try:
        pids = [int(name) for name in view.sysfs.names(KFD_PROCESSES) if name.isdigit()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        view.incomplete.append(f"KFD's process list cannot be read ({errno_name(error.errno)})")
        return {}
    attached = {}
    for pid in pids:
        try:
            names = view.sysfs.names(f"{KFD_PROCESSES}/{pid}")
        except FileNotFoundError:
            continue
        except OSError:
            names = []  # attached, to cards that cannot be told: it counts for all of them
        ids = [int(name[5:]) for name in names if re.fullmatch(r"vram_[0-9]{1,10}", name)]
        attached[pid] = tuple(view.gpus[i] for i in ids if i in view.gpus)
    return attached


def _descriptors(view: _View) -> dict[int, set[str]]:
    """pid to what it has open: `kfd`, or names of our DRM nodes."""
    opened: dict[int, set[str]] = {}
    try:
        pids = [int(name) for name in view.sysfs.names("/proc") if name.isdigit()]
    except OSError as error:
        view.incomplete.append(f"/proc cannot be read ({errno_name(error.errno)})")
        return {}
    for pid in pids:
        try:
            numbers = view.sysfs.names(f"/proc/{pid}/fd")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                view.unreadable.append(pid)
            continue
        for number in numbers:
            found = _target(view, f"/proc/{pid}/fd/{number}")
            if found is not None:
                opened.setdefault(pid, set()).add(found)
    return opened


def _target(view: _View, link: str) -> str | None:
    try:
        text = view.sysfs.readlink(link)
    except OSError:
        return None
    if text == "/dev/kfd":
        return "kfd"
    match = _DRM_NODE.fullmatch(text)
    return match[1] if match and match[1] in view.drm else None


def _check_namespace(view: _View) -> None:
    try:
        namespace = view.sysfs.readlink("/proc/self/ns/pid")
    except OSError:
        return
    if namespace != INITIAL_PID_NAMESPACE:
        view.incomplete.append("this process lives in a pid namespace, while KFD lists the host's pids")


def _holder(view: _View, pid: int, attached: tuple[str, ...] | None, opened: set[str] | None) -> Holder | None:
    in_proc = view.sysfs.exists(f"/proc/{pid}")
    if attached is not None and not in_proc:
        if not view.sysfs.exists(f"{KFD_PROCESSES}/{pid}"):
            return None  # it ended between the two reads
        view.incomplete.append(f"KFD lists pid {pid}, which is not in this /proc (another pid namespace)")
        return Holder("unreadable", pid, None, attached, detail="in another pid namespace")
    drm = sorted(opened - {"kfd"}) if opened else []
    devices = {*(attached or ()), *(d for name in drm if (d := view.drm[name]) is not None)}
    if attached is not None or (opened and "kfd" in opened):
        ghost = opened is None or "kfd" not in opened
        kind = "ghost" if ghost and pid not in view.unreadable and not drm else "compute"
        devices = set() if attached is None or not attached else devices
    else:
        kind = "drm"
        devices = set() if any(view.drm[name] is None for name in drm) else devices
    unit = _unit(view.sysfs, pid)
    said = [f"unit {unit}"] if unit else []
    said += [f"open: {', '.join(drm)}"] if drm else []
    memory = _vram(view, pid) if attached is not None else None
    name = view.sysfs.read_or_none(f"/proc/{pid}/comm")
    return Holder(kind, pid, name, tuple(sorted(devices)), memory, "; ".join(said), unit)


def _vram(view: _View, pid: int) -> int | None:
    """Bytes over all devices, from the only counter that is kept per process and per die."""
    total, seen = 0, False
    try:
        names = view.sysfs.names(f"{KFD_PROCESSES}/{pid}")
    except OSError:
        return None
    for name in names:
        text = view.sysfs.read_or_none(f"{KFD_PROCESSES}/{pid}/{name}") if name.startswith("vram_") else None
        if text and text.strip().isdigit():
            total, seen = total + int(text), True
    return total if seen else None


def _unit(sysfs: Sysfs, pid: int) -> str | None:
    found = _UNIT.findall(sysfs.read_or_none(f"/proc/{pid}/cgroup") or "")
    return found[-1] if found else None
