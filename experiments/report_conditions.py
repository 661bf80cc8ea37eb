"""What the runs of a page were taken under: clocks, power and temperature before and after, and every other fact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dieplace.experiments.report_parts import Folded, Heading, Part, Said, Tabled
from dieplace.run import Run

MOST = 1e18  # beyond it a file is damaged
_READINGS = (
    ("sm_clock_mhz", "core clock, MHz", "{:,.0f}"),
    ("memory_clock_mhz", "memory clock, MHz", "{:,.0f}"),
    ("power_w", "power, W", "{:,.0f}"),
    ("temperature_c", "temperature, C", "{:,.0f}"),
)


def _code(run: Run) -> Iterator[str]:
    """Whether the arms that are compared ran the same machine code: those of one case, where a run has several."""
    told = run.facts.get("code_hash_by_arm")
    if not isinstance(told, Mapping) or not told:
        return
    cases: dict[str, set[str]] = {}
    for point in run.points:
        if point.arm in told:
            cases.setdefault(str(point.factors.get("case", "")), set()).add(str(told[point.arm]))
    if any(len(hashes) > 1 for hashes in cases.values()):
        yield f"Machine code: NOT the same in all arms: {', '.join(f'{arm} {code}' for arm, code in told.items())}."
    elif len(cases) > 1:
        each = ", ".join(f"{case} {min(hashes)}" for case, hashes in cases.items())
        yield f"Machine code: the same in all arms of each case, {each}."
    elif cases:
        yield f"Machine code: the same in all arms, hash {min(next(iter(cases.values())))}."


def section(runs: Sequence[Run], level: int = 2) -> list[Part]:
    """Readings before and after of each run that has them, then the conditions; those that differ by run first."""
    parts: list[Part] = [Heading("Conditions", level)]
    for run in runs:
        rows = list(_before_after(run))
        if rows:
            name = "" if len(runs) == 1 else f"{run.name}: "
            columns = [("gpu", "GPU", None), ("when", "when", None), *_READINGS, ("throttle", "held back by", None)]
            parts += [Said(f"{name}read right before and right after the measurement", "quiet"), Tabled(columns, rows)]
            parts += [Said(line, "quiet") for line in _sentences(run)]
    keys = [key for key in runs[0].conditions if not key.endswith("_why")]
    table = Tabled(
        [("key", "condition", None), *((f"run{i}", _column(runs, i), None) for i in _distinct(runs, keys))],
        [_row(runs, key) for key in keys],
    )
    return [*parts, Folded(f"{len(keys)} conditions recorded", (table,))]


def _before_after(run: Run) -> Iterator[dict[str, Any]]:
    for when in ("before", "after"):
        readings = run.facts.get(f"telemetry_{when}")
        gpus = readings.get("gpus") if isinstance(readings, Mapping) else None
        for index, gpu in enumerate(gpus if isinstance(gpus, list) else []):
            if isinstance(gpu, Mapping):
                row = {key: _number(gpu.get(key)) for key, _, _ in _READINGS}
                yield {"gpu": f"{index}, {gpu.get('bdf', '?')}", "when": when, **row, "throttle": _throttle(gpu)}


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if known else None


def _throttle(gpu: Mapping[str, Any]) -> str:
    reasons = gpu.get("throttle_reasons")
    if reasons is None:
        return "not said"
    return "nothing" if reasons == 0 else f"reasons {reasons:#x}" if isinstance(reasons, int) else str(reasons)


def _sentences(run: Run) -> Iterator[str]:
    share = _number(run.facts.get("clock_share"))
    if share is not None:
        yield f"Clocks after the measurement at {share * 100:.0f} % of the highest."
    if isinstance(run.facts.get("stopped"), str):
        yield f"Measuring ended: {run.facts['stopped']}."
    drifts = run.facts.get("drift")
    if isinstance(drifts, Mapping):
        found = [f"{arm}: {words}" for arm, words in drifts.items() if not str(words).startswith("no drift")]
        yield f"Drift: {'; '.join(found) if found else 'none found in any arm'}."
    yield from _code(run)
    if isinstance(run.facts.get("same_result_in_all_arms"), bool):
        yield f"Result: {'the same number' if run.facts['same_result_in_all_arms'] else 'NOT the same'} in all arms."


def _distinct(runs: Sequence[Run], keys: Sequence[str]) -> list[int]:
    """One column where all runs agree on everything, else one a run."""
    same = all(_value(run.conditions, key) == _value(runs[0].conditions, key) for run in runs for key in keys)
    return [0] if same else list(range(len(runs)))


def _column(runs: Sequence[Run], index: int) -> str:
    same_names = len({run.name for run in runs}) < len(runs)
    return f"{runs[index].name}{f' ({index + 1})' if same_names else ''}" if len(runs) > 1 else "value"


def _row(runs: Sequence[Run], key: str) -> dict[str, Any]:
    return {"key": key, **{f"run{i}": _value(run.conditions, key) for i, run in enumerate(runs)}}


def _value(conditions: Mapping[str, Any], key: str) -> str:
    value = conditions.get(key)
    if value is None:
        return f"unknown: {conditions.get(f'{key}_why', 'not recorded')}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={one}" for name, one in value.items()) or "none"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
