"""A report: one self-contained HTML page, or one Markdown page, from runs of one or several experiments.

Nothing is fetched and no script runs. Every label is escaped as text; the embedded JSON is data in which each `<` is
written as an escape, so that no name in it can end or open an element. Modelled numbers say so in every title.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments import live_tables, report_conditions, report_live, report_sections, summary
from dieplace.experiments.report_parts import Heading, Listed, Part, Said, to_html, to_markdown
from dieplace.experiments.report_style import STYLE
from dieplace.run import Run
from dieplace.whole_file import write_whole


def write(runs: Sequence[Run], path: str | Path, *, markdown: bool = False) -> Path:
    """Write the report of `runs` to `path`; UsageError where they do not belong together or it cannot be written."""
    text = markdown_page(runs) if markdown else page(runs)
    return write_whole(path, text, hint="name another path", folders=True)


def page(runs: Sequence[Run]) -> str:
    """The whole HTML page as text."""
    parts = _parts(runs)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(runs))}</title><style>{STYLE}</style>"
    )
    shown = f"<head>{head}</head><body>{to_html(parts)}{_embedded(runs)}</body>"
    return f'<!doctype html>\n<html lang="en">{shown}</html>\n'


def markdown_page(runs: Sequence[Run]) -> str:
    """The same as Markdown, charts replaced by the numbers behind them."""
    return to_markdown(_parts(runs)) + "\n"


def _parts(runs: Sequence[Run]) -> list[Part]:
    check_origins(runs)
    word = summary.title_word(runs)
    groups = _groups(runs)
    parts: list[Part] = [Heading(_title(runs), 1)]
    parts += [Said(label) for label in dict.fromkeys(run.label for run in runs if run.label)]
    parts.append(_banner(runs, word))
    linked = report_live.ceilings_of([run for run in runs if run.experiment == "link"])
    for group in groups:
        several = len(groups) > 1
        if several:
            parts.append(Heading(_group_title(group, word), 2))
        parts.append(Said(_stamp(group), "quiet"))
        level = 3 if several else 2
        if live_tables.is_live(group):
            parts += report_live.sections(group, linked, level)
        else:
            parts += report_sections.sections(group, word, level)
        parts += report_conditions.section(group, level)
    return parts


def _title(runs: Sequence[Run]) -> str:
    word, groups = summary.title_word(runs), _groups(runs)
    if len(groups) == 1:
        return _group_title(groups[0], word)
    return f"{', '.join(dict.fromkeys(group[0].experiment for group in groups))}: {word}"


def _group_title(group: Sequence[Run], word: str) -> str:
    what = summary.workload_words(group)
    return f"{group[0].experiment}, {word}" + ("" if what == group[0].experiment else f": {what}")


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one experiment and workload stand together, in the order of their first; `link` leads, as its ceilings
    serve the others."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.experiment != "link"):
        found.setdefault((run.experiment, _workload(run)), []).append(run)
    return list(found.values())


def _stamp(runs: Sequence[Run]) -> str:
    created = sorted({run.created for run in runs})
    when = created[0] if len(created) == 1 else f"{created[0]} to {created[-1]}"
    blocks = ", ".join(dict.fromkeys(run.block for run in runs))
    return f"{when} · {runs[0].source} node · {blocks}"


def check_origins(runs: Sequence[Run], held: Callable[[], str] = str) -> None:
    """UsageError unless there are runs and all are of one origin: measured and modelled numbers share no page.

    `held` gives the lines of which file holds which run, for the error.
    """
    if not runs:
        raise UsageError("there is no run to report", hint="name run files, or a folder with some")
    found = sorted({run.origin for run in runs})
    if len(found) > 1:
        raise UsageError(
            f"one report cannot hold runs of different origin: {', '.join(found)}", hint=f"make two{held()}"
        )


def check_together(runs: Sequence[Run], held: Callable[[], str] = str) -> None:
    """UsageError unless the runs are of one experiment, one origin and one workload, as one set of tables needs.

    `held` gives the lines of which file holds which run, for the error.
    """
    check_origins(runs, held)
    experiments = sorted({run.experiment for run in runs})
    if len(experiments) > 1:
        raise UsageError(
            f"one set of tables cannot hold runs of different experiment: {', '.join(experiments)}",
            hint=f"show them one by one, or all in one page with: dieplace bench report{held()}",
        )
    names = sorted({_workload(run) for run in runs})
    if len(names) > 1:
        raise UsageError(
            f"one set of tables cannot hold different workloads: {'; '.join(names)}",
            hint=f"show them one by one, or all in one page with: dieplace bench report{held()}",
        )


def _workload(run: Run) -> str:
    bytes_from = run.workload.get("bytes_from", "model shapes")
    return f"{run.workload['name']} at {run.workload.get('context_tokens')}, bytes from {bytes_from}"


def embedded_json(value: Any) -> str:
    """Strict JSON that is safe inside a script element: no `<`, `>` or `&` is left in it."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _banner(runs: Sequence[Run], word: str) -> Listed:
    head = "Nothing here was measured on an MI355X." if word == "modelled" else ""
    return Listed(head, tuple(summary.notes(runs)), framed=True)


def _embedded(runs: Sequence[Run]) -> str:
    data = embedded_json([run.to_json() for run in runs])
    return (
        "<h2>The runs themselves</h2><p class=quiet>All of the above is computed from the runs embedded in this page as"
        " JSON (element <code>dieplace-runs</code>).</p>"
        f'<script type="application/json" id="dieplace-runs">{data}</script>'
    )
