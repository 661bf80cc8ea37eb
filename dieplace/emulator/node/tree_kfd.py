"""The KFD part of the tree: topology nodes with their links, and `kfd/proc`.

Property names, link weights and their types follow a recorded node (k8s-device-plugin
`testdata/topology-parsing-mi308`) and `kfd_topology.c`; byte counts of `mem_banks` are a partition's share.
"""

from __future__ import annotations

from .entries import (
    Entries,
    File,
    Folder,
    gpu_ids,
    kfd_gpu_nodes,
    kfd_unique_id,
    minor,
    number_of,
    partitions,
    process_bytes,
    share_bytes,
    used_bytes,
)
from .state import NodeState
from .tree_card import numa_node

ROOT = "sys/class/kfd/kfd"
HOST_BYTES_PER_NODE = 1_081_864_880_128  # the recorded node
ARRAYS_PER_XCC = 4  # the recorded node: array_count 4 with num_xcc 1
PCIE, XGMI, SOCKET = 2, 11, 5  # io_link types
# weight, min and max MB/s, as recorded; 41 = 20 + 21 is the way through the other socket
SIBLING, OWN_CPU, FAR = (13, 819200, 819200), (20, 312, 64000), (41, 0, 0)
CPU_KEYS = (
    "lds_size_in_kb", "gds_size_in_kb", "num_gws", "wave_front_size", "array_count", "simd_arrays_per_engine",
    "cu_per_simd_array", "simd_per_cu", "max_slots_scratch_cu", "gfx_target_version", "vendor_id", "device_id",
    "location_id", "domain", "drm_render_minor", "hive_id", "num_sdma_engines", "num_sdma_xgmi_engines",
    "num_sdma_queues_per_engine", "num_cp_queues",
)  # fmt: skip


def kfd(state: NodeState) -> Entries:
    """Everything under sys/class/kfd and dev/kfd; nothing while the driver is unloaded."""
    if not state.loaded:
        return {}
    gpus = kfd_gpu_nodes(state)
    tree: Entries = {
        "dev/kfd": File("", 0o666),
        f"{ROOT}/proc": Folder(),
        f"{ROOT}/topology/generation_id": File(f"{state.generation}\n"),
        f"{ROOT}/topology/system_properties": File("platform_oem 0\nplatform_id 0\nplatform_rev 0\n"),
    }
    ids = gpu_ids(state)
    for node in range(state.style.cpu_nodes):
        tree |= _cpu_node(state, node, gpus)
    for node, (card, p) in enumerate(gpus, start=state.style.cpu_nodes):
        tree |= _gpu_node(state, node, card, p, gpus, ids[card, p])
    return tree | _processes(state, ids)


def _folder(node: int) -> str:
    return f"{ROOT}/topology/nodes/{node}"


def _lines(pairs: dict[str, int]) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs.items())


def _link(kind: int, source: int, target: int, figures: tuple[int, int, int], flags: int) -> File:
    weight, low, high = figures
    return File(_lines({
        "type": kind, "version_major": 0, "version_minor": 0, "node_from": source, "node_to": target,
        "weight": weight, "min_latency": 0, "max_latency": 0, "min_bandwidth": low, "max_bandwidth": high,
        "recommended_transfer_size": 0, "flags": flags,
    }))  # fmt: skip


def _with_links(home: str, io: list[File], p2p: list[File]) -> Entries:
    tree: Entries = {f"{home}/io_links": Folder(), f"{home}/p2p_links": Folder(), f"{home}/caches": Folder()}
    for name, links in (("io_links", io), ("p2p_links", p2p)):
        tree |= {f"{home}/{name}/{i}/properties": link for i, link in enumerate(links)}
    return tree


def _cpu_node(state: NodeState, node: int, gpus: list[tuple[int, int]]) -> Entries:
    style, home = state.style, _folder(node)
    io = [_link(SOCKET, node, other, (21, 0, 0), 0) for other in range(style.cpu_nodes) if other != node]
    p2p = []
    for target, (card, _) in enumerate(gpus, start=style.cpu_nodes):
        if numa_node(state, card) == node:
            io.append(_link(PCIE, node, target, OWN_CPU, 3))
        else:
            p2p.append(_link(PCIE, node, target, FAR, 3))
    threads = style.cores_per_node * style.threads_per_core
    head = {"cpu_cores_count": threads, "simd_count": 0, "mem_banks_count": 1, "caches_count": 0,
            "io_links_count": len(io), "p2p_links_count": len(p2p), "cpu_core_id_base": node * threads,
            "simd_id_base": 0, "max_waves_per_simd": 0}  # fmt: skip
    bank = {"heap_type": 0, "size_in_bytes": HOST_BYTES_PER_NODE, "flags": 0, "width": 64, "mem_clk_max": 5600}
    return _with_links(home, io, p2p) | {
        f"{home}/gpu_id": File("0\n"),
        f"{home}/name": File("\n"),
        f"{home}/properties": File(_lines(head | dict.fromkeys(CPU_KEYS, 0) | {"max_engine_clk_ccompute": 3800})),
        f"{home}/mem_banks/0/properties": File(_lines(bank)),
    }


def _gpu_node(state: NodeState, node: int, card: int, p: int, gpus: list[tuple[int, int]], gpu_id: int) -> Entries:
    home = _folder(node)
    io, p2p = _gpu_links(state, node, card, gpus)
    head = _gpu_properties(state, card, p) | {"io_links_count": len(io), "p2p_links_count": len(p2p)}
    tree = _with_links(home, io, p2p) | {
        f"{home}/gpu_id": File(f"{gpu_id}\n"),
        f"{home}/name": File("ip discovery\n"),
        f"{home}/properties": File(_lines(head)),
    }
    share = share_bytes(state, card, p)
    if share is not None:
        bank = {"heap_type": 1, "size_in_bytes": share, "flags": 0, "width": 8192}
        if state.model.memory_clock_mhz is not None:
            bank["mem_clk_max"] = state.model.memory_clock_mhz
        tree[f"{home}/mem_banks/0/properties"] = File(_lines(bank))
        tree[f"{home}/mem_banks/0/used_memory"] = File(f"{used_bytes(state, card)}\n")
    return tree


def _gpu_links(state: NodeState, node: int, card: int, gpus: list[tuple[int, int]]) -> tuple[list[File], list[File]]:
    io: list[File] = []
    p2p: list[File] = []
    part = state.model
    for cpu in range(state.style.cpu_nodes):
        near = numa_node(state, card) == cpu
        (io if near else p2p).append(_link(PCIE, node, cpu, OWN_CPU if near else FAR, 1))
    rate = part.xgmi_mb_per_s or 0
    for target, (other, _) in enumerate(gpus, start=state.style.cpu_nodes):
        if target == node:
            continue
        whole = partitions(state, card) == 1 and partitions(state, other) == 1
        if other == card:
            io.append(_link(XGMI, node, target, SIBLING, 1))
        elif part.hive and state.cards[other].hive == state.cards[card].hive:
            io.append(_link(XGMI, node, target, (15, rate, rate) if whole else FAR, 1))
        else:
            near = numa_node(state, card) == numa_node(state, other)
            p2p.append(_link(PCIE, node, target, (40 if near else 61, 0, 0), 1))
    return io, p2p


def _gpu_properties(state: NodeState, card: int, p: int) -> dict[str, int]:
    part, style, bdf = state.model, state.style, state.cards[card].bdf
    count = partitions(state, card)
    xccs = part.xccs // count
    domain, bus, rest = int(bdf[:4], 16), int(bdf[5:7], 16), int(bdf[8:10], 16) << 3
    place = bus << 8 | rest | (p if style.partition_id == "low" else p << 28)
    head = {"cpu_cores_count": 0}
    if part.cus_per_xcc is not None:
        head["simd_count"] = 4 * part.cus_per_xcc * xccs
    return head | {
        "mem_banks_count": int(part.hbm_bytes is not None), "caches_count": 0, "io_links_count": 0,
        "p2p_links_count": 0, "cpu_core_id_base": 0, "simd_id_base": 2147487744, "max_waves_per_simd": 8,
        "lds_size_in_kb": 160 if part.gfx == "gfx950" else 64, "gds_size_in_kb": 0, "num_gws": 64,
        "wave_front_size": 64, "array_count": ARRAYS_PER_XCC * xccs, "simd_arrays_per_engine": 1,
        "cu_per_simd_array": part.cu_slots_per_array, "simd_per_cu": 4, "max_slots_scratch_cu": 32,
        "gfx_target_version": part.gfx_target_version, "vendor_id": 4098,
        "device_id": (part.vf_pci_id or 0) if style.virtual_function else part.pci_id, "location_id": place,
        "domain": domain, "drm_render_minor": minor(state, card, p).render or 0, "hive_id": _hive_id(state, card),
        "num_sdma_engines": 2 * xccs, "num_sdma_xgmi_engines": 0, "num_sdma_queues_per_engine": 8,
        "num_cp_queues": 24 * xccs, "max_engine_clk_fcompute": part.engine_clock_mhz or 0, "local_mem_size": 0,
        "unique_id": kfd_unique_id(state, card, p), "num_xcc": xccs, "max_engine_clk_ccompute": 3800,
    }  # fmt: skip


def _hive_id(state: NodeState, card: int) -> int:
    return number_of(f"{state.part} hive {state.cards[card].hive}", 61) if state.model.hive else 0


def _processes(state: NodeState, ids: dict[tuple[int, int], int]) -> Entries:
    tree: Entries = {}
    for index, process in enumerate(state.processes):
        home = f"{ROOT}/proc/{process.host_pid}"
        devices = [(card, p) for card, p in ids if card in process.attached]
        if not devices:
            continue
        tree[f"{home}/pasid"] = File(f"{32768 + index}\n")
        tree[f"{home}/queues"] = Folder()
        for queue, (card, p) in enumerate(d for d in devices if d in process.render):
            tree[f"{home}/queues/{queue}/gpuid"] = File(f"{ids[card, p]}\n")
        for card, p in devices:
            opened = sum(c == card for c, _ in process.render)
            mine = (card, p) in process.render or (not opened and p == 0)
            held = process_bytes(state, index, card) // max(opened, 1) if mine else 0
            tree[f"{home}/vram_{ids[card, p]}"] = File(f"{held}\n")
            tree[f"{home}/sdma_{ids[card, p]}"] = File("0\n")
            tree[f"{home}/stats_{ids[card, p]}/evicted_ms"] = File("0\n")
            tree[f"{home}/stats_{ids[card, p]}/cu_occupancy"] = File("0\n")
    return tree
