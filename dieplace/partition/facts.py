"""What a switch needs to know about a node, read once and compared later: plain data, no handles.

These are narrower and blunter than `Machine`: they also describe a node whose driver is absent, in reset or half
loaded, which a `Machine` never does.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from dieplace.errors import NoSuchDevice, UsageError
from dieplace.modes import Mode
from dieplace.partition.plain import from_plain

_ID = re.compile(r"gpu[0-9]{1,4}")
_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0")


@dataclass(frozen=True)
class DeviceFacts:
    """One KFD GPU node of a card: its partition id, XCCs, SIMDs and the bytes of its memory bank."""

    partition: int
    xccs: int | None
    simds: int | None
    hbm_bytes: int | None
    gpu_id: int | None
    kfd_node: int
    render_minor: int | None
    render_present: bool = True  # the node's /dev/dri/renderD* exists
    sibling_weights: tuple[int, ...] = ()  # KFD link weights to partitions of the same card


@dataclass(frozen=True)
class CardFacts:
    """One PCI function `.0`: what its mode files say now, and what the driver offers.

    A mode that cannot be read is None with a sentence in `whys`. `offered_compute` is valid under the current memory
    mode only (newer kernels); `supported_compute` under any. `selected` is what `xcp_config` happens to describe: a
    compute mode and the memory modes it may be combined with.
    """

    id: str
    bdf: str
    part: str | None
    device_id: int | None
    hive: str | None
    hbm_bytes: int | None
    compute: str | None
    memory: str | None
    offered_compute: tuple[str, ...] = ()
    supported_compute: tuple[str, ...] = ()
    offered_memory: tuple[str, ...] = ()
    selected: tuple[str, tuple[str, ...]] | None = None
    compute_writable: bool = False
    memory_writable: bool = False
    driver: str | None = "amdgpu"
    guest: bool = False
    in_reset: bool = False
    devices: tuple[DeviceFacts, ...] = ()
    unique_id: str | None = None  # of the package, 16 hex digits
    part_xccs: int | None = None
    whys: dict[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> Mode | None:
        """Both modes, or None where either cannot be read."""
        return Mode(self.compute, self.memory) if self.compute and self.memory else None

    @property
    def xccs(self) -> int | None:
        """XCCs of the whole card: its part's, else the sum over its devices; None where one is unread."""
        if self.part_xccs is not None:
            return self.part_xccs  # a sum would be short where KFD has lost a device
        counts = [device.xccs for device in self.devices]
        return sum(c for c in counts if c) if counts and all(counts) else None

    @property
    def scope(self) -> str:
        """What shares a memory mode with this card: its hive, or the card alone."""
        return f"hive {self.hive}" if self.hive else f"card {self.bdf}"


@dataclass(frozen=True)
class NodeFacts:
    """A node at one moment: boot id, KFD generation, the module's state and every card bound to or claimed by it."""

    boot_id: str | None
    generation: str | None
    driver_loaded: bool
    cards: tuple[CardFacts, ...] = ()
    module_state: str | None = None  # /sys/module/amdgpu/initstate
    module_refs: int | None = None
    module_holders: tuple[str, ...] = ()
    driver_version: str | None = None
    reload_why_not: str | None = None  # why the driver cannot be reloaded from here
    notes: tuple[str, ...] = ()

    def card(self, name: str) -> CardFacts:
        """The card called `gpuN`, an index, a BDF with or without the function, or the package's UUID."""
        found = [card for card in self.cards if name.lower() in _names(card)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{name!r} fits {', '.join(card.id for card in found)}", hint="use the PCI address")
        known = [f"{card.id} ({card.bdf})" for card in self.cards]
        raise NoSuchDevice(
            f"no card {name!r} on this node",
            hint=f"there is {', '.join(known) or 'none'}; use the id, the index or the PCI address",
            asked=name,
            known=[card.id for card in self.cards],
        )

    @property
    def device_count(self) -> int:
        """Logical devices that KFD shows (render nodes are never counted: eight exist per card in every mode)."""
        return sum(len(card.devices) for card in self.cards)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeFacts:
        """The inverse of `to_json`; raises TypeError or ValueError on anything else, such as two cards of one name."""
        facts: NodeFacts = from_plain(cls, data)
        for card in facts.cards:
            if not _ID.fullmatch(card.id) or not _BDF.fullmatch(card.bdf):
                raise ValueError(f"no card is called {card.id[:20]!r} ({card.bdf[:20]!r})")
        if len({card.id for card in facts.cards}) + len({card.bdf for card in facts.cards}) != 2 * len(facts.cards):
            raise ValueError("a card is there twice")
        return facts


def _names(card: CardFacts) -> tuple[str, ...]:
    names = (card.id, card.id.removeprefix("gpu"), card.bdf, card.bdf.rsplit(".", 1)[0])
    unique = card.unique_id.lower() if card.unique_id else None
    return (*names, unique, f"gpu-{unique}") if unique else names
