"""Tables and sentences of measured runs, `link` and `weight-swap` on devices; the command and the report print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.experiments.charts import Bar
from dieplace.run import Point, Quantity, Run

Row = dict[str, Any]


@dataclass(frozen=True)
class LiveTable:
    """A title, columns of (key, header, format of numbers or None for text), and rows."""

    title: str
    columns: tuple[tuple[str, str, str | None], ...]
    rows: tuple[Row, ...]
    note: str = ""
    bars: tuple[Bar, ...] = ()


def is_live(runs: Sequence[Run]) -> bool:
    """Whether these runs are shown by this module: measured ones have other quantities than the clock's."""
    return bool(runs) and (runs[0].origin == "measured" or runs[0].experiment in ("link", "scale-out"))


def tables(runs: Sequence[Run]) -> list[LiveTable]:
    """Every table of these runs, in order of showing."""
    if runs[0].experiment == "scale-out":
        from dieplace.experiments import scale_out_tables

        return scale_out_tables.tables(runs)
    if runs[0].experiment == "link":
        return [_latency_table(runs), _rate_table(runs)]
    return [_step_table(runs), _stage_table(runs), _residency_table(runs)]


def sentences(runs: Sequence[Run]) -> list[str]:
    """What the runs show, in words; each verdict names the control it was judged by."""
    from dieplace.experiments.statistics import Estimate, verdict

    if runs[0].experiment == "scale-out":
        from dieplace.experiments import scale_out_tables

        return scale_out_tables.sentences(runs)
    said = []
    for run in runs:
        control = _control(run)
        for point in run.points:
            ratio = point.quantities.get("time_over_local") or point.quantities.get("time_over_near")
            if ratio is None or ratio.value is None or ratio.method.startswith("A/A") or not _headline(run, point):
                continue
            penalty = point.quantities.get("penalty")
            if penalty is not None and penalty.value is None:
                said.append(f"{run.origin}: no penalty is told for {_what(run, point)}, because {penalty.why}")
                continue
            found = Estimate(ratio.value, ratio.low, ratio.high, max(5, len(_samples(point))), ratio.method)
            words = verdict(found, control=control(point), clock_share=run.facts.get("clock_share")).words
            said.append(f"{run.origin}: {_what(run, point)} is {words}")
    return said


def matrix_rows(run: Run) -> list[Row]:
    """One row a reader: latency and read rate of near and far memory at the largest working set."""
    rows: dict[str, Row] = {}
    for point in run.points:
        if not _headline(run, point) or point.factors["directions"] != "one" or point.arm not in ("near", "far"):
            continue
        row = rows.setdefault(point.factors["reader"], {"reader": point.factors["reader"]})
        for name in ("latency_ns", "latency_cycles", "gb_per_s", "time_over_near"):
            quantity = point.quantities.get(name)
            if quantity is not None:
                row[f"{point.factors['what']}_{point.arm}_{name}"] = quantity
    return list(rows.values())


def _headline(run: Run, point: Point) -> bool:
    """Of `link` the largest working set of each kind; of others every point."""
    if run.experiment != "link":
        return True
    of_kind = [p.factors["working_set_bytes"] for p in run.points if p.factors["what"] == point.factors["what"]]
    return bool(point.factors["working_set_bytes"] == max(of_kind))


def _control(run: Run) -> Any:
    from dieplace.experiments.statistics import Estimate

    def of(point: Point) -> Estimate | None:
        for other in run.points:
            ratio = other.quantities.get("time_over_local") or other.quantities.get("time_over_near")
            # Of a step experiment every case has a local arm and a control of its own.
            of_case = other.factors.get("case") == point.factors.get("case")
            same = other.factors == point.factors if run.experiment == "link" else of_case
            if same and ratio is not None and ratio.value is not None and ratio.method.startswith("A/A"):
                return Estimate(ratio.value, ratio.low, ratio.high, len(_samples(other)), ratio.method)
        return None

    return of


def _what(run: Run, point: Point) -> str:
    if run.experiment != "link":
        return f"{run.block} {point.arm}"
    factors = point.factors
    both = "" if factors["directions"] == "one" else f", {factors['directions']}"
    return f"{factors['what']} {point.arm}{both}, {_size(factors)}, by {factors['reader']},"


def _samples(point: Point) -> tuple[float, ...]:
    return max((q.samples for q in point.quantities.values()), key=len, default=())


def _size(factors: Mapping[str, Any]) -> str:
    nbytes = factors["working_set_bytes"]
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _link_row(run: Run, point: Point, names: Sequence[str]) -> Row:
    factors = point.factors
    directions = "" if factors["directions"] == "one" else f", {factors['directions']}"
    row: Row = {
        "reader": factors["reader"],
        "what": f"{factors['what']}{directions}",
        "working_set_bytes": factors["working_set_bytes"],
        "size": _size(factors),
        "directions": factors["directions"],
        "arm": point.arm,
        "cache": factors["cache"],
    }
    for name in names:
        row |= _spread(name, point.quantities.get(name))
    row["ratio"] = _ranged(point.quantities.get("time_over_near"), "{:.3f}")
    row["rate"] = _ranged(point.quantities.get("gb_per_s"), "{:.0f}")
    whys = [q.why for q in point.quantities.values() if q.value is None and q.why]
    row["why"] = "; ".join(dict.fromkeys(whys))
    row["notes"] = "; ".join(point.notes)
    return row


def _spread(name: str, quantity: Quantity | None) -> Row:
    if quantity is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: quantity.value, f"{name}_low": quantity.low, f"{name}_high": quantity.high}


def _ranged(quantity: Quantity | None, form: str) -> str | None:
    """`2.887 [2.879, 2.900]`; None where there is no value."""
    if quantity is None or quantity.value is None:
        return None
    text = form.format(quantity.value)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} [{form.format(quantity.low)}, {form.format(quantity.high)}]"


_FIRST = (("reader", "by", None), ("size", "set", None), ("cache", "cache", None), ("arm", "arm", None))
_RATIO = ("ratio", "x near [95 %]", None)
_NOTE = (
    "x near: time over that of the first arm, median of pairs; the first arm's own is the A/A control. Warm: the last"
    " cache holds the set."
)


def _latency_table(runs: Sequence[Run]) -> LiveTable:
    names = ("latency_ns", "latency_cycles", "time_over_near")
    rows = [_link_row(r, p, names) for r in runs for p in r.points if p.factors["what"] == "latency"]
    columns = (*_FIRST, ("latency_ns", "ns", "{:.0f}"), ("latency_cycles", "SM cycles", "{:.0f}"), _RATIO)
    return LiveTable(f"Latency of dependent loads, {runs[0].origin}", columns, tuple(rows), _NOTE + _whys(rows))


def _rate_table(runs: Sequence[Run]) -> LiveTable:
    names = ("gb_per_s", "of_ceiling", "time_over_near")
    rows = [_link_row(r, p, names) for r in runs for p in r.points if p.factors["what"] != "latency"]
    columns = (("what", "what", None), *_FIRST, ("rate", "GB/s", None), ("of_ceiling", "of ceiling", "{:.2f}"), _RATIO)
    note = (
        " Bytes: near copies count what is read and written, far ones what crosses the link, both at once their sum. Of"
        " ceiling: of the highest cold rate of this run, near or far."
    )
    bars = tuple(
        Bar(
            f"{row['reader']}: {row['what']}, {row['arm']}",
            row["gb_per_s"],
            row["gb_per_s_low"],
            row["gb_per_s_high"],
            (),
            row["rate"],
        )
        for row in rows
        if row["gb_per_s"] is not None and row["working_set_bytes"] == max(r["working_set_bytes"] for r in rows)
    )
    return LiveTable(f"Bandwidth, {runs[0].origin}", columns, tuple(rows), _NOTE + note + _whys(rows), bars)


def _whys(rows: Sequence[Row]) -> str:
    found = dict.fromkeys(row["why"] for row in rows if row["why"])
    notes = [
        f"{row['what']} {row['arm']} {row['size']} by {row['reader']}: {row['notes']}" for row in rows if row["notes"]
    ]
    return "".join([*(f" Empty where: {why}." for why in found), *(f" Noted of {note}." for note in notes)])


def _step_table(runs: Sequence[Run]) -> LiveTable:
    names = ("layer_us", "time_over_local", "predicted_us", "predicted_over_measured")
    rows = []
    for run, point in _points(runs):
        row: Row = {"run": run.block, "arm": point.arm, "cache": point.factors.get("cache")}
        for name in names:
            row |= _spread(name, point.quantities.get(name))
        row["moved_mb"] = point.factors.get("moved_bytes_per_layer", 0) / 1e6
        row["evidence"] = (point.residency_before or {}).get("moved_evidence")
        row["time"] = _ranged(point.quantities.get("layer_us"), "{:.1f}")
        row["ratio"] = _ranged(point.quantities.get("time_over_local"), "{:.3f}")
        rows.append(row)
    columns = (
        ("arm", "arm", None),
        ("moved_mb", "moved MB", "{:.1f}"),
        ("evidence", "weights are", None),
        ("time", "layer us [95 %]", None),
        ("ratio", "x local [95 %]", None),
        ("predicted_us", "predicted us", "{:.1f}"),
        ("predicted_over_measured", "predicted / measured", "{:.3f}"),
    )
    formula = str(runs[0].facts.get("prediction", {}).get("formula", ""))
    caches = ", ".join(dict.fromkeys(str(row["cache"]) for row in rows))
    notes = "".join(f" {note}." for note in dict.fromkeys(note for _, point in _points(runs) for note in point.notes))
    note = (
        f"Moved: bytes of weights that a layer reads from the peer. Caches: {caches}. x local: median of pairs; that of"
        f" local itself is the A/A control. Formula: {formula}.{notes}"
    )
    return LiveTable(f"Time of one layer, {runs[0].origin}", columns, tuple(rows), note, _layer_bars(runs))


def _layer_bars(runs: Sequence[Run]) -> tuple[Bar, ...]:
    """Measured time with its interval; P marks the prediction."""
    found = []
    for _, point in _points(runs):
        time, predicted = point.quantities["layer_us"], point.quantities.get("predicted_us")
        if time.value is not None:
            marks = () if predicted is None or predicted.value is None else (("P", predicted.value),)
            found.append(Bar(point.arm, time.value, time.low, time.high, marks, f"{time.value:.1f} us"))
    return tuple(found)


def _stage_table(runs: Sequence[Run]) -> LiveTable:
    """One row a stage, one column an arm; null where events in a graph do not tell."""
    rows: dict[str, Row] = {}
    arms: dict[str, str] = {}
    whys: dict[str, None] = {}
    for run, point in _points(runs):
        key = f"{run.block} {point.arm}"
        arms[key] = point.arm if len(runs) == 1 else key
        for stage in point.stages:
            rows.setdefault(str(stage["stage"]), {"stage": stage["stage"]})[key] = stage["us"]
            if stage["us"] is None:
                whys.setdefault(str(stage.get("us_why")))
    columns = (("stage", "stage", None), *((key, f"{name} us", "{:.1f}") for key, name in arms.items()))
    note = "Between events in the same graph: each event adds some microseconds, so stages sum to more than the layer."
    told = "".join(f" Empty where: {why}." for why in whys)
    return LiveTable(f"Where a layer's time goes, {runs[0].origin}", columns, tuple(rows.values()), note + told)


def _points(runs: Sequence[Run]) -> list[tuple[Run, Point]]:
    return [(run, point) for run in runs for point in run.points]


def _residency_table(runs: Sequence[Run]) -> LiveTable:
    rows = []
    for run in runs:
        for point in run.points:
            for role, homes in (point.residency_before or {}).get("bytes_by_role_and_domain", {}).items():
                for home, nbytes in homes.items():
                    row = {"run": run.block, "arm": point.arm, "role": role, "home": home, "mb": nbytes / 1e6}
                    rows.append(row)
    columns = (
        ("run", "run", None), ("arm", "arm", None), ("role", "role", None), ("home", "lies in", None),
        ("mb", "MB", "{:,.1f}"),
    )  # fmt: skip
    return LiveTable("Bytes by role and domain, audited", columns, tuple(rows))
