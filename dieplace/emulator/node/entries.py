"""Building blocks of the emulated tree: what can stand at a path, and the numbering of DRM nodes.

Paths are relative to the node's directory (`sys/class/drm/card0`). A path's parents exist by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.modes import partitions_of
from dieplace.parts import FIRMWARE_RESERVE_BYTES

from .state import NodeState

RENDER_BASE = 128
SLOTS_PER_CARD = 8  # the driver registers 7 XCP devices for each card in every mode (amdgpu_xcp.c)
DRM_MINORS = 64


@dataclass(frozen=True)
class File:
    """A plain file with its text and permission bits."""

    text: str
    mode: int = 0o444


@dataclass(frozen=True)
class Link:
    """A symbolic link with its text; it may lead nowhere, as `/proc/<pid>/fd` entries do here."""

    text: str


@dataclass(frozen=True)
class Folder:
    """A folder that must exist even if nothing is in it."""

    mode: int = 0o755


Entry = File | Link | Folder
Entries = dict[str, Entry]


@dataclass(frozen=True)
class Minor:
    """DRM numbers of one slot of a card; both None where the minors ran out ("Skip xcp node")."""

    card: int | None
    render: int | None


def driven_cards(state: NodeState) -> list[int]:
    """Cards bound to amdgpu, in probe order."""
    return [i for i in range(len(state.cards)) if i not in state.style.vfio_cards]


def minor(state: NodeState, card: int, partition: int) -> Minor:
    """DRM numbers of (card, partition): normally card 8g+p and render 128+8g+p; other DRM devices shift them.

    A device without a render node (AST) shifts card numbers only, and still uses up one of the 64 minors.
    """
    slot = SLOTS_PER_CARD * driven_cards(state).index(card) + partition
    number = slot + state.style.other_render + int(state.style.ast)
    if number >= DRM_MINORS:
        return Minor(None, None)
    has_card = partition == 0 or state.style.xcp_card_nodes
    return Minor(number if has_card else None, RENDER_BASE + slot + state.style.other_render)


def partitions(state: NodeState, card: int) -> int:
    """Logical devices that the card is divided into; 0 where KFD did not come back."""
    compute = state.cards[card].compute
    return 0 if compute is None else partitions_of(compute, state.model.xccs)


def live_partitions(state: NodeState, card: int) -> list[int]:
    """Partitions of a card that have a DRM node; the driver drops the KFD node of one that has none."""
    return [p for p in range(partitions(state, card)) if minor(state, card, p).render is not None]


def kfd_gpu_nodes(state: NodeState) -> list[tuple[int, int]]:
    """(card, partition) in KFD node order, those that are there now."""
    return [(card, p) for card, p in state.kfd_order if state.shown(card) and p in live_partitions(state, card)]


def number_of(text: str, bits: int) -> int:
    """A stable pseudo-random number with its top bit set, so that it always prints with all its digits."""
    import hashlib

    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)
    return value | 1 << (bits - 1)


def unique_id(state: NodeState, card: int) -> int:
    """The package's id, as sysfs `unique_id` shows it."""
    return number_of(f"{state.part} {state.cards[card].bdf} package", 64)


def kfd_unique_id(state: NodeState, card: int, partition: int) -> int:
    """The id in KFD: the package's, or an XCD's own on newer kernels (style `unique_id`)."""
    whole = partitions(state, card) <= 1
    if state.style.unique_id == "equal" or (state.style.unique_id == "distinct" and whole):
        return unique_id(state, card)
    return number_of(f"{state.part} {state.cards[card].bdf} xcd {partition}", 64)


def gpu_ids(state: NodeState) -> dict[tuple[int, int], int]:
    """KFD `gpu_id` of each logical device: a 16-bit hash that changes with the mode and never repeats on a node."""
    ids: dict[tuple[int, int], int] = {}
    for card in driven_cards(state):
        for p in range(partitions(state, card)):
            text = f"{state.cards[card].bdf} {state.memory_of(card)} {partitions(state, card)} {p}"
            value = number_of(text, 16)
            while value in ids.values():
                value = value % 0xFFFF + 1
            ids[card, p] = value
    return ids


def share_bytes(state: NodeState, card: int, partition: int) -> int | None:
    """What one partition may allocate: its share, or its whole memory range where the cap is lifted (ALL)."""
    total = state.model.hbm_bytes
    if total is None:
        return None
    if state.cards[card].alloc_mode == "ALL" and state.style.mem_alloc_mode:
        return total // int(state.memory_of(card)[3:])
    count = max(partitions(state, card), 1)
    if state.style.reserve == "spread":
        return total // count
    nominal = (total + FIRMWARE_RESERVE_BYTES) // count
    return nominal if partition < count - 1 else total - nominal * (count - 1)


IDLE_USED_BYTES = 2_907_979_776  # the recorded MI308X node, every card


def used_bytes(state: NodeState, card: int) -> int | None:
    """Bytes in use on the whole package; every driver file that shows usage shows this one."""
    if state.model.hbm_bytes is None:
        return None
    return IDLE_USED_BYTES + sum(process_bytes(state, p, card) for p in range(len(state.processes)))


def process_bytes(state: NodeState, process: int, card: int) -> int:
    """Bytes that one process holds on a card: on the cards whose render node it opened, else on all it attached."""
    who = state.processes[process]
    cards = {c for c, _ in who.render} or set(who.attached)
    return who.vram_bytes // len(cards) if card in cards else 0
