"""Measured steps, what needs no device: arms, the predictions, what a probe says, when a penalty is told.

The predictions' formulas stand here; a run records them with the rates it was given. FORMULA was fixed before any
measurement, TOGETHER_FORMULA after a first run had shown that interleaved arms overlap their reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from dieplace.errors import UsageError
from dieplace.policy import Policy
from dieplace.probing import Levels

if TYPE_CHECKING:
    from dieplace.experiments.harness import Measured
    from dieplace.experiments.statistics import Estimate
    from dieplace.run import Quantity

FORMULA = "predicted = local time + moved bytes x (1 / far read rate - 1 / near read rate), rates of 1 GiB reads"
# FORMULA adds the far reads to the near ones; memory that is read in both places at once overlaps them.
SHARED_NOTE = "near and far parts are read at the same time: the prediction, which adds them, is an upper bound here"
TOGETHER_FORMULA = (
    "predicted = local time - role's bytes / near read rate + the longer of (role's bytes - moved bytes) / near read"
    " rate and moved bytes / far read rate: near and far parts are read at the same time"
)
PREDICTION_LIMIT = 0.15  # a prediction further off the measured time than this is a miss, and the run says why
DEFAULT_ARMS = ("local", "swapped")
_ARM = re.compile(r"^(local|swapped|interleave-([1-7])/8)$")


def policy_of(arm: str) -> Policy:
    """Where an arm's weights go; UsageError for an arm that moves another role."""
    found = _ARM.match(arm)
    if found is None:
        raise UsageError(
            f"weight-swap on devices has no arm {arm!r}", hint="use local, swapped or interleave-k/8 with k from 1 to 7"
        )
    if arm == "local":
        return Policy.local()
    return Policy.peer() if arm == "swapped" else Policy.peer_share(int(found.group(2)))


def share_of(policy: Policy) -> float:
    """The share of a role's bytes that a policy of this experiment puts on the peer."""
    return {"local": 0.0, "peer": 1.0}.get(policy.kind, policy.eighths / 8)


def predicted_us(local_us: float, moved_bytes: float, near_gb_per_s: float, far_gb_per_s: float) -> float:
    """FORMULA in numbers; a GB/s is a byte a nanosecond."""
    return local_us + moved_bytes * (1 / far_gb_per_s - 1 / near_gb_per_s) / 1000


def predicted_together_us(
    local_us: float, role_bytes: float, moved_bytes: float, near_gb_per_s: float, far_gb_per_s: float
) -> float:
    """TOGETHER_FORMULA in numbers; with all bytes moved, or none, it is FORMULA."""
    near, far = (role_bytes - moved_bytes) / near_gb_per_s, moved_bytes / far_gb_per_s
    return local_us + (max(near, far) - role_bytes / near_gb_per_s) / 1000


def why_missed(
    local_us: float, measured_us: float, moved_bytes: float, near_gb_per_s: float, far_gb_per_s: float
) -> str | None:
    """None where FORMULA is within PREDICTION_LIMIT of the measured time, else what the times say about why not."""
    expected = predicted_us(local_us, moved_bytes, near_gb_per_s, far_gb_per_s)
    if abs(expected / measured_us - 1) <= PREDICTION_LIMIT:
        return None
    if expected < measured_us:
        spent_us = measured_us - local_us + moved_bytes / near_gb_per_s / 1000
        return (
            f"predicted {expected / measured_us:.2f} of measured: inside the layer the far bytes came at"
            f" {moved_bytes / spent_us / 1000:.0f} GB/s where a stream of 1 GiB gets {far_gb_per_s:.0f}; too few"
            " loads under way, or bytes that are read more than once, would explain it"
        )
    hidden_us = expected - measured_us
    return (
        f"predicted {expected / measured_us:.2f} of measured: {hidden_us:.1f} us of the far reads took no time of their"
        f" own, as the local layer spends {local_us:.1f} us and would need"
        f" {moved_bytes / near_gb_per_s / 1000:.1f} us to read these bytes; work that goes on beside the far"
        " reads would explain it"
    )


@dataclass(frozen=True)
class Probed:
    """Windows of one role that answered like far memory, of all windows; `agrees` with what was asked for each."""

    windows: int
    far: int
    wrong: int
    near_cycles: float | None
    far_cycles: float | None
    why_not: str | None

    @property
    def agrees(self) -> bool:
        """Every window is where it was asked to be, by its latency."""
        return self.why_not is None and self.wrong == 0 and self.windows > 0

    def to_json(self) -> dict[str, Any]:
        """Plain data with a why beside each unknown number."""
        body = {**vars(self), "agrees": self.agrees}
        for key in ("near_cycles", "far_cycles"):
            if body[key] is None:
                body[f"{key}_why"] = "no window answered so"
        if self.why_not is None:
            body.pop("why_not")
        return body


def judge(cycles: Sequence[float], asked_far: Sequence[bool], levels: Levels) -> Probed:
    """Each window's cycles a hop against the calibrated levels and against where it was asked to be."""
    limit = levels.limit if levels.why_not is None else math.inf
    is_far = [value > limit for value in cycles]
    wrong = sum(found != asked for found, asked in zip(is_far, asked_far, strict=True))
    near = [value for value, far in zip(cycles, is_far, strict=True) if not far]
    far = [value for value, far in zip(cycles, is_far, strict=True) if far]
    return Probed(
        len(cycles), len(far), wrong, median(near) if near else None, median(far) if far else None, levels.why_not
    )


def no_penalty_because(
    probed: Probed,
    rest_evidence: str,
    cold: bool,
    hashes: Mapping[str, str | None],
    ratio: Estimate,
    *,
    control: Estimate | None,
    clock_share: float | None,
    role: str = "weights",
) -> str | None:
    """Why a measured penalty must not be told, or None: the rule of the design for every live number.

    `ratio` is to the first arm, `control` the A/A ratio; noise and clocks are judged as the verdict judges them, so
    that a penalty never stands beside the words "too noisy".
    """
    from dieplace.experiments.statistics import TOO_NOISY, verdict

    if not probed.agrees:
        return probed.why_not or f"{probed.wrong} of {probed.windows} windows of the {role} are not where they belong"
    if rest_evidence not in ("accounted", "probed"):
        return f"the homes of the other roles are {rest_evidence} only"
    if not cold:
        return f"{role} were warm in the last cache"
    if len(set(hashes.values())) != 1 or None in hashes.values():
        return "the arms did not run the same machine code"
    found = verdict(ratio, control=control, clock_share=clock_share)
    if found.kind == "too noisy":
        return found.words.removeprefix(TOO_NOISY)
    return None if control is not None and control.low is not None else "the same arm was not measured twice"


def quantities(
    arm: str,
    measured: Measured,
    *,
    moved_bytes: float,
    rates: tuple[float, float],
    refused: str | None,
    role_bytes: float | None = None,
) -> dict[str, Quantity]:
    """Times in us a layer, the ratio to local with its interval, the penalty or why not, and the prediction.

    `role_bytes` are all bytes a layer reads of what is moved: given, the second prediction stands beside the first.
    Predictions are of origin `modelled`, though from measured rates.
    """
    from dieplace.experiments.harness import CONTROL
    from dieplace.experiments.statistics import median as with_interval
    from dieplace.run import Quantity

    first = next(iter(measured.samples))
    samples = tuple(ns / 1000 for ns in measured.samples[arm])
    time = with_interval(samples, seed=measured.seed)
    ratio = measured.control if arm == first else measured.against_first(arm)
    kind = "A/A control, " if arm == first else "pair by pair, "
    found = {
        "layer_us": Quantity("us", "measured", time.value, time.low, time.high, time.method, samples),
        "time_over_local": Quantity("x", "measured", ratio.value, ratio.low, ratio.high, kind + ratio.method),
    }
    if arm == first:
        again = tuple(ns / 1000 for ns in measured.samples[CONTROL])
        twice = with_interval(again, seed=measured.seed)
        method = f"A/A control, {twice.method}"
        found["control_layer_us"] = Quantity("us", "measured", twice.value, twice.low, twice.high, method, again)
        return found
    local = with_interval([ns / 1000 for ns in measured.samples[first]], seed=measured.seed).value
    expected = predicted_us(local, moved_bytes, *rates)
    why = "a prediction from medians"
    found["predicted_us"] = Quantity("us", "modelled", expected, method=FORMULA, why=why)
    found["predicted_over_measured"] = Quantity("x", "modelled", expected / time.value, method=FORMULA, why=why)
    if role_bytes is not None:
        together = predicted_together_us(local, role_bytes, moved_bytes, *rates)
        method = TOGETHER_FORMULA
        found["predicted_together_us"] = Quantity("us", "modelled", together, method=method, why=why)
        found["predicted_together_over_measured"] = Quantity(
            "x", "modelled", together / time.value, method=method, why=why
        )
    if refused is not None:
        found["penalty"] = Quantity("share", "measured", None, why=refused)
    else:
        low, high = (None if v is None else v - 1 for v in (ratio.low, ratio.high))
        found["penalty"] = Quantity("share", "measured", ratio.value - 1, low, high, kind + ratio.method)
    return found
