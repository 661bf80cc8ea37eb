"""context: how the penalties change as the KV cache grows: 1K, 8K and 32K tokens, weights or KV cache moved."""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, refuse_elsewhere, run_block, workload_of
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms, refuse_context
from dieplace.experiments.step_cases import LIVE, Case, StepArm, live_why_not, refuse_other_forms
from dieplace.run import Run

CONTEXTS = (1024, 8192, 32768)
_MOVED: dict[str, dict[str, float]] = {"local": {}, "swapped": {"weights": 1.0}, "kv far": {"kv_cache": 1.0}}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with a point for each context and arm; UsageError where another context was asked for."""
    if backend in LIVE:
        yield from run_live(backend, options, progress)
        return
    refuse_elsewhere("context", backend, live_why_not(backend), options)
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


def run_live(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """The measured Run on two GPUs, or two halves of a card: a case a context, with a local arm and a control each."""
    from dieplace.experiments.step_run import SWEEP_LAYERS, SWEEP_PLAN, run_cases

    refuse_arms("context", options)
    refuse_context("context", options)
    refuse_other_forms("context", backend, options)
    yield from run_cases("context", backend, options, progress, live_cases(), layers=SWEEP_LAYERS, plan=SWEEP_PLAN)


def live_cases() -> list[Case]:
    """Every context with the arms of the modelled experiment."""
    from dieplace.policy import Policy

    found = []
    for context in CONTEXTS:
        size = f"{context // 1024}K"
        arms = [StepArm(f"{size} {name}", dict.fromkeys(moved, Policy.peer())) for name, moved in _MOVED.items()]
        found.append(Case(size, tuple(arms), context_tokens=context, factors={"context_tokens": context}))
    return found


EXPERIMENT = Experiment(
    name="context",
    summary="penalty of far weights and of a far KV cache against context length",
    factors={"context_tokens": ", ".join(map(str, CONTEXTS)), "arm": ", ".join(_MOVED)},
    run=run,
    cannot=live_why_not,
    steps=1 + len(CONTEXTS) * (1 + len(_MOVED)),
    cards_a_rank={"nvidia": 2},
    live_steps=1 + 3 * len(CONTEXTS),
    blocks=("dpx-nps2",),
)
