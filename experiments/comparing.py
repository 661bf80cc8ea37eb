"""Comparing two runs arm by arm: only under equal conditions, and never across origins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.conditions import CONDITIONS, differing
from dieplace.errors import Incomparable, UsageError
from dieplace.run import Point, Quantity, Run


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

    Measured and modelled numbers are never compared, whatever is allowed.
    """
    known = {condition.key for condition in CONDITIONS if condition.checked}
    for key in allow:
        if key not in known:
            raise UsageError(f"no checked condition is called {key!r}", hint=f"there is {', '.join(sorted(known))}")
    if base.origin != run.origin:
        raise Incomparable(
            f"BASE is {base.origin} and RUN is {run.origin}: their numbers are of different kinds",
            hint="compare two runs of one origin",
            differing=["origin"],
        )
    if base.experiment == run.experiment == "link":
        raise UsageError("link runs have many rates and no one time to compare", hint="dieplace bench show BASE RUN")
    if base.experiment != run.experiment:
        raise Incomparable(
            f"BASE is a {base.experiment} run and RUN a {run.experiment} run",
            hint="compare runs of one experiment",
            differing=["experiment"],
        )
    keys = differing(base.conditions, run.conditions)
    refused = [key for key in keys if key not in allow]
    if refused:
        shown = "; ".join(f"{key}: {base.conditions.get(key)} -> {run.conditions.get(key)}" for key in refused)
        raise Incomparable(
            f"the runs differ in conditions that must be equal: {shown}",
            hint=f"compare all the same with {' '.join(f'--allow {key}' for key in refused)}",
            differing=refused,
        )
    arms = dict.fromkeys(point.arm for point in (*base.points, *run.points))
    rows = [_row(arm, _of(base, arm), _of(run, arm)) for arm in arms]
    if base.block == run.block:  # runs of two modes do not have the same arms
        _require_arms(rows, fail_on_percent)
    worse = [str(row["arm"]) for row in rows if _is_regression(row, run.origin, fail_on_percent)]
    told = [{"key": key, "base": base.conditions.get(key), "run": run.conditions.get(key)} for key in keys]
    return Comparison(run.origin, run.source, rows, told, worse)


def _require_arms(rows: Sequence[dict[str, Any]], limit: float | None) -> None:
    """A limit can be held only by what RUN has: an arm that is gone must not read as *not slower*."""
    lost = [f"{row['arm']} ({row['verdict']})" for row in rows if row["base_us"] is not None and row["run_us"] is None]
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


def _of(run: Run, arm: str) -> Quantity | None:
    return next((_time(point) for point in run.points if point.arm == arm), None)


def _time(point: Point) -> Quantity:
    """The time that is compared: of a token where it is modelled, of a layer where it was measured."""
    return point.quantities["token_us"] if "token_us" in point.quantities else point.quantities["layer_us"]


def _row(arm: str, base: Quantity | None, other: Quantity | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": arm,
        "base_us": base.value if base else None,
        "run_us": other.value if other else None,
    }
    if base is None or other is None or not base.value or other.value is None:
        why = "BASE has no such arm" if base is None else "RUN has no such arm" if other is None else "no value"
        return {**row, "change_percent": None, "change_percent_why": why, "verdict": why}
    change = (other.value / base.value - 1) * 100
    return {**row, "change_percent": change, "verdict": _verdict(change, base, other)}


def _verdict(change: float, base: Quantity, other: Quantity) -> str:
    if base.origin == "modelled":
        if base.by_set == other.by_set:
            return "the model gives the same"
        return f"{'slower' if change > 0 else 'faster'} in the model"
    from dieplace.experiments.statistics import ratio, verdict

    if not base.samples or not other.samples:
        return "too noisy to say, because one side has no samples"
    # Two runs are not paired: they were taken at different times.
    return verdict(ratio(base.samples, other.samples, seed=0, paired=False)).words
