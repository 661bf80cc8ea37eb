"""weight-swap on devices: layers run on one GPU or die, their weights change home under the same addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dieplace.errors import UsageError
from dieplace.experiments import weight_swap_live as live
from dieplace.experiments.registry import Options, Progress
from dieplace.experiments.step_cases import Case, StepArm, refuse_other_forms
from dieplace.experiments.step_run import run_cases
from dieplace.run import Run


def run_live(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run; Unsupported where there is no far memory, UsageError for what has no form here.

    One shard runs on the first device; two run a half of each layer on either, and both halves' weights move.
    """
    from dieplace.allocator_settings import require_fixed_segments
    from dieplace.experiments.weight_swap_shards import SHARDS, run_shards

    require_fixed_segments()
    arms = options.arms or live.DEFAULT_ARMS
    for arm in arms:
        live.policy_of(arm)
    if arms[0] != "local" or len(arms) < 2:
        raise UsageError("weight-swap compares with local", hint="put local first in --arms, and one more behind it")
    if options.shards == SHARDS:
        yield from run_shards(backend, options, progress, case_of(arms))
        return
    refuse_other_forms("weight-swap", backend, options)
    yield from run_cases("weight-swap", backend, options, progress, [case_of(arms)])


def case_of(arms: Sequence[str]) -> Case:
    """The one case: weights near, far, or spread over both."""
    return Case("", tuple(StepArm(a, {} if a == "local" else {"weights": live.policy_of(a)}) for a in arms))
