"""weight-swap: what one token costs when each die's weights lie in the other die's HBM.

The published controlled experiment: DPX/NPS2, two tensor-parallel shards, one per die; then the same buffers at the
same addresses with every shard's weights moved to its peer at once. A mode is a block: `dpx-nps2` has the arms,
`spx-nps1` and `dpx-nps1` are separate runs that are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from dieplace.clock import arm
from dieplace.errors import UsageError
from dieplace.experiments.modelled import Spec, refuse_elsewhere, run_block
from dieplace.experiments.registry import Experiment, Options, Progress
from dieplace.experiments.step_cases import LIVE, live_why_not
from dieplace.run import Run

BLOCKS = {"dpx-nps2": "DPX/NPS2", "spx-nps1": "SPX/NPS1", "dpx-nps1": "DPX/NPS1"}
DEFAULT_ARMS = ("local", "swapped")


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run a block, as each is done, on private emulated nodes.

    On nvidia one measured Run, with the executing GPU's peer as the far memory. Unsupported on other backends;
    UsageError for an unknown model, precision or arm, before anything is placed.
    """
    if backend in LIVE:
        from dieplace.experiments.weight_swap_devices import run_live

        yield from run_live(backend, options, progress)
        return
    refuse_elsewhere("weight-swap", backend, live_why_not(backend), options)
    specs = [_spec(name) for name in options.arms or DEFAULT_ARMS]
    for block, mode in BLOCKS.items():
        # A mode without local memory has one arm: what local() gives there.
        chosen = specs if block == "dpx-nps2" else [_spec("local")]
        yield run_block("weight-swap", block, mode, chosen, options, progress)


def _spec(name: str) -> Spec:
    placement = arm(name)
    if placement.stages is not None or placement.cached_as_remote:
        raise UsageError(
            f"weight-swap has no arm {name!r}: it moves whole roles",
            hint="use local, swapped, swapped-kv_cache, swapped-sync_flag or interleave-k/8",
        )
    return Spec(name, placement.peer_share)


EXPERIMENT = Experiment(
    name="weight-swap",
    summary="each die's weights in the other die's HBM: the penalty on one token",
    factors={"arm": "local, swapped, swapped-kv_cache, swapped-sync_flag, interleave-k/8", "block": ", ".join(BLOCKS)},
    run=run,
    cannot=live_why_not,
    steps=len(BLOCKS) * 3 + 1,
    live_steps=4,
    blocks=tuple(BLOCKS),
    cards_a_rank={"nvidia": 2},
)
