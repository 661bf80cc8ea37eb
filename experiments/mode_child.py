"""One block of `mode` on AMD cards, taken by a child process: whoever switches modes must not hold the driver open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dieplace.errors import Unsupported
from dieplace.experiments.modelled import emulated_only
from dieplace.experiments.registry import Options, Progress

if TYPE_CHECKING:
    from dieplace.experiments.mode import Take


def cannot_here(backend: str) -> str | None:
    """None where a decode step can be timed on the cards of this host; else why not."""
    return emulated_only(backend)


def take_in_child(options: Options, progress: Progress) -> Take:
    """What measures one block; Unsupported with the reason where no step can be timed here."""
    raise Unsupported(f"mode cannot time a step on amd: {cannot_here('amd')}", hint="name --backend emulated")
