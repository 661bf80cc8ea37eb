"""The timing model: how long a decode step takes when its memory lies here or there, with parameter sets and ranges.

Nothing in here is measured. `parameters` holds the sets, `equations` the model over a `Workload`, `arms` the placements
that experiments compare, `ranges` one answer over all sets.
"""

from dieplace.clock.arms import Placement, arm
from dieplace.clock.equations import StageTime, Terms, TokenTime, time_token
from dieplace.clock.parameters import PARAMETER_SETS, ParameterSet, parameter_set
from dieplace.clock.ranges import Ranged, over_sets

__all__ = [
    "PARAMETER_SETS",
    "ParameterSet",
    "Placement",
    "Ranged",
    "StageTime",
    "Terms",
    "TokenTime",
    "arm",
    "over_sets",
    "parameter_set",
    "time_token",
]
