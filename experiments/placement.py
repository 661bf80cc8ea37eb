"""placement: the full factorial of where weights, KV cache and sync flags lie: in DPX/NPS2, or on two GPUs.

Eight arms, each role on its own die or on the peer. Modelled penalties need not add: the link limit makes weights weigh
more than the sum of their parts, and flags pay by distance alone there (polling by many waves is not counted). On two
GPUs one of them computes; each layer sets and awaits flags where two shards would meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, refuse_elsewhere, run_block
from dieplace.experiments.modelled_run import PLACED_ROLES
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.experiments.step_cases import LIVE, Case, StepArm, live_why_not, refuse_other_forms
from dieplace.run import Run

# Uncached memory is a plain allocation (hipExtMallocWithFlags): VMM memory, which can move, is of the coarse class.
FLAGS_STAY = "flags lie in uncached memory there, which cannot change its home under the same addresses"
_SHORT = {"weights": "weights", "kv_cache": "kv", "sync_flag": "flags"}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with eight points."""
    if backend in LIVE:
        yield from run_live(backend, options, progress)
        return
    refuse_elsewhere("placement", backend, live_why_not(backend), options)
    refuse_arms("placement", options)
    yield run_block("placement", "dpx-nps2", "DPX/NPS2", specs(), options, progress)


def run_live(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """The measured Run on two GPUs, or on the two halves of a card."""
    from dieplace.experiments.step_run import SWEEP_LAYERS, run_cases

    refuse_arms("placement", options)
    refuse_other_forms("placement", backend, options)
    yield from run_cases("placement", backend, options, progress, [live_case(backend)], layers=SWEEP_LAYERS)


def live_case(backend: str = "nvidia") -> Case:
    """All eight arms over a step with hand-offs; on AMD those that move flags are missing."""
    from dieplace.policy import Policy

    arms = [StepArm(spec.arm, {role: Policy.peer() for role in spec.peer_share}) for spec in specs()]
    missing = [arm.name for arm in arms if backend == "amd" and "sync_flag" in arm.homes]
    kept = tuple(arm for arm in arms if arm.name not in missing)
    return Case("", kept, handoffs=True, missing=dict.fromkeys(missing, FLAGS_STAY))


def specs() -> list[Spec]:
    """All eight, nothing moved first; an arm is named by what lies on the peer."""
    found = []
    for moved in itertools.product((False, True), repeat=len(PLACED_ROLES)):
        roles = [role for role, is_far in zip(PLACED_ROLES, moved, strict=True) if is_far]
        name = "+".join(_SHORT[role] for role in roles) + " far" if roles else "local"
        found.append(Spec(name, dict.fromkeys(roles, 1.0)))
    return sorted(found, key=lambda spec: len(spec.peer_share))


EXPERIMENT = Experiment(
    name="placement",
    summary="weights, KV cache and sync flags near or far: all eight combinations",
    factors={role: "local, peer" for role in PLACED_ROLES},
    run=run,
    cannot=live_why_not,
    steps=10,
    cards_a_rank={"nvidia": 2},
    live_steps=4,
    blocks=("dpx-nps2",),
)
