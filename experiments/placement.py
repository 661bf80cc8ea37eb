"""placement: the full factorial of where weights, KV cache and sync flags lie, in DPX/NPS2.

Eight arms, each role on its own die or on the peer. Penalties need not add: the link limit makes weights weigh more
than the sum of their parts, and flags pay by distance alone here (polling by many waves is not counted).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, emulated_only, refuse_elsewhere, run_block
from dieplace.experiments.modelled_run import PLACED_ROLES
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.run import Run

_SHORT = {"weights": "weights", "kv_cache": "kv", "sync_flag": "flags"}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run with eight points."""
    refuse_elsewhere("placement", backend, emulated_only(backend), options)
    refuse_arms("placement", options)
    yield run_block("placement", "dpx-nps2", "DPX/NPS2", specs(), options, progress)


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
    cannot=emulated_only,
    steps=10,
    blocks=("dpx-nps2",),
)
