"""A report: one self-contained HTML page from runs, with charts, tables, conditions and the runs themselves embedded.

Nothing is fetched and no script runs. Every label is escaped as text; the embedded JSON is data in which each `<` is
written as an escape, so that no name in it can end or open an element. Modelled numbers say so in every title.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments import charts, summary
from dieplace.experiments.published import Row, rows, why_not
from dieplace.run import Point, Run

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 60px; background: #fff; color: #22262d;
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 8px; border-top: 1px solid #e3e6eb; padding-top: 20px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
p, ul { margin: 6px 0; } ul { padding-left: 22px; } li, td, .said { overflow-wrap: anywhere; }
td.w { min-width: 290px; } td.f { min-width: 210px; } td.k { white-space: nowrap; }
.banner { background: #fdf3dc; border: 1px solid #e8cf8e; border-radius: 6px; padding: 10px 14px; margin: 14px 0; }
.said { font-size: 17px; font-weight: 600; }
.quiet { color: #555b66; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin: 8px 0 4px; }
th { text-align: left; border-bottom: 2px solid #b9c2d0; padding: 4px 8px; vertical-align: bottom; }
td { border-bottom: 1px solid #e9ecf1; padding: 4px 8px; vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; display: block; margin: 6px 0; }
details { margin: 10px 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; background: #f4f6fa; padding: 10px; }
"""
_WORDS = {
    "stream_us": "stream",
    "handoff_us": "hand-off",
    "distance_us": "distance",
    "link_us": "link",
    "cache_type_us": "cache type",
    "wait_us": "wait",
}
_ROLE_WORDS = {"weights": "weights", "kv_cache": "KV cache", "sync_flag": "sync flags"}


def write(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the report of `runs` to `path`; UsageError where they do not belong together or it cannot be written."""
    target = Path(path)
    text = page(runs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", hint="name another path") from error
    return target


def page(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    check_together(runs)
    word = summary.title_word(runs)
    first = runs[0]
    model = f"{first.workload['name']}, {first.workload['context_tokens']:,} tokens of context"
    title = f"{first.experiment}, {word}: {model}"
    label = f"<p>{escape(first.label)}</p>" if first.label else ""
    body = [
        f"<h1>{escape(title)}</h1>{label}",
        f'<p class="quiet">{escape(first.created)} · {escape(first.source)} node · {_blocks(runs)}</p>',
        _banner(runs, word),
        *(f'<p class="said">{escape(line)}</p>' for line in summary.verdicts(runs)),
        _token_section(runs, word),
        _cause_section(runs, word),
        _stage_section(runs, word),
        _card_section(runs, word),
        _published_section(runs, word),
        _parameter_section(runs),
        _condition_section(runs),
        _embedded(runs),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    shown = f"<head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body>"
    return f'<!doctype html>\n<html lang="en">{shown}</html>\n'


def check_together(runs: Sequence[Run]) -> None:
    """UsageError unless the runs are of one experiment, one origin and one workload."""
    if not runs:
        raise UsageError("there is no run to report", hint="name run files, or a folder with some")
    for what, key in (("experiment", "experiment"), ("origin", "origin")):
        found = sorted({getattr(run, key) for run in runs})
        if len(found) > 1:
            raise UsageError(f"one report cannot hold runs of different {what}: {', '.join(found)}")
    names = sorted({f"{run.workload['name']} at {run.workload['context_tokens']}" for run in runs})
    if len(names) > 1:
        raise UsageError(f"one report cannot hold different workloads: {'; '.join(names)}")
    if runs[0].experiment != "weight-swap":
        raise UsageError(f"there is no report for {runs[0].experiment} runs", hint="weight-swap runs have one")


def embedded_json(value: Any) -> str:
    """Strict JSON that is safe inside a script element: no `<`, `>` or `&` is left in it."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _blocks(runs: Sequence[Run]) -> str:
    return escape(", ".join(run.block for run in runs))


def _banner(runs: Sequence[Run], word: str) -> str:
    lines = dict.fromkeys(note for run in runs for note in run.notes)
    head = "Nothing here was measured on an MI355X." if word == "modelled" else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in lines)
    return f'<div class="banner"><b>{head}</b><ul>{items}</ul></div>'


def _name(run: Run, point: Point) -> str:
    return f"{run.block} {point.arm}"


def _token_section(runs: Sequence[Run], word: str) -> str:
    found = []
    for run, point in summary.points(runs):
        token = point.quantities["token_us"]
        if token.value is not None:
            marks = tuple(sorted(token.by_set.items()))
            text = f"{token.value:.0f} us, {point.quantities['penalty'].value or 0:+.1%}"
            found.append(charts.Bar(_name(run, point), token.value, token.low, token.high, marks, text))
    chart = charts.bars(found, unit="us", describe=f"{word} time per token of each arm")
    table = _table(
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
    return f"<h2>Time per token, {word}</h2>{chart}<p class=quiet>{why}</p>{table}"


def _cause_section(runs: Sequence[Run], word: str) -> str:
    found = []
    for run, point in summary.points(runs):
        parts = tuple((_WORDS[term], _value(point, term)) for term in summary.TERMS)
        if sum(v for _, v in parts):
            found.append(charts.Stack(_name(run, point), parts, f"+{sum(v for _, v in parts):.1f} us"))
    if not found:
        return ""
    chart = charts.stacks(found, unit="us", describe=f"{word} time that each placement adds to a token, by cause")
    what = (
        "Distance: far loads and hand-offs. Link: bandwidth between the dies. Cache type: memory of the peer is mapped"
        " NC. Wait: release words. Set A."
    )
    return f"<h2>What the placement adds to a token, by cause, {word}</h2>{chart}<p class=quiet>{what}</p>"


def _stage_section(runs: Sequence[Run], word: str) -> str:
    columns = [("stage", "stage", None), ("repeats", "times", "{:d}")]
    for run, point in summary.points(runs):
        columns.append((summary.column_key(run, point), f"{_name(run, point)}, us", "{:.1f}"))
    drawn = []
    for run, point in summary.points(runs):
        parts = _stage_parts(point)
        drawn.append(charts.Stack(_name(run, point), parts, f"{sum(v for _, v in parts):.0f} us"))
    chart = charts.stacks(drawn, unit="us", describe=f"{word} time of a token by what it is spent on")
    table = _table(columns, summary.stage_rows(runs))
    return (
        f"<h2>Where a token's time goes, {word}</h2>{chart}<h3>Microseconds a token by stage, {word}, set A</h3>{table}"
    )


def _stage_parts(point: Point) -> tuple[tuple[str, float], ...]:
    keys = ("stream_us", "handoff_us", *summary.TERMS)
    return tuple((_WORDS[key], sum(s[key] * s["repeats"] for s in point.stages)) for key in keys)


def _card_section(runs: Sequence[Run], word: str) -> str:
    parts = [f"<h2>Bytes by role and die, from the audit ({escape(runs[0].source)})</h2>"]
    for run, point in summary.points(runs):
        rows_here = [r for r in summary.residency_rows([run]) if r["arm"] == point.arm]
        if not rows_here:
            continue
        dies = [
            [
                charts.Held(_ROLE_WORDS[r["role"]], r["device"], _bytes(r[f"die{die}_bytes"]))
                for r in rows_here
                if r[f"die{die}_bytes"]
            ]
            for die in (0, 1)
        ]
        crossing = sum(summary.crossing_bytes_per_token(run, point).values())
        evidence = (point.residency_before or {}).get("evidence")
        text = f"{_bytes(crossing)} a token\ncross the link, {word}\nfrom shapes and audit"
        parts.append(f"<h3>{escape(_name(run, point))}: evidence {escape(str(evidence))}</h3>")
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


def _published_section(runs: Sequence[Run], word: str) -> str:
    why = why_not(runs[0].workload)
    head = f"<h2>Published figures beside {word} ones</h2>"
    if why is not None:
        return f"{head}<p>{escape(why)}.</p>"
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
        body.append(_cells(cells, kinds))
    head = ("figure", "published", "unit", "modelled", "range", "residual", "why")
    return f"<table>{_head(head, numeric=('modelled', 'range', 'residual'))}{''.join(body)}</table>"


def _parameter_section(runs: Sequence[Run]) -> str:
    sets = runs[0].facts.get("parameter_sets", [])
    if not sets:
        return ""
    body = "".join(
        _cells(
            (
                s["name"],
                s["label"],
                f"{s['handoff_us']:.4g}",
                f"{s['packed_steps']:.4g}",
                f"{s['local_gain']:.4g}",
                f"{s['link_tb_per_s']:.4g}",
                f"{s['release_wait_us']:.4g}",
                s["fitted_to"],
            ),
            ("", "", "n", "n", "n", "n", "n", ""),
        )
        for s in sets
    )
    head = ("set", "label", "hand-off us", "far steps", "local gain", "link TB/s", "wait us", "fitted to")
    return f"<h2>Parameter sets of the model</h2><table>{_head(head, numeric=head[2:7])}{body}</table>"


def _condition_section(runs: Sequence[Run]) -> str:
    keys = [key for key in runs[0].conditions if not key.endswith("_why")]
    body = []
    for key in keys:
        values = list(dict.fromkeys(_condition(run.conditions, key) for run in runs))
        body.append(_cells((key, "; ".join(values)), ("", "")))
    return (
        f"<h2>Conditions</h2><details><summary>{len(keys)} recorded</summary><table>{''.join(body)}</table></details>"
    )


def _condition(conditions: Mapping[str, Any], key: str) -> str:
    value = conditions.get(key)
    if value is None:
        return f"unknown: {conditions.get(f'{key}_why', 'not recorded')}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _embedded(runs: Sequence[Run]) -> str:
    data = embedded_json([run.to_json() for run in runs])
    return (
        "<h2>The runs themselves</h2><p class=quiet>All of the above is computed from the runs embedded in this page as"
        " JSON (element <code>dieplace-runs</code>).</p>"
        f'<script type="application/json" id="dieplace-runs">{data}</script>'
    )


def _table(columns: Sequence[tuple[str, str, str | None]], found: Iterable[Mapping[str, Any]]) -> str:
    head = "".join(f"<th{_numeric(f)}>{escape(header)}</th>" for _, header, f in columns)
    body = "".join(
        _cells([_show(row.get(key), f) for key, _, f in columns], ["n" if f else "" for _, _, f in columns])
        for row in found
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _head(headers: Sequence[str], *, numeric: Sequence[str]) -> str:
    cells = (f"<th{' class=n' if header in numeric else ''}>{escape(header)}</th>" for header in headers)
    return f"<tr>{''.join(cells)}</tr>"


def _numeric(form: str | None) -> str:
    return " class=n" if form else ""


def _show(value: Any, form: str | None) -> str:
    if value is None:
        return "-"
    return form.format(value) if form else str(value)


def _cells(cells: Sequence[Any], kinds: Sequence[str]) -> str:
    shown = (
        f"<td{f' class={kind}' if kind else ''}>{escape(str(cell))}</td>"
        for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _value(point: Point, name: str) -> float:
    return point.quantities[name].value or 0.0


def _bytes(nbytes: float) -> str:
    scale: Sequence[tuple[float, str]] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((f"{nbytes / unit:.2f} {word}" for unit, word in scale if nbytes >= unit), f"{nbytes:.0f} B")
