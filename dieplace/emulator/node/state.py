"""The whole state of an emulated node as frozen data, and its versioned JSON.

The directory tree is a function of this state alone, so nothing of the node lives anywhere else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dieplace.errors import UsageError
from dieplace.modes import MEMORY_WORDS
from dieplace.parts import PARTS, Part

SCHEMA = "dieplace/emulated-node/1"


@dataclass(frozen=True)
class Style:
    """How this node's kernel, firmware and host behave where real stacks differ."""

    unique_id: str = (
        "equal"  # equal on siblings | distinct (SPX keeps the package's) | transitional (distinct in SPX too)
    )
    xcp_name: str = "underscore"  # amdgpu_xcp_N (DKMS) | dot: amdgpu_xcp.N (distribution kernels)
    partition_id: str = "low"  # in location_id bits [2:0] | high: bits [31:28]
    available_list: str = "dynamic"  # by current NPS | static: by XCC count only (older kernels)
    nps_table: str = "newest"  # newest | 2025
    auto_rule: str = "newer"  # newer | older
    lock: str = "gpu"  # compute set refused for users of this card | node: of any card (not cgroup-aware)
    ast: bool = False  # a BMC video device takes card0 and one DRM minor
    other_render: int = 0  # other DRM devices with render nodes, probed first
    mem_alloc_mode: bool = True
    nps_configs: bool = True  # compute_partition_config/supported_nps_configs exists
    config_folder: bool = True  # compute_partition_config exists
    xcp_card_nodes: bool = True
    reserve: str = "spread"  # the firmware's 16 MiB: off every partition | last: off the last one (recorded MI308X)
    virtual_function: bool = False
    product_name: bool = True
    vfio_cards: tuple[int, ...] = ()
    domains: str = "one"  # all cards in PCI domain 0 | two: the same bus numbers again in domain 1
    nps_caps: tuple[str, ...] | None = None  # overrides the part's
    hives: int = 1
    slow_start_s: float = 0.0  # after a load the cards appear one by one over this time
    slow_eperm_s: float = 0.0  # each card's mode files give EPERM for this long after it appeared
    nps_after_reboot: str = "keep"  # undocumented on hardware | NPS1
    drm_stays: bool = False  # after unload /sys/class/drm stays behind, empty
    ghosts_block_unload: bool = True
    cpu_nodes: int = 2
    cores_per_node: int = 64
    threads_per_core: int = 2


CHOICES = {
    "unique_id": ("equal", "distinct", "transitional"),
    "xcp_name": ("underscore", "dot"),
    "partition_id": ("low", "high"),
    "available_list": ("dynamic", "static"),
    "nps_table": ("newest", "2025"),
    "auto_rule": ("newer", "older"),
    "lock": ("gpu", "node"),
    "domains": ("one", "two"),
    "reserve": ("spread", "last"),
    "nps_after_reboot": ("keep", "NPS1"),
}


@dataclass(frozen=True)
class CardState:
    """One card; `compute` is None where no KFD node came back, `appeared_s` is None while it is still starting."""

    bdf: str
    hive: int
    compute: str | None = "SPX"
    asked: str = "SPX"  # what compute_partition_config describes
    alloc_mode: str = "CAPPING"
    in_reset: bool = False
    appears_s: float | None = None  # None: it is there
    usable_s: float | None = None  # None: mode files answer


@dataclass(frozen=True)
class Hive:
    """Cards whose memory mode changes together: what the hardware has, and what was asked for."""

    memory: str
    wish: str | None = None


@dataclass(frozen=True)
class Process:
    """Somebody who uses cards; `render` holds (card, partition) of open render nodes, `attached` the cards in KFD."""

    pid: int
    host_pid: int
    name: str
    uid: int = 0
    cgroup: str = "0::/user.slice"
    kfd_open: bool = True
    attached: tuple[int, ...] = ()
    render: tuple[tuple[int, int], ...] = ()
    vram_bytes: int = 0
    in_namespace: bool = True  # visible in this /proc


@dataclass(frozen=True)
class Fault:
    """A failure on demand: at `step`, on `card` (None: any), `times` times (None: always)."""

    step: str
    error: int | None = None
    card: int | None = None
    times: int | None = 1
    seconds: float = 0.0
    path: str | None = None
    status: str | None = None


@dataclass(frozen=True)
class NodeState:
    """Everything; `revision` grows with each change, `kfd_order` is (card, partition) in KFD node order."""

    part: str
    cards: tuple[CardState, ...]
    hives: tuple[Hive, ...]
    style: Style
    boot_id: str
    revision: int = 1
    generation: int = 1
    loaded: bool = True
    uid: int = 0
    kfd_order: tuple[tuple[int, int], ...] = ()
    processes: tuple[Process, ...] = ()
    faults: tuple[Fault, ...] = ()
    log: tuple[str, ...] = ()
    loads: int = 1

    @property
    def model(self) -> Part:
        """The part of every card."""
        return PARTS[self.part]

    @property
    def memory_caps(self) -> tuple[str, ...]:
        """NPS modes that can be asked for; empty on guests, APUs and where the firmware offers one."""
        caps = self.style.nps_caps if self.style.nps_caps is not None else self.model.memory_caps
        return () if self.style.virtual_function or self.model.apu or len(caps) < 2 else caps

    def memory_of(self, card: int) -> str:
        """The memory mode the card's hardware is in."""
        return self.hives[self.cards[card].hive].memory

    def shown(self, card: int) -> bool:
        """Whether amdgpu drives this card and it has finished appearing."""
        return self.loaded and card not in self.style.vfio_cards and self.cards[card].appears_s is None

    def index(self, bdf: str) -> int | None:
        """The card with this BDF."""
        return next((i for i, card in enumerate(self.cards) if card.bdf == bdf), None)

    def style_differences(self) -> dict[str, Any]:
        """The styles in which this node is not the usual one."""
        return {f.name: getattr(self.style, f.name) for f in fields(Style) if getattr(self.style, f.name) != f.default}

    def with_card(self, index: int, **changes: Any) -> NodeState:
        """A copy in which one card differs."""
        cards = list(self.cards)
        cards[index] = replace(cards[index], **changes)
        return replace(self, cards=tuple(cards))


def new_boot_id() -> str:
    """A fresh kernel boot id."""
    import uuid

    return str(uuid.uuid4())


def to_json(state: NodeState) -> dict[str, Any]:
    """Plain data under the versioned schema."""
    return {"schema": SCHEMA, **asdict(state)}


def from_json(data: Any) -> NodeState:
    """Rebuild a state; anything that is not a complete one is a UsageError."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"not an emulated node: its state does not carry the schema {SCHEMA}")
    try:
        body = {key: value for key, value in data.items() if key != "schema"}
        body["style"] = Style(**_tuples(body["style"]))
        for name, kind in (("cards", CardState), ("hives", Hive), ("processes", Process), ("faults", Fault)):
            body[name] = tuple(kind(**_tuples(item)) for item in body[name])
        state = NodeState(**_tuples(body))
        PARTS[state.part], tuple(state.hives[card.hive] for card in state.cards)
        return state
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"not a complete emulated node: {error}") from error


def check_style(words: dict[str, Any]) -> Style:
    """A Style from keyword arguments; an unknown field or word is a UsageError that lists what there is."""
    known = {f.name: f for f in fields(Style)}
    for name, value in words.items():
        if name not in known:
            raise UsageError(f"an emulated node has no style {name!r}", hint=f"styles are {', '.join(known)}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UsageError(f"style {name} cannot be {value!r}", hint=f"it is one of {', '.join(CHOICES[name])}")
    style = Style(**_tuples(words))
    _check_numbers(style)
    bad = set(style.nps_caps or ()) - set(MEMORY_WORDS)
    if bad or any(not isinstance(card, int) or card < 0 for card in style.vfio_cards):
        raise UsageError(
            "styles nps_caps and vfio_cards are lists of memory modes and of card numbers",
            hint=f"memory modes are {', '.join(MEMORY_WORDS)}",
        )
    return style


def style_from_text(name: str, text: str) -> Any:
    """The value that a word on a command line means for this style: by the type of its default."""
    default = next((f.default for f in fields(Style) if f.name == name), None)
    try:
        if isinstance(default, bool):
            return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}[text.lower()]
        if isinstance(default, int | float):
            return type(default)(text)
        if name == "vfio_cards":
            return tuple(int(part) for part in text.split(",") if part)
    except (KeyError, ValueError):
        raise UsageError(f"style {name} cannot be {text!r}", hint=f"it is like {default!r}") from None
    return tuple(text.upper().split(",")) if name == "nps_caps" else text


def _check_numbers(style: Style) -> None:
    limits = {"cpu_nodes": (1, 16), "cores_per_node": (1, 256), "threads_per_core": (1, 8), "other_render": (0, 7),
              "hives": (1, 64), "slow_start_s": (0, 3600), "slow_eperm_s": (0, 3600)}  # fmt: skip
    for name, (low, high) in limits.items():
        value = getattr(style, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise UsageError(f"style {name} cannot be {value!r}", hint=f"it is a number from {low} to {high}")


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    return value


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value
