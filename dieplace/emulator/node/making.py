"""Making and finding emulated nodes: `create` makes one in a folder, `open_node` finds it again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dieplace.errors import NoSuchMode, UsageError
from dieplace.modes import Mode
from dieplace.parts import PARTS, Part

from . import rules, store
from .entries import driven_cards, live_partitions
from .node import Node
from .state import CardState, Hive, NodeState, Style, check_style, new_boot_id
from .tree import tree

MAX_CARDS = 8  # 64 DRM minors, 8 a card
BUSES = (0x05, 0x15, 0x65, 0x75, 0x85, 0x95, 0xE5, 0xF5)


def create(
    directory: str | Path,
    part: str = "MI355X",
    cards: int = MAX_CARDS,
    mode: str | Mode = "SPX/NPS1",
    *,
    replace_old: bool = False,
    uid: int = 0,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    **styles: Any,
) -> Node:
    """Make an emulated node in `directory` and return it.

    `styles` are the fields of `Style`. UsageError: unknown part, style or mode, or a folder that holds something else;
    NoSuchMode: the part's driver does not offer the mode. `replace_old` allows an older node there to be replaced.
    """
    home = Path(directory)
    state = _first_state(_part(part), cards, mode, check_style(styles), uid)
    _check_place(home, replace_old)
    with store.locked(home):
        _write_first(home, state)
    return Node(home, clock=clock, sleep=sleep)


def open_node(
    directory: str | Path, *, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> Node:
    """The node that lives in `directory`; UsageError where there is none or its state cannot be read."""
    return Node(Path(directory), clock=clock, sleep=sleep)


def default_directory() -> Path:
    """Where commands keep their emulated node: the XDG state folder."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    state = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return state / "dieplace" / "node"


def open_or_create(directory: str | Path | None = None) -> Node:
    """The node in `directory` (the default one without), made as an 8-card MI355X on first use."""
    home = Path(directory) if directory is not None else default_directory()
    if not store.is_node(home):
        _check_place(home, False)
        with store.locked(home):
            if not store.is_node(home):  # two commands may be the first at once
                _write_first(home, _first_state(PARTS["MI355X"], MAX_CARDS, "SPX/NPS1", Style(), 0))
    return open_node(home)


def reset(node: Node) -> None:
    """Put a node back as it was made: same part, cards, styles and user, SPX/NPS1, nothing pending, held or broken."""
    old = node.state
    fresh = _first_state(old.model, len(old.cards), "SPX/NPS1", old.style, old.uid)
    node.replace_state(fresh)


def _part(name: str) -> Part:
    found = next((part for part in PARTS.values() if part.name.lower() == str(name).lower()), None)
    if found is None:
        raise UsageError(f"no part {name!r} can be emulated", hint=f"parts are {', '.join(PARTS)}", asked=name)
    return found


def _first_state(part: Part, cards: int, mode: str | Mode, style: Style, uid: int) -> NodeState:
    if isinstance(cards, bool) or not isinstance(cards, int) or not 1 <= cards <= MAX_CARDS:
        raise UsageError(f"an emulated node cannot have {cards!r} cards", hint=f"1 to {MAX_CARDS}")
    wanted = Mode.parse(mode) if isinstance(mode, str) else mode
    caps = style.nps_caps if style.nps_caps is not None else part.memory_caps
    offered = rules.modes_of(part.xccs, caps, part.gfx, style.nps_table)
    if wanted not in offered:
        raise NoSuchMode(
            f"{part.name} does not offer {wanted}", hint=f"its driver offers {', '.join(map(str, offered))}",
            asked=str(wanted), offered=[str(m) for m in offered],
        )  # fmt: skip
    hives = cards if not part.hive else min(style.hives, cards)
    items = tuple(
        CardState(_bdf(i, cards, style), i * hives // cards, wanted.compute, wanted.compute) for i in range(cards)
    )
    state = NodeState(part.name, items, tuple(Hive(wanted.memory) for _ in range(hives)), style, new_boot_id(), uid=uid)
    order = tuple((card, p) for card in driven_cards(state) for p in live_partitions(state, card))
    return replace(state, kfd_order=order, generation=1 + style.cpu_nodes + len(order))


def _bdf(index: int, cards: int, style: Style) -> str:
    half = (cards + 1) // 2
    if style.domains == "two" and index >= half:
        return f"0001:{BUSES[index - half]:02x}:00.0"
    return f"0000:{BUSES[index]:02x}:00.0"


def _write_first(home: Path, state: NodeState) -> None:
    try:
        store.write_state(home, state)
        store.write_tree(home, tree(state), state.revision)
    except OSError as error:
        raise UsageError(
            f"cannot write an emulated node to {home}: {error.strerror}", hint="name another folder"
        ) from error


def _check_place(home: Path, replace_old: bool) -> None:
    if store.is_node(home):
        if not replace_old:
            raise UsageError(
                f"{home} already holds an emulated node",
                hint="--replace (from Python replace_old=True), or name another folder",
            )
        return
    try:
        occupied = home.exists() and any(item.name != store.OWN for item in home.iterdir())
    except OSError as error:
        raise UsageError(f"cannot use {home}: {error.strerror}", hint="name a folder of your own") from error
    if occupied:
        raise UsageError(f"{home} is not empty and holds no emulated node", hint="name a new folder")
