"""What a switch must know, read from sysfs and KFD alone: no device node is opened, no library loaded.

Reading never raises for a driver that is absent, half loaded or in reset; the gap becomes a `why`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping

from dieplace.backends.amd.cards import AMD_VENDOR, PCI, bdf_of, drm_cards
from dieplace.backends.amd.kfd import KfdNode, KfdTopology, read_topology
from dieplace.modes import COMPUTE_WORDS, MEMORY_WORDS
from dieplace.partition.facts import CardFacts, DeviceFacts, NodeFacts
from dieplace.parts import part_of_pci
from dieplace.sysfs import Sysfs, errno_name

MODULE = "/sys/module/amdgpu"
_MODULES_DEP_BYTES = 1 << 23  # a distribution's has some 600 kB
_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0")


def observe(sysfs: Sysfs, ids: Mapping[str, str] | None = None, *, links: bool = False) -> NodeFacts:
    """The node now. `ids` pins card names by BDF, so that `gpu3` stays `gpu3` while the driver comes back."""
    loaded = sysfs.exists(MODULE)
    topology = read_topology(sysfs, links=links) if loaded else KfdTopology((), None)
    nodes: dict[str, list[KfdNode]] = {}
    for node in topology.gpus:
        nodes.setdefault(bdf_of(node.key[:3]), []).append(node)
    shown = {bdf_of(key) for key in drm_cards(sysfs)} | set(nodes)
    names = _names(sysfs, shown, ids or {})
    cards = tuple(_card(sysfs, name, bdf, nodes.get(bdf, [])) for bdf, name in names.items())
    refs = sysfs.read_or_none(f"{MODULE}/refcnt")
    return NodeFacts(
        boot_id=sysfs.read_or_none("/proc/sys/kernel/random/boot_id"),
        generation=topology.generation_id,
        driver_loaded=loaded,
        cards=cards,
        module_state=sysfs.read_or_none(f"{MODULE}/initstate"),
        module_refs=int(refs) if refs and refs.lstrip("-").isdigit() else None,
        module_holders=_holders(sysfs),
        driver_version=sysfs.read_or_none(f"{MODULE}/version"),
        reload_why_not=_reload_why_not(sysfs, loaded),
        notes=topology.notes,
    )


def _names(sysfs: Sysfs, shown: set[str], ids: Mapping[str, str]) -> dict[str, str]:
    """BDF to `gpuN`: cards that amdgpu shows first, in BDF order (as discovery numbers them), then the others."""
    present = {bdf for bdf in _pci_cards(sysfs) if _mine(sysfs, bdf)} | shown
    ordered = sorted(present, key=lambda bdf: (bdf not in shown, bdf))
    taken, names = set(ids.values()), {}
    numbers = (f"gpu{i}" for i in range(len(ordered) + len(ids)))
    free = (name for name in numbers if name not in taken)
    for bdf in ordered:
        names[bdf] = ids[bdf] if bdf in ids else next(free)
    return dict(sorted(names.items(), key=lambda item: int(item[1][3:])))


def _pci_cards(sysfs: Sysfs) -> list[str]:
    try:
        return [name for name in sysfs.names(PCI) if _BDF.fullmatch(name)]
    except OSError:
        return []


def _mine(sysfs: Sysfs, bdf: str) -> bool:
    if sysfs.read_or_none(f"{PCI}/{bdf}/vendor") != AMD_VENDOR:
        return False
    return part_of_pci(_hex(sysfs, bdf, "device")) is not None or sysfs.exists(f"{PCI}/{bdf}/current_compute_partition")


def _card(sysfs: Sysfs, name: str, bdf: str, nodes: list[KfdNode]) -> CardFacts:
    device_id = _hex(sysfs, bdf, "device")
    part = part_of_pci(device_id)
    whys: dict[str, str] = {}
    compute, reset_a = _mode(sysfs, bdf, "compute", COMPUTE_WORDS, whys)
    memory, reset_b = _mode(sysfs, bdf, "memory", MEMORY_WORDS, whys)
    hives = {node.properties.get("hive_id", 0) for node in nodes} - {0}
    total = sysfs.read_or_none(f"{PCI}/{bdf}/mem_info_vram_total") or ""
    return CardFacts(
        id=name,
        bdf=bdf,
        part=part.name if part else None,
        device_id=device_id,
        hive=f"{hives.pop():016x}" if len(hives) == 1 else None,
        hbm_bytes=int(total) if total.isascii() and total.isdigit() and int(total) else None,
        compute=compute,
        memory=memory,
        offered_compute=_words(sysfs, bdf, "available_compute_partition", COMPUTE_WORDS),
        supported_compute=_words(sysfs, bdf, "compute_partition_config/supported_xcp_configs", COMPUTE_WORDS),
        offered_memory=_words(sysfs, bdf, "available_memory_partition", MEMORY_WORDS),
        selected=_selected(sysfs, bdf),
        compute_writable=_writable(sysfs, bdf, "current_compute_partition"),
        memory_writable=_writable(sysfs, bdf, "current_memory_partition"),
        driver=_driver(sysfs, bdf),
        guest=part is not None and device_id == part.vf_pci_id,
        in_reset=reset_a or reset_b,
        devices=tuple(_device(sysfs, node, nodes) for node in sorted(nodes, key=lambda n: n.key[3])),
        part_xccs=part.xccs if part else None,
        unique_id=sysfs.read_or_none(f"{PCI}/{bdf}/unique_id"),
        whys=whys,
    )


def _mode(sysfs: Sysfs, bdf: str, kind: str, words: tuple[str, ...], whys: dict[str, str]) -> tuple[str | None, bool]:
    """The mode word, or None with a why; and whether the card answers EPERM, which the driver does in reset."""
    try:
        text = sysfs.read(f"{PCI}/{bdf}/current_{kind}_partition").strip()
    except OSError as error:
        in_reset = error.errno == errno.EPERM
        whys[kind] = "the card is in reset (EPERM)" if in_reset else f"its mode file: {errno_name(error.errno)}"
        return None, in_reset
    if text not in words:
        whys[kind] = f"the driver says {text[:24]!r}"
        return None, False
    return text, False


def _words(sysfs: Sysfs, bdf: str, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    text = sysfs.read_or_none(f"{PCI}/{bdf}/{name}") or ""
    return tuple(word for part in text.split(",") if (word := part.strip()) in known)


def _selected(sysfs: Sysfs, bdf: str) -> tuple[str, tuple[str, ...]] | None:
    word = (sysfs.read_or_none(f"{PCI}/{bdf}/compute_partition_config/xcp_config") or "").strip()
    memories = _words(sysfs, bdf, "compute_partition_config/supported_nps_configs", MEMORY_WORDS)
    return (word, memories) if word in COMPUTE_WORDS and memories else None


def _writable(sysfs: Sysfs, bdf: str, name: str) -> bool:
    # The mode bits, not access(2): the driver drops the write bit where it will not switch, and root passes any check.
    try:
        return bool(os.stat(sysfs.path(f"{PCI}/{bdf}/{name}")).st_mode & 0o200)
    except OSError:
        return False


def _driver(sysfs: Sysfs, bdf: str) -> str | None:
    try:
        return sysfs.readlink(f"{PCI}/{bdf}/driver").rsplit("/", 1)[-1]
    except OSError:
        return None


def _device(sysfs: Sysfs, node: KfdNode, siblings: list[KfdNode]) -> DeviceFacts:
    numbers = {sibling.number for sibling in siblings}
    minor = node.properties.get("drm_render_minor")
    return DeviceFacts(
        partition=node.key[3],
        xccs=node.properties.get("num_xcc"),
        simds=node.properties.get("simd_count"),
        hbm_bytes=node.memory_bytes,
        gpu_id=node.gpu_id,
        kfd_node=node.number,
        render_minor=minor,
        render_present=minor is not None and sysfs.exists(f"/dev/dri/renderD{minor}"),
        sibling_weights=tuple(link.weight for link in node.links if link.target in numbers and link.direct),
    )


def _holders(sysfs: Sysfs) -> tuple[str, ...]:
    try:
        return tuple(sysfs.names(f"{MODULE}/holders"))
    except OSError:
        return ()


def _reload_why_not(sysfs: Sysfs, loaded: bool) -> str | None:
    if loaded and not sysfs.exists(f"{MODULE}/initstate"):
        return "amdgpu is built into this kernel, so only a reboot loads it again"
    release = sysfs.read_or_none("/proc/sys/kernel/osrelease")
    if release and not sysfs.exists(f"/lib/modules/{release}/modules.dep"):
        return f"the module tree /lib/modules/{release} is not visible here (in a container, mount the host's)"
    return _loaded_from_elsewhere(sysfs, f"/lib/modules/{release}/modules.dep") if release and loaded else None


def _loaded_from_elsewhere(sysfs: Sysfs, index: str) -> str | None:
    """A driver that this host's module tree does not hold came out of an image, as KMM loads it: once unloaded, a plain
    modprobe would not find it again, and KMM would load it whenever it likes (k8s-gpu-dra-driver PR 88)."""
    try:
        text = sysfs.read(index, limit_bytes=_MODULES_DEP_BYTES)
    except (OSError, ValueError):
        return None  # not readable is not a sign of anything
    if re.search(r"(^|/)amdgpu\.ko[.a-z0-9]*:", text, re.MULTILINE):
        return None
    return (
        f"the loaded amdgpu is not in this host's module tree ({index} lists none), so a plain modprobe could not load "
        "it again: it came from elsewhere, as with Kubernetes KMM or the GPU operator; change the mode through that "
        "operator, or delete its NodeModulesConfig first"
    )


def _hex(sysfs: Sysfs, bdf: str, name: str) -> int | None:
    text = (sysfs.read_or_none(f"{PCI}/{bdf}/{name}") or "").strip()
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None
