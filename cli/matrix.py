"""The matrices of `dieplace topo -m`: what a device reads from each domain, every value with its origin."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dieplace.cli.table import Column, Table
from dieplace.cli.topology import METRICS
from dieplace.errors import UsageError
from dieplace.machine import Device, Domain, Figure, Machine

if TYPE_CHECKING:
    from dieplace.experiments.link_matrix import LinkCell
    from dieplace.run import Run

WIDTH = 80
DISTANCE_LEGEND = "0 its own memory, 1 other memory of its card, 2 another card, 3 the host. Classes, not latencies."
SPREAD = "0* its own memory, spread over several dies: part of every read crosses to another die"


@dataclass(frozen=True)
class LinkRun:
    """A `link` run, the file it came from, its cells of one metric by (device, domain), and what to say of them."""

    run: Run
    where: str
    cells: dict[tuple[str, str], LinkCell]
    notes: tuple[str, ...]


def link_run(name: str, metric: str) -> LinkRun:
    """The run that `--from` names, a file or a folder with one link run; UsageError where it has nothing to say."""
    from dieplace.cli.bench_files import load_runs, run_paths
    from dieplace.experiments.link_matrix import METRICS as MEASURED
    from dieplace.experiments.link_matrix import cells, one_link_run

    if metric not in MEASURED:
        raise UsageError("a distance is not measured", hint="--from goes with -m latency or -m bandwidth")
    loaded = [(load_runs([str(path)])[0], str(path)) for path in run_paths([name])]
    run = one_link_run([one for one, _ in loaded], name)
    where = next(path for one, path in loaded if one is run)
    found = cells(run, metric)
    if not found:
        raise UsageError(f"{where} holds no {metric} of memory", hint="take one with: dieplace bench run link")
    return LinkRun(run, where, {(cell.reader, cell.home): cell for cell in found}, _notes(run, found, where))


def _notes(run: Run, found: tuple[LinkCell, ...], where: str) -> tuple[str, ...]:
    sets = sorted({cell.working_set_bytes for cell in found})
    sizes = " and ".join(f"{size >> 20:,} MiB" for size in sets)
    halves = [
        (c.quantity.high - c.quantity.low) / 2 / c.quantity.value
        for c in found
        if c.quantity.value and c.quantity.low is not None and c.quantity.high is not None
    ]
    spread = f", 95 % intervals within {max(halves):.1%}" if halves else ""
    return (
        f"{run.origin} by {where} on {run.created[:10]}: medians over {sizes}, cold{spread}",
        *run.notes,
    )


def matrix_values(found: Machine, metric: str, taken: LinkRun | None = None) -> list[dict[str, Any]]:
    """One cell a (device, domain) pair: value or None with a why, and its origin."""
    cells = []
    for device in found.devices:
        by_target = {link.target: link for link in found.links if link.initiator == device.id}
        for domain in found.domains:
            cell: dict[str, Any] = {"initiator": device.id, "target": domain.id}
            taken_here = taken.cells.get((device.id, domain.id)) if taken else None
            if taken and taken_here:
                quantity = taken_here.quantity
                figure = Figure(quantity.value, quantity.origin, taken.where)
                cell |= {"low": quantity.low, "high": quantity.high}
                cell["working_set_bytes"] = taken_here.working_set_bytes
            elif metric == "distance":
                figure = Figure(float(_distance(device, domain)), "reported", "topology")
                cell["spread"] = domain.id == device.domain and not device.local_guaranteed
            else:
                figure = _reported(found, device, domain, by_target, metric)
            value = int(figure.value) if metric == "distance" and figure.value is not None else figure.value
            cell |= {"value": value, "origin": figure.origin, "from": figure.source}
            if value is None:
                cell["value_why"] = figure.why
            cells.append(cell)
    return cells


def _distance(device: Device, domain: Domain) -> int:
    if domain.card is None:
        return 3
    if domain.card != device.card:
        return 2
    return 0 if domain.id == device.domain else 1


def _reported(found: Machine, device: Device, domain: Domain, links: dict[str, Any], metric: str) -> Figure:
    """What the driver reports for the link to the domain's devices, or why it says nothing."""
    if domain.id == device.domain:
        return Figure(None, "reported", "", "no driver reports a device's own memory")
    if domain.card is None:
        targets = [domain.id]
    else:
        targets = [d.id for d in found.devices_of(domain.card) if d.domain == domain.id]
    figures = [getattr(links[target], metric) for target in targets if target in links]
    if not figures:
        return Figure(None, "reported", "", "the driver lists no link")
    known = [figure for figure in figures if figure.value is not None]
    return known[0] if known else figures[0]


def matrix_tables(
    found: Machine, metric: str, values: list[dict[str, Any]], taken: LinkRun | None = None
) -> Iterator[Table | str]:
    """The cells as one or more tables of at most 80 columns, with a legend."""
    origins = sorted({cell["origin"] for cell in values if cell["value"] is not None})
    unit = "" if metric == "distance" else f" ({METRICS[metric]})"
    origin = f", {' and '.join(origins)}" if origins and metric != "distance" else ""
    yield f"{metric}{unit}: row reads from column{origin}; {found.source} node"
    if not values:
        none = "no device" if not found.devices else "no memory domain"
        why = "; host memory is read by CPUs, which are no devices" if found.backend == "cpu" else ""
        yield textwrap.fill(f"there is {none} on this node{why}: no matrix is drawn", WIDTH)
        return
    if all(cell["value"] is None for cell in values):
        yield textwrap.fill("nothing is known of any pair, so no matrix is drawn:", WIDTH)
        yield from _reasons(values)
        return
    targets = [domain.id for domain in found.domains]
    mixed = len(origins) > 1 and metric != "distance"
    shown = {(c["initiator"], c["target"]): _cell(c, metric, mixed=mixed) for c in values}
    first = max((len(device.id) for device in found.devices), default=6)
    wide = max([2, *(len(text) for text in shown.values())])
    step = max(1, (WIDTH - first) // (wide + 2))
    names = {target: f"{index}" for index, target in enumerate(targets)}
    for start in range(0, len(targets), step):
        chosen = targets[start : start + step]
        columns = [Column("id", "device"), *(Column(t, names[t], right=True) for t in chosen)]
        rows = [{"id": d.id, **{t: shown.get((d.id, t)) for t in chosen}} for d in found.devices]
        yield Table(columns, rows)
    yield "columns: " + _numbered(targets)
    if mixed:
        yield textwrap.fill("r  reported by the driver; the others are the run's", WIDTH)
    for note in taken.notes if taken else ():
        yield textwrap.fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if metric == "distance":
        yield textwrap.fill(DISTANCE_LEGEND, WIDTH)
        if any(cell.get("spread") for cell in values):
            yield textwrap.fill(SPREAD, WIDTH, subsequent_indent="   ")
    yield from _reasons(values)


def _reasons(values: list[dict[str, Any]]) -> Iterator[str]:
    """Why cells are `-`, each reason once."""
    for why in dict.fromkeys(cell["value_why"] for cell in values if cell["value"] is None):
        yield textwrap.fill(f"-  {why}", WIDTH, subsequent_indent="   ")


def _numbered(targets: list[str]) -> str:
    """`0 gpu0/mem0  1 gpu0/mem1 ...` over lines of at most 80 columns."""
    lines, line = [], ""
    for index, target in enumerate(targets):
        item = f"{index} {target}"
        if len(line) + len(item) + 2 > WIDTH - 9:
            lines.append(line)
            line = ""
        line += f"{'  ' if line else ''}{item}"
    return ("\n" + " " * 9).join([*lines, line])


def _cell(cell: dict[str, Any], metric: str, *, mixed: bool) -> str:
    value = cell["value"]
    if value is None:
        return "-"
    if metric == "distance":
        return f"{value}*" if cell.get("spread") else f"{value}"
    mark = ("r" if cell["origin"] == "reported" else " ") if mixed else ""
    return (f"{value:.0f}" if value >= 100 else f"{value:.1f}") + mark


def value_table(values: list[dict[str, Any]]) -> Table:
    """The cells as one long table, for CSV."""
    keys = ("initiator", "target", "value", "low", "high", "origin", "from", "value_why")
    return Table([Column(key, key) for key in keys], values)
