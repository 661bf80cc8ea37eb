"""NVIDIA GPUs as cards of one device and one domain; another GPU is the far memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dieplace.backends.nvidia.nvml import Gpu, Nvml, Seen, cuda_view
from dieplace.hostnodes import host_domains
from dieplace.machine import Card, Device, Domain, Figure, Link, Machine
from dieplace.sysfs import Sysfs

NO_XCCS = "NVIDIA GPUs have no XCDs"
NO_MODE = "NVIDIA GPUs are not partitioned here (MIG is left alone)"
NOT_ASKED = "the CUDA driver was not asked, so as not to start it here"
NO_LATENCY = "the driver reports no latency"


def snapshot(sysfs: Sysfs, session: Any, *, ask_cuda: bool = True) -> Machine:
    """Cards in BDF order; SM counts stand in `cus`; the index is the one this process sees.

    Asking CUDA starts its driver in this process, which then looks at CUDA_VISIBLE_DEVICES never again: with
    `ask_cuda=False` it is not started, and SM counts and indices stay unknown.
    """
    with Nvml() as nvml:
        gpus, version = nvml.gpus(), nvml.version()
        links = [_link(a, b, nvml.joined_by_nvlink(a.index, b.index), gpus) for a in gpus for b in gpus if a is not b]
    seen = cuda_view() if ask_cuda else NOT_ASKED
    nodes = {gpu.bdf: _numa_node(sysfs, gpu.bdf) for gpu in gpus}
    return Machine(
        source="live",
        backend="nvidia",
        cards=tuple(_card(i, gpu, seen, nodes[gpu.bdf]) for i, gpu in enumerate(gpus)),
        devices=tuple(_device(i, gpu, seen, nodes[gpu.bdf]) for i, gpu in enumerate(gpus)),
        domains=(*(_domain(i, gpu, nodes[gpu.bdf]) for i, gpu in enumerate(gpus)), *host_domains(sysfs)),
        links=tuple(links),
        notes=(f"the CUDA driver cannot be asked: {seen}",) if ask_cuda and isinstance(seen, str) else (),
        stamp=(sysfs.read_or_none("/proc/sys/kernel/random/boot_id"), None),
        host={"kernel": sysfs.read_or_none("/proc/sys/kernel/osrelease"), "nvidia_driver": version},
        session=session,
    )


def _card(index: int, gpu: Gpu, seen: Seen | str, numa_node: int | None) -> Card:
    whys = {"xccs": NO_XCCS, "mode": NO_MODE, "hive": "xGMI only", "gfx": "AMD only", "stacks_per_die": "not reported"}
    sms = _sms(gpu, seen, whys)
    if numa_node is None:
        whys["numa_node"] = "no readable numa_node file, or it says -1"
    return Card(
        id=f"gpu{index}",
        bdf=gpu.bdf,
        part=gpu.name,
        device_id=gpu.pci_device_id,
        xccs=None,
        cus=sms,
        hbm_bytes=gpu.memory_bytes,
        mode=None,
        dies=1,
        uuid=gpu.uuid,
        numa_node=numa_node,
        whys=whys,
    )


def _device(index: int, gpu: Gpu, seen: Seen | str, numa_node: int | None) -> Device:
    whys = {"xccs": NO_XCCS, "render_node": "not used on NVIDIA", "kfd_node": "AMD only", "gpu_id": "AMD only"}
    sms = _sms(gpu, seen, whys)
    position = None if isinstance(seen, str) else seen.index.get(gpu.bdf)
    if position is None:
        whys["runtime_index"] = seen if isinstance(seen, str) else "hidden by CUDA_VISIBLE_DEVICES"
    return Device(
        id=f"gpu{index}/p0",
        card=f"gpu{index}",
        partition=0,
        bdf=gpu.bdf,
        xccs=None,
        cus=sms,
        memory_limit_bytes=gpu.memory_bytes,
        domain=f"gpu{index}/mem0",
        whole_card=True,
        local_guaranteed=True,
        dies=(0,),
        numa_node=numa_node,
        runtime_index=position,
        unique_id=gpu.uuid,
        aliases=(f"gpu{index}",),
        whys=whys,
    )


def _domain(index: int, gpu: Gpu, numa_node: int | None) -> Domain:
    whys = {} if gpu.memory_bytes is not None else {"total_bytes": "the driver does not say"}
    return Domain(f"gpu{index}/mem0", f"gpu{index}", (0,), gpu.memory_bytes, numa_node, (f"gpu{index}/die0",), whys)


def _sms(gpu: Gpu, seen: Seen | str, whys: dict[str, str]) -> int | None:
    count = None if isinstance(seen, str) else seen.sms.get(gpu.bdf)
    if count is None:
        whys["cus"] = seen if isinstance(seen, str) else "hidden by CUDA_VISIBLE_DEVICES"
    return count


def _link(a: Gpu, b: Gpu, nvlink: bool | None, gpus: Sequence[Gpu]) -> Link:
    """Bandwidth over all NVLinks of `a`: behind a switch the driver does not say which of them lead to `b`."""
    names = {gpu.bdf: f"gpu{index}/p0" for index, gpu in enumerate(gpus)}
    kind = "unknown" if nvlink is None else "nvlink" if nvlink else "pcie"
    if nvlink and a.nvlinks and a.nvlink_mb_per_s:
        total = a.nvlinks * a.nvlink_mb_per_s / 1000
        bandwidth = Figure(total, "reported", f"NVML: {a.nvlinks} links of {a.nvlink_mb_per_s} MB/s, one direction")
    else:
        bandwidth = Figure(None, "reported", "NVML", "the driver reports no link speed")
    return Link(names[a.bdf], names[b.bdf], kind, None, bandwidth, Figure(None, "reported", "NVML", NO_LATENCY))


def _numa_node(sysfs: Sysfs, bdf: str) -> int | None:
    text = (sysfs.read_or_none(f"/sys/bus/pci/devices/{Path(bdf).name}/numa_node") or "").strip()
    return int(text) if text.isdigit() and len(text) < 6 else None
