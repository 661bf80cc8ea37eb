"""The host's part of the tree: CPU NUMA nodes, CPUs, the kernel module, and `/proc`.

Two sockets with one NUMA node each is the usual MI300 and MI350 server; hyper-threads of a core are numbered
after all cores, as Linux does on such hosts.
"""

from __future__ import annotations

from .entries import Entries, File, Folder, Link, minor
from .state import NodeState, Process
from .tree_kfd import HOST_BYTES_PER_NODE

KERNEL = "6.8.0-emulated"


def host(state: NodeState) -> Entries:
    """sys/devices/system, sys/module, lib/modules and proc."""
    tree: Entries = {
        "proc/sys/kernel/random/boot_id": File(f"{state.boot_id}\n"),
        "proc/sys/kernel/osrelease": File(f"{KERNEL}\n"),
        "proc/cmdline": File("quiet\n"),
        f"lib/modules/{KERNEL}/modules.dep": File("updates/dkms/amdgpu.ko:\n"),
        f"lib/modules/{KERNEL}/updates/dkms/amdgpu.ko": File(""),
        "proc/modules": File("amdgpu 20000000 0 - Live 0x0000000000000000\n" if state.loaded else ""),
        "sys/module": Folder(),
    }
    if state.loaded:
        tree |= {
            "sys/module/amdgpu/initstate": File("live\n"),
            "sys/module/amdgpu/refcnt": File(f"{len(state.processes)}\n"),
            "sys/module/amdgpu/version": File("6.16.13\n"),
            "sys/module/amdgpu/holders": Folder(),
            "sys/module/amdxcp/initstate": File("live\n"),
            "sys/module/amdxcp/holders/amdgpu": Link("../../amdgpu"),
        }
    for process in state.processes:
        if process.in_namespace:
            tree |= _process(state, process)
    return tree | _cpus(state)


def _cpus(state: NodeState) -> Entries:
    style, system = state.style, "sys/devices/system"
    cores, nodes = style.cores_per_node * style.cpu_nodes, range(style.cpu_nodes)
    every = ranges([*range(cores * style.threads_per_core)])
    tree: Entries = {f"{system}/cpu/{name}": File(f"{every}\n") for name in ("online", "possible", "present")}
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        tree[f"{system}/node/{name}"] = File(f"{ranges([*nodes])}\n")
    for node in nodes:
        home = f"{system}/node/node{node}"
        tree[f"{home}/cpulist"] = File(f"{ranges(node_cpus(state, node))}\n")
        tree[f"{home}/distance"] = File(" ".join("10" if other == node else "32" for other in nodes) + "\n")
        tree[f"{home}/meminfo"] = File(f"Node {node} MemTotal: {HOST_BYTES_PER_NODE // 1024} kB\n")
        for cpu in node_cpus(state, node):
            siblings = [cpu % cores + cores * thread for thread in range(style.threads_per_core)]
            tree[f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list"] = File(f"{ranges(siblings)}\n")
            tree[f"{system}/cpu/cpu{cpu}/topology/core_id"] = File(f"{cpu % style.cores_per_node}\n")
            tree[f"{system}/cpu/cpu{cpu}/topology/physical_package_id"] = File(f"{node}\n")
    return tree


def node_cpus(state: NodeState, node: int) -> list[int]:
    """CPU numbers of a NUMA node: its cores, then their second threads after everybody's cores."""
    per, cores = state.style.cores_per_node, state.style.cores_per_node * state.style.cpu_nodes
    return [t * cores + node * per + core for t in range(state.style.threads_per_core) for core in range(per)]


def ranges(numbers: list[int]) -> str:
    """`0-3,8` for [0, 1, 2, 3, 8]: the kernel's list format."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _process(state: NodeState, process: Process) -> Entries:
    home = f"proc/{process.pid}"
    inner = f"{process.host_pid}\t{process.pid}" if process.pid != process.host_pid else str(process.pid)
    uids = "\t".join([str(process.uid)] * 4)
    tree: Entries = {
        f"{home}/comm": File(f"{process.name[:15]}\n"),
        f"{home}/cmdline": File(f"{process.name}\0"),
        f"{home}/cgroup": File(f"{process.cgroup}\n"),
        f"{home}/status": File(f"Name:\t{process.name[:15]}\nPid:\t{process.pid}\nUid:\t{uids}\nNSpid:\t{inner}\n"),
        f"{home}/fd": Folder(0o500),
        f"{home}/fdinfo": Folder(0o555),
        f"{home}/fd/0": Link("/dev/null"),
    }
    number = 3
    if process.kfd_open:
        tree |= {f"{home}/fd/{number}": Link("/dev/kfd"), f"{home}/fdinfo/{number}": File("pos:\t0\n", 0o400)}
        number += 1
    for card, p in process.render:
        render = minor(state, card, p).render
        tree[f"{home}/fd/{number}"] = Link(f"/dev/dri/renderD{render}")
        tree[f"{home}/fdinfo/{number}"] = File(_fdinfo(state, process, card, number), 0o400)
        number += 1
    return tree


def _fdinfo(state: NodeState, process: Process, card: int, client: int) -> str:
    kib = process.vram_bytes // max(len(process.render), 1) // 1024
    return (
        f"pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t{state.cards[card].bdf}\n"
        f"drm-client-id:\t{process.pid * 64 + client}\npasid:\t32768\n"
        f"drm-memory-vram:\t{kib} KiB\ndrm-memory-gtt:\t0 KiB\ndrm-memory-cpu:\t0 KiB\n"
    )
