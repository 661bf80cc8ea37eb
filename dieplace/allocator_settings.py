"""torch's expandable segments: found, never changed, and refused where something is measured.

They cannot be exported to other processes (aiter issue 4174), and a plain pool uses them while a pool with its own
allocator does not (pytorch PR 185818), so that two arms of one experiment would lie on different page layouts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dieplace.errors import UsageError

# c10/core/AllocatorConfig.h: the first name is the current one, the others are still read.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class ExpandableSegments:
    """`on`, and what says so: `NAME=value` of the environment, torch itself, or None where they are off."""

    on: bool
    source: str | None = None


def expandable_segments(environ: Mapping[str, str] | None = None, torch: Any = None) -> ExpandableSegments:
    """Whether torch uses expandable segments, by the environment and, once its CUDA side runs, by torch itself.

    torch is not loaded to ask. A torch that does not tell its settings is taken at the environment's word.
    """
    environ = os.environ if environ is None else environ
    torch = sys.modules.get("torch") if torch is None else torch
    for name in VARIABLES:
        for entry in environ.get(name, "").split(","):
            key, _, value = entry.partition(":")
            if key.strip() == "expandable_segments" and value.strip() == "True":
                return ExpandableSegments(True, f"{name}={environ[name]}")
    return ExpandableSegments(True, "torch's allocator settings") if _torch_says(torch) else ExpandableSegments(False)


def require_fixed_segments(environ: Mapping[str, str] | None = None) -> None:
    """UsageError where expandable segments are on; the setting is the user's and stays as it is."""
    found = expandable_segments(environ)
    if found.on:
        raise UsageError(
            f"nothing is measured with expandable segments on ({found.source})",
            hint="run without that setting",
            source=found.source,
        )


def _torch_says(torch: Any) -> bool:
    try:
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return False
        return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    except (AttributeError, KeyError, TypeError, RuntimeError):
        return False
