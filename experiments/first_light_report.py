"""The page of a first light, and the rows that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.errors import UsageError
from dieplace.experiments.first_light_bundle import AS_FOUND, Bundle
from dieplace.experiments.first_light_catalogue import QUESTIONS, question
from dieplace.experiments.markup import html_table
from dieplace.experiments.report_style import SCROLLING
from dieplace.whole_file import write_whole

if TYPE_CHECKING:
    from dieplace.experiments.first_light_questions import Answer
    from dieplace.run import Run

SHOWN = 6  # sentences of an experiment that stand open on the page
MARKS = {"answered": "yes", "unknown": "unknown", "refused": "refused", "not-asked": "not asked"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f27; margin: 32px auto; max-width: 1020px; padding: 0 20px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 34px 0 6px; }
h3 { font-size: 15px; margin: 18px 0 2px; }
.banner { background: #fff4d6; border: 1px solid #e7c766; border-radius: 6px; padding: 10px 14px; margin: 14px 0; }
.bad { background: #fde8e6; border-color: #d98880; }
.quiet { color: #555b66; font-size: 13px; margin: 2px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin: 8px 0 4px; }
th { text-align: left; border-bottom: 2px solid #b9c2d0; padding: 4px 8px; vertical-align: bottom; }
td { border-bottom: 1px solid #e9ecf1; padding: 5px 8px; vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.state { white-space: nowrap; font-weight: 600; }
.answered { color: #14693a; } .unknown { color: #8a5a00; } .refused { color: #a33127; } .not-asked { color: #6a717d; }
details { margin: 6px 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; background: #f4f6fa; padding: 8px; }
h1, li, p, summary { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .asked, .asked tbody, .asked tr, .asked td { display: block; } .asked tr:first-child { display: none; }
  .asked td { border: 0; padding: 3px 0; overflow-wrap: anywhere; }
  .asked tr { border-bottom: 1px solid #e9ecf1; padding: 8px 0; }
  .asked .state { white-space: normal; }
}
"""


def answer_rows(bundle: Bundle) -> list[dict[str, Any]]:
    """One row a question, in the order of the catalogue; one that has no answer yet says so."""
    rows = []
    for one in QUESTIONS:
        found = bundle.answers.get(one.id)
        rows.append(
            {
                "question": one.id, "text": one.text, "source": one.source,
                "status": found.status if found else "missing",
                "answer": _word(found), "said": found.said if found else _not_yet(bundle),
                "mode": found.mode if found and found.mode != AS_FOUND else None,
                "origin": found.origin if found and found.status in ("answered", "unknown") else None,
            }
        )  # fmt: skip
    return rows


def experiment_rows(bundle: Bundle) -> list[dict[str, Any]]:
    """One row an experiment, with what its runs say."""
    rows = []
    for name, outcome in bundle.experiments.items():
        rows.append(
            {
                "experiment": name,
                "status": MARKS.get(outcome.status, outcome.status),
                "runs": len(outcome.runs),
                "said": outcome.why or "done",
            }
        )
    return rows


def head_lines(bundle: Bundle) -> list[str]:
    """How it stands, in sentences, for the terminal and the top of the page."""
    parts = ", ".join(bundle.parts) or "no card"
    lines = [f"First light of {bundle.cards} x {parts} ({bundle.origin}), {bundle.started}: {bundle.state}."]
    lines += list(bundle.notes)
    where = f"found in {bundle.start}" if bundle.start and bundle.start != AS_FOUND else "none here"
    lines.append(f"Modes: {where}; {bundle.restored_said}.")
    lines += [f"Not visited: {state}: {why}" for state, why in bundle.refused.items()]
    if bundle.missing:
        lines.append(f"Missing: {', '.join(bundle.missing)}.")
    return lines


def counts(bundle: Bundle) -> dict[str, int]:
    """Answers by status."""
    found = dict.fromkeys((*MARKS, "missing"), 0)
    for row in answer_rows(bundle):
        found[row["status"]] += 1
    return found


def sentences_of(runs: Sequence[Run]) -> list[str]:
    """What runs of one experiment say in words; none where this release cannot read them."""
    from dieplace.experiments import live_tables, summary

    try:
        if live_tables.is_live(runs):
            return list(live_tables.sentences(runs))
        return list(summary.verdicts(runs))
    except (KeyError, ValueError, TypeError, AttributeError, IndexError):
        return []


def write(bundle: Bundle, path: str | Path | None = None, *, markdown: bool = False) -> Path:
    """Write the page, into the bundle unless a path is given."""
    target = Path(path) if path is not None else bundle.folder / ("report.md" if markdown else "report.html")
    return write_whole(target, as_markdown(bundle) if markdown else page(bundle), folders=True)


def as_markdown(bundle: Bundle) -> str:
    """The answers and experiments as Markdown."""
    head, *rest = head_lines(bundle)
    lines = [f"# {head}", "", *(f"- {line}" for line in rest), ""]
    lines += ["| question | answer | what was seen | asked in | origin |", "| --- | --- | --- | --- | --- |"]
    for row in answer_rows(bundle):
        cells = (row["question"], row["answer"], row["said"], row["mode"] or "-", row["origin"] or "-")
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    lines += ["", "| experiment | status | runs | what was seen |", "| --- | --- | --- | --- |"]
    for row in experiment_rows(bundle):
        told = (row["experiment"], row["status"], str(row["runs"]), row["said"])
        lines.append(f"| {' | '.join(map(_cell, told))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that stays in its cell, and is no markup."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def page(bundle: Bundle) -> str:
    """The whole page as text."""
    title = f"First light: {bundle.cards} x {', '.join(bundle.parts) or 'no card'}, {bundle.origin}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(bundle.started)} to {escape(bundle.ended or "now")} · {escape(bundle.backend)}</p>',
        _banner(bundle),
        answers_section(bundle),
        _experiments_section(bundle),
        _states_section(bundle),
        _conditions_section(bundle),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    shown = f"<head>{head}<style>{_STYLE}{SCROLLING}</style></head><body>{''.join(body)}</body>"
    return f'<!doctype html>\n<html lang="en">{shown}</html>\n'


def answers_section(bundle: Bundle) -> str:
    """The table of questions and answers, each with how it was asked and what was seen."""
    head = "<tr><th>question</th><th>answer</th><th>what was seen</th></tr>"
    body = "".join(_answer_row(bundle, row) for row in answer_rows(bundle))
    told = ", ".join(f"{n} {MARKS.get(status, status)}" for status, n in counts(bundle).items() if n)
    told = told.replace(" yes", " answered")
    table = f"<div class=wide><table class=asked>{head}{body}</table></div>"
    return f"<h2>Questions</h2><p class=quiet>{escape(told)}</p>{table}"


def _answer_row(bundle: Bundle, row: Mapping[str, Any]) -> str:
    asked = question(row["question"])
    found = bundle.answers.get(row["question"])
    where = f"asked in {row['mode']}; " if row["mode"] else ""
    origin = f"{row['origin']}; " if row["origin"] else ""
    evidence = "".join(f"{escape(line)}\n" for line in (found.evidence if found else ()))
    value = embedded_text(found.value) if found and found.value else ""
    more = f"<details><summary>evidence</summary><pre>{evidence}{value}</pre></details>" if evidence or value else ""
    return (
        f"<tr><td>{escape(asked.text)}<p class=quiet>{escape(asked.id)}: {escape(asked.how)}. {escape(asked.source)}"
        f'</p></td><td class="state {escape(row["status"])}">{escape(row["answer"])}</td>'
        f"<td>{escape(row['said'])}<p class=quiet>{escape(where + origin)}why it matters: {escape(asked.why)}</p>"
        f"{more}</td></tr>"
    )


def embedded_text(value: Mapping[str, Any]) -> str:
    """A value as lines of text, escaped."""
    import json

    return escape(json.dumps(dict(value), indent=1, allow_nan=False)[:6000])


def _banner(bundle: Bundle) -> str:
    kind = "banner bad" if bundle.restored is False else "banner"
    items = "".join(f"<li>{escape(line)}</li>" for line in head_lines(bundle)[1:])
    return f'<div class="{kind}"><b>{escape(head_lines(bundle)[0])}</b><ul>{items}</ul></div>'


def _experiments_section(bundle: Bundle) -> str:
    parts = ["<h2>Experiments</h2>"]
    columns = [("experiment", "experiment", None), ("status", "status", None), ("runs", "runs", "{:d}"),
               ("said", "what was seen", None)]  # fmt: skip
    parts.append(html_table(columns, experiment_rows(bundle)))
    for name in bundle.experiments:
        runs = _runs(bundle, name)
        said = sentences_of(runs) if runs else []
        if said:
            parts.append(f"<h3>{escape(name)}</h3>{_folded(said)}")
    files = "run files lie in runs/: dieplace bench show and bench report read them"
    return "".join([*parts, f"<p class=quiet>{files}</p>"])


def _folded(said: Sequence[str]) -> str:
    """Sentences; what is beyond the first few can be opened."""
    shown, rest = ("".join(f"<p>{escape(line)}</p>" for line in part) for part in (said[:SHOWN], said[SHOWN:]))
    return shown + (f"<details><summary>{len(said) - SHOWN} more</summary>{rest}</details>" if rest else "")


def _states_section(bundle: Bundle) -> str:
    rows = [{"state": state, "file": name} for state, name in bundle.trees.items()]
    columns = [("state", "state", None), ("file", "recording", None)]
    how = "dieplace --backend replayed --node FILE list shows the node as it was"
    return f"<h2>States that were recorded</h2>{html_table(columns, rows)}<p class=quiet>{how}</p>"


def _conditions_section(bundle: Bundle) -> str:
    rows = [
        {"key": key, "value": str(value) if value is not None else f"unknown: {bundle.conditions.get(f'{key}_why')}"}
        for key, value in bundle.conditions.items()
        if not key.endswith("_why")
    ]
    table = html_table([("key", "condition", None), ("value", "value", None)], rows)
    return f"<h2>Conditions</h2><details><summary>{len(rows)} recorded</summary>{table}</details>"


def _runs(bundle: Bundle, name: str) -> list[Run]:
    from dieplace.run import Run

    try:
        return [Run.load(path) for path in bundle.run_files(name)]
    except UsageError:
        return []


def _word(found: Answer | None) -> str:
    if found is None:
        return "missing"
    return found.word or MARKS[found.status]


def _not_yet(bundle: Bundle) -> str:
    return "first light was interrupted before it came to this" if bundle.state != "running" else "not asked yet"
