"""What differs between vendors for a rig: names of clocks, caches, telemetry, and what counts as near and as far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.backends import torch_build, torch_timing
from dieplace.backends.availability import Availability
from dieplace.errors import UsageError
from dieplace.experiments.rotation import LAST_CACHE_BYTES
from dieplace.machine import Device, Machine

SAME_CARD, OTHER_CARD = "same card", "other card"
ONE_DEVICE = "one device is visible: there is no far memory"
NOT_MI355X = "measured on NVIDIA GPUs: it validates the harness and the code and says nothing about an MI355X"
OTHER_PART = "measured on {part}: it validates the harness and the code and says nothing about an MI355X"
PART = "MI355X"


@dataclass(frozen=True)
class Parts:
    """One vendor's half of a rig; `placed`: buffers come from the memory group; `checks_clock`: see `TorchRig`."""

    timer: str
    latency_clock: str
    cycle_unit: str
    placed: bool
    checks_clock: bool
    readers: Callable[[Sequence[Device]], tuple[str, ...]]
    part: Callable[[Machine, Sequence[Device]], str]
    share_of_card: Callable[[Machine, Sequence[Device]], float]
    cache_bytes: Callable[[Sequence[Device]], int]
    telemetry: Callable[[Machine, Sequence[str]], tuple[str | None, tuple[Any, ...], str | None]]
    note: Callable[[str], str | None]


def parts_of(backend: str) -> Parts:
    """The parts of a backend whose devices torch drives; UsageError for another."""
    if backend not in _PARTS:
        raise UsageError(f"no rig drives the {backend} backend", hint=f"one of {', '.join(_PARTS)}")
    return _PARTS[backend]


def cannot(backend: str, *, probe: Callable[[], Availability] | None = None) -> str | None:
    """None where a rig can run here, else one sentence: no driver or GPU, or no torch that is built for it.

    On NVIDIA the answer is None without looking: that a run there needs a GPU is told when it is asked for.
    """
    if backend != "amd":
        return None if backend in _PARTS else f"no torch drives the devices of {backend}"
    if probe is None:
        from dieplace.discover import make_backend

        probe = make_backend("amd").probe
    answer = probe()
    return answer.reason if not answer.available else torch_build.why_not("amd")


def seen_devices(machine: Machine) -> list[Device]:
    """The devices that this process sees, in runtime order."""
    seen = [d for d in machine.devices if d.runtime_index is not None]
    return sorted(seen, key=lambda d: d.runtime_index or 0)


def far_homes(machine: Machine, devices: Mapping[str, Device], reader: Device) -> dict[str, str]:
    """`same card` and `other card` to the first visible device whose own memory is that far from the reader's."""
    found: dict[str, str] = {}
    hive = machine.card(reader.card).hive
    for other in devices.values():
        if other.domain == reader.domain:  # itself, or interleaved memory that both use
            continue
        if other.card == reader.card:
            found.setdefault(SAME_CARD, other.id)
        elif machine.card(other.card).hive == hive:
            found.setdefault(OTHER_CARD, other.id)
    return {name: found[name] for name in (SAME_CARD, OTHER_CARD) if name in found}


def no_far_because(machine: Machine, reader: Device) -> str:
    """Why a device has no far memory that this process could name."""
    domain = machine.domain(reader.domain) if reader.domain is not None else None
    if domain is not None and len(domain.dies) > 1:
        return f"{domain.id} is interleaved over dies {', '.join(map(str, domain.dies))}: no memory is far as a whole"
    return ONE_DEVICE


# ---- NVIDIA


def _all(seen: Sequence[Device]) -> tuple[str, ...]:
    return tuple(device.id for device in seen)


def _properties(seen: Sequence[Device]) -> list[Any]:
    import torch

    return [torch.cuda.get_device_properties(device.runtime_index or 0) for device in seen]


def _nvidia_part(machine: Machine, seen: Sequence[Device]) -> str:
    return _properties(seen)[0].name if seen else ""


def _nvidia_cache(seen: Sequence[Device]) -> int:
    return max((p.L2_cache_size for p in _properties(seen)), default=0)


def _nvidia_telemetry(machine: Machine, bdfs: Sequence[str]) -> tuple[str | None, tuple[Any, ...], str | None]:
    from dieplace.backends.nvidia.telemetry import read_all

    return read_all()


# ---- AMD


def _first_card(seen: Sequence[Device]) -> tuple[str, ...]:
    """Both halves of one card read; devices of other cards are homes only: every pair of sixteen would take an hour."""
    return tuple(device.id for device in seen if device.card == seen[0].card)


def _amd_part(machine: Machine, seen: Sequence[Device]) -> str:
    return machine.card(seen[0].card).part or "an unknown AMD part" if seen else ""


def _amd_share(machine: Machine, seen: Sequence[Device]) -> float:
    if not seen:
        return 1.0
    whole, mine = machine.card(seen[0].card).xccs, seen[0].xccs
    return mine / whole if whole and mine else 1.0


def _amd_cache(seen: Sequence[Device]) -> int:
    # torch tells the L2 of one XCD; what holds a working set is the memory-side cache of the card (CDNA 4 white paper).
    return LAST_CACHE_BYTES[PART]


def _amd_telemetry(machine: Machine, bdfs: Sequence[str]) -> tuple[str | None, tuple[Any, ...], str | None]:
    from dieplace.backends.amd.telemetry import read_all
    from dieplace.sysfs import Sysfs

    return read_all(getattr(machine.session, "sysfs", None) or Sysfs("/"), bdfs)


def _amd_note(part: str) -> str | None:
    return None if part == PART else OTHER_PART.format(part=part)


_PARTS = {
    "nvidia": Parts(
        timer=torch_timing.TIMER,
        latency_clock="%globaltimer",
        cycle_unit="SM cycles",
        placed=False,
        checks_clock=False,
        readers=_all,
        part=_nvidia_part,
        share_of_card=lambda machine, seen: 1.0,
        cache_bytes=_nvidia_cache,
        telemetry=_nvidia_telemetry,
        note=lambda part: NOT_MI355X,
    ),
    "amd": Parts(
        timer=torch_timing.HIP_TIMER,
        latency_clock="s_memrealtime",
        cycle_unit="engine cycles",
        placed=True,
        checks_clock=True,
        readers=_first_card,
        part=_amd_part,
        share_of_card=_amd_share,
        cache_bytes=_amd_cache,
        telemetry=_amd_telemetry,
        note=_amd_note,
    ),
}
