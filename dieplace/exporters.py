"""What other systems read: Slurm's gres.conf, a profile of AMD's Device Config Manager, a systemd unit.

Each function returns text and changes nothing. Formats: gres.conf(5) of Slurm; `docs/configuration/configmap.md` of
ROCm/device-config-manager; systemd.service(5) and systemd.unit(5).
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby

from dieplace import numberlist
from dieplace.errors import Unsupported, UsageError
from dieplace.machine import Device, Machine
from dieplace.modes import Mode

TARGETS = ("slurm", "kubernetes", "systemd")
DCM_CLIENT_SERVICES = ("amd-metrics-exporter", "gpuagent")  # what Device Config Manager's own example stops
DCM_NAMESPACE = "kube-amd-gpu"
PROFILE_FILE = "/etc/dieplace/partition.toml"
START_LIMIT_S = 480  # an eight-card driver reload; the unit of NVIDIA's mig-parted allows the same
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-\[\],]*")
_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


def slurm(machine: Machine, *, node_name: str | None = None, cores: Mapping[int, Sequence[int]] | None = None) -> str:
    """gres.conf lines: one logical device a line, by the render node of its partition, in the runtime's order.

    The order matters: Slurm numbers devices by line, and sets ROCR_VISIBLE_DEVICES by that number (`amd_gpu_env`).
    `cores` maps a NUMA node to core numbers as `slurmd -C` counts them (sockets, then cores); see `slurm_cores`.
    Library-based detection cannot tell partitions apart (SchedMD/slurm PR 204), so it is switched off.
    """
    name = node_name or socket.gethostname().split(".")[0]
    if not _HOST_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no Slurm node name", hint="letters, digits, - and . only")
    devices = sorted(_with_render_nodes(machine), key=lambda device: device.kfd_node or 0)
    kinds = {device.id: _slurm_type(machine, device) for device in devices}
    counts = [f"gpu:{kind}:{list(kinds.values()).count(kind)}" for kind in dict.fromkeys(kinds.values())]
    head = [
        f"# gres.conf for {name}: {len(devices)} logical devices. Made anew after every mode change.",
        f"# In slurm.conf: GresTypes=gpu, and for this node Gres={','.join(counts)}",
    ]
    lines = []
    for device in devices:
        place = (cores or {}).get(device.numa_node if device.numa_node is not None else -1)
        words = [f"NodeName={name}", "AutoDetect=off", "Name=gpu", f"Type={kinds[device.id]}"]
        words += [f"File={device.render_node}", f"Cores={numberlist.show(place)}" if place else "", "Flags=amd_gpu_env"]
        lines.append(" ".join(filter(None, words)))
    return "\n".join([*head, *lines]) + "\n"


def slurm_cores(
    siblings: Mapping[int, Sequence[int]], nodes: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """NUMA node -> core numbers: cores counted in the order of their first CPU, one for all its hyper-threads."""
    first = sorted({min(group) for group in siblings.values()})
    number = {cpu: first.index(min(siblings[cpu])) for cpu in siblings}
    return {node: tuple(sorted({number[cpu] for cpu in cpus if cpu in number})) for node, cpus in nodes.items()}


def kubernetes(machine: Machine, *, profile: str = "dieplace", namespace: str = DCM_NAMESPACE) -> str:
    """A ConfigMap for AMD's Device Config Manager that keeps the cards in their present modes.

    Its rules (configmap.md): the counts add up to the number of cards, and one profile has one memory mode. Cards are
    assigned in their order, so a run of equal cards is one entry.
    """
    if not _PROFILE_NAME.fullmatch(profile):
        raise UsageError(f"{profile!r} is no profile name", hint="letters, digits, _ . and - only")
    modes = [_mode_of(machine, index) for index in range(len(machine.cards))]
    if len({mode.memory for mode in modes}) > 1:
        raise Unsupported(
            "the cards are in several memory modes, and Device Config Manager takes one a profile",
            hint="switch them to one memory mode first: dieplace partition set MODE",
            modes=[str(mode) for mode in modes],
        )
    runs = [(mode, len(list(group))) for mode, group in groupby(modes)]
    entries = [
        {"computePartition": mode.compute, "memoryPartition": mode.memory, "numGPUsAssigned": count}
        for mode, count in runs
    ]
    config = {
        "gpu-config-profiles": {profile: {"skippedGPUs": {"ids": []}, "profiles": entries}},
        "gpuClientSystemdServices": {"names": list(DCM_CLIENT_SERVICES)},
    }
    body = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
    return (
        f"# Apply it, then: kubectl label node NODE dcm.amd.com/gpu-config-profile={profile} --overwrite\n"
        f"{_dcm_warning(modes)}"
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: config-manager-config\n"
        f"  namespace: {namespace}\ndata:\n  config.json: |\n{body}\n"
    )


def systemd(
    command: str, *, profile: str = "current", profile_file: str = PROFILE_FILE, mode: str | None = None
) -> str:
    """A one-shot unit that brings the node to a profile at boot, before schedulers and containers start.

    Compute modes are lost at every reload and reboot; whether a memory mode survives a reboot is undocumented. The unit
    never reboots and never stops a service; a busy card fails it (exit 5), which `systemctl status` then shows.
    """
    if not _PROFILE_NAME.fullmatch(profile):
        raise UsageError(f"{profile!r} is no profile name", hint="letters, digits, _ . and - only")
    for text in (command, profile_file):
        if not text.startswith("/") or any(letter in text for letter in "\n\"'\\%$"):
            raise UsageError(
                f"{text!r} cannot stand in a systemd unit", hint="give an absolute path without quotes, % or $"
            )
    words = f'"{command}" partition apply --file "{profile_file}" --profile {profile} --yes --wait 60'
    return f"""# /etc/systemd/system/dieplace-partition.service
# First: dieplace partition export --profile {profile} > {profile_file}
# Then:  systemctl daemon-reload && systemctl enable dieplace-partition.service
[Unit]
Description=Partition the accelerators{f" ({mode})" if mode else ""}
After=systemd-modules-load.service systemd-udevd.service local-fs.target
Before=slurmd.service kubelet.service docker.service containerd.service amd-metrics-exporter.service
ConditionPathExists={profile_file}
ConditionPathExists=/sys/module/amdgpu

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={words}
TimeoutStartSec={START_LIMIT_S}

[Install]
WantedBy=multi-user.target
"""


def _with_render_nodes(machine: Machine) -> tuple[Device, ...]:
    if machine.backend == "nvidia" or not machine.devices:
        raise Unsupported("there are no AMD logical devices here to list", hint="run: dieplace list")
    for device in machine.devices:
        if device.render_node is None:
            raise Unsupported(f"{device.id} has no render node to list", hint="run: dieplace doctor")
    return machine.devices


def _slurm_type(machine: Machine, device: Device) -> str:
    """`mi355x_dpx_nps2`: the part and mode, so that jobs ask for a die and not for any GPU."""
    card = machine.card(device.card)
    words = [card.part or "gpu", *([card.mode.compute, card.mode.memory] if card.mode else [])]
    return "_".join(re.sub("[^a-z0-9]", "", word.lower()) for word in words)


def _mode_of(machine: Machine, index: int) -> Mode:
    card = machine.cards[index]
    if card.mode is None:
        raise Unsupported(
            f"the mode of {card.id} cannot be read ({card.whys.get('mode', 'no reason is known')})",
            hint="run: dieplace doctor",
        )
    return card.mode


def _dcm_warning(modes: Sequence[Mode]) -> str:
    unusual = sorted({str(mode) for mode in modes if mode.memory == "NPS2" and mode.compute != "DPX"})
    if not unusual:
        return ""
    return (
        f"# Device Config Manager documents NPS2 with DPX only; {', '.join(unusual)} may be refused by its release.\n"
    )
