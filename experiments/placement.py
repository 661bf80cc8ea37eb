"""placement: the full factorial of where weights, KV cache and sync flags lie: in DPX/NPS2, or on two GPUs.

Eight arms, each role on its own die or on the peer. Modelled penalties need not add: the link limit makes weights weigh
more than the sum of their parts, and flags pay by distance alone there (polling by many waves is not counted). On two
GPUs one of them computes; each layer sets and awaits flags where two shards would meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dieplace.experiments.modelled import Spec, emulated_only, refuse_elsewhere, run_block
from dieplace.experiments.modelled_run import PLACED_ROLES
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.run import Run

if TYPE_CHECKING:
    from dieplace.experiments.step_cases import Case

_SHORT = {"weights": "weights", "kv_cache": "kv", "sync_flag": "flags"}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with eight points."""
    if backend == "nvidia":
        yield from run_live(options, progress)
        return
    refuse_elsewhere("placement", backend, cannot(backend), options)
    refuse_arms("placement", options)
    yield run_block("placement", "dpx-nps2", "DPX/NPS2", specs(), options, progress)


def run_live(options: Options, progress: Progress) -> Iterator[Run]:
    """The measured Run on two GPUs."""
    from dieplace.experiments.step_cases import refuse_other_forms
    from dieplace.experiments.step_run import SWEEP_LAYERS, run_cases

    refuse_arms("placement", options)
    refuse_other_forms("placement", options)
    yield from run_cases("placement", options, progress, [live_case()], layers=SWEEP_LAYERS)


def live_case() -> Case:
    """All eight arms over a step with hand-offs."""
    from dieplace.experiments.step_cases import Case, StepArm
    from dieplace.policy import Policy

    arms = [StepArm(spec.arm, {role: Policy.peer() for role in spec.peer_share}) for spec in specs()]
    return Case("", tuple(arms), handoffs=True)


def cannot(backend: str) -> str | None:
    """None on the emulated and the nvidia backend; elsewhere why not."""
    return None if backend == "nvidia" else emulated_only(backend)


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
    cannot=cannot,
    steps=10,
    live_steps=4,
    blocks=("dpx-nps2",),
)
