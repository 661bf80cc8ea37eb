"""The matrices of `dieplace topo -m`: what a device reads from each domain, every value with its origin."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dieplace.cli.table import Column, Table
from dieplace.cli.topology import METRICS
from dieplace.errors import UsageError
from dieplace.machine import Device, Domain, Figure, Machine

WIDTH = 80
DISTANCE_LEGEND = "0 its own memory, 1 other memory of its card, 2 another card, 3 the host. Classes, not latencies."
SPREAD = "0* its own memory, spread over several dies: part of every read crosses to another die"


def matrix_values(found: Machine, metric: str, run_file: str | None = None) -> list[dict[str, Any]]:
    """One cell a (device, domain) pair: value or None with a why, and its origin."""
    measured = _measured(run_file, metric) if run_file else {}
    cells = []
    for device in found.devices:
        by_target = {link.target: link for link in found.links if link.initiator == device.id}
        for domain in found.domains:
            cell: dict[str, Any] = {"initiator": device.id, "target": domain.id}
            if (device.id, domain.id) in measured:
                figure = Figure(measured[device.id, domain.id], "measured", run_file or "")
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


def matrix_tables(found: Machine, metric: str, values: list[dict[str, Any]]) -> Iterator[Table | str]:
    """The cells as one or more tables of at most 80 columns, with a legend."""
    origins = sorted({cell["origin"] for cell in values if cell["value"] is not None})
    unit = "" if metric == "distance" else f" ({METRICS[metric]})"
    origin = f", {' and '.join(origins)}" if origins and metric != "distance" else ""
    yield f"{metric}{unit}: row reads from column{origin}; {found.source} node"
    if values and all(cell["value"] is None for cell in values):
        yield textwrap.fill("nothing is known of any pair, so no matrix is drawn:", WIDTH)
        yield from _reasons(values)
        return
    targets = [domain.id for domain in found.domains]
    shown = {(c["initiator"], c["target"]): _cell(c, metric) for c in values}
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


def _cell(cell: dict[str, Any], metric: str) -> str:
    value = cell["value"]
    if value is None:
        return "-"
    if metric == "distance":
        return f"{value}*" if cell.get("spread") else f"{value}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def value_table(values: list[dict[str, Any]]) -> Table:
    """The cells as one long table, for CSV."""
    return Table([Column(k, k) for k in ("initiator", "target", "value", "origin", "from", "value_why")], values)


def _measured(run_file: str, metric: str) -> dict[tuple[str, str], float]:
    """Cells of a `link` run: points with factors `initiator` and `target` and this metric's value."""
    key = {"latency": "latency_ns", "bandwidth": "bandwidth_gb_per_s"}.get(metric)
    if key is None:
        raise UsageError("a distance is not measured", hint="--from goes with -m latency or -m bandwidth")
    try:
        run = json.loads(Path(run_file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the run file {run_file!r}: {error}") from error
    cells = run.get("link_matrix") if isinstance(run, dict) else None
    found: dict[tuple[str, str], float] = {}
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and isinstance(cell.get(key), (int, float)):
            found[str(cell.get("initiator")), str(cell.get("target"))] = float(cell[key])
    if not found:
        raise UsageError(f"{run_file!r} holds no {metric} of links", hint="take one with: dieplace bench run link")
    return found
