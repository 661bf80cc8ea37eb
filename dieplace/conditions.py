"""The conditions of a run: a typed registry of recorded facts that may explain a number.

Each has a key with its unit, a kind, and `checked`: whether two runs must agree on it to be compared. What cannot be
known is null with a why. The model is pyperf's metadata table: printing and checking come from one place.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dieplace.machine import Machine
from dieplace.sysfs import Sysfs


@dataclass(frozen=True)
class Unknown:
    """What a collector answers when a fact cannot be had."""

    why: str


@dataclass(frozen=True)
class Condition:
    """One recorded fact; `collect` is None for facts that only the caller can give."""

    key: str
    kind: type
    text: str
    checked: bool = False
    collect: Callable[[Machine | None], Any] | None = None


def collect(machine: Machine | None, **given: Any) -> dict[str, Any]:
    """All conditions as plain data; `given` overrides or fills what a collector cannot see.

    A given value may be an `Unknown`. A key that is not registered, or a value of another kind, is a TypeError: it is
    a mistake of the caller's code.
    """
    unknown_keys = set(given) - {condition.key for condition in CONDITIONS}
    if unknown_keys:
        raise TypeError(f"not registered conditions: {', '.join(sorted(unknown_keys))}")
    found: dict[str, Any] = {}
    for condition in CONDITIONS:
        value = given.get(condition.key)
        if value is None and condition.collect is not None:
            value = condition.collect(machine)
        if value is None:
            value = Unknown("not recorded by this experiment")
        if isinstance(value, Unknown):
            found[condition.key], found[f"{condition.key}_why"] = None, value.why
        elif isinstance(value, condition.kind) or (condition.kind is float and isinstance(value, int)):
            found[condition.key] = value
        else:
            raise TypeError(f"condition {condition.key} is a {condition.kind.__name__}, got {type(value).__name__}")
    return found


def differing(base: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Checked keys on which two sets of conditions disagree, in registry order; unknown on both sides agrees."""
    return tuple(c.key for c in CONDITIONS if c.checked and base.get(c.key) != other.get(c.key))


def _version(name: str) -> Callable[[Machine | None], Any]:
    def read(_: Machine | None) -> Any:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return Unknown(f"{name} is not installed")

    return read


def _host_id(_: Machine | None) -> str:
    # A digest: equal hosts stay equal, and a committed run names nobody's machine.
    try:
        identity = Path("/etc/machine-id").read_text()
    except OSError:
        identity = ""
    return hashlib.sha256(f"{platform.node()}|{identity}".encode()).hexdigest()[:12]


def _cpu_model(_: Machine | None) -> Any:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError as error:
        return Unknown(f"/proc/cpuinfo: {error.strerror}")
    return Unknown("/proc/cpuinfo names no model")


def _cpu_quota(_: Machine | None) -> Any:
    from dieplace.binding.host import cpu_quota

    granted, where = cpu_quota(Sysfs("/"))
    return Unknown(where) if granted is None else granted


def _of_machine(read: Callable[[Machine], Any], why: str) -> Callable[[Machine | None], Any]:
    def look(machine: Machine | None) -> Any:
        value = read(machine) if machine is not None else None
        return Unknown(why) if value is None else value

    return look


def _parts(machine: Machine) -> list[str]:
    return sorted({card.part or "unknown" for card in machine.cards})


def _modes(machine: Machine) -> list[str]:
    return sorted({str(card.mode) for card in machine.cards if card.mode is not None})


# Devices can be named by UUID (NVIDIA and AMD: GPU-..., MIG-...): a run file names nobody's hardware.
_UUID = re.compile(r"\b(GPU|MIG)-[0-9A-Fa-f]{8}[0-9A-Fa-f/-]*")


def _variables(_: Machine | None) -> dict[str, str]:
    names = ("HIP_", "ROCR_", "CUDA_VISIBLE", "HSA_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC", "PYTORCH_HIP_ALLOC")
    found = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(names)}
    return {key: _UUID.sub(r"\1-(left out)", value) for key, value in found.items()}


def _now(_: Machine | None) -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


_NO_TELEMETRY = "no telemetry was read"
CONDITIONS: tuple[Condition, ...] = (
    Condition("backend", str, "which backend ran it", True, _of_machine(lambda m: m.backend, "no machine")),
    Condition("source", str, "live, emulated or replayed", True, _of_machine(lambda m: m.source, "no machine")),
    Condition("parts", list, "card models of the node", True, _of_machine(_parts, "no machine")),
    Condition("cards", int, "cards of the node", False, _of_machine(lambda m: len(m.cards), "no machine")),
    Condition("modes", list, "partition modes of the cards", True, _of_machine(_modes, "no machine")),
    Condition(
        "driver_version",
        str,
        "version of the kernel driver",
        True,
        _of_machine(lambda m: m.host.get("amdgpu_version") or m.host.get("driver_version"), "the driver does not say"),
    ),
    Condition("code_hash", str, "hash of the kernels that ran", True),
    Condition("timer", str, "what took the times", True),
    Condition("workload", str, "model, precision, context and tokens", True),
    Condition("parameter_sets", list, "parameter sets of the clock", True),
    Condition("core_clock_mhz", float, "shader clock", True, lambda _: Unknown(_NO_TELEMETRY)),
    Condition("memory_clock_mhz", float, "memory clock", True, lambda _: Unknown(_NO_TELEMETRY)),
    Condition("power_w", float, "socket power", False, lambda _: Unknown(_NO_TELEMETRY)),
    Condition("temperature_c", float, "hottest sensor", False, lambda _: Unknown(_NO_TELEMETRY)),
    Condition("dieplace_version", str, "version of dieplace", False, _version("dieplace")),
    Condition("python_version", str, "version of Python", False, lambda _: platform.python_version()),
    Condition("torch_version", str, "version of torch", False, _version("torch")),
    Condition("flydsl_version", str, "version of FlyDSL", False, _version("flydsl")),
    Condition("triton_version", str, "version of Triton", False, _version("triton")),
    Condition("amdsmi_version", str, "version of amdsmi", False, _version("amdsmi")),
    Condition("pyrsmi_version", str, "version of pyrsmi", False, _version("pyrsmi")),
    Condition("numpy_version", str, "version of numpy", False, _version("numpy")),
    Condition("scipy_version", str, "version of scipy", False, _version("scipy")),
    Condition("host_id", str, "digest of the host's identity", False, _host_id),
    Condition("platform", str, "operating system and machine", False, lambda _: f"{sys.platform} {platform.machine()}"),
    Condition("kernel_release", str, "release of the host's kernel", False, lambda _: platform.release()),
    Condition("cpu_model", str, "CPU of the host", False, _cpu_model),
    Condition("cpus_allowed", int, "CPUs that affinity allows", False, lambda _: len(os.sched_getaffinity(0))),
    Condition("cpu_quota_cpus", float, "CPUs that the cgroup's quota gives", False, _cpu_quota),
    Condition("environment", dict, "variables that change devices or allocators", False, _variables),
    Condition("taken_at", str, "UTC time of collection", False, _now),
)
