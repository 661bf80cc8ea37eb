"""verify: rounds of 1, 2, 4 and 8 tokens, as speculative decoding makes; the union of their experts is read once.

Experts per layer are the expectation for independent uniform routing; published rounds read fewer (about 7 and 11.7
for 2 and 4 tokens), as real tokens share experts. Time is of a whole round, not of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.experiments.modelled import Spec, emulated_only, refuse_elsewhere, run_block, workload_of
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.run import Run

TOKENS = (1, 2, 4, 8)
BLOCKS = {"dpx-nps2": "DPX/NPS2", "spx-nps1": "SPX/NPS1"}
_MOVED: dict[str, dict[str, float]] = {"local": {}, "swapped": {"weights": 1.0}}


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run a mode with a point for each number of tokens and arm."""
    refuse_elsewhere("verify", backend, emulated_only(backend), options)
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


EXPERIMENT = Experiment(
    name="verify",
    summary="rounds of 1, 2, 4, 8 tokens: the union of their experts, near and far",
    factors={"tokens": ", ".join(map(str, TOKENS)), "arm": ", ".join(_MOVED), "block": ", ".join(BLOCKS)},
    run=run,
    cannot=emulated_only,
    steps=2 + 8 + 4 + 4 + 4,
    blocks=tuple(BLOCKS),
)
