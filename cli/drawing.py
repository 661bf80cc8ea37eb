"""The drawing of `dieplace topo -o svg`: CPU nodes, cards, dies, XCDs, HBM stacks and links, as one SVG.

Colour of an XCD: its logical device. Colour of an HBM stack: its memory domain. One row of cards a CPU node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from dieplace.cli.render import amount, count_of
from dieplace.machine import Card, Device, Domain, Machine

DEVICE_COLOURS = ("#3b6fb6", "#c8641f", "#3f8f4f", "#8a4fa0", "#b03a48", "#1f8a8a", "#8c6d1f", "#5c5c5c")
DOMAIN_COLOURS = ("#a9c4e6", "#f0bf94", "#b2d8b8", "#d3b5dd", "#e6b3ba", "#a6d8d8", "#e0cf9a", "#cccccc")
MARGIN, GAP, PAD = 24, 18, 10
CARD_WIDTH, DIE_HEIGHT, HEAD, FOOT = 302, 104, 46, 26
BAR, STUB = 26, 18
PER_ROW = 4
LEAST_WIDTH = 720  # the captions need it


@dataclass(frozen=True)
class _Row:
    """Cards of one CPU node that stand beside each other."""

    host: str
    cards: tuple[Card, ...]


def draw(found: Machine, title: str) -> str:
    """The whole SVG document as text; every label is escaped."""
    rows = _rows(found)
    fabric = _fabric(found)
    heights = [_row_height(row, fabric) for row in rows]
    columns = max([1, *(len(row.cards) for row in rows)])
    bar = columns * CARD_WIDTH + (columns - 1) * GAP
    width = max(LEAST_WIDTH, 2 * MARGIN + bar)
    top = 64
    height = top + sum(heights) + GAP * len(rows) + 74
    parts = [_text(MARGIN, 34, title, size=19, weight="bold")]
    if found.source == "emulated":
        parts.append(_text(MARGIN, 54, "An emulated node: nothing here is a real device.", size=13, fill="#a33"))
    y, joints = top, []
    for row, tall in zip(rows, heights, strict=True):
        parts += _draw_row(found, row, y, tall, bar, fabric)
        joints.append(y + tall - BAR / 2)
        y += tall + GAP
    if fabric and len(joints) > 1:
        x = MARGIN / 2
        parts += [_line(x, joints[0], x, joints[-1], 3)]
        parts += [_line(x, joint, MARGIN, joint, 3) for joint in joints]
    parts += _legend(found, y + 8)
    body = "\n".join(['<rect width="100%" height="100%" fill="#ffffff"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'style="max-width:100%;height:auto" '  # a window narrower than the drawing shows all of it
        f'font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


def _rows(found: Machine) -> list[_Row]:
    rows = []
    nodes = list(dict.fromkeys(card.numa_node for card in found.cards))
    for node in nodes:
        host = next((d for d in found.domains if d.card is None and d.numa_node == node), None)
        label = f"{host.id} · {amount(host.total_bytes)}" if host else "no CPU node known"
        cards = [card for card in found.cards if card.numa_node == node]
        rows += [_Row(label, tuple(cards[i : i + PER_ROW])) for i in range(0, len(cards), PER_ROW)]
    if not rows:
        rows = [_Row(f"{d.id} · {amount(d.total_bytes)}", ()) for d in found.domains]
    return rows


def _fabric(found: Machine) -> str:
    """What joins the cards, as one line; empty where nothing is reported."""
    owner = {device.id: device.card for device in found.devices}
    pairs: dict[str, set[frozenset[str]]] = {}
    for link in found.links:
        ends = frozenset(owner[end] for end in (link.initiator, link.target) if end in owner)
        if len(ends) == 2:
            pairs.setdefault(link.kind, set()).add(ends)
    texts = []
    names = {"xgmi": "xGMI", "nvlink": "NVLink", "pcie": "PCIe"}
    full = len(found.cards) * (len(found.cards) - 1) // 2
    for kind, ends_set in pairs.items():
        how = "every card to every other" if len(ends_set) == full else "some pairs"
        texts.append(f"{names.get(kind, kind)}: {how} ({len(ends_set)} card pairs)")
    return "; ".join(texts)


def _row_height(row: _Row, fabric: str) -> int:
    tallest = max((_card_height(card) for card in row.cards), default=0)
    under = STUB + BAR if fabric and row.cards else 0
    return BAR + (STUB + tallest if row.cards else 0) + under


def _card_height(card: Card) -> int:
    return HEAD + -(-(card.dies or 1) // 2) * (DIE_HEIGHT + PAD) + FOOT


def _draw_row(found: Machine, row: _Row, y: float, tall: int, bar: int, fabric: str) -> Iterator[str]:
    yield _box(MARGIN, y, bar, BAR, "#eeeeee", "#888888")
    yield _text(MARGIN + PAD, y + 18, row.host, size=13)
    under = y + tall - BAR
    if row.cards and fabric:
        yield _box(MARGIN, under, bar, BAR, "#f4f0fa", "#7a6a9a")
        yield _text(MARGIN + PAD, under + 18, fabric, size=13)
    for index, card in enumerate(row.cards):
        x = MARGIN + index * (CARD_WIDTH + GAP)
        top = y + BAR + STUB
        centre = x + CARD_WIDTH / 2
        yield _line(centre, y + BAR, centre, top, 2)
        yield _text(centre + 6, top - 5, "PCIe", size=10, fill="#666666")
        if fabric:
            yield _line(centre, top + _card_height(card), centre, under, 3)
        yield from _draw_card(found, card, x, top)


def _draw_card(found: Machine, card: Card, x: float, y: float) -> Iterator[str]:
    yield _box(x, y, CARD_WIDTH, _card_height(card), "#fbfbfb", "#333333", radius=6)
    yield _text(x + PAD, y + 19, f"{card.id} · {card.part or 'unknown part'}", size=14, weight="bold")
    yield _text(x + CARD_WIDTH - PAD, y + 19, str(card.mode or "mode unknown"), size=13, anchor="end")
    yield _text(x + PAD, y + 37, f"{card.bdf} · {amount(card.hbm_bytes)}", size=11, fill="#555555")
    dies = card.dies or 1
    across = min(dies, 2)
    wide = (CARD_WIDTH - (across + 1) * PAD) / across
    for die in range(dies):
        left = x + PAD + (die % across) * (wide + PAD)
        top = y + HEAD + (die // across) * (DIE_HEIGHT + PAD)
        if die % across:
            yield _line(left - PAD, top + DIE_HEIGHT / 2, left, top + DIE_HEIGHT / 2, 4, "#b03a48")
        if die >= across:
            yield _line(left + wide / 2, top - PAD, left + wide / 2, top, 4, "#b03a48")
        yield from _draw_die(found, card, die if card.dies else None, left, top, wide)
    yield _text(x + PAD, y + _card_height(card) - 9, _devices_line(found.devices_of(card.id)), size=11)


def _draw_die(found: Machine, card: Card, die: int | None, x: float, y: float, wide: float) -> Iterator[str]:
    yield _box(x, y, wide, DIE_HEIGHT, "#ffffff", "#777777")
    yield _text(x + 6, y + 14, "dies not known" if die is None else f"die {die}", size=11, fill="#555555")
    count = (card.xccs or 0) // (card.dies or 1)
    owners = _owners(found, card, die)
    size = min(30.0, (wide - 12) / max(count, 1) - 3)
    for index in range(count):
        owner = owners[index * len(owners) // count] if owners else None
        colour = DEVICE_COLOURS[(owner.partition if owner else -1) % len(DEVICE_COLOURS)]
        left = x + 6 + index * (size + 3)
        yield _box(left, y + 21, size, 26, colour, "#ffffff", title=f"XCD of {owner.id}" if owner else "XCD")
        yield _text(left + size / 2, y + 38, f"p{owner.partition}" if owner else "?", 10, "#ffffff", anchor="middle")
    domains = [d for d in found.domains_of(card.id) if die is None or die in d.dies]
    yield from _draw_memory(card, domains, x, y + 53, wide)


def _draw_memory(card: Card, domains: list[Domain], x: float, y: float, wide: float) -> Iterator[str]:
    stacks = card.stacks_per_die or 1
    size = (wide - 12) / stacks - 3
    for index in range(stacks):
        domain = domains[index * len(domains) // stacks] if domains else None
        number = int(domain.id.rsplit("mem", 1)[1]) if domain else -1
        colour = DOMAIN_COLOURS[number % len(DOMAIN_COLOURS)] if domain else "#dddddd"
        yield _box(x + 6 + index * (size + 3), y, size, 22, colour, "#888888", title=domain.id if domain else "HBM")
        if size > 24:
            yield _text(x + 6 + index * (size + 3) + size / 2, y + 15, "HBM", size=9, anchor="middle")
    yield _text(x + 6, y + 40, _memory_line(domains), size=11)


def _memory_line(domains: list[Domain]) -> str:
    if not domains:
        return "domains not known"
    if len(domains) > 1:
        return " ".join(domain.id.split("/")[1] for domain in domains)
    domain = domains[0]
    name = domain.id.split("/")[1]
    if len(domain.dies) > 1:
        return f"part of {name}"
    return f"{name} · {amount(domain.total_bytes)}"


def _owners(found: Machine, card: Card, die: int | None) -> list[Device]:
    devices = found.devices_of(card.id)
    if die is None:
        return list(devices)
    return [device for device in devices if die in device.dies]


def _devices_line(devices: tuple[Device, ...]) -> str:
    if not devices:
        return "no logical device"
    first = devices[0]
    indices = [d.runtime_index for d in devices if d.runtime_index is not None]
    shown = f"index {indices[0]}" if len(indices) == 1 else f"index {indices[0]}-{indices[-1]}" if indices else "hidden"
    each = f"{count_of(first.xccs, 'XCD')}, {count_of(first.cus, 'CU')}"
    if first.whole_card:
        return f"whole card: {each}, {shown}"
    return f"{len(devices)} devices of {each}, {shown}"


def _legend(found: Machine, y: float) -> Iterator[str]:
    lines = [
        "Squares: XCDs, coloured and named by logical device. Blocks: HBM stacks, coloured by memory domain.",
    ]
    if any(card.dies and card.dies > 1 for card in found.cards):
        lines += [
            "Red: the link between dies. Die numbers follow the driver's XCD order; the physical order was not read."
        ]
    for index, line in enumerate(lines):
        yield _text(MARGIN, y + 12 + 18 * index, line, fill="#444444")


def _text(
    x: float, y: float, text: str, size: int = 12, fill: str = "#111111", weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int = 2, title: str = ""
) -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}">{inner}</rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, width: int, stroke: str = "#7a6a9a") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'
