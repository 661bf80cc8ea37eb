"""One block of `mode` on AMD cards, taken by a child process: whoever switches modes must not hold the driver open."""

from __future__ import annotations

from dieplace.experiments.modelled import emulated_only


def cannot_here(backend: str) -> str | None:
    """None where a decode step can be timed on the cards of this host; else why not."""
    return emulated_only(backend)
