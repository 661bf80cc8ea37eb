"""context: how the penalties change as the KV cache grows: 1K, 8K and 32K tokens, weights or KV cache moved."""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, emulated_only, refuse_elsewhere, run_block, workload_of
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms, refuse_context
from dieplace.run import Run

CONTEXTS = (1024, 8192, 32768)
_MOVED: dict[str, dict[str, float]] = {"local": {}, "swapped": {"weights": 1.0}, "kv far": {"kv_cache": 1.0}}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with a point for each context and arm; UsageError where another context was asked for."""
    refuse_elsewhere("context", backend, emulated_only(backend), options)
    refuse_arms("context", options)
    refuse_context("context", options)
    specs = [
        Spec(
            f"{context // 1024}K {name}",
            moved,
            workload=workload_of(options, context_tokens=context),
            factors={"context_tokens": context},
        )
        for context in CONTEXTS
        for name, moved in _MOVED.items()
    ]
    yield run_block("context", "dpx-nps2", "DPX/NPS2", specs, options, progress)


EXPERIMENT = Experiment(
    name="context",
    summary="penalty of far weights and of a far KV cache against context length",
    factors={"context_tokens": ", ".join(map(str, CONTEXTS)), "arm": ", ".join(_MOVED)},
    run=run,
    cannot=emulated_only,
    steps=1 + len(CONTEXTS) * (1 + len(_MOVED)),
    blocks=("dpx-nps2",),
)
