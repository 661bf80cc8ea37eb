"""A report: one self-contained HTML page from runs, with charts, tables, conditions and the runs themselves embedded.

Nothing is fetched and no script runs. Every label is escaped as text; the embedded JSON is data in which each `<` is
written as an escape, so that no name in it can end or open an element. Modelled numbers say so in every title.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments import charts, live_tables, summary
from dieplace.experiments.markup import head_row, html_table, row_of_cells
from dieplace.experiments.report_sections import (
    card_section,
    cause_section,
    published_section,
    stage_section,
    token_section,
)
from dieplace.run import Run

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
    title = f"{first.experiment}, {word}: {summary.workload_words(runs)}"
    label = f"<p>{escape(first.label)}</p>" if first.label else ""
    body = [
        f"<h1>{escape(title)}</h1>{label}",
        f'<p class="quiet">{escape(first.created)} · {escape(first.source)} node · {_blocks(runs)}</p>',
        _banner(runs, word),
        *(_live_sections(runs) if live_tables.is_live(runs) else _modelled_sections(runs, word)),
        _condition_section(runs),
        _embedded(runs),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    shown = f"<head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body>"
    return f'<!doctype html>\n<html lang="en">{shown}</html>\n'


def _modelled_sections(runs: Sequence[Run], word: str) -> list[str]:
    return [
        *(f'<p class="said">{escape(line)}</p>' for line in summary.verdicts(runs)),
        *(f"<p>Left out: {escape(block)}: {escape(why)}</p>" for block, why in summary.left_out(runs).items()),
        token_section(runs, word),
        cause_section(runs, word),
        stage_section(runs, word),
        card_section(runs, word),
        published_section(runs, word),
        _parameter_section(runs),
    ]


def _live_sections(runs: Sequence[Run]) -> list[str]:
    found = [f"<p>{escape(line)}</p>" for line in live_tables.sentences(runs)]
    for table in live_tables.tables(runs):
        note = f"<p class=quiet>{escape(table.note)}</p>" if table.note else ""
        unit = "GB/s" if table.title.startswith("Bandwidth") else "us"
        chart = charts.bars(table.bars, unit=unit, describe=table.title) if table.bars else ""
        found.append(f"<h2>{escape(table.title)}</h2>{chart}{note}{html_table(table.columns, table.rows)}")
    return found


def check_together(runs: Sequence[Run]) -> None:
    """UsageError unless the runs are of one experiment, one origin and one workload."""
    if not runs:
        raise UsageError("there is no run to report", hint="name run files, or a folder with some")
    for what, key in (("experiment", "experiment"), ("origin", "origin")):
        found = sorted({getattr(run, key) for run in runs})
        if len(found) > 1:
            raise UsageError(f"one report cannot hold runs of different {what}: {', '.join(found)}")
    names = sorted({_workload(run) for run in runs})
    if len(names) > 1:
        raise UsageError(f"one report cannot hold different workloads: {'; '.join(names)}")


def _workload(run: Run) -> str:
    bytes_from = run.workload.get("bytes_from", "model shapes")
    return f"{run.workload['name']} at {run.workload.get('context_tokens')}, bytes from {bytes_from}"


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


def _parameter_section(runs: Sequence[Run]) -> str:
    sets = runs[0].facts.get("parameter_sets", [])
    if not sets:
        return ""
    body = "".join(
        row_of_cells(
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
    return f"<h2>Parameter sets of the model</h2><table>{head_row(head, numeric=head[2:7])}{body}</table>"


def _condition_section(runs: Sequence[Run]) -> str:
    keys = [key for key in runs[0].conditions if not key.endswith("_why")]
    body = []
    for key in keys:
        values = list(dict.fromkeys(_condition(run.conditions, key) for run in runs))
        body.append(row_of_cells((key, "; ".join(values)), ("", "")))
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
