"""verify: rounds of 1, 2, 4 and 8 tokens, as speculative decoding makes; the union of their experts is read once.

Modelled, experts per layer are the expectation for independent uniform routing; published rounds read fewer (about 7
and 11.7 for 2 and 4 tokens), as real tokens share experts. Measured, they are counted from what the router chose of
random tokens. Time is of a whole round, not of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, refuse_elsewhere, run_block, workload_of
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.experiments.step_cases import LIVE, Case, StepArm, live_why_not, refuse_other_forms
from dieplace.run import Run

TOKENS = (1, 2, 4, 8)
BLOCKS = {"dpx-nps2": "DPX/NPS2", "spx-nps1": "SPX/NPS1"}
_MOVED: dict[str, dict[str, float]] = {"local": {}, "swapped": {"weights": 1.0}}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run a mode with a point for each number of tokens and arm."""
    if backend in LIVE:
        yield from run_live(backend, options, progress)
        return
    refuse_elsewhere("verify", backend, live_why_not(backend), options)
    refuse_arms("verify", options)
    specs = [
        Spec(
            f"{n} {'token' if n == 1 else 'tokens'} {name}",
            moved,
            workload=workload_of(options, tokens=n),
            factors={"tokens": n},
        )
        for n in TOKENS
        for name, moved in _MOVED.items()
    ]
    for block, mode in BLOCKS.items():
        yield run_block("verify", block, mode, specs, options, progress)


def run_live(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """The measured Run on two GPUs, or two halves of a card: a case a number of tokens, each with its own control."""
    from dieplace.experiments.step_run import SWEEP_LAYERS, SWEEP_PLAN, run_cases

    refuse_arms("verify", options)
    refuse_other_forms("verify", backend, options)
    yield from run_cases("verify", backend, options, progress, live_cases(), layers=SWEEP_LAYERS, plan=SWEEP_PLAN)


def live_cases() -> list[Case]:
    """Every number of tokens with the arms of the modelled experiment."""
    from dieplace.policy import Policy

    found = []
    for n in TOKENS:
        round_of = f"{n} {'token' if n == 1 else 'tokens'}"
        arms = [StepArm(f"{round_of} {name}", dict.fromkeys(moved, Policy.peer())) for name, moved in _MOVED.items()]
        found.append(Case(round_of, tuple(arms), tokens=n, factors={"tokens": n}))
    return found


EXPERIMENT = Experiment(
    name="verify",
    summary="rounds of 1, 2, 4, 8 tokens: the union of their experts, near and far",
    factors={"tokens": ", ".join(map(str, TOKENS)), "arm": ", ".join(_MOVED), "block": ", ".join(BLOCKS)},
    run=run,
    cannot=live_why_not,
    steps=2 + 8 + 4 + 4 + 4,
    cards_a_rank={"nvidia": 2},
    live_steps=1 + 3 * len(TOKENS),
    blocks=tuple(BLOCKS),
)
