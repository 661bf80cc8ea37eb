"""One answer over all parameter sets: the headline set's value, and the range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dieplace.clock.arms import Placement
from dieplace.clock.equations import TokenTime, time_token
from dieplace.clock.parameters import HEADLINE_SET, PARAMETER_SETS, ParameterSet
from dieplace.workload import Workload


@dataclass(frozen=True)
class Ranged:
    """A modelled number: `value` of the headline set, `low` and `high` over all sets, and each set's own."""

    value: float
    low: float
    high: float
    by_set: dict[str, float]


def over_sets(
    workload: Workload,
    placement: Placement,
    pick: Callable[[TokenTime], float],
    sets: Sequence[ParameterSet] = PARAMETER_SETS,
) -> Ranged:
    """`pick` of the token's time under every set; the value is the headline set's, or the first set's without it."""
    by_set = {s.name: pick(time_token(workload, placement, s)) for s in sets}
    value = by_set.get(HEADLINE_SET, next(iter(by_set.values())))
    return Ranged(value, min(by_set.values()), max(by_set.values()), by_set)
