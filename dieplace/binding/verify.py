"""`exec --verify`: a child with the program's own environment and binding says what it sees, and that is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dieplace import numberlist
from dieplace.binding.bind import carry_out
from dieplace.binding.launch import child_environment, restore_signals
from dieplace.binding.prepare import Prepared
from dieplace.errors import BackendError, DieplaceError

TIMEOUT_S = 120.0
MEMORY_TOLERANCE = 0.03  # the CUDA driver reports less than NVML, by what it keeps for itself


@dataclass(frozen=True)
class Check:
    """One comparison: what was planned, what the child saw, and whether they agree (None: could not be asked)."""

    label: str
    what: str
    planned: str
    seen: str
    ok: bool | None


def verify(prepared: Prepared, environ: Mapping[str, str], *, strict: bool = False) -> tuple[Check, ...]:
    """Start the child and compare: device BDFs with partition, CUs, bytes; CPUs, memory nodes and policy."""
    answer = _ask(prepared, {**environ, **prepared.added}, strict)
    return (*_devices(prepared, answer), *_host(prepared, answer))


def _ask(prepared: Prepared, environ: Mapping[str, str], strict: bool) -> dict[str, Any]:
    def bind() -> None:
        restore_signals()
        carry_out(prepared.binding, strict=strict)

    command = [sys.executable, "-m", "dieplace.binding.readback", prepared.vendor]
    try:
        done = subprocess.run(
            command, env=child_environment(environ), capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, preexec_fn=bind,
        )  # fmt: skip
        value = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"the GPU runtime did not answer in {TIMEOUT_S:.0f} s", hint="run: dieplace doctor"
        ) from error
    except (OSError, ValueError) as error:
        raise BackendError(f"the checking child did not answer: {error}", hint="run: dieplace doctor") from error
    except subprocess.SubprocessError as error:
        if isinstance(error.__cause__, DieplaceError):
            raise error.__cause__ from error
        raise BackendError(f"the checking child could not be bound: {error}") from error
    if not isinstance(value, dict):
        raise BackendError("the checking child answered something else than an object")
    return value


def _devices(prepared: Prepared, answer: dict[str, Any]) -> list[Check]:
    label, seen = prepared.label, answer.get("devices")
    if not prepared.devices:
        return []
    if seen is None:
        why = str(answer.get("devices_why"))
        asked = None if prepared.vendor == "none" else False
        return [Check(label, "devices", str(len(prepared.devices)), why, asked)]
    found = f"{len(seen)} ({answer['devices_why']})" if answer.get("devices_why") else str(len(seen))
    checks = [Check(label, "devices", str(len(prepared.devices)), found, len(seen) == len(prepared.devices))]
    for device, found in zip(prepared.devices, seen, strict=False):
        checks.append(Check(label, f"{device.id} BDF", device.bdf, found["bdf"], _same_bdf(device.bdf, found["bdf"])))
        same = None if device.cus is None else device.cus == found["cus"]
        checks.append(Check(label, f"{device.id} CUs", str(device.cus or "not known"), str(found["cus"]), same))
        if device.memory_limit_bytes is not None:
            near = abs(found["bytes"] - device.memory_limit_bytes) <= MEMORY_TOLERANCE * device.memory_limit_bytes
            told = str(device.memory_limit_bytes), str(found["bytes"])
            checks.append(Check(label, f"{device.id} bytes", *told, near))
    return checks


def _same_bdf(planned: str, found: str) -> bool:
    """Equal as numbers: drivers write the domain with four or eight digits."""
    try:
        return _bdf_numbers(planned) == _bdf_numbers(found)
    except ValueError:
        return False


def _bdf_numbers(text: str) -> tuple[int, ...]:
    head, _, function = text.partition(".")
    return (*(int(part, 16) for part in head.split(":")), int(function or "0", 16))


def _host(prepared: Prepared, answer: dict[str, Any]) -> list[Check]:
    binding, checks = prepared.binding, []
    if binding.cpus is not None:
        wanted, seen = numberlist.show(binding.cpus), numberlist.show(answer.get("cpus") or ())
        checks.append(Check(prepared.label, "Cpus_allowed_list", wanted, seen, wanted == seen))
    if binding.policy is not None:
        wanted = f"{binding.policy} {numberlist.show(binding.nodes)}"
        seen = f"{answer.get('policy')} {numberlist.show(answer.get('nodes') or ())}"
        checks.append(Check(prepared.label, "memory policy", wanted, seen, wanted == seen))
        mems = tuple(answer.get("mems") or ())
        told = f"contains {numberlist.show(binding.nodes)}"
        checks.append(
            Check(prepared.label, "Mems_allowed_list", told, numberlist.show(mems), set(binding.nodes) <= set(mems))
        )
    return checks
