"""One published figure beside the model's, and the numbers it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dieplace.run import Quantity

MODEL, PRECISION, CONTEXT = "gpt-oss-120b", "mxfp4", 1024
FIT = "input to the fit of sets A and B; C is the unfitted prediction"


@dataclass(frozen=True)
class Row:
    """One published figure: `low` and `high` in `unit` (equal for a single figure), or None for a statement.

    `modelled` is None where nothing models it; `residual` is modelled minus the nearest end of what was published, 0
    inside it, None where there is nothing to subtract. `reason` says why they differ or agree, or why there is none.
    """

    claim: str
    published: str
    unit: str
    low: float | None
    high: float | None
    modelled: Quantity | None
    reason: str

    @property
    def residual(self) -> float | None:
        if self.modelled is None or self.modelled.value is None or self.low is None or self.high is None:
            return None
        return self.modelled.value - min(max(self.modelled.value, self.low), self.high)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"claim": self.claim, "published": self.published, "unit": self.unit}
        body |= {"published_low": self.low, "published_high": self.high}
        if self.low is None:
            body["published_low_why"] = body["published_high_why"] = "a statement, not a number"
        body["modelled"] = self.modelled.to_json() if self.modelled else None
        if self.modelled is None:
            body["modelled_why"] = self.reason
        body["residual"] = self.residual
        if self.residual is None:
            body["residual_why"] = self.reason
        body["reason"] = self.reason
        return body


def percent(found: Quantity | None) -> Quantity | None:
    """A share in percent."""
    if found is None or found.value is None:
        return None
    return Quantity(
        "%",
        found.origin,
        found.value * 100,
        None if found.low is None else found.low * 100,
        None if found.high is None else found.high * 100,
        found.method,
        by_set={name: value * 100 for name, value in found.by_set.items()},
    )


def get(found: Mapping[str, Quantity] | None, name: str) -> Quantity | None:
    """A quantity of a point, None where there is no point."""
    return found.get(name) if found else None


def exact(value: float | None, unit: str, method: str) -> Quantity | None:
    """A number that is counted or computed, with no range."""
    return None if value is None else Quantity(unit, "modelled", value, value, value, method)


def times(penalty: Quantity | None, factor: float) -> Quantity | None:
    """How much faster local memory is, as a ratio, times a factor that the model is given."""
    if penalty is None or penalty.value is None or penalty.low is None or penalty.high is None:
        return None
    value, low, high = ((1 + number) * factor for number in (penalty.value, penalty.low, penalty.high))
    by_set = {name: (1 + number) * factor for name, number in penalty.by_set.items()}
    return Quantity("x", penalty.origin, value, low, high, penalty.method, by_set=by_set)
