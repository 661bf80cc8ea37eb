"""`dieplace list` and `dieplace topo`: what there is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.options import DRAWINGS, FORMATS, machine, settings
from dieplace.cli.table import Column, Table
from dieplace.errors import NoBackend

if TYPE_CHECKING:
    from dieplace.cli.matrix import LinkRun
    from dieplace.machine import Card, Device, Domain, Machine

METRICS = {"latency": "ns", "bandwidth": "GB/s", "distance": "class"}
ORDER_NOTE = "note: die numbers follow the driver's XCD order; the physical order was not read"


@click.command("list")
@click.pass_context
def list_devices(ctx: click.Context) -> None:
    """List the logical devices, one line each: what it has and where its memory is."""
    found = machine(ctx, links=False)
    rows = [device_row(found, device) for device in found.devices]
    payload = {
        "backend": found.backend,
        "devices": rows,
        "cards": [card_row(card) for card in found.cards],
        "domains": [domain_row(domain) for domain in found.domains],
        "notes": list(found.notes),
    }
    render.answer(
        ctx,
        "list/1",
        payload,
        source=found.source,
        table=lambda: _list_body(found, rows),
        csv_table=lambda: [Table([Column(key, key) for key in _CSV_KEYS], rows)],
    )


def _list_body(found: Machine, rows: list[dict[str, Any]]) -> Iterator[Table | str]:
    notes = [f"note: {note}" for note in found.notes]
    if not rows:
        yield Table(_DOMAIN_COLUMNS, [domain_row(d) for d in found.domains], title_of(found), notes)
        return
    several = len({row["part"] for row in rows}) > 1
    shown = _NVIDIA_COLUMNS if is_nvidia(found.cards[0]) else _DEVICE_COLUMNS
    columns = [column for column in shown if column.key != "part" or several]
    yield Table(columns, rows, title_of(found), [*_dashes(columns, rows), *notes])


def _dashes(columns: list[Column], rows: list[dict[str, Any]]) -> list[str]:
    """Why a cell is `-`, each reason once, with the columns it stands in."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for column in columns:
            if row[column.key] is None:
                reasons.setdefault(row[f"{column.key}_why"], {})[column.header] = None
    return [f"- in {', '.join(headers)}: {why}" for why, headers in reasons.items()]


def device_row(found: Machine, device: Device) -> dict[str, Any]:
    """A device as plain data with the keys of `list --json`; unknown values have a `..._why` beside them."""
    card = found.card(device.card)
    count = len(found.devices_of(card.id))
    row: dict[str, Any] = {
        "id": device.id,
        "card": device.card,
        "part": card.part,
        "mode": str(card.mode) if card.mode else None,
        "share": "whole card" if device.whole_card else f"{device.partition + 1} of {count}",
        "xcds": device.xccs,
        "cus": device.cus,
        "hbm_bytes": device.memory_limit_bytes,
        "domain": device.domain,
        "dies": list(device.dies) or None,
        "local_guaranteed": device.local_guaranteed,
        "bdf": device.bdf,
        "numa_node": device.numa_node,
        "render_node": device.render_node,
        "runtime_index": device.runtime_index,
        "kfd_node": device.kfd_node,
        "gpu_id": device.gpu_id,
        "unique_id": device.unique_id,
        "aliases": list(device.aliases),
    }
    own = {"xccs": "xcds", "memory_limit_bytes": "hbm_bytes"}
    return with_whys(row, {own.get(key, key): why for key, why in {**card.whys, **device.whys}.items()})


def card_row(card: Card) -> dict[str, Any]:
    """A card as plain data."""
    row = {
        "id": card.id,
        "bdf": card.bdf,
        "part": card.part,
        "mode": str(card.mode) if card.mode else None,
        "xcds": card.xccs,
        "cus": card.cus,
        "hbm_bytes": card.hbm_bytes,
        "dies": card.dies,
        "stacks_per_die": card.stacks_per_die,
        "numa_node": card.numa_node,
        "hive": card.hive,
        "gfx": card.gfx,
        "uuid": card.uuid,
    }
    return with_whys(row, {"xcds" if key == "xccs" else key: why for key, why in card.whys.items()})


def domain_row(domain: Domain) -> dict[str, Any]:
    """A domain as plain data."""
    row = {
        "id": domain.id,
        "card": domain.card,
        "dies": list(domain.dies) or None,
        "total_bytes": domain.total_bytes,
        "numa_node": domain.numa_node,
        "aliases": list(domain.aliases),
    }
    return with_whys(row, domain.whys)


def with_whys(row: dict[str, Any], whys: dict[str, str]) -> dict[str, Any]:
    """The row with `KEY_why` beside each None."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        out[key] = value
        if value is None:
            out[f"{key}_why"] = whys.get(key, "does not apply here")
    return out


def is_nvidia(card: Card) -> bool:
    """Whether a card is NVIDIA's, live or replayed: its mode, XCDs and render node are then not worth a column."""
    return (card.part or "").startswith("NVIDIA")


def title_of(found: Machine) -> str:
    """One line: what the node is, and whether it is a real one."""
    kinds: dict[str, int] = {}
    for card in found.cards:
        mode = card.mode or (None if is_nvidia(card) else "an unknown mode")
        text = f"{card.part or 'unknown part'}" + (f" in {mode}" if mode else "")
        kinds[text] = kinds.get(text, 0) + 1
    what = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    where = f"{found.source} node" + (f" ({found.backend})" if found.backend != found.source else "")
    if not found.cards:
        return f"{where}: no cards, {render.count_of(len(found.domains), 'host domain')}"
    return f"{where}: {what}, {render.count_of(len(found.devices), 'logical device')}"


@click.command("topo")
@click.option("-m", "--matrix", type=click.Choice(METRICS), help="A matrix: row reads from column.")
@click.option("--from", "run_file", metavar="RUN", help="Take measured values from this run file (with -m).")
@click.option("-o", "--output", type=click.Choice(FORMATS + DRAWINGS), help="Form of the answer; svg is a drawing.")
@click.pass_context
def topo(ctx: click.Context, matrix: str | None, run_file: str | None, output: str | None) -> None:
    """Show the node as a tree, as a matrix (-m) or as a drawing (-o svg)."""
    if output:
        settings(ctx).output = output
    if run_file and matrix is None:
        raise click.UsageError("--from needs -m latency or -m bandwidth")
    if matrix is not None:
        _matrix(ctx, matrix, run_file)
        return
    found = machine(ctx)
    from dieplace.cli.drawing import draw

    payload = {key: value for key, value in found.to_json().items() if key not in ("schema", "source")}
    render.answer(
        ctx,
        "topo/1",
        payload,
        source=found.source,
        table=lambda: _tree(found),
        csv_table=lambda: [Table(_LINK_COLUMNS, _link_rows(found))],
        svg=lambda: draw(found, title_of(found)),
    )


def _matrix(ctx: click.Context, metric: str, run_file: str | None) -> None:
    from dieplace.cli.matrix import link_run, matrix_tables, matrix_values, value_table

    taken = link_run(run_file, metric) if run_file else None
    found = _machine_of(ctx, taken) if taken else machine(ctx)
    values = matrix_values(found, metric, taken)
    payload: dict[str, Any] = {
        "metric": metric,
        "unit": METRICS[metric],
        "direction": "row reads from column",
        "cells": values,
    }
    if taken:
        payload |= {"run": taken.where, "notes": list(taken.notes)}
    render.answer(
        ctx,
        "topo-matrix/1",
        payload,
        source=found.source,
        table=lambda: matrix_tables(found, metric, values, taken),
        csv_table=lambda: [value_table(values)],
    )


def _machine_of(ctx: click.Context, taken: LinkRun) -> Machine:
    """The node at hand, which must be the run's own; where there is no accelerator here, the one the run recorded."""
    from dieplace.experiments.link_matrix import machine_of, require_same_machine

    try:
        found = machine(ctx)
    except NoBackend:
        if settings(ctx).backend is not None:
            raise
        return machine_of(taken.run)
    require_same_machine(taken.run, found, taken.where)
    return found


def _tree(found: Machine) -> Iterator[str]:
    """The node as lines: CPU node, card, domain, device."""
    yield title_of(found)
    nodes: list[int | None] = [d.numa_node for d in found.domains if d.card is None]
    nodes += [n for n in dict.fromkeys(card.numa_node for card in found.cards) if n not in nodes]
    for node in nodes:
        host = next((d for d in found.domains if d.card is None and d.numa_node == node), None)
        size = f"  {render.amount(host.total_bytes)}" if host else ""
        yield f"{host.id if host else 'no CPU node known'}{size}"
        yield from _branches([_card_branch(found, card) for card in found.cards if card.numa_node == node])
    for note in found.notes:
        yield textwrap.fill(f"note: {note}", 80, subsequent_indent="  ")
    if any(card.dies and card.dies > 1 for card in found.cards):
        yield ORDER_NOTE


Branch = tuple[str, list[Any]]


def _card_branch(found: Machine, card: Card) -> Branch:
    mode = "" if is_nvidia(card) else f"{card.mode or 'mode unknown'}  "
    head = f"{card.id}  {card.part or 'unknown part'}  {card.bdf}  {mode}{render.amount(card.hbm_bytes)}"
    domains = found.domains_of(card.id)
    children: list[Branch] = [_domain_branch(found, domain) for domain in domains]
    children += [_device_branch(d) for d in found.devices_of(card.id) if d.domain is None]
    return head, children


def _domain_branch(found: Machine, domain: Domain) -> Branch:
    dies = f"die{'s' if len(domain.dies) > 1 else ''} {','.join(map(str, domain.dies))}  " if domain.dies else ""
    head = f"{domain.id}  {dies}{render.amount(domain.total_bytes)}"
    return head, [_device_branch(d) for d in found.devices_of(domain.card or "") if d.domain == domain.id]


def _device_branch(device: Device) -> Branch:
    share = "  whole card" if device.whole_card else ""
    if device.gpu_id is None and device.kfd_node is None:
        index = "hidden" if device.runtime_index is None else f"CUDA {device.runtime_index}"
        return f"{device.id}{share}  {render.count_of(device.cus, 'SM')}  {index}", []
    index = "no HIP index" if device.runtime_index is None else f"HIP {device.runtime_index}"
    render_node = (device.render_node or "no render node").rsplit("/", 1)[-1]
    size = f"{render.count_of(device.xccs, 'XCD')}  {render.count_of(device.cus, 'CU')}"
    return f"{device.id}{share}  {size}  {render_node}  {index}", []


def _branches(items: list[Branch], lead: str = "") -> Iterator[str]:
    for position, (head, children) in enumerate(items):
        last = position == len(items) - 1
        yield f"{lead}{'└─ ' if last else '├─ '}{head}"
        yield from _branches(children, lead + ("   " if last else "│  "))


def _link_rows(found: Machine) -> list[dict[str, Any]]:
    return [
        {
            "initiator": link.initiator,
            "target": link.target,
            "kind": link.kind,
            "weight": link.weight,
            "bandwidth_gb_per_s": link.bandwidth.value,
            "bandwidth_origin": link.bandwidth.origin,
            "latency_ns": link.latency.value,
            "latency_origin": link.latency.origin,
        }
        for link in found.links
    ]


_LINK_COLUMNS = [
    Column(key, key)
    for key in (
        "initiator",
        "target",
        "kind",
        "weight",
        "bandwidth_gb_per_s",
        "bandwidth_origin",
        "latency_ns",
        "latency_origin",
    )
]
_DOMAIN_COLUMNS = [
    Column("id", "domain"),
    Column("total_bytes", "GB", right=True, show=render.gigabytes),
    Column("numa_node", "NUMA", right=True),
]


def _short_render(path: str) -> str:
    return path.rsplit("/", 1)[-1].removeprefix("renderD")


_DEVICE_COLUMNS = [
    Column("id", "device"),
    Column("part", "part"),
    Column("mode", "mode"),
    Column("share", "share"),
    Column("xcds", "XCDs", right=True),
    Column("cus", "CUs", right=True),
    Column("hbm_bytes", "HBM GB", right=True, show=render.gigabytes),
    Column("domain", "domain"),
    Column("numa_node", "NUMA", right=True),
    Column("render_node", "renderD", right=True, show=_short_render),
    Column("runtime_index", "HIP", right=True),
]
_CSV_KEYS = (
    "id",
    "card",
    "part",
    "mode",
    "share",
    "xcds",
    "cus",
    "hbm_bytes",
    "domain",
    "dies",
    "local_guaranteed",
    "bdf",
    "numa_node",
    "render_node",
    "runtime_index",
)
_NVIDIA_COLUMNS = [
    Column("id", "device"),
    Column("part", "part"),
    Column("share", "share"),
    Column("cus", "SMs", right=True),
    Column("hbm_bytes", "HBM GB", right=True, show=render.gigabytes),
    Column("domain", "domain"),
    Column("numa_node", "NUMA", right=True),
    Column("runtime_index", "CUDA", right=True),
]
