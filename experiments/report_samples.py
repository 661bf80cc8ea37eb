"""The section of a report that shows every sample: in order of taking and as a distribution, with the A/A beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

from dieplace.experiments import charts_samples, generic_tables
from dieplace.experiments.link_tables import headline, what_words
from dieplace.experiments.live_table import arm_words, digits, ranged, run_words
from dieplace.experiments.report_parts import Drawn, Folded, Heading, Part, Said, Tabled
from dieplace.experiments.statistics import median as with_interval
from dieplace.experiments.statistics import without_slowest
from dieplace.run import Point, Run

MOST_SAMPLED = 8  # rows of samples that are shown at once; more are folded


def sections(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    """The section, empty where no run has samples."""
    rows = [row for run in runs for row in _sampled(run, runs)]
    if not rows:
        return []
    drawn = [
        Drawn(
            charts_samples.samples(rows[start : start + MOST_SAMPLED], describe="samples in order of taking and ECDF")
        )
        for start in range(0, len(rows), MOST_SAMPLED)
    ]
    more = [Folded(f"{len(rows) - MOST_SAMPLED} more arms", tuple(drawn[1:]), of_page=True)] if len(drawn) > 1 else []
    note = "Every sample that was taken; none was left out."
    if any(row.control for row in rows):
        note += " A/A: the same arm a second time in every block."
    else:
        note += " The samples of the A/A control are not in these files; its ratio stands in the tables."
    table = Folded("the samples in numbers", (Tabled(_SPREADS, [_numbers(row) for row in rows]),), of_page=True)
    return [Heading(f"All samples, {word}", level), Said(note, "quiet"), drawn[0], *more, table]


def _sampled(run: Run, runs: Sequence[Run]) -> Iterator[charts_samples.Sampled]:
    if run.experiment == "scale-out":
        from dieplace.experiments.scale_out_tables import drawn_points

        for label, name, point in drawn_points(run, runs):
            yield from _row(label, name, point)
        return
    main = generic_tables.main_quantity(run)
    for point in run.points:
        if run.experiment == "link" and not headline(run, point):
            continue
        names: tuple[str | None, ...] = ("latency_ns", "gb_per_s") if run.experiment == "link" else (main,)
        for each in names:
            label = _link_label(run, point, runs) if run.experiment == "link" else arm_words(run, point, runs)
            yield from _row(label, each, point)


def _row(label: str, name: str | None, point: Point) -> Iterator[charts_samples.Sampled]:
    """The samples of one quantity, nothing where it has none."""
    quantity = point.quantities.get(name) if name else None
    if quantity is None or not quantity.samples or quantity.value is None or not all(quantity.samples):
        return
    control = point.quantities.get(f"control_{name}")
    text = f"{ranged(quantity, digits(quantity.value))} {quantity.unit}, {len(quantity.samples)} samples"
    yield charts_samples.Sampled(
        label, quantity.samples, control.samples if control else (), text, rate=quantity.unit.endswith("/s")
    )


def _link_label(run: Run, point: Point, runs: Sequence[Run]) -> str:
    return f"{run_words(run, runs)} {what_words(point)}".strip(" ,")


_SPREADS = (
    ("arm", "arm", None), ("count", "samples", "{:d}"), ("least", "least", "{:,.4g}"), ("low", "quarter", "{:,.4g}"),
    ("median", "median [95 %]", None), ("high", "three quarters", "{:,.4g}"), ("most", "most", "{:,.4g}"),
    ("trimmed", "median [95 %] without the slowest 1 %", None), ("again", "A/A median", "{:,.4g}"),
)  # fmt: skip


def _numbers(row: charts_samples.Sampled) -> dict[str, Any]:
    """Quartiles, and the median with and without the slowest 1 %: what outliers do is seen, none is dropped."""
    cuts = quantiles(row.samples, n=4, method="inclusive") if len(row.samples) > 1 else [row.samples[0]] * 3
    slowest = without_slowest(row.samples) if not row.rate else [-s for s in without_slowest([-s for s in row.samples])]
    return {
        "arm": row.label, "count": len(row.samples), "least": min(row.samples), "low": cuts[0],
        "median": row.text.rpartition(", ")[0], "high": cuts[2], "most": max(row.samples), "trimmed": _median(slowest),
        "again": median(row.control) if row.control else None,
    }  # fmt: skip


def _median(samples: Sequence[float]) -> str:
    found = with_interval(samples, seed=0)
    form = digits(found.value)
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    return f"{form.format(found.value)} [{form.format(low)}, {form.format(high)}]"
