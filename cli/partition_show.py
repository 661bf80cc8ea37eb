"""The answer of `dieplace partition show`, and the table of devices that a switch ends with."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dieplace.cli import render
from dieplace.cli.table import Column, Table
from dieplace.errors import DieplaceError
from dieplace.partition.control import Control
from dieplace.partition.facts import CardFacts, NodeFacts
from dieplace.partition.journal import Record, Wish, live_wishes, standing
from dieplace.partition.plan import holder_text, span
from dieplace.partition.support import offered_modes, validated


def show_answer(ctx: click.Context, control: Control, facts: NodeFacts) -> None:
    """Print modes, offers, devices, holders and what earlier switches left behind."""
    record = Record(control.store)
    told, pending, damaged = _on_record(record, facts)
    found = control.holders()
    rows = [_row(card) for card in facts.cards]
    payload = {
        "driver": {"loaded": facts.driver_loaded, "version": facts.driver_version, "state": facts.module_state},
        "cards": rows,
        "holders": [asdict(holder) for holder in found.holders],
        "holders_incomplete": list(found.incomplete),
        "pending": None if damaged else [asdict(wish) for wish in pending],
        "standing": list(told),
    }
    held = [f"Held by {holder_text(holder)}." for holder in found.holders]
    blind = [f"View of holders incomplete: {why}." for why in found.incomplete]
    gone = [] if facts.driver_loaded else ["The amdgpu driver is not loaded."]
    render.answer(
        ctx,
        "partition-show/1",
        payload,
        source=control.source,
        table=lambda: [*gone, *told, _cards_table(rows), *_offers(rows), "", devices_table(facts), *held, *blind],
    )


def _on_record(record: Record, facts: NodeFacts) -> tuple[tuple[str, ...], tuple[Wish, ...], bool]:
    """What earlier switches left, and whether the record of them is damaged: then the node is shown all the same."""
    try:
        return standing(record, facts), live_wishes(record, facts), False
    except DieplaceError as error:
        return (f"{error.message}: whether a memory mode is pending is not known.",), (), True


def _row(card: CardFacts) -> dict[str, Any]:
    offered = offered_modes(card)
    return {
        "card": card.id,
        "bdf": card.bdf,
        "part": card.part,
        "mode": str(card.mode) if card.mode else None,
        "mode_why": "; ".join(card.whys.values()) or None,
        "devices": len(card.devices),
        "hbm_bytes": card.hbm_bytes,
        "hive": card.hive,
        "driver": card.driver,
        "in_reset": card.in_reset,
        "offered": [str(mode) for mode in offered],
        "unvalidated": [str(mode) for mode in offered if not validated(card.part, mode)],
    }


def _cards_table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        Column("card", "card"),
        Column("bdf", "address"),
        Column("part", "part"),
        Column("mode", "mode"),
        Column("devices", "devices", right=True),
        Column("hbm_bytes", "HBM GB", right=True, show=render.gigabytes),
    ]
    notes = [f"{row['card']}: mode not readable: {row['mode_why']}" for row in rows if row["mode"] is None]
    foreign = [f"{row['card']} is bound to {row['driver']}" for row in rows if row["driver"] not in ("amdgpu", None)]
    return Table(columns, rows, notes=[*notes, *foreign])


def _offers(rows: list[dict[str, Any]]) -> list[str]:
    """What the cards offer, once where all offer the same."""
    cards: dict[str, list[str]] = {}
    for row in rows:
        words = [word + ("*" if word in row["unvalidated"] else "") for word in row["offered"]]
        cards.setdefault(", ".join(words) or "nothing", []).append(row["card"])
    said = [f"{span(tuple(names))}: offered {words}" for words, names in cards.items()]
    return [*said, "(*: the driver offers it, AMD does not list it)"] if any("*" in line for line in said) else said


def devices_table(facts: NodeFacts) -> Table:
    """Partition to render node and KFD node, which no two tools agree on (legacy-rocm-build issue 4261)."""
    columns = [
        Column("device", "device"),
        Column("xccs", "XCDs", right=True),
        Column("hbm_bytes", "HBM GB", right=True, show=render.gigabytes),
        Column("render_node", "render node"),
        Column("kfd_node", "KFD node", right=True),
    ]
    rows = [
        {
            "device": f"{card.id}/p{device.partition}",
            "xccs": device.xccs,
            "hbm_bytes": device.hbm_bytes,
            "render_node": f"/dev/dri/renderD{device.render_minor}" if device.render_minor is not None else None,
            "kfd_node": device.kfd_node,
        }
        for card in facts.cards
        for device in card.devices
    ]
    return Table(columns, rows)
