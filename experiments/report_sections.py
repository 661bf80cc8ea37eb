"""The sections of a modelled report: times, causes, stages and their waterfall, bytes by die, published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dieplace.clock.parameters import HEADLINE_SET
from dieplace.experiments import charts, charts_places, summary
from dieplace.experiments.markup import show_bytes
from dieplace.experiments.published import Row, rows, why_not
from dieplace.experiments.report_parts import Drawn, Folded, Heading, Part, Said, Tabled
from dieplace.run import Point, Run

_WORDS = {
    "stream_us": "stream",
    "handoff_us": "hand-off",
    "distance_us": "distance",
    "link_us": "link",
    "cache_type_us": "cache type",
    "wait_us": "wait",
}
ROLE_WORDS = {"weights": "weights", "kv_cache": "KV cache", "sync_flag": "sync flags", "activation": "activations"}
MOST_OPEN = 4  # pictures of arms that are shown at once; more are folded


def sections(runs: Sequence[Run], word: str, level: int = 2) -> list[Part]:
    """All sections of one modelled experiment; titles are at `level`."""
    return [
        *(Said(line, "verdict") for line in summary.verdicts(runs)),
        *(Said(f"Left out: {block}: {why}") for block, why in summary.left_out(runs).items()),
        *_token(runs, word, level),
        *_causes(runs, word, level),
        *_stages(runs, word, level),
        *_cards(runs, word, level),
        *_roofline(word, level),
        *_published(runs, word, level),
        *_parameters(runs, level),
    ]


def name_of(run: Run, point: Point, runs: Sequence[Run]) -> str:
    """The arm, with its block where the page has several."""
    return point.arm if len(runs) == 1 else f"{run.block} {point.arm}"


def _token(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    found = []
    for run, point in summary.points(runs):
        token = point.quantities["token_us"]
        if token.value is not None:
            marks = tuple(sorted(token.by_set.items()))
            text = f"{token.value:.0f} us, {(point.quantities['penalty'].value or 0) * 100:+.1f} %"
            found.append(charts.Bar(name_of(run, point, runs), token.value, token.low, token.high, marks, text))
    columns = (
        ("run", "run", None),
        ("arm", "arm", None),
        ("token_us", "token us", "{:.1f}"),
        ("token_us_low", "low", "{:.1f}"),
        ("token_us_high", "high", "{:.1f}"),
        ("penalty_percent", "slower by %", "{:.1f}"),
        ("penalty_percent_low", "low", "{:.1f}"),
        ("penalty_percent_high", "high", "{:.1f}"),
        ("penalty_unfitted_percent", "unfitted set C %", "{:.1f}"),
    )
    chart = charts.bars(found, unit="us", describe=f"{word} time per token of each arm") if found else ""
    caption = "Letters mark parameter sets, the whisker is their range."
    return [
        Heading(f"Time per {summary.step_word(runs)}, {word}", level),
        *([Drawn(chart, caption=caption)] if found else []),
        Said("Low, high: the range over parameter sets. Slower by: against all-local memory, same set.", "quiet"),
        Tabled(columns, summary.arm_rows(runs)),
    ]


def _causes(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    found = []
    for run, point in summary.points(runs):
        parts = tuple((_WORDS[term], _value(point, term)) for term in summary.TERMS)
        if sum(v for _, v in parts):
            found.append(charts.Stack(name_of(run, point, runs), parts, f"+{sum(v for _, v in parts):.1f} us"))
    if not found:
        return []
    chart = charts.stacks(found, unit="us", describe=f"{word} time that each placement adds to a token, by cause")
    columns = (
        ("run", "run", None), ("arm", "arm", None), *((term, f"{_WORDS[term]}, us", "{:.1f}") for term in summary.TERMS)
    )  # fmt: skip
    return [
        Heading(f"What the placement adds to a {summary.step_word(runs)}, by cause, {word}", level),
        Drawn(chart, (Tabled(columns, summary.term_rows(runs)),)),
        Said(
            "Distance: far loads and hand-offs. Link: bandwidth between the dies. Cache type: memory of the peer is"
            f" mapped NC. Wait: release words. Set {HEADLINE_SET}.",
            "quiet",
        ),
    ]


def _stages(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    columns: list[tuple[str, str, str | None]] = [("stage", "stage", None), ("repeats", "times", "{:d}")]
    drawn = []
    for run, point in summary.points(runs):
        columns.append((summary.column_key(run, point), f"{name_of(run, point, runs)}, us", "{:.1f}"))
        parts = tuple((_WORDS[k], sum(s[k] * s["repeats"] for s in point.stages)) for k in _WORDS)
        drawn.append(charts.Stack(name_of(run, point, runs), parts, f"{sum(v for _, v in parts):.0f} us"))
    step = summary.step_word(runs)
    return [
        Heading(f"Where a {step}'s time goes, {word}", level),
        Drawn(charts.stacks(drawn, unit="us", describe=f"{word} time of a {step} by what it is spent on")),
        Heading(f"Microseconds a {step} by stage, {word}, set {HEADLINE_SET}", level + 1),
        Tabled(columns, summary.stage_rows(runs)),
        *_waterfalls(runs, word, level + 1),
    ]


def _waterfalls(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    """From each arm's all-local counterpart to the arm, stage by stage."""
    totals = summary.stage_rows(runs)
    found: list[Part] = []
    for run, point in summary.points(runs):
        base = _base_of(runs, run, point)
        if base is None:
            continue
        here, there = summary.column_key(run, point), summary.column_key(*base)
        steps = [charts.Step(r["stage"], r.get(here, 0.0) - r.get(there, 0.0)) for r in totals[:-1]]
        moved = [step for step in steps if abs(step.value) >= 0.05]
        if not moved:
            continue
        names = name_of(*base, runs), name_of(run, point, runs)
        chart = charts.waterfall(
            charts.Step(names[0], totals[-1][there]), moved, charts.Step(names[1], totals[-1][here]),
            unit="us", describe=f"{word} steps from {names[0]} to {names[1]}, by stage",
        )  # fmt: skip
        title = Heading(f"From {names[0]} to {names[1]}, stage by stage, {word}", level)
        found += [title, Drawn(chart)]
    return _few(found, 2 * MOST_OPEN, "more arms, stage by stage")


def _base_of(runs: Sequence[Run], run: Run, point: Point) -> tuple[Run, Point] | None:
    """The point with everything local and the same step: of the same run, else of the run whose memory is local."""

    def same(other: Point) -> bool:
        keys = ("context_tokens", "tokens")
        return not other.factors.get("roles_moved") and all(other.factors.get(k) == point.factors.get(k) for k in keys)

    for one in (run, *(r for r in runs if r.facts.get("local_guaranteed") and r is not run)):
        if one is run and not run.facts.get("local_guaranteed"):
            continue
        base = next((other for other in one.points if same(other)), None)
        if base is not None and base is not point:
            return one, base
    return None


def _cards(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    parts: list[Part] = []
    for run, point in summary.points(runs):
        rows_here = [r for r in summary.residency_rows([run]) if r["arm"] == point.arm]
        if not rows_here:
            continue
        evidence = (point.residency_before or {}).get("evidence")
        crossing = sum(summary.crossing_bytes(run, point).values())
        bytes_from = "ISA counts and audit" if run.code_hash else "shapes and audit"
        link = f"{show_bytes(crossing)} a {summary.step_word(runs)}\ncross the link, {word}\nfrom {bytes_from}"
        picture = charts_places.places(
            [_die(run, die, rows_here) for die in (0, 1)], link=link, describe=f"bytes on each die, {point.arm}"
        )
        parts.append(Heading(f"{name_of(run, point, runs)}: evidence {evidence}", level + 1))
        parts.append(Drawn(picture, (Said(link.replace("\n", " ")),)))
    columns = (
        ("run", "run", None), ("arm", "arm", None), ("role", "role", None), ("device", "used by", None),
        ("die0_bytes", "bytes on die 0", "{:,d}"), ("die1_bytes", "bytes on die 1", "{:,d}"),
    )  # fmt: skip
    return [
        Heading(f"Bytes by role and die, from the audit ({runs[0].source})", level),
        *_few(parts, 2 * MOST_OPEN, "more arms"),
        Folded("the same as a table", (Tabled(columns, summary.residency_rows(runs)),), of_page=True),
    ]


def _die(run: Run, die: int, rows_here: Sequence[Mapping[str, Any]]) -> charts_places.Place:
    held = tuple(
        charts_places.Held(ROLE_WORDS[r["role"]], r["device"], show_bytes(r[f"die{die}_bytes"]))
        for r in rows_here
        if r[f"die{die}_bytes"]
    )
    readers = ", ".join(d["id"] for d in run.machine["devices"] if die in d["dies"])
    parts = tuple(f"XCD {die * 4 + number}" for number in range(4))
    return charts_places.Place(f"die {die}", f"computes: {readers}", held, parts)


def _few(parts: list[Part], most: int, summary_: str) -> list[Part]:
    return parts if len(parts) <= most else [*parts[:most], Folded(summary_, tuple(parts[most:]), of_page=True)]


def _roofline(word: str, level: int) -> list[Part]:
    why = (
        "None here: a share of a ceiling needs one that was measured in the same run, and nothing was measured. A"
        " link run of the card gives it."
    )
    return [Heading(f"Bytes over the measured ceiling, {word}", level), Said(why)]


def _published(runs: Sequence[Run], word: str, level: int) -> list[Part]:
    head = Heading(f"Published figures beside {word} ones", level)
    why = why_not(runs[0])
    if why is not None:
        return [head, Said(f"None here: {why}.")]
    found = rows(runs)
    dots = [
        charts.Compared(row.claim, (row.low, row.high), m.value, m.low, m.high)
        for row in found
        if row.unit == "%" and row.low is not None and row.high is not None and row.low <= 50
        for m in [row.modelled]
        if m is not None and m.value is not None and m.low is not None and m.high is not None
    ]
    chart = [Drawn(charts.compared(dots, unit="%", describe="published and modelled percentages"))] if dots else []
    columns = (
        ("figure", "figure", None), ("published", "published", None), ("unit", "unit", None),
        ("modelled", word, None), ("range", "range", None), ("residual", "residual", "{:+.2f}"), ("why", "why", None),
    )  # fmt: skip
    return [head, *chart, Tabled(columns, [_figure_row(row) for row in found])]


def _figure_row(row: Row) -> dict[str, Any]:
    modelled = row.modelled
    body: dict[str, Any] = {"figure": row.claim, "published": row.published, "unit": row.unit}
    body |= {"modelled": None, "range": None, "residual": row.residual, "why": row.reason}
    if modelled is not None and modelled.value is not None:
        body["modelled"] = f"{modelled.value:.3g}"
        if modelled.low is not None and modelled.high is not None and modelled.low != modelled.high:
            body["range"] = f"{modelled.low:.3g} to {modelled.high:.3g}"
    return body


def _parameters(runs: Sequence[Run], level: int) -> list[Part]:
    sets = runs[0].facts.get("parameter_sets", [])
    if not sets:
        return []
    numbers = (
        ("handoff_us", "hand-off us"), ("packed_steps", "far steps"), ("local_gain", "local gain"),
        ("link_tb_per_s", "link TB/s"), ("release_wait_us", "wait us"),
    )  # fmt: skip
    columns = (
        ("name", "set", None), ("label", "label", None), *((key, header, "{:.4g}") for key, header in numbers),
        ("fitted_to", "fitted to", None),
    )  # fmt: skip
    return [Heading("Parameter sets of the model", level), Tabled(columns, sets)]


def _value(point: Point, name: str) -> float:
    return point.quantities[name].value or 0.0
