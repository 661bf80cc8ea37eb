"""One conversation with AMD's library, in a process of its own: `python -I smi_child.py '{"op": ...}'`.

Run as a file, so that it imports nothing but the standard library and `amdsmi`: it answers with one JSON object on the
standard output it was started with, and everything that the binding prints goes nowhere. A process of its own because
the library keeps render nodes open until shutdown, caches handles that a mode change kills, and can hang in init.

Calls by binding (names from AMD SMI's changelog): compute modes are set through accelerator profiles, looked up by
name, from 6.4 on, and through `amdsmi_set_gpu_compute_partition` before; memory modes through
`amdsmi_set_gpu_memory_partition_mode` from 6.4 on. Only 7.0.2 was run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

Reply = dict[str, Any]


class Refused(Exception):
    """The conversation cannot go on; `stage` is import, init, find or call."""

    def __init__(self, stage: str, text: str, code: int | None = None, name: str | None = None) -> None:
        super().__init__(text)
        self.reply = {"ok": False, "stage": stage, "text": text, "code": code, "name": name}


def main() -> int:
    """Answer one request; the exit status is 0 whenever an answer was written."""
    answer_fd = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        reply = converse(json.loads(sys.argv[1]))
    except Refused as refused:
        reply = refused.reply
    except Exception as error:  # a binding may raise anything, and the parent must get an answer
        reply = {"ok": False, "stage": "call", "text": f"{type(error).__name__}: {error}", "code": None, "name": None}
    os.write(answer_fd, json.dumps(reply).encode())
    # Not a normal exit: the library's own destructors have crashed after a mode change.
    os._exit(0)


def converse(request: Reply) -> Reply:
    """Carry out `versions`, `descriptors`, `init`, `list`, `set-compute` or `set-memory`."""
    smi = load(request.get("rocm_path"))
    versions = versions_of(smi)
    if request["op"] == "versions":
        return {"ok": True, "versions": versions}
    if request["op"] == "descriptors":
        return {"ok": True, "versions": versions, "open": descriptors(smi)}
    begin(smi)
    try:
        if request["op"] == "init":
            return {"ok": True, "versions": versions}
        if request["op"] == "list":
            return {"ok": True, "versions": versions, "devices": [describe(smi, h) for h in handles(smi)]}
        handle = find(smi, request["bdf"])
        if request["op"] == "set-compute":
            how = set_compute(smi, handle, request["word"])
        elif request["op"] == "set-memory":
            how = set_memory(smi, handle, request["word"])
        else:
            raise Refused("call", f"unknown request {request['op']!r}")
        return {"ok": True, "versions": versions, "how": how}
    finally:
        with contextlib.suppress(Exception):  # the process ends here; nothing can be held after it
            smi.amdsmi_shut_down()


def descriptors(smi: Any) -> dict[str, list[str]]:
    """Device files that this process has open: before init, after it, after the getters, and after shutdown."""
    found = {"before": open_devices()}
    begin(smi)
    try:
        found["initialised"] = open_devices()
        for handle in handles(smi):
            describe(smi, handle)
        found["asked"] = open_devices()
    finally:
        with contextlib.suppress(Exception):
            smi.amdsmi_shut_down()
    return {**found, "shut_down": open_devices()}


def open_devices(folder: str = "/proc/self/fd") -> list[str]:
    """Files of /dev/dri and /dev/kfd among a process's descriptors, one entry a descriptor: these keep a driver in."""
    found = []
    for number in os.listdir(folder):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            target = os.readlink(os.path.join(folder, number))
            if target == "/dev/kfd" or target.startswith("/dev/dri/"):
                found.append(target)
    return sorted(found)


def load(rocm_path: str | None) -> Any:
    """The binding, from the named ROCm where it carries one, so that binding and library are of one release."""
    if rocm_path:
        os.environ["ROCM_PATH"] = os.environ["ROCM_HOME"] = rocm_path
        shipped = os.path.join(rocm_path, "share", "amd_smi")
        if os.path.isdir(os.path.join(shipped, "amdsmi")):
            sys.path.insert(0, shipped)
    warnings.simplefilter("ignore")  # 10.0 warns about every compute-partition call
    try:
        import amdsmi
    except Exception as error:  # KeyError, OSError and AttributeError have all been seen, not only ImportError
        raise Refused("import", f"{type(error).__name__}: {error}") from error
    return amdsmi


def versions_of(smi: Any) -> dict[str, str]:
    """Binding and library version, each only where it is known; this call also forces late loading failures out."""
    found: dict[str, str] = {}
    try:
        from importlib.metadata import version

        found["binding"] = version("amdsmi")
    except Exception:  # a binding from a ROCm tree has no metadata
        pass
    try:
        library = smi.amdsmi_get_lib_version()
        found["library"] = ".".join(str(library[key]) for key in ("major", "minor", "release"))
    except OSError as error:  # 7.14 and later import without a library and fail here
        raise Refused("import", f"OSError: {error}") from error
    except Exception:  # 24.x answers another shape; the version is then simply not known
        pass
    return found


def begin(smi: Any) -> None:
    """Initialise for AMD GPUs."""
    try:
        smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except Exception as error:
        raise failed("init", error) from error


def failed(stage: str, error: Exception) -> Refused:
    """The status of an amdsmi exception by number and name, or the exception's own text."""
    code = getattr(error, "err_code", None)
    if code is None:
        by_class = {"AmdSmiRetryException": (9, "RETRY"), "AmdSmiTimeoutException": (8, "TIMEOUT")}
        code, name = by_class.get(type(error).__name__, (None, None))
        return Refused(stage, f"{type(error).__name__}: {error}", code, name)
    return Refused(stage, " ".join(str(error).split()), int(code), status_name(int(code)))


def status_name(code: int) -> str | None:
    """`NOT_SUPPORTED` for 2, from this binding's own table."""
    try:
        from amdsmi import amdsmi_wrapper

        names = amdsmi_wrapper.amdsmi_status_t__enumvalues
        return names.get(code, "").removeprefix("AMDSMI_STATUS_") or None
    except Exception:  # the table is not part of the public interface
        return None


def handles(smi: Any) -> list[Any]:
    """All logical devices, in the library's own order, which is never relied on."""
    try:
        return list(smi.amdsmi_get_processor_handles())
    except Exception as error:
        raise failed("find", error) from error


def describe(smi: Any, handle: Any) -> Reply:
    """One device; a question that fails is None. 7.0.2 answers some failures with "N/A" or 0 instead of raising."""
    kfd = ask(smi, "amdsmi_get_gpu_kfd_info", handle) or {}
    profile = (ask(smi, "amdsmi_get_gpu_accelerator_partition_profile", handle) or {}).get("partition_profile") or {}
    partitions = profile.get("num_partitions")
    return {
        "bdf": ask(smi, "amdsmi_get_gpu_device_bdf", handle),
        "partition": number(kfd.get("current_partition_id")),
        "compute": ask(smi, "amdsmi_get_gpu_compute_partition", handle),
        "memory": ask(smi, "amdsmi_get_gpu_memory_partition", handle),
        "partitions": number(partitions) or None,
    }


def number(value: Any) -> int | None:
    """An integer that means something: "N/A" and the all-ones sentinels do not."""
    return value if isinstance(value, int) and 0 <= value < 0xFFFFFFFF else None


def ask(smi: Any, call: str, handle: Any) -> Any:
    """The call's answer, or None where this binding lacks it or it fails."""
    try:
        return getattr(smi, call)(handle)
    except Exception:  # any class: amdsmi's own, AttributeError, UnboundLocalError
        return None


def find(smi: Any, bdf: str) -> Any:
    """The primary partition's handle: by address and partition id, never by position. The library itself lets a
    secondary switch the whole card (24.7), so sending to the primary only is our rule."""
    card = bdf.rsplit(".", 1)[0]
    seen, primary = [], []
    for handle in handles(smi):
        address = ask(smi, "amdsmi_get_gpu_device_bdf", handle)
        seen.append(str(address))
        kfd = ask(smi, "amdsmi_get_gpu_kfd_info", handle) or {}
        partition = number(kfd.get("current_partition_id"))
        if address == bdf and partition in (0, None):
            primary.append(handle)
    if len(primary) == 1:
        return primary[0]
    same = sum(address.startswith(card) for address in seen)
    why = f"{len(primary)} of its {same} devices call themselves the first partition" if primary else "it is not listed"
    raise Refused("find", f"the library's list of {len(seen)} devices does not single out {bdf}: {why}")


def set_compute(smi: Any, handle: Any, word: str) -> str:
    """Set a compute mode by name; returns the call that was used."""
    index = profile_index(smi, handle, word)
    if index is not None:
        return call(smi, "amdsmi_set_gpu_accelerator_partition_profile", handle, index)
    kind = getattr(smi, "AmdSmiComputePartitionType", None)
    if kind is None or not hasattr(kind, word):
        raise Refused("call", f"this binding knows no compute mode {word}")
    return call(smi, "amdsmi_set_gpu_compute_partition", handle, getattr(kind, word))


def profile_index(smi: Any, handle: Any, word: str) -> int | None:
    """The index whose profile is called `word`, or None where profiles are not there or not trustworthy. (7.0.2 raises
    UnboundLocalError for a card without profiles, and its `resource_profiles` are wrong; neither is needed here.)"""
    if not hasattr(smi, "amdsmi_set_gpu_accelerator_partition_profile"):
        return None
    config = ask(smi, "amdsmi_get_gpu_accelerator_partition_profile_config", handle)
    profiles = config.get("profiles", []) if isinstance(config, dict) else []
    matching = [p.get("profile_index") for p in profiles if p.get("profile_type") == word]
    return matching[0] if len(matching) == 1 and number(matching[0]) is not None else None


def set_memory(smi: Any, handle: Any, word: str) -> str:
    """Record a memory mode by name; returns the call that was used."""
    kind = getattr(smi, "AmdSmiMemoryPartitionType", None)
    if kind is None or not hasattr(kind, word):
        raise Refused("call", f"this binding knows no memory mode {word}")
    newer = "amdsmi_set_gpu_memory_partition_mode"
    return call(smi, newer if hasattr(smi, newer) else "amdsmi_set_gpu_memory_partition", handle, getattr(kind, word))


def call(smi: Any, name: str, *arguments: Any) -> str:
    """Make one mutating call; its exception becomes a status."""
    function = getattr(smi, name, None)
    if function is None:
        raise Refused("call", f"this binding has no {name}")
    try:
        function(*arguments)
    except Exception as error:
        raise failed("call", error) from error
    return name


if __name__ == "__main__":
    main()
