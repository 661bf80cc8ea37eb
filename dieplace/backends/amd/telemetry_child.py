"""Power and utilisation through pyrsmi, in a process of its own: `python -I telemetry_child.py '{"rocm_path": ...}'`.

pyrsmi 1.1.0 initialises AMD's library twice and shuts it down once, lets KeyError escape, and answers -1 for a failure;
all that ends with this process. It is never asked about partitions or processes, where it calls symbols that its
library does not have.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> int:
    """Answer with one JSON object on the standard output this was started with."""
    answer_fd = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    rocm_path = json.loads(sys.argv[1]).get("rocm_path")
    if rocm_path:
        os.environ["ROCM_PATH"] = os.environ["ROCM_HOME"] = rocm_path
    try:
        reply: dict[str, Any] = {"ok": True, "devices": devices()}
    except BaseException as error:  # also SystemExit and what ctypes throws: the parent must get an answer
        reply = {"ok": False, "stage": "call", "text": f"{type(error).__name__}: {error}"}
    os.write(answer_fd, json.dumps(reply).encode())
    os._exit(0)


def devices() -> list[dict[str, Any]]:
    """One entry a logical device; a reading that failed is None."""
    from pyrsmi import rocml

    rocml.smi_initialize()
    readings = {
        "power_w": rocml.smi_get_device_average_power,
        "utilisation_percent": rocml.smi_get_device_utilization,
        "pci_id": rocml.smi_get_device_pci_id,
    }
    return [
        {name: known(read, index) for name, read in readings.items()} for index in range(rocml.smi_get_device_count())
    ]


def known(read: Any, index: int) -> float | int | None:
    """A reading, or None: pyrsmi says -1, "N/A" or the all-ones value where it does not know."""
    try:
        value = read(index)
    except Exception:  # any class, by design of that package
        return None
    return value if isinstance(value, (int, float)) and 0 <= value < 0xFFFFFFFFFFFFFFFF else None


if __name__ == "__main__":
    main()
