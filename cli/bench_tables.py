"""The tables of bench run and bench show: rows come from `experiments/summary.py`, this lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dieplace.cli.table import Column, Prose, Table

if TYPE_CHECKING:
    from dieplace.experiments.live_tables import LiveTable
    from dieplace.run import Run

WIDTH, FIRST_WIDTH, NUMBER_WIDTH = 80, 12, 5
MOST_TURNED = 12
MOST_ARMS_ACROSS = 4  # a column each fits 80 characters; more are in the report


def tables(runs: Sequence[Run], payload: dict[str, Any], why: str | None) -> list[Table | str]:
    """All tables and sentences of a set of runs; `why` stands where no published figures belong beside them."""
    from dieplace.experiments import summary

    word = payload["origin"]
    what = summary.workload_words(runs)
    step = summary.step_word(runs)
    few = len(payload["arms"]) <= MOST_ARMS_ACROSS
    parts: list[Table | str] = [_arm_table(payload["arms"], step, f"Time per {step}, {word}: {what}"), ""]
    parts += [*map(Prose, payload["verdicts"])]
    parts += [*(Prose(f"left out: {block}: {why}") for block, why in payload["left_out"].items()), ""]
    parts += [_term_table(payload["terms"], f"What the placement adds to a {step} by cause, {word}, us"), ""]
    if few:
        parts += [Table(_stage_columns(runs), payload["stages"], title=f"Microseconds a {step} by stage, {word}"), ""]
        parts += [_residency_table(payload["residency"], runs[0].source), ""]
    else:
        parts += ["stages and bytes by die: in the report, or with --json", ""]
    if why:
        parts += [Prose(f"no published figures here: {why}"), ""]
    else:
        parts += [_published_table(payload["published"], word), ""]
    return [*parts, *(Prose(f"note: {note}") for note in payload["notes"])]


def live_parts(found: Sequence[LiveTable], payload: dict[str, Any]) -> list[Table | str]:
    """Tables and sentences of measured runs."""
    parts: list[Table | str] = []
    for one in found:
        columns = [
            Column(key, header, right=form is not None, show=form.format if form else str)
            for key, header, form in one.columns
            if any(row.get(key) not in (None, "") for row in one.shown_rows)
        ]
        table = Table(columns, list(one.shown_rows), title=one.title, notes=[f"  {one.note}"] if one.note else [])
        if all(column.right for column in columns[1:]) and not _fits(columns):  # a column an arm
            table = turned(table)
            if not _fits(table.columns):
                parts += [Prose(f"{one.title}: {len(columns) - 1} columns, in the report or with --json"), ""]
                continue
        parts += [table, ""]
    return [*parts, *map(Prose, payload["verdicts"]), "", *(Prose(f"note: {note}") for note in payload["notes"])]


def turned(table: Table) -> Table:
    """The table with its columns as rows; the headers of numbers must end in one unit, which the title then has."""
    first, *rest = table.columns
    unit = rest[0].header.rpartition(" ")[2]
    heads = [Column("arm", "arm")] + [
        Column(str(number), str(row[first.key]), right=True, show=rest[0].show) for number, row in enumerate(table.rows)
    ]
    rows = [
        {"arm": column.header.removesuffix(f" {unit}")}
        | {str(number): row.get(column.key) for number, row in enumerate(table.rows)}
        for column in rest
    ]
    return Table(heads, rows, title=f"{table.title}, {unit}", notes=table.notes)


def _fits(columns: Sequence[Column]) -> bool:
    """Whether 80 characters hold a first column of 16 and no header of the others broken within a word."""
    longest = (max(max(map(len, column.header.split())), NUMBER_WIDTH) for column in columns[1:])
    return len(columns) <= MOST_TURNED and FIRST_WIDTH + sum(2 + width for width in longest) <= WIDTH


def _term_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    numbers = [("distance_us", "distance"), ("link_us", "link"), ("cache_type_us", "cache type"), ("wait_us", "wait")]
    columns = [Column(key, header, right=True, show=one_decimal) for key, header in numbers]
    return Table([Column("run", "run"), Column("arm", "arm"), *columns], rows, title=title)


def _arm_table(rows: Sequence[dict[str, Any]], step: str, title: str) -> Table:
    return Table(
        [
            Column("run", "run"),
            Column("arm", "arm"),
            Column("token_us", f"{step} us", right=True, show=one_decimal),
            Column("token_us_low", "low", right=True, show=one_decimal),
            Column("token_us_high", "high", right=True, show=one_decimal),
            Column("penalty_percent", "slower %", right=True, show=one_decimal),
            Column("penalty_percent_low", "low", right=True, show=one_decimal),
            Column("penalty_percent_high", "high", right=True, show=one_decimal),
        ],
        rows,
        title=title,
        notes=["  low, high: range over parameter sets; slower: than all-local memory, same set"],
    )


def _stage_columns(runs: Sequence[Run]) -> list[Column]:
    from dieplace.experiments import summary

    columns = [Column("stage", "stage"), Column("repeats", "times", right=True)]
    for run, point in summary.points(runs):
        header = f"{run.block} {point.arm}" if len(run.points) > 1 else run.block
        columns.append(Column(summary.column_key(run, point), header, right=True, show=one_decimal))
    return columns


def _residency_table(rows: Sequence[dict[str, Any]], source: str) -> Table:
    from dieplace.experiments.markup import show_bytes

    return Table(
        [
            Column("run", "run"),
            Column("arm", "arm"),
            Column("role", "role"),
            Column("device", "used by"),
            Column("die0_bytes", "on die 0", right=True, show=show_bytes),
            Column("die1_bytes", "on die 1", right=True, show=show_bytes),
        ],
        rows,
        title=f"Bytes by role and die, audited ({source})",
    )


def _published_table(figures: Sequence[dict[str, Any]], word: str) -> Table:
    rows = []
    whys: dict[str, int] = {}
    for figure in figures:
        modelled = figure["modelled"] or {}
        number = whys.setdefault(figure["reason"], len(whys) + 1)
        rows.append(
            {
                "claim": figure["claim"],
                "published": figure["published"],
                "value": modelled.get("value"),
                "low": modelled.get("low"),
                "high": modelled.get("high"),
                "residual": figure["residual"],
                "why": number,
            }
        )
    return Table(
        [
            Column("claim", "published figure"),
            Column("published", "published"),
            Column("value", word, right=True, show=_three_digits),
            Column("low", "low", right=True, show=_three_digits),
            Column("high", "high", right=True, show=_three_digits),
            Column("residual", "residual", right=True, show=_signed),
            Column("why", "why", right=True),
        ],
        rows,
        title=f"Published figures beside {word} ones, in the published unit",
        notes=[f"  {number}: {text}" for text, number in whys.items()],
    )


def one_decimal(value: float) -> str:
    """A number with one decimal."""
    return f"{value:,.1f}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _signed(value: float) -> str:
    return f"{value:+.2f}"
