"""Comparing two runs point by point: only under equal conditions, and never across origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dieplace.conditions import CONDITIONS, differing
from dieplace.errors import Incomparable, UsageError
from dieplace.experiments import generic_tables
from dieplace.run import Point, Quantity, Run

if TYPE_CHECKING:
    from dieplace.experiments.statistics import Estimate


@dataclass(frozen=True)
class Comparison:
    """Rows by arm, the conditions that differ by leave, and the arms slower than the limit."""

    origin: str
    source: str
    rows: list[dict[str, Any]]
    differing: list[dict[str, Any]]
    regressions: list[str]


def compare_runs(base: Run, run: Run, *, allow: Sequence[str] = (), fail_on_percent: float | None = None) -> Comparison:
    """RUN against BASE. Incomparable (exit 2) names every checked condition that differs and was not allowed.

    Measured and modelled numbers are never compared, whatever is allowed. Measured ones are judged by their samples: a
    bootstrap interval of the ratio of medians, held to the A/A control and the clocks of both runs.
    """
    known = {condition.key for condition in CONDITIONS if condition.checked}
    for key in allow:
        if key not in known:
            raise UsageError(f"no checked condition is called {key!r}", hint=f"there is {', '.join(sorted(known))}")
    _require_same_kind(base, run)
    keys = differing(base.conditions, run.conditions)
    refused = [key for key in keys if key not in allow]
    if refused:
        shown = "; ".join(f"{key}: {base.conditions.get(key)} -> {run.conditions.get(key)}" for key in refused)
        raise Incomparable(
            f"the runs differ in conditions that must be equal: {shown}",
            hint=f"compare all the same with {' '.join(f'--allow {key}' for key in refused)}",
            differing=refused,
        )
    first, second = _times(base), _times(run)
    clocks = _clock_share(base, run)
    rows = []
    for name in dict.fromkeys((*first, *second)):
        points = [(one, taken[name][0]) for one, taken in ((base, first), (run, second)) if name in taken]
        judge = _Judge(_control(points), clocks)
        before, after = (taken[name][1] if name in taken else None for taken in (first, second))
        rows.append(_row(name, before, after, judge))
    if base.block == run.block:  # runs of two modes do not have the same arms
        _require_arms(rows, fail_on_percent)
    worse = [str(row["arm"]) for row in rows if _is_regression(row, run.origin, fail_on_percent)]
    told = [{"key": key, "base": base.conditions.get(key), "run": run.conditions.get(key)} for key in keys]
    return Comparison(run.origin, run.source, rows, told, worse)


def _require_same_kind(base: Run, run: Run) -> None:
    if base.origin != run.origin:
        raise Incomparable(
            f"BASE is {base.origin} and RUN is {run.origin}: their numbers are of different kinds",
            hint="compare two runs of one origin",
            differing=["origin"],
        )
    if base.experiment != run.experiment:
        raise Incomparable(
            f"BASE is a {base.experiment} run and RUN a {run.experiment} run",
            hint="compare runs of one experiment",
            differing=["experiment"],
        )


def _require_arms(rows: Sequence[dict[str, Any]], limit: float | None) -> None:
    """A limit can be held only by what RUN has: an arm that is gone must not read as *not slower*."""
    lost = [f"{row['arm']} ({row['verdict']})" for row in rows if row["base"] is not None and row["run"] is None]
    if limit is not None and lost:
        raise Incomparable(
            f"a limit of {limit:g} % was set, but RUN has nothing to hold to it for {', '.join(lost)}",
            hint="run the same arms in both, or leave out --fail-on",
            differing=["arms"],
        )


def _is_regression(row: dict[str, Any], origin: str, limit: float | None) -> bool:
    """Slower by more than the limit; measured numbers also need a verdict that says slower."""
    if limit is None or row["change_percent"] is None or row["change_percent"] <= limit:
        return False
    return origin == "modelled" or str(row["verdict"]).startswith("slower")


def _times(run: Run) -> dict[str, tuple[Point, Quantity]]:
    """What is compared, by a name that both runs give it: a token, a layer, a load, a rate, or the main number."""
    found: dict[str, tuple[Point, Quantity]] = {}
    main = generic_tables.main_quantity(run)
    for point in run.points:
        names = ("token_us", "layer_us", "latency_ns", "gb_per_s", *((main,) if main else ()))
        name = next((name for name in names if name in point.quantities), None)
        if name is not None:
            found.setdefault(_named(run, point), (point, point.quantities[name]))
    return found


def _named(run: Run, point: Point) -> str:
    """The arm, with what tells it from other points of that arm: of `link` the kind, set, directions and reader."""
    if sum(other.arm == point.arm for other in run.points) == 1:
        return point.arm
    same = [other for other in run.points if other.arm == point.arm]
    keys = [key for key in point.factors if len({str(other.factors.get(key)) for other in same}) > 1]
    told = ", ".join(_factor(key, point.factors) for key in keys)
    return f"{point.arm}, {told}" if told else point.arm


def _factor(key: str, factors: Mapping[str, Any]) -> str:
    value = factors[key]
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return str(value)


@dataclass(frozen=True)
class _Judge:
    """What both runs' noise allows to be concluded: the worse A/A control and the lower clocks."""

    control: Estimate | None
    clock_share: float | None


def _control(points: Sequence[tuple[Run, Point]]) -> Estimate | None:
    """The A/A ratio of the points' own cases that lies farthest off 1; None where there is none."""
    from dieplace.experiments.statistics import MIN_PAIRS, Estimate

    found = [q for run, point in points for other in run.points if _one_case(run, point, other) for q in _again(other)]
    if not found:
        return None
    worst = max(found, key=lambda q: max((q.low or 1.0) - 1, 1 - (q.high or 1.0)))
    return Estimate(worst.value or 1.0, worst.low, worst.high, MIN_PAIRS, worst.method)


def _one_case(run: Run, point: Point, other: Point) -> bool:
    """Whether two points were measured together: of `link` by the same reader with the same set, of steps in a case."""
    if run.experiment == "link":
        return other.factors == point.factors
    return bool(other.factors.get("case") == point.factors.get("case"))


def _again(point: Point) -> list[Quantity]:
    each = point.quantities.values()
    return [q for q in each if q.unit == "x" and q.method.startswith("A/A") and q.value is not None]


def _clock_share(base: Run, run: Run) -> float | None:
    shares = [one.facts.get("clock_share") for one in (base, run)]
    return min((float(s) for s in shares if isinstance(s, (int, float)) and not isinstance(s, bool)), default=None)


def _row(name: str, base: Quantity | None, other: Quantity | None, judge: _Judge) -> dict[str, Any]:
    unit = (other or base).unit if other or base else ""  # type: ignore[union-attr]
    row: dict[str, Any] = {"arm": name, "unit": unit}
    for side, quantity in (("base", base), ("run", other)):
        row[side] = quantity.value if quantity else None
        if unit == "us":  # the name that times had before other units were compared
            row[f"{side}_us"] = row[side]
    row |= {"change_percent": None, "change_low_percent": None, "change_high_percent": None}
    if base is None or other is None or not base.value or other.value is None or base.unit != other.unit:
        why = "BASE has no such arm" if base is None else "RUN has no such arm" if other is None else "no value"
        return {**row, "change_percent_why": why, "verdict": why}
    if base.origin == "modelled":
        change = (_slower(base, other) - 1) * 100
        return {**row, "change_percent": change, "verdict": _modelled(change, base, other)}
    return row | _measured(base, other, judge)


def _slower(base: Quantity, other: Quantity) -> float:
    """How many times as long: times as they are, rates turned round."""
    assert base.value is not None and other.value is not None
    return base.value / other.value if _is_rate(base) and other.value else other.value / base.value


def _is_rate(quantity: Quantity) -> bool:
    return quantity.unit.endswith("/s")


def _modelled(change: float, base: Quantity, other: Quantity) -> str:
    if base.by_set == other.by_set:
        return "the model gives the same"
    return f"{'slower' if change > 0 else 'faster'} in the model"


def _measured(base: Quantity, other: Quantity, judge: _Judge) -> dict[str, Any]:
    """Change and verdict from the samples of both; two runs are not paired: they were taken at different times."""
    from dieplace.experiments.statistics import ratio, verdict

    change = (_slower(base, other) - 1) * 100
    first, second = (q.samples for q in ((other, base) if _is_rate(base) else (base, other)))
    if not first or not second or min(first) <= 0 or min(second) <= 0:
        return {"change_percent": change, "verdict": "too noisy to say, because one side has no samples"}
    found = ratio(first, second, seed=0, paired=False)
    low, high = ((found.low - 1) * 100, (found.high - 1) * 100) if found.low and found.high else (None, None)
    words = verdict(found, control=judge.control, clock_share=judge.clock_share).words
    return {
        "change_percent": (found.value - 1) * 100, "change_low_percent": low, "change_high_percent": high,
        "verdict": words,
    }  # fmt: skip
