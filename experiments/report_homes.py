"""The section of a report that shows where the bytes of measured arms lay: a picture of the GPUs or dies an arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dieplace.experiments.charts_places import Held, Place, places
from dieplace.experiments.live_table import arm_words, points_of
from dieplace.experiments.markup import show_bytes
from dieplace.experiments.report_parts import Drawn, Folded, Heading, Part, Said, Tabled
from dieplace.experiments.report_sections import MOST_OPEN, ROLE_WORDS
from dieplace.run import Point, Run


def sections(runs: Sequence[Run], level: int) -> list[Part]:
    """A picture an arm, empty where no arm was audited."""
    parts: list[Part] = []
    for run, point in points_of(runs):
        by_role = (point.residency_before or {}).get("bytes_by_role_and_domain")
        if not isinstance(by_role, Mapping) or not by_role:
            continue
        found = list(_places(run, point, by_role))
        evidence, moved = ((point.residency_before or {}).get(key) for key in ("evidence", "moved_evidence"))
        apart = f"what moves is {moved}, the rest " if moved and moved != evidence else ""
        title = f"{arm_words(run, point, runs)}{_rank_words(point)}: {apart}{evidence}"
        link = _crossing(point)
        picture = places(found, link=link, describe=f"bytes by home, {point.arm}")
        instead = [_table(by_role)] if "rank" in point.factors else []  # other runs have a table of all of their arms
        told = [Said(link.replace("\n", " "))] if link else []
        parts += [Heading(title, level + 1), Drawn(picture, (*told, *instead))]
    if not parts:
        return []
    most = 2 * MOST_OPEN
    rest = [Folded("more arms", tuple(parts[most:]), of_page=True)] if len(parts) > most else []
    return [Heading(f"Where the bytes lay, from the audit ({runs[0].source})", level), *parts[:most], *rest]


def _table(by_role: Mapping[str, Mapping[str, Any]]) -> Tabled:
    rows = [
        {"role": ROLE_WORDS.get(role, role), "home": home, "size": show_bytes(nbytes)}
        for role, homes in by_role.items()
        for home, nbytes in homes.items()
    ]
    return Tabled((("role", "role", None), ("home", "lies in", None), ("size", "bytes", "{}")), rows)


def _rank_words(point: Point) -> str:
    """Of a point of one rank of several: which, and its card."""
    rank, card = point.factors.get("rank"), point.factors.get("card")
    host = f"{point.factors['host']} " if point.factors.get("host") else ""
    return "" if rank is None else f", rank {rank} on {host}{card}"


def _places(run: Run, point: Point, by_role: Mapping[str, Mapping[str, Any]]) -> Iterator[Place]:
    """The memory of every visible GPU or die, with what lay in it; host memory only where something did.

    Of a rank only the memory of its own cards: the others' is not what its audit looked at.
    """
    visible = run.facts.get("visible")
    own_cards = str(point.factors["card"]).split("+") if "card" in point.factors else None
    used = dict.fromkeys(home for homes in by_role.values() for home in homes)
    part_of = {card["id"]: card.get("part") for card in run.machine.get("cards", ())}
    one_reader = run.workload.get("shards") == 1
    for domain in run.machine.get("domains", ()):
        devices = [d["id"] for d in run.machine.get("devices", ()) if d.get("domain") == domain["id"]]
        seen = bool(devices) and (visible is None or bool(set(devices) & set(visible)))
        elsewhere = own_cards is not None and domain.get("card") not in own_cards
        if domain["id"] not in used and (not seen or elsewhere):
            continue
        computing = _computes(run, devices) if one_reader else devices
        name = str(part_of.get(domain.get("card")) or "").removeprefix("NVIDIA ")
        told = f"computes: {', '.join(computing)}" if computing else ""
        memory = "host memory" if domain.get("card") is None else "its HBM"
        yield Place(f"{domain['id']} {name}".strip(), told, _held(by_role, domain["id"]), memory=memory)
    known = {domain["id"] for domain in run.machine.get("domains", ())}
    for home in (home for home in used if home not in known):
        yield Place(home, "", _held(by_role, home), memory="this memory")


def _held(by_role: Mapping[str, Mapping[str, Any]], home: str) -> tuple[Held, ...]:
    found = ((role, homes.get(home)) for role, homes in by_role.items())
    return tuple(Held(ROLE_WORDS.get(role, role), "", show_bytes(nbytes)) for role, nbytes in found if nbytes)


def _computes(run: Run, devices: Sequence[str]) -> list[str]:
    """Of one shard, the device that ran it: named by the run, else the first in the runtime's order."""
    named = run.facts.get("executing")
    if isinstance(named, (list, tuple)):
        return [device for device in devices if device in named]
    indexed = [
        (d["runtime_index"], d["id"]) for d in run.machine.get("devices", ()) if d.get("runtime_index") is not None
    ]
    return [device for device in devices if indexed and device == min(indexed)[1]]


def _crossing(point: Point) -> str:
    far = point.factors.get("bytes_read_far", point.factors.get("moved_bytes_per_layer"))
    if not isinstance(far, (int, float)):
        return ""
    return f"{show_bytes(far)} a layer\ncross the link"
