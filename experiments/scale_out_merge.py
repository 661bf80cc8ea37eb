"""The merged run: every rank's points side by side, each with where its card stands among all of them.

Points of two ranks are compared when arm and factors are the same once a rank's own cards are called `card` and
`peer`. Of each point one quantity is compared, its main one: a time, or a rate, of which more is faster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dieplace.conditions import differing
from dieplace.errors import UsageError
from dieplace.experiments import outliers
from dieplace.experiments.rank_end import Launch, RankEnd
from dieplace.run import Point, Quantity, Run

NAME = "scale-out"
SEED = 20261130
TIMES = ("ns", "us", "ms", "s", "SM cycles", "cycles")
RATES = ("GB/s", "TB/s", "GiB/s", "tokens/s")
# Of a card at the time of its measurement: they may explain an outlier, and are no reason to refuse a comparison.
OWN_CONDITIONS = ("core_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
MODELLED_NOTE = (
    "modelled times are of the same model on every card: they show that all ranks took part, and no card's speed"
)
_Member = tuple[RankEnd, Run, Point]


def merge(ends: Sequence[RankEnd], launch: Launch) -> list[Run]:
    """One run a block; UsageError where no rank measured anything, or ranks ran different experiments."""
    alive = [end for end in ends if not end.lost]
    if not alive:
        raise UsageError("no rank measured anything", hint="; ".join(f"rank {e.rank}: {e.why}" for e in ends))
    blocks: dict[str, list[tuple[RankEnd, Run]]] = {}
    for end in alive:
        for run in end.runs:
            blocks.setdefault(common(end, run.block), []).append((end, run))
    for key in ("experiment", "origin"):
        found = sorted({getattr(run, key) for members in blocks.values() for _, run in members})
        if len(found) > 1:
            raise UsageError(f"ranks have runs of different {key}: {', '.join(found)}", hint="give each a folder")
    return [_merged(block, members, ends, launch) for block, members in blocks.items()]


def common(end: RankEnd, text: str) -> str:
    """A text in which the rank's own cards are called `card`, and `peer` where it has a second."""
    names = ("card", "peer", *(f"card{number}" for number in range(2, 64)))
    for card, name in zip((end.cards or {}).get("cards", ()), names, strict=False):
        text = re.sub(rf"\b{re.escape(card)}\b", name, text)
    return text


def label(end: RankEnd) -> str:
    """`host0 gpu2`, `host0 gpu2+gpu3`."""
    cards = "+".join((end.cards or {}).get("cards", ())) or "no card"
    return cards if end.node is None else f"host{end.node} {cards}"


def main_quantity(run: Run, point: Point) -> tuple[str, Quantity] | None:
    """What is compared of a point: the run's headline, else its first time or rate with samples, else with a value."""
    named = {name: q for name, q in point.quantities.items() if q.value is not None and q.unit in (*TIMES, *RATES)}
    headline = run.facts.get("headline")
    if headline in named:
        return str(headline), named[str(headline)]
    sampled = [(name, q) for name, q in named.items() if q.samples and not name.startswith("control_")]
    return next(iter([*sampled, *named.items()]), None)


def _merged(block: str, members: list[tuple[RankEnd, Run]], ends: Sequence[RankEnd], launch: Launch) -> Run:
    first = members[0][1]
    points = [point for group in _groups(members) for point in _compared(group)]
    conditions = _conditions([run for _, run in members])
    hashes = sorted({str(run.code_hash) for _, run in members})
    seeds = {run.seed for _, run in members}
    return Run(
        experiment=NAME,
        block=block,
        origin=first.origin,
        source=first.source,
        points=tuple(points),
        conditions=conditions,
        workload={**first.workload, "experiment": first.experiment, "name": _name(first)},
        machine=first.machine,
        created=min(run.created for _, run in members),
        label=first.label,
        seed=first.seed if len(seeds) == 1 else None,
        seed_why=first.seed_why if len(seeds) == 1 else "ranks had different seeds",
        code_hash=first.code_hash if len(hashes) == 1 else None,
        code_hash_why=first.code_hash_why if len(hashes) == 1 else f"ranks ran different code: {', '.join(hashes)}",
        notes=_notes(members, ends),
        facts={
            "experiment": first.experiment,
            "launch_id": launch.launch_id,
            "world_size": len(ends),
            "rule": outliers.RULE,
            "ranks": [_rank_facts(end, dict((e.rank, r) for e, r in members)) for end in ends],
            "machines": _machines(members),
        },
    )


def _name(run: Run) -> str:
    name = str(run.workload["name"])
    return name if run.experiment in name else f"{run.experiment}: {name}"


def _groups(members: list[tuple[RankEnd, Run]]) -> Iterable[list[_Member]]:
    """Points that are compared with one another, each group in order of rank."""
    groups: dict[str, list[_Member]] = {}
    for end, run in members:
        for point in run.points:
            factors = {k: common(end, v) if isinstance(v, str) else v for k, v in point.factors.items()}
            key = json.dumps([point.arm, factors], sort_keys=True)
            groups.setdefault(key, []).append((end, run, replace(point, factors=factors)))
    return groups.values()


def _compared(group: list[_Member]) -> Iterator[Point]:
    """The group's points, each with `over_all_cards`, `modified_z_score` and the factors rank, host, card, outlier."""
    mains = {end.rank: main for end, run, point in group if (main := main_quantity(run, point)) is not None}
    names = {name for name, _ in mains.values()}
    samples = {str(rank): q.samples if len(q.samples) > 1 else (q.value or 0.0,) for rank, (_, q) in mains.items()}
    why = "no other rank has such a point" if len(samples) < 2 else "" if len(names) == 1 else "ranks told other things"
    found: Mapping[str, outliers.Standing] = {}
    if not why:
        rates = next(iter(mains.values()))[1].unit in RATES
        found = outliers.standings(samples, seed=SEED, rates=rates)
    for end, run, point in group:
        cards = "+".join((end.cards or {}).get("cards", ()))
        factors = {"rank": end.rank, "host": f"host{end.node}", "card": cards, **point.factors}
        standing = found.get(str(end.rank))
        factors["outlier"] = "unknown" if standing is None or standing.outlier is None else _yes(standing.outlier)
        quantities = {**point.quantities, **_standing_quantities(run.origin, standing, why or "it has no value")}
        yield replace(point, factors=factors, quantities=quantities)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _standing_quantities(origin: str, standing: outliers.Standing | None, why: str) -> dict[str, Quantity]:
    if standing is None:
        return {name: Quantity(unit, origin, None, why=why) for name, unit in _UNITS.items()}
    ratio = standing.over_all
    return {
        "over_all_cards": Quantity("x", origin, ratio.value, ratio.low, ratio.high, ratio.method, why=ratio.why),
        "modified_z_score": Quantity("sd", origin, standing.score, method=outliers.RULE, why=standing.score_why),
    }


_UNITS = {"over_all_cards": "x", "modified_z_score": "sd"}


def _conditions(runs: Sequence[Run]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in runs[0].conditions.items():
        if key.endswith("_why"):
            continue
        if all(run.conditions.get(key) == value for run in runs):
            found[key] = value
            if value is None:
                found[f"{key}_why"] = runs[0].conditions.get(f"{key}_why", "not recorded")
        else:
            found[key], found[f"{key}_why"] = None, "differs between ranks: see facts.ranks"
    return found


def _rank_facts(end: RankEnd, runs: Mapping[int, Run]) -> dict[str, Any]:
    """How the rank ended, and those of its conditions that explain a card."""
    run = runs.get(end.rank)
    body = end.to_json()
    for key in (*OWN_CONDITIONS, "host_id", "driver_version", "code_hash") if run else ():
        assert run is not None
        body[key] = run.conditions.get(key)
        if body[key] is None:
            body[f"{key}_why"] = run.conditions.get(f"{key}_why", "not recorded")
    return body


def _notes(members: list[tuple[RankEnd, Run]], ends: Sequence[RankEnd]) -> tuple[str, ...]:
    first = members[0][1]
    notes = [MODELLED_NOTE] if first.origin == "modelled" else []
    notes += [note for _, run in members for note in run.notes]
    for end, run in members[1:]:
        keys = [key for key in differing(first.conditions, run.conditions) if key not in OWN_CONDITIONS]
        if keys:
            told = ", ".join(f"{key} {first.conditions.get(key)} and {run.conditions.get(key)}" for key in keys)
            notes.append(f"rank {members[0][0].rank} and rank {end.rank} ran under unlike conditions: {told}")
    notes += [f"rank {end.rank} ({label(end)}) was cut short: {end.why}" for end in ends if not end.lost and end.why]
    notes += [lost_words(end) for end in ends if end.lost]
    return tuple(dict.fromkeys(notes))


def lost_words(end: RankEnd) -> str:
    """One sentence about a rank that is missing."""
    code = "" if end.code is None else f" (exit code {end.code})"
    return f"rank {end.rank} ({label(end)}) is lost{code}: {end.why}"


def _machines(members: list[tuple[RankEnd, Run]]) -> dict[str, Any]:
    """The machine of each further host, by name; that of the first host is the run's own."""
    found: dict[str, Any] = {}
    for end, run in members:
        if end.node != members[0][0].node:
            found.setdefault(f"host{end.node}", run.machine)
    return found
