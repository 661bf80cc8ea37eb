"""Physical cards: what the PCI device's own files say, and what KFD adds, as `Card` data.

The partition files exist on the PCI device alone (partition 0); every logical device of a card inherits its mode from
there (amdsmi issue 100: tools that asked the others showed N/A).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dieplace.backends.amd.kfd import KfdNode, KfdTopology
from dieplace.errors import UsageError
from dieplace.machine import Card
from dieplace.modes import Mode, partitions_of
from dieplace.parts import Part, part_of_pci
from dieplace.sysfs import Sysfs, errno_name

DRM = "/sys/class/drm"
PCI = "/sys/bus/pci/devices"
AMD_VENDOR = "0x1002"
_BDF = re.compile(r"/([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.[0-7]/drm/card[0-9]+$")

Key = tuple[int, int, int]


@dataclass(frozen=True)
class Package:
    """A card with what is needed to place its devices: its KFD nodes in partition order, its files, its layout."""

    key: Key
    card: Card
    base: str | None  # folder of its PCI files, None where this tree has none
    nodes: tuple[KfdNode, ...]
    part: Part | None
    partitions: int | None  # how many logical devices the card's mode makes, None where the mode is unknown


@dataclass
class _Reading:
    """One card while it is read: where it is, what KFD has of it, and why a field stays None."""

    sysfs: Sysfs
    name: str
    key: Key
    base: str | None
    nodes: Sequence[KfdNode]
    part: Part | None = None
    device_id: int | None = None
    whys: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def bdf_of(key: Key) -> str:
    """The PCI address of a card, `dddd:bb:dd.0`: the function number is never part of it."""
    return f"{key[0]:04x}:{key[1]:02x}:{key[2]:02x}.0"


def find_packages(sysfs: Sysfs, topology: KfdTopology) -> tuple[list[Package], list[str]]:
    """Every card that DRM or KFD knows, in BDF order, and what there is to tell about them."""
    bases = drm_cards(sysfs)
    nodes: dict[Key, list[KfdNode]] = {}
    notes: list[str] = []
    seen: dict[tuple[int, int, int, int], int] = {}
    for node in topology.gpus:
        if node.key in seen:
            notes.append(
                f"KFD nodes {seen[node.key]} and {node.number} name the same partition {node.key[3]} of "
                f"{bdf_of(node.key[:3])}: node {node.number} cannot be told apart and is left out"
            )
            continue
        seen[node.key] = node.number
        nodes.setdefault(node.key[:3], []).append(node)
    keys = sorted({*nodes, *(key for key, base in bases.items() if _switchable(sysfs, base))})
    packages = []
    for index, key in enumerate(keys):
        package, told = _package(sysfs, f"gpu{index}", key, bases.get(key), nodes.get(key, []))
        packages.append(package)
        notes += told
    return packages, notes


def drm_cards(sysfs: Sysfs) -> dict[Key, str]:
    """AMD cards by key, from the link text of `/sys/class/drm/cardN`; XCP platform devices have no BDF in it."""
    found: dict[Key, str] = {}
    try:
        names = sysfs.names(DRM)
    except OSError:
        return found
    for name in names:
        if not re.fullmatch(r"card[0-9]+", name):
            continue
        try:
            match = _BDF.search(sysfs.readlink(f"{DRM}/{name}"))
        except OSError:
            continue
        if match and sysfs.read_or_none(f"{DRM}/{name}/device/vendor") == AMD_VENDOR:
            key = (int(match[1], 16), int(match[2], 16), int(match[3], 16))
            base = f"{PCI}/{bdf_of(key)}"
            found[key] = base if sysfs.exists(base) else f"{DRM}/{name}/device"
    return found


def _switchable(sysfs: Sysfs, base: str) -> bool:
    """A card without KFD nodes is shown when it has partition files or is a part we know."""
    known = part_of_pci(_hex(_Reading(sysfs, "", (0, 0, 0), base, ()), "device"))
    return known is not None or sysfs.exists(f"{base}/current_compute_partition")


def _package(
    sysfs: Sysfs, name: str, key: Key, base: str | None, nodes: list[KfdNode]
) -> tuple[Package, tuple[str, ...]]:
    reading = _Reading(sysfs, name, key, base, sorted(nodes, key=lambda node: node.key[3]))
    _recognise(reading)
    mode = _mode(reading)
    partitions = _partitions(reading, mode)
    if partitions and len(nodes) != partitions:
        reading.notes.append(_incomplete(name, mode, len(nodes), partitions))
    card = _card(reading, mode, whole=partitions is not None and len(nodes) == partitions)
    return Package(key, card, base, tuple(reading.nodes), reading.part, partitions), tuple(reading.notes)


def _recognise(reading: _Reading) -> None:
    """Part and PCI device id; a part is known by its id alone, never by a CU count (aiter issue 2325)."""
    stated = reading.nodes[0].properties.get("device_id") if reading.nodes else None
    reading.device_id = stated or _hex(reading, "device")
    reading.part = part_of_pci(reading.device_id)
    if reading.part is None:
        shown = "unknown" if reading.device_id is None else f"0x{reading.device_id:04x}"
        reading.whys["part"] = f"PCI device id {shown} is not a part that dieplace knows"
        reading.whys["dies"] = reading.whys["stacks_per_die"] = "the part is not known"
        return
    if reading.device_id == reading.part.vf_pci_id:
        told = f"{reading.name} is a virtual function: a guest is told the mode that its host chose to tell"
        reading.notes.append(told)
    for key in ("dies", "stacks_per_die"):
        if getattr(reading.part, key) is None:
            reading.whys[key] = reading.part.whys.get(key, "not read")


def _partitions(reading: _Reading, mode: Mode | None) -> int | None:
    """How many logical devices the card makes: from its mode, else from the XCDs of one of them."""
    part, nodes = reading.part, reading.nodes
    if mode is not None:
        return partitions_of(mode.compute, part.xccs if part else _total(nodes, "num_xcc") or 0) or None
    if part is not None and nodes and nodes[0].properties.get("num_xcc"):
        return max(1, part.xccs // nodes[0].properties["num_xcc"])
    return 1 if part is None and len(nodes) == 1 and reading.base is not None else None


def _card(reading: _Reading, mode: Mode | None, *, whole: bool) -> Card:
    """The card's data; `whole` says that KFD shows all of it, so that sums over its nodes are its own."""
    part, nodes, whys = reading.part, reading.nodes, reading.whys
    sizes = _sizes(reading, whole)
    unique_id = _unique_id(reading)
    hive = nodes[0].properties.get("hive_id") if nodes else None
    return Card(
        id=reading.name,
        bdf=bdf_of(reading.key),
        part=part.name if part else None,
        device_id=reading.device_id,
        xccs=sizes["xccs"],
        cus=sizes["cus"],
        hbm_bytes=sizes["hbm_bytes"],
        mode=mode,
        dies=part.dies if part else None,
        stacks_per_die=part.stacks_per_die if part else None,
        unique_id=unique_id,
        uuid=f"GPU-{unique_id}" if unique_id else None,
        numa_node=_numa_node(reading),
        hive=f"0x{hive:016x}" if hive else None,
        gfx=_gfx(nodes, part),
        whys=whys,
    )


def _sizes(reading: _Reading, whole: bool) -> dict[str, int | None]:
    """XCDs, CUs and bytes of the card, each from the part, its own files, or the sum over all of its nodes."""
    part, nodes = reading.part, reading.nodes
    cus = _cus(nodes) if whole else None
    hbm = _decimal(reading, "mem_info_vram_total")
    if hbm is None and whole and all(node.memory_bytes for node in nodes):
        hbm = sum(node.memory_bytes or 0 for node in nodes)
    sizes = {
        "xccs": part.xccs if part else (_total(nodes, "num_xcc") if whole else None),
        "cus": cus if cus is not None or part is None else part.cus,
        "hbm_bytes": hbm,
    }
    for key, value in sizes.items():
        if value is None:
            known = part.whys.get("cus_per_xcc" if key == "cus" else key) if part else None
            reading.whys.setdefault(key, known or "its KFD nodes are incomplete and no file names it")
    return sizes


def _mode(reading: _Reading) -> Mode | None:
    """The card's mode as the driver states it; None with a why, never a default (ROCm issue 4688)."""
    guess = _looks_like(reading.part, reading.nodes)
    if reading.base is None:
        reading.whys["mode"] = "this tree has no PCI files for the card" + guess
        return None
    words: list[str] = []
    for name in ("current_compute_partition", "current_memory_partition"):
        try:
            words.append(reading.sysfs.read(f"{reading.base}/{name}").strip())
        except OSError as error:
            reset = ": the card is in reset, or hidden" if error.errno == errno.EPERM else ""
            reading.whys["mode"] = f"{name} cannot be read ({errno_name(error.errno)}{reset})" + guess
            return None
    try:
        return Mode.parse("/".join(words))
    except UsageError:
        reading.whys["mode"] = f"the driver answers {' and '.join(word[:24] or 'nothing' for word in words)}"
        return None


def _looks_like(part: Part | None, nodes: Sequence[KfdNode]) -> str:
    """What KFD alone tells about the compute mode; it cannot tell the memory mode."""
    xccs = nodes[0].properties.get("num_xcc", 0) if nodes else 0
    if part is None or not xccs or part.xccs % xccs:
        return ""
    count = part.xccs // xccs
    word = "CPX" if xccs == 1 and count > 1 else {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}.get(count)
    return f"; KFD shows {count} devices of {xccs} XCDs, as in {word}" if word else ""


def _incomplete(name: str, mode: Mode | None, found: int, expected: int) -> str:
    asked = f"{mode} makes" if mode else "its XCD counts say"
    return (
        f"{name}: {asked} {expected} logical devices, KFD shows {found}: a hidden or failed node, a driver still "
        "starting, or no render node left for it (amdsmi issue 99)"
    )


def _unique_id(reading: _Reading) -> str | None:
    """The package's id: its own file, else KFD's where that is the package's (equal on all partitions, or SPX)."""
    text = _text(reading, "unique_id").lower()
    if re.fullmatch(r"[0-9a-f]{1,16}", text):
        return text.zfill(16)
    ids = {node.properties.get("unique_id", 0) for node in reading.nodes}
    if len(ids) == 1 and (value := ids.pop()):
        return f"{value:016x}"
    reading.whys["unique_id"] = "no unique_id file, and KFD's ids are missing or differ between the partitions"
    return None


def _numa_node(reading: _Reading) -> int | None:
    text = _text(reading, "numa_node")
    if text.isascii() and text.isdigit() and len(text) < 6:
        return int(text)
    no_node = "the driver says -1: no CPU node is near"
    reading.whys["numa_node"] = no_node if text == "-1" else "no readable numa_node file"
    return None


def _gfx(nodes: Sequence[KfdNode], part: Part | None) -> str | None:
    version = nodes[0].properties.get("gfx_target_version", 0) if nodes else 0
    if version:
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return part.gfx if part else None


def _cus(nodes: Sequence[KfdNode]) -> int | None:
    counts = [cus_of(node) for node in nodes]
    return None if not counts or None in counts else sum(count or 0 for count in counts)


def cus_of(node: KfdNode) -> int | None:
    """Compute units of one logical device: `simd_count` over `simd_per_cu`."""
    per_cu = node.properties.get("simd_per_cu", 0)
    return node.properties.get("simd_count", 0) // per_cu or None if per_cu else None


def _total(nodes: Sequence[KfdNode], key: str) -> int | None:
    values = [node.properties.get(key, 0) for node in nodes]
    return sum(values) if values and all(values) else None


def _text(reading: _Reading, name: str) -> str:
    if reading.base is None:
        return ""
    return (reading.sysfs.read_or_none(f"{reading.base}/{name}") or "").strip()


def _hex(reading: _Reading, name: str) -> int | None:
    text = _text(reading, name)
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None


def _decimal(reading: _Reading, name: str) -> int | None:
    text = _text(reading, name)
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) and int(text) > 0 else None
