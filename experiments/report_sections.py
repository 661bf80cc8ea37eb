"""The sections of a report: charts and tables of times, causes, stages, bytes by die, and published figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dieplace.clock.parameters import HEADLINE_SET
from dieplace.experiments import charts, summary
from dieplace.experiments.markup import head_row, html_table, row_of_cells, show_bytes
from dieplace.experiments.published import Row, rows, why_not
from dieplace.run import Point, Run

_WORDS = {
    "stream_us": "stream",
    "handoff_us": "hand-off",
    "distance_us": "distance",
    "link_us": "link",
    "cache_type_us": "cache type",
    "wait_us": "wait",
}
_ROLE_WORDS = {"weights": "weights", "kv_cache": "KV cache", "sync_flag": "sync flags"}


def _name(run: Run, point: Point, runs: Sequence[Run]) -> str:
    """The arm, with its block where the page has several."""
    return point.arm if len(runs) == 1 else f"{run.block} {point.arm}"


def token_section(runs: Sequence[Run], word: str) -> str:
    found = []
    for run, point in summary.points(runs):
        token = point.quantities["token_us"]
        if token.value is not None:
            marks = tuple(sorted(token.by_set.items()))
            text = f"{token.value:.0f} us, {point.quantities['penalty'].value or 0:+.1%}"
            found.append(charts.Bar(_name(run, point, runs), token.value, token.low, token.high, marks, text))
    chart = charts.bars(found, unit="us", describe=f"{word} time per token of each arm")
    table = html_table(
        (
            ("run", "run", None),
            ("arm", "arm", None),
            ("token_us", "token us", "{:.1f}"),
            ("token_us_low", "low", "{:.1f}"),
            ("token_us_high", "high", "{:.1f}"),
            ("penalty_percent", "slower by %", "{:.1f}"),
            ("penalty_percent_low", "low", "{:.1f}"),
            ("penalty_percent_high", "high", "{:.1f}"),
            ("penalty_unfitted_percent", "unfitted set C %", "{:.1f}"),
        ),
        summary.arm_rows(runs),
    )
    why = "Letters mark each parameter set, the whisker is their range. Slower by: against all-local memory, same set."
    return f"<h2>Time per {summary.step_word(runs)}, {word}</h2>{chart}<p class=quiet>{why}</p>{table}"


def cause_section(runs: Sequence[Run], word: str) -> str:
    found = []
    for run, point in summary.points(runs):
        parts = tuple((_WORDS[term], _value(point, term)) for term in summary.TERMS)
        if sum(v for _, v in parts):
            found.append(charts.Stack(_name(run, point, runs), parts, f"+{sum(v for _, v in parts):.1f} us"))
    if not found:
        return ""
    chart = charts.stacks(found, unit="us", describe=f"{word} time that each placement adds to a token, by cause")
    what = (
        "Distance: far loads and hand-offs. Link: bandwidth between the dies. Cache type: memory of the peer is mapped"
        f" NC. Wait: release words. Set {HEADLINE_SET}."
    )
    step = summary.step_word(runs)
    return f"<h2>What the placement adds to a {step}, by cause, {word}</h2>{chart}<p class=quiet>{what}</p>"


def stage_section(runs: Sequence[Run], word: str) -> str:
    columns = [("stage", "stage", None), ("repeats", "times", "{:d}")]
    for run, point in summary.points(runs):
        columns.append((summary.column_key(run, point), f"{_name(run, point, runs)}, us", "{:.1f}"))
    drawn = []
    for run, point in summary.points(runs):
        parts = _stage_parts(point)
        drawn.append(charts.Stack(_name(run, point, runs), parts, f"{sum(v for _, v in parts):.0f} us"))
    chart = charts.stacks(drawn, unit="us", describe=f"{word} time of a token by what it is spent on")
    table = html_table(columns, summary.stage_rows(runs))
    step = summary.step_word(runs)
    title = f"Microseconds a {step} by stage, {word}, set {HEADLINE_SET}"
    return f"<h2>Where a {step}'s time goes, {word}</h2>{chart}<h3>{title}</h3>{table}"


def _stage_parts(point: Point) -> tuple[tuple[str, float], ...]:
    keys = ("stream_us", "handoff_us", *summary.TERMS)
    return tuple((_WORDS[key], sum(s[key] * s["repeats"] for s in point.stages)) for key in keys)


def card_section(runs: Sequence[Run], word: str) -> str:
    parts = [f"<h2>Bytes by role and die, from the audit ({escape(runs[0].source)})</h2>"]
    for run, point in summary.points(runs):
        rows_here = [r for r in summary.residency_rows([run]) if r["arm"] == point.arm]
        if not rows_here:
            continue
        dies = [
            [
                charts.Held(_ROLE_WORDS[r["role"]], r["device"], show_bytes(r[f"die{die}_bytes"]))
                for r in rows_here
                if r[f"die{die}_bytes"]
            ]
            for die in (0, 1)
        ]
        crossing = sum(summary.crossing_bytes(run, point).values())
        bytes_from = "ISA counts and audit" if run.code_hash else "shapes and audit"
        evidence = (point.residency_before or {}).get("evidence")
        text = f"{show_bytes(crossing)} a {summary.step_word(runs)}\ncross the link, {word}\nfrom {bytes_from}"
        parts.append(f"<h3>{escape(_name(run, point, runs))}: evidence {escape(str(evidence))}</h3>")
        parts.append(
            charts.card(dies, readers=_readers(run), crossing=text, describe=f"bytes on each die, {point.arm}")
        )
    return "".join(parts)


def _readers(run: Run) -> list[str]:
    found = []
    for die in (0, 1):
        ids = [d["id"] for d in run.machine["devices"] if die in d["dies"]]
        found.append(f"computes: {', '.join(ids)}")
    return found


def published_section(runs: Sequence[Run], word: str) -> str:
    why = why_not(runs[0])
    head = f"<h2>Published figures beside {word} ones</h2>"
    if why is not None:
        return f"{head}<p>None here: {escape(why)}.</p>"
    found = rows(runs)
    dots = [
        charts.Compared(row.claim, (row.low, row.high), m.value, m.low, m.high)
        for row in found
        if row.unit == "%" and row.low is not None and row.high is not None and row.low <= 50
        for m in [row.modelled]
        if m is not None and m.value is not None and m.low is not None and m.high is not None
    ]
    chart = charts.compared(dots, unit="%", describe="published and modelled percentages") if dots else ""
    return head + chart + _published_table(found)


def _published_table(found: Sequence[Row]) -> str:
    body = []
    for row in found:
        modelled = row.modelled
        value = low_high = "-"
        if modelled is not None and modelled.value is not None:
            value = f"{modelled.value:.3g}"
            if modelled.low is not None and modelled.high is not None and modelled.low != modelled.high:
                low_high = f"{modelled.low:.3g} to {modelled.high:.3g}"
        residual = "-" if row.residual is None else f"{row.residual:+.2f}"
        cells = (row.claim, row.published, row.unit, value, low_high, residual, row.reason)
        kinds = ("f", "", "k", "n", "n", "n", "w")
        body.append(row_of_cells(cells, kinds))
    head = ("figure", "published", "unit", "modelled", "range", "residual", "why")
    return f"<table>{head_row(head, numeric=('modelled', 'range', 'residual'))}{''.join(body)}</table>"


def _value(point: Point, name: str) -> float:
    return point.quantities[name].value or 0.0
