"""Near and far memory as a matrix: what each device read from each domain in a `link` run, and whose machine it was.

`dieplace topo --from RUN` and the report draw these cells. A cell is the largest working set of its pair, so that what
stands there is memory and no cache; a run that never left the caches gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.errors import Incomparable, UsageError
from dieplace.machine import Machine
from dieplace.run import Point, Quantity, Run

# The metric's kind of point and its quantity: reads are the rate of a row, copies move bytes both ways.
METRICS = {"latency": ("latency", "latency_ns"), "bandwidth": ("read", "gb_per_s")}
_CARD_KEYS = ("bdf", "part", "device_id", "mode", "hbm_bytes", "uuid", "unique_id")
_DEVICE_KEYS = ("bdf", "domain", "cus", "local_guaranteed", "unique_id")


@dataclass(frozen=True)
class LinkCell:
    """One (reader, home) pair: a device id, a domain id, and the quantity with its samples."""

    reader: str
    home: str
    quantity: Quantity
    working_set_bytes: int

    @property
    def near(self) -> bool:
        """Whether the domain is of the reader's own card."""
        return self.reader.partition("/")[0] == self.home.partition("/")[0]


def cells(run: Run, metric: str) -> tuple[LinkCell, ...]:
    """Cells of one metric, `latency` (ns) or `bandwidth` (GB/s of reads), in order of the run's points.

    UsageError for a run of another experiment. A pair whose points are all warm or without a value has no cell.
    """
    if run.experiment != "link":
        raise UsageError(
            f"a {run.experiment} run holds no {metric} of links", hint="take one with: dieplace bench run link"
        )
    what, name = METRICS[metric]
    best: dict[tuple[str, str], LinkCell] = {}
    for point in run.points:
        factors, quantity = point.factors, point.quantities.get(name)
        if factors.get("what") != what or factors.get("directions") != "one" or factors.get("cache") != "cold":
            continue
        home = _home(run, point)
        if quantity is None or quantity.value is None or home is None:
            continue
        cell = LinkCell(str(factors["reader"]), home, quantity, int(factors["working_set_bytes"]))
        known = best.get((cell.reader, home))
        if known is None or known.working_set_bytes < cell.working_set_bytes:
            best[cell.reader, home] = cell
    return tuple(best.values())


def _home(run: Run, point: Point) -> str | None:
    """The domain that a point read: named by its factors, else by its arm; None where the arm names no one place."""
    domain_of = {device["id"]: device.get("domain") for device in run.machine.get("devices", ())}
    reader, named = point.factors["reader"], point.factors.get("home")
    if point.arm == "near":
        return domain_of.get(reader)
    if point.arm == "far" and isinstance(named, str):
        return domain_of.get(named) or named
    readers = run.facts.get("visible") or list(domain_of)
    others = [name for name in readers if name != reader]
    # The far memory of `link` is the first other device's, as the experiment chooses it.
    return domain_of.get(others[0]) if point.arm == "far" and others else None


def one_link_run(runs: Iterable[Run], where: str) -> Run:
    """The `link` run among them; UsageError where there is none or more than one."""
    found = [run for run in runs if run.experiment == "link"]
    if not found:
        raise UsageError(f"{where} holds no link run", hint="take one with: dieplace bench run link")
    if len(found) > 1:
        blocks = ", ".join(run.block for run in found)
        raise UsageError(f"{where} holds {len(found)} link runs ({blocks})", hint="name one run file")
    return found[0]


def machine_of(run: Run) -> Machine:
    """The machine that the run recorded; its source is `replayed`."""
    return Machine.from_json(dict(run.machine))


def require_same_machine(run: Run, machine: Machine, where: str) -> None:
    """Incomparable (exit 2) naming every key by which `machine` is not the one that the run was taken on.

    Serial numbers are compared where both sides have them: run files leave them out.
    """
    differing = list(_differing(run, machine))
    if not differing:
        return
    keys = [key for key, _, _ in differing]
    shown = "; ".join(f"{key}: {theirs} there, {ours} here" for key, theirs, ours in differing[:4])
    more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
    raise Incomparable(
        f"{where} was taken on another machine: {shown}{more}",
        hint=f"see that machine's own matrix with: dieplace --backend replayed --node {where} topo -m ... --from ...",
        differing=keys,
    )


def _differing(run: Run, machine: Machine) -> Iterable[tuple[str, Any, Any]]:
    here = machine.to_json()
    if machine.source not in ("replayed", run.source):
        yield "source", run.source, machine.source
    for group, keys in (("cards", _CARD_KEYS), ("devices", _DEVICE_KEYS)):
        theirs, ours = _by_id(run.machine.get(group, ())), _by_id(here[group])
        if list(theirs) != list(ours):
            yield f"{group}.id", _listed(theirs), _listed(ours)
            continue
        for name in theirs:
            for key in keys:
                one, other = theirs[name].get(key), ours[name].get(key)
                if one != other and None not in (one, other):
                    yield f"{group}.{name}.{key}", one, other


def _by_id(items: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(item["id"]): item for item in items}


def _listed(found: Mapping[str, Any]) -> str:
    names = list(found)
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"
