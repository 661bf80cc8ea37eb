"""Tables of `link` runs: latency and bandwidth of near and far memory by working set, and the matrix of both."""

from __future__ import annotations

from collections.abc import Sequence

from dieplace.experiments.charts import Bar
from dieplace.experiments.live_table import LiveTable, Row, ranged, run_words, size_words, spread
from dieplace.run import Point, Run

_RUN = ("run", "run", None)
_FIRST = (("reader", "by", None), ("held", "set", None), ("arm", "arm", None))
_RATIO = ("ratio", "x near [95 %]", None)
_NOTE = (
    "x near: time over that of the first arm, median of pairs; the first arm's own is the A/A control. Warm: the last"
    " cache holds the set."
)


def headline(run: Run, point: Point) -> bool:
    """Whether a point is of the largest working set of its kind."""
    of_kind = [p.factors["working_set_bytes"] for p in run.points if p.factors["what"] == point.factors["what"]]
    return bool(point.factors["working_set_bytes"] == max(of_kind))


def what_words(point: Point) -> str:
    """`latency far, 1024 MiB, by gpu0/p0,`."""
    factors = point.factors
    both = "" if factors["directions"] == "one" else f", {factors['directions']}"
    return f"{factors['what']} {point.arm}{both}, {size_words(factors['working_set_bytes'])}, by {factors['reader']},"


def _row(point: Point, names: Sequence[str], run: str) -> Row:
    factors = point.factors
    directions = "" if factors["directions"] == "one" else f", {factors['directions']}"
    row: Row = {
        "run": run,
        "reader": factors["reader"],
        "what": f"{factors['what']}{directions}",
        "working_set_bytes": factors["working_set_bytes"],
        "size": size_words(factors["working_set_bytes"]),
        "directions": factors["directions"],
        "arm": point.arm,
        "cache": factors["cache"],
        "held": f"{size_words(factors['working_set_bytes'])}, {factors['cache']}",
    }
    for name in names:
        row |= spread(name, point.quantities.get(name))
    row["ratio"] = ranged(point.quantities.get("time_over_near"), "{:.3f}")
    row["rate"] = ranged(point.quantities.get("gb_per_s"), "{:.0f}")
    whys = [q.why for q in point.quantities.values() if q.value is None and q.why]
    row["why"] = "; ".join(dict.fromkeys(whys))
    row["notes"] = "; ".join(point.notes)
    return row


def latency_table(runs: Sequence[Run]) -> LiveTable:
    """One row a working set and arm."""
    names = ("latency_ns", "latency_cycles", "time_over_near")
    rows = [_row(p, names, run_words(r, runs)) for r in runs for p in r.points if p.factors["what"] == "latency"]
    columns = (_RUN, *_FIRST, ("latency_ns", "ns", "{:.0f}"), ("latency_cycles", "SM cycles", "{:.0f}"), _RATIO)
    return LiveTable(f"Latency of dependent loads, {runs[0].origin}", columns, tuple(rows), _NOTE + _whys(rows))


def rate_table(runs: Sequence[Run]) -> LiveTable:
    """One row a kind of transfer, working set and arm; bars of the largest set."""
    names = ("gb_per_s", "of_ceiling", "time_over_near")
    rows = [_row(p, names, run_words(r, runs)) for r in runs for p in r.points if p.factors["what"] != "latency"]
    columns = (
        _RUN,
        ("what", "what", None),
        *_FIRST,
        ("rate", "GB/s", None),
        ("of_ceiling", "of ceiling", "{:.2f}"),
        _RATIO,
    )
    note = (
        " Bytes: near copies count what is read and written, far ones what crosses the link, both at once their sum. Of"
        " ceiling: of the highest cold rate of this run, near or far."
    )
    largest = max((row["working_set_bytes"] for row in rows), default=0)
    bars = tuple(
        Bar(
            f"{row['run']} {row['reader']}: {row['what']}, {row['arm']}".strip(),
            row["gb_per_s"],
            row["gb_per_s_low"],
            row["gb_per_s_high"],
            (),
            row["rate"],
        )
        for row in rows
        if row["gb_per_s"] is not None and row["working_set_bytes"] == largest
    )
    title = f"Bandwidth, {runs[0].origin}"
    return LiveTable(title, columns, tuple(rows), _NOTE + note + _whys(rows), bars, "GB/s")


def _whys(rows: Sequence[Row]) -> str:
    found = dict.fromkeys(row["why"] for row in rows if row["why"])
    notes = [
        f"{row['what']} {row['arm']} {row['size']} by {row['reader']}: {row['notes']}" for row in rows if row["notes"]
    ]
    return "".join([*(f" Empty where: {why}." for why in found), *(f" Noted of {note}." for note in notes)])
