"""Tables of measured decode steps (weight-swap, placement, context, verify): time of a layer, stages, bytes by home."""

from __future__ import annotations

from collections.abc import Sequence

from dieplace.experiments.charts import Bar
from dieplace.experiments.live_table import LiveTable, Row, arm_words, points_of, ranged, run_words, spread
from dieplace.experiments.markup import show_bytes
from dieplace.run import Run

RESIDENCY = "Bytes by role and domain, audited"


def is_step(runs: Sequence[Run]) -> bool:
    """Whether every point has the time of a layer."""
    return all("layer_us" in point.quantities for _, point in points_of(runs))


def time_table(runs: Sequence[Run]) -> LiveTable:
    """One row an arm: moved bytes, evidence, time, ratio to local, and the prediction where one was made."""
    names = [
        *("layer_us", "time_over_local", "predicted_us", "predicted_over_measured"),
        *("predicted_together_us", "predicted_together_over_measured"),
    ]
    rows = []
    for run, point in points_of(runs):
        row: Row = {"run": run.block, "arm": arm_words(run, point, runs), "cache": point.factors.get("cache")}
        for name in names:
            row |= spread(name, point.quantities.get(name))
        moved_bytes = point.factors.get("moved_bytes_per_layer") or 0
        row |= {"moved_mb": moved_bytes / 1e6, "moved": show_bytes(moved_bytes)}
        row["evidence"] = (point.residency_before or {}).get("moved_evidence")
        row["time"] = ranged(point.quantities.get("layer_us"), "{:,.1f}")
        row["ratio"] = ranged(point.quantities.get("time_over_local"), "{:.3f}")
        row["foretold"] = _foretold(row, "predicted")
        row["foretold_together"] = _foretold(row, "predicted_together")
        rows.append(row)
    several = len({row["evidence"] for row in rows}) > 1
    columns = (
        ("arm", "arm", None),
        ("moved", "moved", "{}"),
        *((("evidence", "these are", None),) if several else ()),
        ("time", "layer us [95 %]", None),
        ("ratio", "x local [95 %]", None),
        ("foretold", "predicted us (share)", None),
        ("foretold_together", "together us (share)", None),
    )
    caption = "P marks the prediction." if any(row["predicted_us"] is not None for row in rows) else ""
    title, note = f"Time of one layer, {runs[0].origin}", _time_note(runs, rows)
    return LiveTable(title, columns, tuple(rows), note, _bars(runs), caption=caption)


def _foretold(row: Row, name: str) -> str | None:
    """`212.5 (1.058)`: the predicted time, and what it is of the measured one; two columns more do not fit 80."""
    time, share = row[f"{name}_us"], row[f"{name}_over_measured"]
    return None if time is None else f"{time:,.1f}" if share is None else f"{time:,.1f} ({share:.3f})"


def _time_note(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    told = runs[0].facts.get("prediction", {})
    formula = str(told.get("formula", ""))
    if any(row["predicted_together_us"] is not None for row in rows):
        formula += f". Together: a second prediction, {told.get('together_formula', '')}"
    evidence = rows[0]["evidence"] if len({row["evidence"] for row in rows}) == 1 else None
    caches = ", ".join(dict.fromkeys(str(row["cache"]) for row in rows if row["cache"]))
    notes = "".join(f" {note}." for note in dict.fromkeys(note for _, point in points_of(runs) for note in point.notes))
    return (
        f"Moved: bytes that a layer reads from the peer{f'; their home is {evidence}' if evidence else ''}."
        f"{f' Caches: {caches}.' if caches else ''} x local: median of pairs; that of local itself is the A/A control."
        f"{f' Formula: {formula}; its share is of the measured time.' if formula else ''}{notes}"
    )


def _bars(runs: Sequence[Run]) -> tuple[Bar, ...]:
    """Measured time with its interval; P marks the prediction."""
    found = []
    for run, point in points_of(runs):
        time, predicted = point.quantities["layer_us"], point.quantities.get("predicted_us")
        if time.value is not None:
            marks = () if predicted is None or predicted.value is None else (("P", predicted.value),)
            label = arm_words(run, point, runs)
            found.append(Bar(label, time.value, time.low, time.high, marks, f"{time.value:,.1f} us"))
    return tuple(found)


def stage_tables(runs: Sequence[Run]) -> list[LiveTable]:
    """A table a run, for runs may have stages of their own: one row a stage, one column an arm; null where events in a
    graph do not tell."""
    return [_stage_table(run, run_words(run, runs)) for run in runs]


def _stage_table(run: Run, name: str) -> LiveTable:
    rows: dict[str, Row] = {}
    whys: dict[str, None] = {}
    for place, point in enumerate(run.points):
        for stage in point.stages:
            rows.setdefault(str(stage["stage"]), {"stage": stage["stage"]})[f"us_{place}"] = stage.get("us")
            if stage.get("us") is None:
                whys.setdefault(str(stage.get("us_why")))
    arms = ((f"us_{place}", f"{point.arm} us", "{:,.1f}") for place, point in enumerate(run.points))
    told = "".join(f" Empty where: {why}." for why in whys)
    title = f"Where a layer's time goes{f', {name}' if name else ''}, {run.origin}"
    return LiveTable(title, (("stage", "stage", None), *arms), tuple(rows.values()), stage_note([run]) + told)


def stage_note(runs: Sequence[Run]) -> str:
    """How stage times were taken; by events inside the graph where a run does not say otherwise."""
    methods = dict.fromkeys(str(run.facts.get("stage_method", _BY_EVENTS)) for run in runs)
    return " ".join(f"{method[0].upper()}{method[1:].rstrip('.')}." for method in methods)


_BY_EVENTS = "between events in the same graph: each event adds some microseconds, so stages sum to more than the layer"


def residency_table(runs: Sequence[Run]) -> LiveTable:
    """One row an arm, role and home."""
    rows = []
    for run, point in points_of(runs):
        for role, homes in (point.residency_before or {}).get("bytes_by_role_and_domain", {}).items():
            for home, nbytes in homes.items():
                told = {"mb": nbytes / 1e6, "bytes": nbytes, "size": show_bytes(nbytes)}
                arm = {
                    "arm": arm_words(run, point, runs).removeprefix(f"{run.block} "),
                    "rank": point.factors.get("rank"),
                }
                rows.append({"run": run.block, **arm, "role": role, "home": home, **told})
    columns = (
        ("run", "run", None), ("arm", "arm", None), ("rank", "rank", None), ("role", "role", None),
        ("home", "lies in", None), ("size", "bytes", "{}"),
    )  # fmt: skip
    return LiveTable(RESIDENCY, columns, tuple(rows))
