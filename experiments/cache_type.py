"""cache-type: how much of a far buffer's penalty is its cache type and not its distance.

On AMD a buffer moved to the peer die is also mapped NC instead of RW. The third arm, local but cached as if remote
(`amdgpu.mtype_local=1` on the same binary), separates the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, emulated_only, refuse_elsewhere, run_block
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.run import Run

SPECS = (
    Spec("local"),
    Spec("local-nc", cached_as_remote=frozenset({"weights"}), factors={"mtype_local": 1}),
    Spec("swapped", {"weights": 1.0}),
)


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with three points."""
    refuse_elsewhere("cache-type", backend, cannot(backend), options)
    refuse_arms("cache-type", options)
    yield run_block("cache-type", "dpx-nps2", "DPX/NPS2", SPECS, options, progress)


def cannot(backend: str) -> str | None:
    """Only AMD cards change a buffer's cache type with its home."""
    if backend in ("nvidia", "cpu"):
        return "memory there keeps its cache type wherever it lies"
    if backend == "amd":
        return "local-nc needs the driver loaded anew with mtype_local=1, which no experiment here does"
    return emulated_only(backend)


EXPERIMENT = Experiment(
    name="cache-type",
    summary="local, local but cached as if remote, and swapped: distance apart from type",
    factors={"arm": ", ".join(spec.arm for spec in SPECS)},
    run=run,
    cannot=cannot,
    steps=5,
    blocks=("dpx-nps2",),
)
