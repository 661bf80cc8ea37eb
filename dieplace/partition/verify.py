"""Whether a node is what a switch promised, by counts and bytes, not by mode words alone.

A mode file can say DPX while KFD lost a node to render-minor exhaustion (amdsmi issue 99), or while one die's memory is
missing; so every card's devices, XCCs, SIMDs, bytes, render nodes and sibling links are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dieplace.modes import Mode, partitions_of
from dieplace.partition.facts import CardFacts, DeviceFacts, NodeFacts

SIBLING_WEIGHT = 13  # kfd_crat.c: partitions of one package; anything else means a wrong grouping
_BYTES_TOLERANCE = 0.03  # shares are cut from what the driver did not reserve; recorded trees differ by under 1 %


def mismatches(facts: NodeFacts, targets: Mapping[str, Mode], before: NodeFacts | None) -> tuple[str, ...]:
    """All that differs from `targets`, as sentences; empty means verified. `before` gives XCC and byte totals."""
    if not facts.driver_loaded:
        return ("the driver is not loaded",)
    found: list[str] = []
    if facts.module_state not in (None, "live"):
        found.append(f"the driver module is {facts.module_state}, not live")
    for name, mode in targets.items():
        earlier = next((c for c in before.cards if c.id == name), None) if before else None
        card = next((c for c in facts.cards if (c.bdf == earlier.bdf if earlier else c.id == name)), None)
        if card is None:
            found.append(f"{name} is not there")
            continue
        found += [f"{name}: {text}" for text in _card(card, mode, earlier)]
    minors = [d.render_minor for c in facts.cards for d in c.devices if d.render_minor is not None]
    if len(minors) != len(set(minors)):
        found.append("two devices claim the same render node")
    return tuple(found)


def _card(card: CardFacts, mode: Mode, before: CardFacts | None) -> Iterable[str]:
    if card.mode is None:
        yield f"its mode cannot be read ({'; '.join(card.whys.values()) or 'no reason given'})"
        return
    if card.mode != mode:
        yield f"is {card.mode}, not {mode}"
    xccs = (before.xccs if before else None) or card.xccs
    if xccs is None:
        yield "the number of XCCs is not known, so its devices cannot be counted"
        return
    expected = partitions_of(mode.compute, xccs)
    ids = sorted(device.partition for device in card.devices)
    if ids != list(range(expected)):
        yield f"has {len(ids)} devices (partitions {ids}), not {expected}"
        return
    yield from _shares(card, expected, xccs, before)
    for device in card.devices:
        if not device.render_present:
            yield f"partition {device.partition} has no render node renderD{device.render_minor}"
        if any(weight != SIBLING_WEIGHT for weight in device.sibling_weights):
            yield f"partition {device.partition} is not a sibling by its links (weights {device.sibling_weights})"


def _shares(card: CardFacts, expected: int, xccs: int, before: CardFacts | None) -> Iterable[str]:
    for device in card.devices:
        if device.xccs != xccs // expected:
            yield f"partition {device.partition} has {device.xccs} XCCs, not {xccs // expected}"
    simds = {device.simds for device in card.devices}
    each = [d.simds // d.xccs for d in (before.devices if before else ()) if d.simds and d.xccs]
    wanted = each[0] * xccs // expected if each else None
    if len(simds) != 1 or (wanted is not None and simds != {wanted}):
        yield f"its partitions have {sorted(map(str, simds))} SIMDs, not {wanted or 'equal numbers'}"
    yield from _bytes(card, expected, before)


def _bytes(card: CardFacts, expected: int, before: CardFacts | None) -> Iterable[str]:
    unread = [d.partition for d in card.devices if not d.hbm_bytes]
    if unread:
        yield f"the memory size of partitions {unread} cannot be read"
        return
    total = card.hbm_bytes or (_sum(before.devices) if before else None)
    if total is None:
        yield "the card's memory size is not known, so the shares cannot be checked"
        return
    for device in card.devices:
        share = (device.hbm_bytes or 0) * expected / total
        if abs(share - 1) > _BYTES_TOLERANCE:
            yield f"partition {device.partition} has {device.hbm_bytes:,} bytes, not 1/{expected} of {total:,}"


def _sum(devices: tuple[DeviceFacts, ...]) -> int | None:
    sizes = [device.hbm_bytes for device in devices]
    return sum(s for s in sizes if s) if sizes and all(sizes) else None


def modes_of(facts: NodeFacts) -> dict[str, Mode]:
    """Card to mode, where readable."""
    return {card.id: card.mode for card in facts.cards if card.mode is not None}
