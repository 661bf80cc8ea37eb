"""The part of the tree that belongs to the cards: PCI devices, DRM class, XCP platform devices, device nodes.

File names, modes and texts: partition interface of the amdgpu driver (`amdgpu_gfx.c`, `amdgpu_gmc.c`,
`amdgpu_xcp.c`); what AMD's library demands of them was found by running libamd_smi 24.7 over such trees.
"""

from __future__ import annotations

from . import rules
from .entries import (
    SLOTS_PER_CARD,
    Entries,
    File,
    Folder,
    Link,
    driven_cards,
    minor,
    partitions,
    unique_id,
    used_bytes,
)
from .state import NodeState

AST_BDF = "0000:c2:00.0"


def cards(state: NodeState) -> Entries:
    """Everything under sys/devices/pci*, sys/bus/pci, sys/class/drm, sys/devices/platform and dev/dri."""
    tree: Entries = {"sys/bus/pci/devices": Folder(), "sys/devices/platform": Folder(), "dev": Folder()}
    for index in range(len(state.cards)):
        tree |= _pci_device(state, index)
    if state.style.ast:
        tree |= _ast()
    tree |= _other_render(state)
    if state.style.drm_stays:
        tree["sys/class/drm"] = Folder()
    for index in driven_cards(state):
        if state.shown(index):
            tree |= _driver_files(state, index) | _drm_nodes(state, index)
    return tree


def device_folder(bdf: str) -> str:
    """Where the PCI device lives; the other paths are links to it."""
    return f"sys/devices/pci{bdf[:7]}/{bdf}"


def _pci_device(state: NodeState, index: int) -> Entries:
    card, part = state.cards[index], state.model
    home = device_folder(card.bdf)
    pci_id = part.vf_pci_id if state.style.virtual_function else part.pci_id
    tree: Entries = {
        f"{home}/vendor": File("0x1002\n"),
        f"{home}/device": File(f"0x{pci_id:04x}\n"),
        f"{home}/subsystem_vendor": File("0x1002\n"),
        f"{home}/subsystem_device": File(f"0x{part.pci_id:04x}\n"),
        f"{home}/class": File("0x120000\n"),
        f"{home}/revision": File("0x00\n"),
        f"{home}/numa_node": File(f"{numa_node(state, index)}\n"),
        f"{home}/subsystem": Link("../../../bus/pci"),
        f"sys/bus/pci/devices/{card.bdf}": Link(f"../../../{device_folder(card.bdf)[4:]}"),
    }
    driver = "vfio-pci" if index in state.style.vfio_cards else "amdgpu" if state.shown(index) else None
    if driver:
        tree[f"{home}/driver"] = Link(f"../../../bus/pci/drivers/{driver}")
        tree[f"sys/bus/pci/drivers/{driver}/{card.bdf}"] = Link(f"../../../../{device_folder(card.bdf)[4:]}")
    return tree


def numa_node(state: NodeState, index: int) -> int:
    """CPU NUMA node of a card: the first cards on the first node, evenly."""
    return index * state.style.cpu_nodes // len(state.cards)


def _driver_files(state: NodeState, index: int) -> Entries:
    home, part, style = device_folder(state.cards[index].bdf), state.model, state.style
    nps = int(state.memory_of(index)[3:])
    listed = rules.supported_compute(part.xccs)
    if style.available_list == "dynamic":
        listed = rules.available_compute(part.xccs, nps, part.gfx, style.nps_table)
    guest = style.virtual_function
    tree: Entries = {
        f"{home}/current_compute_partition": File(
            f"{state.cards[index].compute or 'UNKNOWN'}\n", 0o444 if guest else 0o644
        ),
        f"{home}/current_memory_partition": File(f"NPS{nps}\n", 0o644 if state.memory_caps else 0o444),
        f"{home}/unique_id": File(f"{unique_id(state, index):016x}\n"),
        f"{home}/xgmi_physical_id": File(f"{index}\n"),
        f"{home}/vbios_version": File("113-EMULATED-000\n"),
        f"{home}/hwmon/hwmon{index}/name": File("amdgpu\n"),
        f"{home}/enforce_isolation": File(" ".join("0" * partitions(state, index)) + "\n", 0o644),
    }
    if not guest:
        tree[f"{home}/available_compute_partition"] = File(", ".join(listed) + "\n")
    if state.memory_caps:
        tree[f"{home}/available_memory_partition"] = File(", ".join(state.memory_caps) + "\n")
    if style.product_name:
        tree[f"{home}/product_name"] = File(f"{part.pci_name}\n")
    if style.mem_alloc_mode:
        tree[f"{home}/compute_partition_mem_alloc_mode"] = File(f"{state.cards[index].alloc_mode}\n", 0o644)
    if style.config_folder and not guest:
        tree |= _config_folder(state, index, home)
    return tree | _memory_files(state, index, home)


def _memory_files(state: NodeState, index: int, home: str) -> Entries:
    total, used = state.model.hbm_bytes, used_bytes(state, index)
    if total is None or used is None:
        return {}
    tree: Entries = {f"{home}/mem_info_vram_vendor": File("emulated\n")}
    for name, value in (("vram_total", total), ("vram_used", used), ("vis_vram_total", total), ("vis_vram_used", used)):
        tree[f"{home}/mem_info_{name}"] = File(f"{value}\n")
    return tree


def _config_folder(state: NodeState, index: int, home: str) -> Entries:
    part, asked = state.model, state.cards[index].asked
    folder = f"{home}/compute_partition_config"
    tree: Entries = {
        f"{folder}/supported_xcp_configs": File(", ".join(rules.supported_compute(part.xccs)) + "\n"),
        f"{folder}/xcp_config": File(f"{asked}\n", 0o644),
    }
    if state.memory_caps and state.style.nps_configs:
        allowed = rules.nps_of(asked, part.gfx, state.style.nps_table)
        words = [word for word in state.memory_caps if int(word[3:]) in allowed]
        tree[f"{folder}/supported_nps_configs"] = File((", ".join(words) or "Not supported") + "\n")
    engines = {"xcc": part.xccs, "dma": 2 * part.xccs}
    if part.decoders is not None:
        engines["dec"] = part.decoders
    if part.decoders is not None and part.jpeg_rings_per_decoder is not None:
        engines["jpeg"] = part.decoders * part.jpeg_rings_per_decoder
    for engine, available in engines.items():
        count, shared = rules.shared_instances(available, rules.partitions_of(asked, part.xccs))
        tree[f"{folder}/{engine}/num_inst"] = File(f"{count}\n", 0o400)
        tree[f"{folder}/{engine}/num_shared"] = File(f"{shared}\n", 0o400)
    return tree


def _drm_nodes(state: NodeState, index: int) -> Entries:
    tree: Entries = {}
    for slot in range(SLOTS_PER_CARD):
        numbers = minor(state, index, slot)
        if numbers.render is None:
            continue
        home = (
            device_folder(state.cards[index].bdf)
            if slot == 0
            else f"sys/devices/platform/{_xcp_name(state, index, slot)}"
        )
        if numbers.card is not None:
            tree |= _drm_node(home, f"card{numbers.card}", numbers.card)
        tree |= _drm_node(home, f"renderD{numbers.render}", numbers.render)
    return tree


def _drm_node(home: str, name: str, number: int) -> Entries:
    return {
        f"{home}/drm/{name}/dev": File(f"226:{number}\n"),
        f"{home}/drm/{name}/device": Link(f"../../../{home.rsplit('/', 1)[1]}"),
        f"sys/class/drm/{name}": Link(f"../../{home[4:]}/drm/{name}"),
        f"dev/dri/{name}": File("", 0o666),
    }


def _xcp_name(state: NodeState, index: int, slot: int) -> str:
    number = (SLOTS_PER_CARD - 1) * driven_cards(state).index(index) + slot - 1
    return f"amdgpu_xcp{'_' if state.style.xcp_name == 'underscore' else '.'}{number}"


def _ast() -> Entries:
    home = device_folder(AST_BDF)
    return {
        f"{home}/vendor": File("0x1a03\n"),
        f"{home}/device": File("0x2000\n"),
        f"{home}/class": File("0x030000\n"),
        f"sys/bus/pci/devices/{AST_BDF}": Link(f"../../../{home[4:]}"),
        f"{home}/drm/card0/dev": File("226:0\n"),
        f"{home}/drm/card0/device": Link(f"../../../{AST_BDF}"),
        "sys/class/drm/card0": Link(f"../../{home[4:]}/drm/card0"),
        "dev/dri/card0": File("", 0o660),
        "sys/module/ast/initstate": File("live\n"),
    }


def _other_render(state: NodeState) -> Entries:
    tree: Entries = {}
    for number in range(state.style.other_render):
        home = f"sys/devices/platform/vgem.{number}"
        tree |= _drm_node(home, f"card{number + int(state.style.ast)}", number + int(state.style.ast))
        tree |= _drm_node(home, f"renderD{128 + number}", 128 + number)
    return tree
