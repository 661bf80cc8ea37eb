"""From cards and KFD nodes to a `Machine`: devices, domains, links, CPU nodes, render nodes, predicted HIP indices.

Die rule (amdgpu aqua_vanjaram.c): the memory range of a partition is its first XCC over the XCCs of a range, so equal
shares in order. That XCC order follows the dies is natural and was not read anywhere.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from dieplace.backends.amd.cards import Package, bdf_of, cus_of, find_packages
from dieplace.backends.amd.kfd import LINK_TYPES, KfdLink, KfdNode, KfdTopology, read_topology
from dieplace.backends.amd.visibility import Entry, Visible, visible
from dieplace.hostnodes import host_domains
from dieplace.machine import Device, Domain, Figure, Link, Machine
from dieplace.sysfs import Sysfs, errno_name

MADE_UP = "the driver writes a constant for partitions of one card; measure it: dieplace bench run link"
NO_LATENCY = "the driver reports no latency"


def snapshot(
    sysfs: Sysfs, *, environ: Mapping[str, str], source: str, backend: str, session: Any = None, links: bool = True
) -> Machine:
    """Discover the node behind `sysfs`; unknown fields are None with a why, and oddities are told in `notes`."""
    topology = read_topology(sysfs, links=links)
    packages, notes = find_packages(sysfs, topology)
    entries, opened = _runtime_entries(sysfs, packages, topology, source)
    seen = visible(entries, environ)
    hosts = host_domains(sysfs) or _kfd_hosts(topology)
    devices = [d for package in packages for d in _devices(package, seen, opened)]
    domains = [d for package in packages for d in _domains(package)]
    return Machine(
        source=source,
        backend=backend,
        cards=tuple(package.card for package in packages),
        devices=tuple(devices),
        domains=(*domains, *hosts),
        links=_links(packages, topology),
        notes=(*topology.notes, *notes, *opened.pop("", ()), *seen.notes),
        stamp=stamp(sysfs),
        host=_host(sysfs),
        session=session,
    )


def stamp(sysfs: Sysfs) -> tuple[str | None, str | None]:
    """(boot id, KFD generation id): when either differs, the node is no longer the one that was discovered."""
    boot = sysfs.read_or_none("/proc/sys/kernel/random/boot_id")
    generation = sysfs.read_or_none("/sys/class/kfd/kfd/topology/generation_id")
    return boot, generation


def _devices(package: Package, seen: Visible, hidden: Mapping[str, Sequence[str]]) -> list[Device]:
    return [_device(package, node, seen, hidden) for node in package.nodes]


def _device(package: Package, node: KfdNode, seen: Visible, hidden: Mapping[str, Sequence[str]]) -> Device:
    card, partition = package.card, node.key[3]
    name = f"{card.id}/p{partition}"
    whole = package.partitions == 1
    whys: dict[str, str] = {}
    dies = _dies_of(package, partition, package.partitions)
    if not dies:
        whys["dies"] = card.whys.get("dies") or card.whys.get("mode") or "which die its XCDs are on was not read"
    domain = _domain_of(package, partition)
    if domain is None:
        whys["domain"] = card.whys.get("mode", "the mode has more memory ranges than logical devices")
    if cus_of(node) is None:
        whys["cus"] = card.whys.get("cus", "KFD states no SIMDs for it")
    if node.memory_bytes is None:
        whys["memory_limit_bytes"] = node.memory_why or "not stated"
    index = seen.index(name)
    if index is None:
        whys["runtime_index"] = hidden[name][0] if name in hidden else "hidden by the visibility variables"
    minor = node.properties.get("drm_render_minor", 0)
    span = _span(package, domain)
    unique_id = node.properties.get("unique_id", 0)
    return Device(
        id=name,
        card=card.id,
        partition=partition,
        bdf=f"{bdf_of(package.key)[:-1]}{partition}",
        xccs=node.properties.get("num_xcc") or None,
        cus=cus_of(node),
        memory_limit_bytes=node.memory_bytes,
        domain=domain,
        whole_card=whole,
        local_guaranteed=bool(
            dies and span and card.mode and set(span) <= set(dies) and (card.mode.memory_ranges > 1 or card.dies == 1)
        ),
        dies=dies,
        kfd_node=node.number,
        gpu_id=node.gpu_id,
        render_node=f"/dev/dri/renderD{minor}" if minor else None,
        numa_node=card.numa_node,
        runtime_index=index,
        unique_id=f"{unique_id:016x}" if unique_id else None,
        aliases=(card.id,) if whole else (),
        whys=whys,
    )


def _dies_of(package: Package, index: int, shares: int | None) -> tuple[int, ...]:
    """The dies that share `index` of `shares` equal shares of the XCDs covers; empty where it was not read.

    On an APU the XCDs are not spread evenly over the dies (one carries the CPU), so only the whole card is known.
    """
    dies = package.card.dies
    if not dies or not shares or index >= shares:
        return ()
    if shares == 1:
        return tuple(range(dies))
    if package.part is None or package.part.apu:
        return ()
    return tuple(range(index * dies // shares, -(-(index + 1) * dies // shares)))


def _domain_of(package: Package, partition: int) -> str | None:
    mode, partitions = package.card.mode, package.partitions
    if mode is None or not partitions or partitions % mode.memory_ranges or partition >= partitions:
        return None
    return f"{package.card.id}/mem{partition // (partitions // mode.memory_ranges)}"


def _span(package: Package, domain: str | None) -> tuple[int, ...]:
    if domain is None or package.card.mode is None:
        return ()
    return _dies_of(package, int(domain.rsplit("mem", 1)[1]), package.card.mode.memory_ranges)


def _domains(package: Package) -> list[Domain]:
    """One domain a memory range; none where the memory mode is unknown."""
    card = package.card
    if card.mode is None:
        return []
    found = []
    for index in range(card.mode.memory_ranges):
        name = f"{card.id}/mem{index}"
        dies = _dies_of(package, index, card.mode.memory_ranges)
        total, why = _domain_bytes(package, name)
        whys = {} if total is not None else {"total_bytes": why}
        if not dies:
            whys["dies"] = card.whys.get("dies", "which dies it spans was not read")
        alias = (f"{card.id}/die{dies[0]}",) if len(dies) == 1 and card.mode.memory_ranges == card.dies else ()
        found.append(Domain(name, card.id, dies, total, card.numa_node, alias, whys))
    return found


def _domain_bytes(package: Package, name: str) -> tuple[int | None, str]:
    """The shares of the partitions of a range; else the card's bytes in equal parts."""
    card, mode = package.card, package.card.mode
    shares = [n.memory_bytes for n in package.nodes if _domain_of(package, n.key[3]) == name]
    expected = (package.partitions or 0) // (mode.memory_ranges if mode else 1)
    total = sum(share or 0 for share in shares)
    complete = bool(shares) and len(shares) == expected and None not in shares
    if complete and (card.hbm_bytes is None or total <= card.hbm_bytes):
        return total, ""
    if mode is not None and card.hbm_bytes is not None:
        return card.hbm_bytes // mode.memory_ranges, ""
    return None, card.whys.get("hbm_bytes", "its KFD nodes are incomplete")


def _links(packages: Sequence[Package], topology: KfdTopology) -> tuple[Link, ...]:
    names = {node.number: f"{p.card.id}/p{node.key[3]}" for p in packages for node in p.nodes}
    owner = {node.number: p.card.id for p in packages for node in p.nodes}
    names |= {node.number: f"host/node{i}" for i, node in enumerate(topology.cpus)}
    return tuple(
        _link(names[node.number], names[link.target], link, owner.get(link.target) == package.card.id)
        for package in packages
        for node in package.nodes
        for link in sorted(node.links, key=lambda link: link.target)
        if link.target in names
    )


def _link(initiator: str, target: str, link: KfdLink, same_card: bool) -> Link:
    kind = "same-card" if same_card else LINK_TYPES.get(link.type, "unknown")
    source = "KFD io_links" if link.direct else "KFD p2p_links"
    if same_card:
        bandwidth = Figure(None, "reported", source, MADE_UP)
    elif link.max_bandwidth_mb_per_s:
        bandwidth = Figure(link.max_bandwidth_mb_per_s / 1000, "reported", f"{source} max_bandwidth")
    else:
        bandwidth = Figure(None, "reported", source, "the driver reports 0 for this path")
    latency = (
        Figure(float(link.min_latency), "reported", f"{source} min_latency")
        if link.min_latency
        else Figure(None, "reported", source, NO_LATENCY)
    )
    return Link(initiator, target, kind, link.weight or None, bandwidth, latency)


def _runtime_entries(
    sysfs: Sysfs, packages: Sequence[Package], topology: KfdTopology, source: str
) -> tuple[list[Entry], dict[str, list[str]]]:
    """Devices in the thunk's walk order, without those whose render node it cannot open; and why not, by device.

    ENOENT and EPERM skip a device; EACCES makes the whole runtime fail (ROCm issue 3144). The key "" holds notes.
    """
    names = {node.number: f"{p.card.id}/p{node.key[3]}" for p in packages for node in p.nodes}
    unseen = not sysfs.exists("/dev/dri") and source == "replayed"  # a bare KFD tree: take them as openable
    entries: list[Entry] = []
    hidden: dict[str, list[str]] = {}
    for node in topology.gpus:
        name = names.get(node.number)
        if name is None:
            continue
        why = None if unseen else _render_trouble(sysfs, node.properties.get("drm_render_minor", 0))
        if why is None:
            entries.append(Entry(name, node.properties.get("unique_id") or None))
        else:
            hidden[name] = [why[1]]
            if why[0] == errno.EACCES:
                hidden.setdefault("", []).append(f"{name}: {why[1]}: the whole HIP runtime fails on such a node")
    return entries, hidden


def _render_trouble(sysfs: Sysfs, minor: int) -> tuple[int, str] | None:
    path = f"/dev/dri/renderD{minor}"
    try:
        sysfs.openable(path)
    except OSError as error:
        return error.errno or 0, f"{path} cannot be opened ({errno_name(error.errno)})"
    return None


def closed_render_nodes(sysfs: Sysfs) -> tuple[tuple[str, int], ...]:
    """Render nodes of visible KFD nodes that this user cannot open, with the errno; EACCES breaks the whole runtime."""
    minors = [node.properties.get("drm_render_minor", 0) for node in read_topology(sysfs, links=False).gpus]
    troubles = [(f"/dev/dri/renderD{minor}", _render_trouble(sysfs, minor)) for minor in minors if minor]
    return tuple((path, trouble[0]) for path, trouble in troubles if trouble is not None)


def _kfd_hosts(topology: KfdTopology) -> tuple[Domain, ...]:
    """CPU nodes as KFD counts them: right while they are 0..k in NUMA order, which is all a bare KFD tree tells."""
    return tuple(
        Domain(
            f"host/node{i}", None, (), n.memory_bytes, i, (), {} if n.memory_bytes else {"total_bytes": "not stated"}
        )
        for i, n in enumerate(topology.cpus)
    )


def _host(sysfs: Sysfs) -> dict[str, Any]:
    return {
        "kernel": sysfs.read_or_none("/proc/sys/kernel/osrelease"),
        "amdgpu_version": sysfs.read_or_none("/sys/module/amdgpu/version"),
    }
