"""KFD topology as plain data: `/sys/class/kfd/kfd/topology`, read through a Sysfs and never trusted.

A node that is missing, unreadable or damaged becomes a note, never a guess: kernels number nodes densely, but a
device cgroup hides nodes with EPERM, and a reload shows them late (rocm-systems PR 1609: loops that stopped there
lost devices).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

from dieplace.sysfs import Sysfs, errno_name

TOPOLOGY = "/sys/class/kfd/kfd/topology"
LINK_TYPES = {2: "pcie", 11: "xgmi"}  # HSA_IOLINKTYPE in the thunk's hsakmttypes.h
SAME_CARD_WEIGHT = 13  # siblings of one package, in sysfs of every mode (k8s-device-plugin topology-parsing-mi308)


@dataclass(frozen=True)
class KfdLink:
    """One `io_links` (direct) or `p2p_links` entry; bandwidths in MB/s as the driver writes them."""

    target: int
    type: int
    weight: int
    min_bandwidth_mb_per_s: int
    max_bandwidth_mb_per_s: int
    min_latency: int
    direct: bool


@dataclass(frozen=True)
class KfdNode:
    """One node: a CPU socket (`gpu_id` 0) or a logical GPU."""

    number: int
    gpu_id: int | None
    properties: Mapping[str, int]
    memory_bytes: int | None
    memory_why: str | None = None
    links: tuple[KfdLink, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """GPU nodes have SIMDs; `gpu_id` alone would lose a node whose id file cannot be read."""
        return self.properties.get("simd_count", 0) > 0 or bool(self.gpu_id)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """(PCI domain, bus, device, partition).

        The partition id is in the function bits of `location_id` on older kernels and in bits 31:28 on newer ones;
        a high nibble that is not zero wins.
        """
        location = self.properties.get("location_id", 0)
        high = (location >> 28) & 0xF
        return (
            self.properties.get("domain", 0),
            (location >> 8) & 0xFF,
            (location >> 3) & 0x1F,
            high or location & 0x7,
        )


@dataclass(frozen=True)
class KfdTopology:
    """Every node that could be read, in number order, and what could not."""

    nodes: tuple[KfdNode, ...]
    generation_id: str | None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[KfdNode, ...]:
        """GPU nodes in number order."""
        return tuple(node for node in self.nodes if node.is_gpu)

    @property
    def cpus(self) -> tuple[KfdNode, ...]:
        """CPU nodes in number order."""
        return tuple(node for node in self.nodes if not node.is_gpu)


@dataclass
class _Reader:
    sysfs: Sysfs
    links: bool
    notes: list[str] = field(default_factory=list)


def read_topology(sysfs: Sysfs, *, links: bool = True) -> KfdTopology:
    """Read all nodes; `links=False` leaves out their links, which are most of the files of a CPX node."""
    reader = _Reader(sysfs, links)
    numbers = _numbers(reader, f"{TOPOLOGY}/nodes", "KFD nodes")
    if numbers and numbers != list(range(numbers[-1] + 1)):
        missing = sorted(set(range(min(numbers[-1] + 1, 4096))) - set(numbers))
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        reader.notes.append(f"KFD node numbers have gaps (missing {shown}): AMD's library stops at the first one")
    nodes = [node for number in numbers if (node := _node(reader, number)) is not None]
    return KfdTopology(tuple(nodes), sysfs.read_or_none(f"{TOPOLOGY}/generation_id"), tuple(reader.notes))


def parse_properties(text: str) -> tuple[dict[str, int], list[str]]:
    """`key value` lines as integers, and the keys whose value is not a plain decimal of at most 64 bits."""
    values: dict[str, int] = {}
    bad: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        value = value.strip()
        if value.isascii() and value.isdigit() and len(value) <= 20 and int(value) < 1 << 64:
            values[key] = int(value)
        elif key:
            bad.append(key)
    return values, bad


def _node(reader: _Reader, number: int) -> KfdNode | None:
    base = f"{TOPOLOGY}/nodes/{number}"
    properties = _properties(reader, f"{base}/properties", f"KFD node {number}")
    if properties is None:
        return None
    gpu_id = _integer(reader.sysfs.read_or_none(f"{base}/gpu_id"))
    if gpu_id is None:
        reader.notes.append(f"KFD node {number} has no readable gpu_id")
    is_gpu = properties.get("simd_count", 0) > 0 or bool(gpu_id)
    if is_gpu and "location_id" not in properties:
        reader.notes.append(f"KFD node {number} has no location_id: it cannot be told which device it is; left out")
        return None
    memory, why = _memory(reader.sysfs, base)
    links = _links(reader, base, number) if reader.links and is_gpu else ()
    return KfdNode(number, gpu_id, properties, memory, why, links)


def _properties(reader: _Reader, path: str, what: str) -> dict[str, int] | None:
    try:
        text = reader.sysfs.read(path)
    except OSError as error:
        hidden = " (hidden by the device cgroup)" if error.errno == errno.EPERM else ""
        reader.notes.append(f"{what} cannot be read: {errno_name(error.errno)}{hidden}")
        return None
    values, bad = parse_properties(text)
    if bad:
        shown = ", ".join(repr(key[:24]) for key in bad[:3])
        reader.notes.append(f"{what} has {len(bad)} damaged properties ({shown})")
    if not values:
        reader.notes.append(f"{what} has no properties yet; left out")
        return None
    return values


def _memory(sysfs: Sysfs, base: str) -> tuple[int | None, str | None]:
    """The partition's share of HBM in bytes, over all memory banks of the node."""
    try:
        banks = [name for name in sysfs.names(f"{base}/mem_banks") if name.isdigit()]
        sizes = [parse_properties(sysfs.read(f"{base}/mem_banks/{bank}/properties"))[0] for bank in banks]
    except OSError as error:
        return None, f"mem_banks cannot be read: {errno_name(error.errno)}"
    known = [size["size_in_bytes"] for size in sizes if "size_in_bytes" in size]
    if not known or sum(known) == 0:
        return None, "mem_banks names no size"
    return sum(known), None


def _links(reader: _Reader, base: str, number: int) -> tuple[KfdLink, ...]:
    found: list[KfdLink] = []
    for folder, direct in (("io_links", True), ("p2p_links", False)):
        if not reader.sysfs.exists(f"{base}/{folder}"):
            continue
        for index in _numbers(reader, f"{base}/{folder}", f"the {folder} of KFD node {number}"):
            path = f"{base}/{folder}/{index}/properties"
            values = _properties(reader, path, f"link {index} of KFD node {number}")
            if values and "node_to" in values:
                found.append(_link(values, direct))
    return tuple(found)


def _link(values: Mapping[str, int], direct: bool) -> KfdLink:
    return KfdLink(
        target=values["node_to"],
        type=values.get("type", 0),
        weight=values.get("weight", 0),
        min_bandwidth_mb_per_s=values.get("min_bandwidth", 0),
        max_bandwidth_mb_per_s=values.get("max_bandwidth", 0),
        min_latency=values.get("min_latency", 0),
        direct=direct,
    )


def _numbers(reader: _Reader, path: str, what: str) -> list[int]:
    """The numbered entries of a folder in numeric order; other names become a note."""
    try:
        names = reader.sysfs.names(path)
    except OSError as error:
        reader.notes.append(f"{what} cannot be listed: {errno_name(error.errno)}")
        return []
    strange = [name for name in names if not (name.isascii() and name.isdigit() and len(name) < 10)]
    if strange:
        reader.notes.append(f"{what}: {len(strange)} names are not numbers ({strange[0][:24]!r}); left out")
    return sorted(int(name) for name in names if name not in strange)


def _integer(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
