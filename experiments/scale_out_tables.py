"""Tables and sentences of a merged run: the cards against all of them, how far they spread, and which one is odd."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dieplace.experiments import outliers
from dieplace.experiments.charts import Bar
from dieplace.experiments.live_table import LiveTable
from dieplace.experiments.scale_out_merge import main_quantity
from dieplace.run import Point, Quantity, Run

_PLACE = ("rank", "host", "card", "outlier")
_QUIET = ("cache", "directions", "roles_moved", "bytes_per_token_by_role")
Row = dict[str, Any]


def tables(runs: Sequence[Run]) -> list[LiveTable]:
    """The ranks, the cards in the main comparisons, and the spread of every comparison.

    Modelled times say nothing about cards, so that of those the middle one is left out.
    """
    cards = [] if runs[0].origin == "modelled" else [_cards_table(runs)]
    return [_ranks_table(runs), *cards, _spread_table(runs)]


def sentences(runs: Sequence[Run]) -> list[str]:
    """Which cards are odd, or how far all of them lie apart; then the ranks that are missing."""
    said: list[str] = []
    for run in runs:
        where = f"{run.origin}: {run.block}: " if len(runs) > 1 else f"{run.origin}: "
        groups = [group for _, group in _groups(run) if _main(run, group)]
        odd = [point for group in groups for point in group if point.factors["outlier"] == "yes"]
        said += [f"{where}{_odd_words(run, point, groups)}" for point in odd]
        if not odd:
            said += [f"{where}{words}" for words in _even_words(run, groups)]
    lost = {rank["rank"]: rank for run in runs for rank in run.facts["ranks"] if rank["state"] == "lost"}
    return said + [_lost_words(rank) for rank in lost.values()]


def drawn_points(run: Run, runs: Sequence[Run]) -> Iterator[tuple[str, str, Point]]:
    """What a report draws the samples of: each card in each main comparison, with its words and its quantity's name."""
    for group in (group for _, group in _groups(run) if _main(run, group)):
        for point in group:
            found = main_quantity(run, point)
            if found is not None:
                yield f"{_card(point)}: {_run_words(run, runs)}{_what(run, point)}", found[0], point


def _run_words(run: Run, runs: Sequence[Run]) -> str:
    """The block before what it compared, where several are shown together."""
    return f"{run.block} " if len(runs) > 1 else ""


def _run_column(runs: Sequence[Run]) -> tuple[tuple[str, str, str | None], ...]:
    return (("run", "run", None),) if len(runs) > 1 else ()


def _odd_words(run: Run, point: Point, groups: Sequence[Sequence[Point]]) -> str:
    ratio, score = point.quantities["over_all_cards"], point.quantities["modified_z_score"]
    count = next(len(_standing(group)) for group in groups if point in group)
    how = "infinite: " + str(score.why) if score.value is None else f"{score.value:+.1f}"
    return (
        f"{_card(point)} (rank {point.factors['rank']}) is an outlier, {_off(ratio)} the median of {count} cards in"
        f" {_what(run, point)} (modified z-score {how}, limit {outliers.SCORE_LIMIT:g})"
    )


def _even_words(run: Run, groups: Sequence[Sequence[Point]]) -> Iterator[str]:
    spreads = [(_spread(group), group) for group in groups if len(_standing(group)) > 1]
    if not spreads:
        yield "nothing to compare: one rank measured"
        return
    (low, high), group = max(spreads, key=lambda found: found[0][1] - found[0][0])
    cards = len(_standing(group))
    wide = f"{(low - 1) * 100:+.1f} % to {(high - 1) * 100:+.1f} % of their median in {_what(run, group[0])}"
    if cards < outliers.MIN_CARDS:
        yield f"{cards} cards lie within {wide}; of fewer than {outliers.MIN_CARDS} none can be called the odd one"
    else:
        yield f"no outlier among {cards} cards: they lie within {wide}"


def _off(ratio: Quantity) -> str:
    value = ratio.value or 1.0
    word, sign = ("slower than", 1) if value > 1 else ("faster than", -1)
    text = f"{sign * (value - 1) * 100:.1f} %"
    if ratio.low is not None and ratio.high is not None:
        ends = sorted(sign * (end - 1) * 100 for end in (ratio.low, ratio.high))
        text += f" [{ends[0]:.1f}, {ends[1]:.1f}]"
    return f"{text} {word}"


def _lost_words(rank: Mapping[str, Any]) -> str:
    where = " ".join(str(part) for part in (rank["host"], "+".join(rank["cards"])) if part)
    code = "" if rank["exit_code"] is None else f" (exit code {rank['exit_code']})"
    return f"rank {rank['rank']}{f' on {where}' if where else ''} is lost{code}: {rank.get('why')}"


def _groups(run: Run) -> Iterator[tuple[str, list[Point]]]:
    """Points that were compared with one another."""
    found: dict[str, list[Point]] = {}
    for point in run.points:
        factors = {key: value for key, value in point.factors.items() if key not in _PLACE}
        found.setdefault(json.dumps([point.arm, factors], sort_keys=True), []).append(point)
    yield from found.items()


def _main(run: Run, group: Sequence[Point]) -> bool:
    """Of points by working set the largest of each kind; of others all."""
    size = group[0].factors.get("working_set_bytes")
    kind = group[0].factors.get("what")
    same = [p.factors["working_set_bytes"] for p in run.points if "working_set_bytes" in p.factors]
    kinds = [p.factors["working_set_bytes"] for p in run.points if kind and p.factors.get("what") == kind]
    return size is None or bool(size == max(kinds or same))


def _standing(group: Sequence[Point]) -> list[Point]:
    return [point for point in group if point.quantities["over_all_cards"].value is not None]


def _spread(group: Sequence[Point]) -> tuple[float, float]:
    ratios = [point.quantities["over_all_cards"].value or 1.0 for point in _standing(group)]
    return min(ratios), max(ratios)


def _card(point: Point) -> str:
    return f"{point.factors['host']} {point.factors['card']}"


def _what(run: Run, point: Point) -> str:
    """`read near, 1024 MiB`: the arm and what else tells this comparison from the run's others."""
    words = [str(point.factors["what"])] if "what" in point.factors else []
    words.append(point.arm)
    if "working_set_bytes" in point.factors:
        words.append(_size(point.factors["working_set_bytes"]))
    known = (*_PLACE, *_QUIET, "what", "reader", "working_set_bytes")
    varying = {k for p in run.points for k, v in p.factors.items() if k not in known and v != point.factors.get(k)}
    words += [f"{key} {point.factors[key]}" for key in point.factors if key in varying]
    return " ".join(words)


def _size(nbytes: int) -> str:
    name, shift = next(
        (n, s) for n, s in (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)) if nbytes >= 1 << s or not s
    )
    return f"{nbytes >> shift:,} {name}"


def _cards_table(runs: Sequence[Run]) -> LiveTable:
    rows: list[Row] = []
    bars: list[Bar] = []
    for run in runs:
        for group in (group for _, group in _groups(run) if _main(run, group)):
            for point in _standing(group):
                rows.append(_card_row(run, point))
                bars.append(_bar(run, point, runs))
    columns = (
        *_run_column(runs),
        ("what", "what", None), ("rank", "rank", None), ("card", "card", None), ("value", "median", None),
        ("ratio", "x all [95 %]", None), ("score", "score", "{:+.1f}"), ("outlier", "outlier", None),
    )  # fmt: skip
    note = (
        "x all: the card's time over the median of all cards' (of rates the inverse): over 1 is slower."
        f" Outlier: {outliers.RULE}; of fewer than {outliers.MIN_CARDS} cards none is called one."
    )
    return LiveTable(f"Each card against all, {runs[0].origin}", columns, tuple(rows), note, tuple(bars), unit="x")


def _card_row(run: Run, point: Point) -> Row:
    found = main_quantity(run, point)
    name, quantity = found if found is not None else ("", Quantity("", run.origin, None, why="no value"))
    ratio, score = point.quantities["over_all_cards"], point.quantities["modified_z_score"]
    return {
        "run": run.block,
        "what": _what(run, point),
        "quantity": name,
        "rank": point.factors["rank"],
        "host": point.factors["host"],
        "card": point.factors["card"] if _one_host(run) else _card(point),
        "median": quantity.value,
        "median_low": quantity.low,
        "median_high": quantity.high,
        "unit": quantity.unit,
        "value": "-" if quantity.value is None else f"{quantity.value:,.1f} {quantity.unit}",
        "over_all_cards": ratio.value,
        "over_all_cards_low": ratio.low,
        "over_all_cards_high": ratio.high,
        "ratio": _ranged(ratio, "{:.3f}"),
        "score": score.value,
        **({} if score.value is not None else {"score_why": score.why}),
        "outlier": point.factors["outlier"],
    }


def _one_host(run: Run) -> bool:
    return len({point.factors["host"] for point in run.points}) == 1


def _bar(run: Run, point: Point, runs: Sequence[Run]) -> Bar:
    ratio = point.quantities["over_all_cards"]
    odd = ", outlier" if point.factors["outlier"] == "yes" else ""
    text = f"x {ratio.value:.3f}{odd}"
    label = f"{_card(point)}: {_run_words(run, runs)}{_what(run, point)}"
    return Bar(label, ratio.value or 0.0, ratio.low, ratio.high, (), text)


def _ranged(quantity: Quantity, form: str) -> str:
    if quantity.value is None:
        return "-"
    text = form.format(quantity.value)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} [{form.format(quantity.low)}, {form.format(quantity.high)}]"


def _spread_table(runs: Sequence[Run]) -> LiveTable:
    rows = []
    for run in runs:
        for _, group in _groups(run):
            compared = _standing(group)
            if len(compared) < 2:
                continue
            ranked = sorted(compared, key=lambda point: point.quantities["over_all_cards"].value or 0.0)
            rows.append(
                {
                    "run": run.block,
                    "what": _what(run, group[0]),
                    "cards": len(compared),
                    "fastest": _card(ranked[0]),
                    "slowest": _card(ranked[-1]),
                    "spread_percent": (_spread(group)[1] / _spread(group)[0] - 1) * 100,
                    "outliers": ", ".join(_card(p) for p in compared if p.factors["outlier"] == "yes"),
                }
            )
    columns = (
        *_run_column(runs),
        ("what", "what", None), ("cards", "cards", "{}"), ("fastest", "fastest", None), ("slowest", "slowest", None),
        ("spread_percent", "spread %", "{:.1f}"), ("outliers", "outliers", None),
    )  # fmt: skip
    note = "Spread: the slowest card's time over the fastest one's."
    return LiveTable(f"Spread of the cards in every comparison, {runs[0].origin}", columns, tuple(rows), note)


def _ranks_table(runs: Sequence[Run]) -> LiveTable:
    rows = []
    for rank in {r["rank"]: r for run in runs for r in run.facts["ranks"]}.values():
        rows.append(
            {
                "rank": rank["rank"],
                "host": rank["host"],
                "card": "+".join(rank["cards"]),
                "bdf": " ".join(rank["bdfs"]),
                "part": ", ".join(dict.fromkeys(rank["parts"])),
                "state": rank["state"],
                "exit_code": rank["exit_code"],
                "core_clock_mhz": rank.get("core_clock_mhz"),
                "power_w": rank.get("power_w"),
                "temperature_c": rank.get("temperature_c"),
                "why": rank.get("why", ""),
            }
        )
    columns = (
        ("rank", "rank", None), ("host", "host", None), ("card", "card", None), ("part", "part", None),
        ("state", "state", None), ("exit_code", "exit", "{}"), ("core_clock_mhz", "MHz", "{:.0f}"),
        ("power_w", "W", "{:.0f}"), ("temperature_c", "C", "{:.0f}"), ("why", "why", None),
    )  # fmt: skip
    read = any(row[key] is not None for row in rows for key in ("core_clock_mhz", "power_w", "temperature_c"))
    note = "Clock, power and temperature: right after the rank's measurement." if read else ""
    return LiveTable("Ranks", columns, tuple(rows), note)
