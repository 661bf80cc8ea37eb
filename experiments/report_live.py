"""The sections of a measured report: verdicts, tables, the near/far matrix, ceilings, stages, homes and all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dieplace.experiments import (
    charts,
    charts_places,
    generic_tables,
    link_matrix,
    live_tables,
    report_homes,
    report_samples,
)
from dieplace.experiments.charts_places import MatrixCell
from dieplace.experiments.link_tables import headline
from dieplace.experiments.live_table import LiveTable, arm_words, digits, points_of, ranged, run_words, size_words
from dieplace.experiments.report_parts import Drawn, Folded, Heading, Listed, Part, Said, Tabled
from dieplace.experiments.report_sections import MOST_OPEN
from dieplace.experiments.step_tables import RESIDENCY, is_step, stage_note
from dieplace.run import Point, Quantity, Run

MOST_LISTED = 14  # verdicts that are shown at once


def sections(runs: Sequence[Run], ceilings: Ceilings | None, level: int = 2) -> list[Part]:
    """All sections of one measured experiment; `ceilings` are those of the page's `link` run, where it has one."""
    word = runs[0].origin
    parts = _verdicts(live_tables.sentences(runs))
    if runs[0].experiment == "link":
        parts += _matrices(runs, word, level)
    tables = live_tables.tables(runs)
    for table in (one for one in tables if one.title != RESIDENCY):
        parts += _table(table, level)
    parts += _waterfalls(runs, word, level) if is_step(runs) else []
    parts += _roofline(runs, ceilings, word, level)
    parts += report_homes.sections(runs, level)
    for table in (one for one in tables if one.title == RESIDENCY):
        parts += _table(table, level)
    return [*parts, *report_samples.sections(runs, word, level)]


def _verdicts(lines: Sequence[str]) -> list[Part]:
    """A few stand out; many are a list."""
    if len(lines) <= MOST_OPEN:
        return [Said(line, "verdict") for line in lines]
    rest = (Listed("", tuple(lines[MOST_LISTED:])),)
    more = [Folded(f"{len(lines) - MOST_LISTED} more findings", rest, of_page=True)] if len(lines) > MOST_LISTED else []
    return [Listed("What was found", tuple(lines[:MOST_LISTED])), *more]


def _table(table: LiveTable, level: int) -> list[Part]:
    if not table.rows:
        return []
    columns = [c for c in table.columns if any(row.get(c[0]) not in (None, "") for row in table.rows)]
    chart = charts.bars(table.bars, unit=table.unit, describe=table.title) if table.bars else ""
    note = [Said(table.note, "quiet")] if table.note else []
    if table.title == RESIDENCY:  # drawn as well, for a reader of the page
        return [Folded(table.title, (Tabled(columns, table.shown_rows),))]
    drawn = [Drawn(chart, caption=table.caption)] if chart else []
    return [Heading(table.title, level), *drawn, *note, Tabled(columns, table.shown_rows)]


@dataclass(frozen=True)
class Ceilings:
    """Measured read rates of near and far memory in GB/s, and what measured them."""

    near: float
    far: float | None
    source: str


def ceilings_of(link_runs: Sequence[Run]) -> Ceilings | None:
    """The highest cold one-direction rates of `link` runs; None where there is none."""
    best: dict[str, float] = {}
    for _, point in points_of(link_runs):
        rate, factors = point.quantities.get("gb_per_s"), point.factors
        if rate is None or rate.value is None or factors.get("cache") != "cold" or factors.get("directions") != "one":
            continue
        side = "near" if point.arm.startswith("near") and "far" not in point.arm else "far"
        best[side] = max(best.get(side, 0.0), rate.value)
    if "near" not in best:
        return None
    return Ceilings(best["near"], best.get("far"), "the link run of this page, highest cold rate")


def _own_ceilings(run: Run) -> Ceilings | None:
    told = run.facts.get("prediction")
    near, far = (
        (told.get(f"{side}_gb_per_s") for side in ("near", "far")) if isinstance(told, Mapping) else (None, None)
    )
    if not isinstance(near, (int, float)) or near <= 0:
        return None
    return Ceilings(float(near), float(far) if isinstance(far, (int, float)) and far > 0 else None, "reads of this run")


def _roofline(runs: Sequence[Run], linked: Ceilings | None, word: str, level: int) -> list[Part]:
    head = Heading(f"Bytes over the measured ceiling, {word}", level)
    if runs[0].experiment == "link":
        return [head, *_link_roofline(runs)]
    shares, used = [], None
    for run, point in points_of(runs):
        ceiling = linked or _own_ceilings(run)
        time, read = _time_us(run, point), _bytes_read(run, point)
        if ceiling is None or time is None or read is None or not time.value:
            continue
        near, far = read
        floor = max(near / ceiling.near, far / ceiling.far if ceiling.far else 0.0) / 1000
        text = f"{floor:.1f} of {time.value:.1f} us, {floor / time.value * 100:.0f} %"
        by_far = bool(ceiling.far) and far / (ceiling.far or 1.0) > near / ceiling.near
        shares.append(charts.Share(arm_words(run, point, runs), floor / time.value, text, by_far))
        used = ceiling
    if not shares or used is None:
        why = "bytes a step reads and a ceiling measured in the same run are not both known"
        return [head, Said(f"None here: {why}.")] if is_step(runs) else []
    rates = f"near {used.near:,.0f} GB/s" + (f", far {used.far:,.0f} GB/s" if used.far else "")
    note = (
        f"Time that the bytes alone need at the ceiling, over the time measured. Ceiling: {rates}, from {used.source}."
        " Near and far memory are read at the same time, so the slower of the two counts."
    )
    rows = [{"arm": s.label, "share": s.share, "text": s.text} for s in shares]
    table = Tabled((("arm", "arm", None), ("text", "byte floor of measured", None), ("share", "share", "{:.3f}")), rows)
    chart = charts.roofline(shares, describe="bytes over the ceiling")
    return [head, Drawn(chart, (table,), "Red: far memory is the slower."), Said(note, "quiet")]


def _link_roofline(runs: Sequence[Run]) -> list[Part]:
    shares = []
    for run, point in points_of(runs):
        share, rate = point.quantities.get("of_ceiling"), point.quantities.get("gb_per_s")
        if not headline(run, point) or share is None or share.value is None or rate is None or rate.value is None:
            continue
        factors = point.factors
        size = size_words(factors["working_set_bytes"])
        label = f"{run_words(run, runs)} {factors['what']} {point.arm}, {size}, {factors['reader']}".strip()
        far = not point.arm.startswith("near") or "far" in point.arm
        shares.append(charts.Share(label, share.value, f"{rate.value:,.0f} GB/s, {share.value:.2f}", far))
    if not shares:
        return [Said("None here: no cold rate was measured.")]
    note = "Each rate over the highest cold rate of its kind of memory, near or far, in the same run."
    rows = [{"label": share.label, "text": share.text} for share in shares]
    table = Tabled((("label", "read", None), ("text", "rate, share of the ceiling", None)), rows)
    return [Drawn(charts.roofline(shares, describe="rates over the ceiling of the run"), (table,)), Said(note, "quiet")]


def _time_us(run: Run, point: Point) -> Quantity | None:
    main = "layer_us" if "layer_us" in point.quantities else generic_tables.main_quantity(run)
    found = point.quantities.get(main) if main else None
    return found if found is not None and found.unit == "us" and found.value is not None else None


def _bytes_read(run: Run, point: Point) -> tuple[float, float] | None:
    """Bytes of one sample from near and from far memory, as the point or the workload says; None where unknown."""
    total = point.factors.get("bytes_read", run.workload.get("bytes_per_layer"))
    far = point.factors.get("bytes_read_far", point.factors.get("moved_bytes_per_layer", 0))
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (total, far)) or total <= 0:
        return None
    return max(total - far, 0.0), min(far, total)


def _matrices(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    parts: list[Part] = [Heading(f"Near and far memory, {word}", level)]
    for run in runs:
        for metric, unit in (("latency", "ns"), ("bandwidth", "GB/s")):
            found = link_matrix.cells(run, metric)
            if found:
                parts.append(_matrix(found, metric, unit, run, runs))
    return parts if len(parts) > 1 else []


def _matrix(found: Sequence[link_matrix.LinkCell], metric: str, unit: str, run: Run, runs: Sequence[Run]) -> Drawn:
    readers = list(dict.fromkeys(cell.reader for cell in found))
    homes = sorted({cell.home for cell in found})
    by_pair = {(cell.reader, cell.home): cell for cell in found}
    best = {r: _best([c.quantity.value or 0.0 for c in found if c.reader == r], metric) for r in readers}

    def cell(reader: str, home: str) -> MatrixCell | None:
        one = by_pair.get((reader, home))
        if one is None or not one.quantity.value:
            return None
        value = one.quantity.value
        ratio = value / best[reader] if metric == "latency" else best[reader] / value
        told = ranged(one.quantity, digits(value)) or ""
        under = told.partition(" ")[2] + (f", x {ratio:.2f}" if ratio > 1.005 else "")
        return MatrixCell(f"{digits(value).format(value)} {unit}", under.strip(", "), ratio)

    size = size_words(max(c.working_set_bytes for c in found))
    title = f"{metric.capitalize()} of {'dependent loads' if metric == 'latency' else 'reads'}, {size}, cold"
    title += f", {run_words(run, runs)}" if len(runs) > 1 else ""
    rows = [
        {"reader": r, **{h: (ranged(by_pair[r, h].quantity, "{:,.0f}") if (r, h) in by_pair else None) for h in homes}}
        for r in readers
    ]
    table = Tabled((("reader", f"{metric}, {unit}: row reads from column", None), *((h, h, None) for h in homes)), rows)
    grid = [[cell(reader, home) for home in homes] for reader in readers]
    return Drawn(charts_places.matrix(title, readers, homes, grid, describe=title), (table,))


def _best(values: Sequence[float], metric: str) -> float:
    return (min(values) if metric == "latency" else max(values)) or 1.0


def _waterfalls(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    """From each case's local arm to every other, stage by stage."""
    found: list[Part] = []
    for run, point in points_of(runs):
        base = _base_of(run, point)
        here, there = _stage_us(point), _stage_us(base) if base else {}
        if base is None or not here or here.keys() != there.keys():
            continue
        steps = [charts.Step(stage, here[stage] - there[stage]) for stage in here]
        names = arm_words(run, base, runs), arm_words(run, point, runs)
        chart = charts.waterfall(
            charts.Step(names[0], sum(there.values())), steps, charts.Step(names[1], sum(here.values())),
            unit="us", describe=f"from {names[0]} to {names[1]} by stage",
        )  # fmt: skip
        title = Heading(f"From {names[0]} to {names[1]}, stage by stage, {word}", level + 1)
        found += [title, Drawn(chart, caption="" if found else stage_note(runs))]
    if not found:
        return []
    most = 2 * MOST_OPEN
    rest = [Folded("more arms, stage by stage", tuple(found[most:]), of_page=True)] if len(found) > most else []
    return [*found[:most], *rest]


def _base_of(run: Run, point: Point) -> Point | None:
    """The arm with everything local of the same case, for a point that moves something."""
    if not point.factors.get("roles_moved"):
        return None
    cases = (p for p in run.points if p.factors.get("case") == point.factors.get("case"))
    return next((p for p in cases if not p.factors.get("roles_moved")), None)


def _stage_us(point: Point) -> dict[str, float]:
    """Microseconds by stage; empty where one of them is not known."""
    found: dict[str, float] = {}
    for stage in point.stages:
        if stage.get("us") is None:
            return {}
        found[str(stage["stage"])] = float(stage["us"])
    return found
