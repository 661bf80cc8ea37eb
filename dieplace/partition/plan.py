"""A plan: ordered steps to another mode, with what it disturbs, what blocks it and how to undo it. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.backends.base import Holder
from dieplace.modes import Mode
from dieplace.partition.control import Road
from dieplace.partition.facts import NodeFacts
from dieplace.partition.support import validated

if TYPE_CHECKING:
    from dieplace.backends.base import Backend

STEP_KINDS = ("stop-unit", "set-memory", "unload", "load", "set-compute", "verify", "start-unit")
CHANGES = ("set-memory", "unload", "load", "set-compute")


@dataclass(frozen=True)
class Step:
    """One action: `kind` is one of STEP_KINDS, `target` a card id, a hive or a unit, `value` the mode word if any."""

    kind: str
    target: str
    text: str
    bdf: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class Blast:
    """What a plan disturbs: the cards whose devices disappear, those re-set only because the reload loses their mode,
    whether the driver is reloaded, and logical devices before and after."""

    cards: tuple[str, ...]
    bystanders: tuple[str, ...]
    reload: bool
    devices_before: int
    devices_after: int


@dataclass(frozen=True)
class Reloads:
    """How long earlier reloads on this host took, in seconds, oldest first; empty means not known yet."""

    seconds: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.seconds:
            return "how long a reload takes on this host is not known yet"
        low, high = (f"{seconds:.0f}" for seconds in (min(self.seconds), max(self.seconds)))
        if len(self.seconds) == 1:
            return f"the one reload before on this host took {low} s"
        took = low if low == high else f"{low} to {high}"
        return f"earlier reloads took {took} s (n={len(self.seconds)})"


@dataclass(frozen=True)
class Plan:
    """Everything a switch will do, decided before the first write.

    `targets` maps every card that the end state is checked for to its mode, bystanders included. `before` is the node
    the plan was made for: `apply` refuses another. `blockers` must be gone before step one; `incomplete` lists why the
    view of holders cannot be trusted. `undo` is where `restore` leads. `session` is never serialised.
    """

    source: str
    targets: dict[str, Mode]
    steps: tuple[Step, ...]
    blast: Blast
    before: NodeFacts
    road: Road
    reloads: Reloads = Reloads()
    blockers: tuple[Holder, ...] = ()
    incomplete: tuple[str, ...] = ()
    undo: dict[str, Mode] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stop_units: tuple[str, ...] = ()
    purpose: str = "set"  # or "restore"
    command: str | None = None  # what to run with more privilege
    start: NodeFacts | None = None  # what the node must still be at step one, where `before` is an older record
    restore_to: NodeFacts | None = None  # what a later `restore` leads to, where that is not `before`
    session: Backend | None = field(default=None, compare=False, repr=False)
    rocm_path: str | None = None

    @property
    def empty(self) -> bool:
        """Whether the node is already as asked: nothing will be written."""
        return not any(step.kind in CHANGES for step in self.steps)

    @property
    def reload(self) -> bool:
        """Whether the driver will be reloaded, which ends every use of every card."""
        return self.blast.reload

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def to_json(self) -> dict[str, Any]:
        """Plain data, versioned by the command that prints it."""
        return {
            "source": self.source,
            "purpose": self.purpose,
            "targets": {card: str(mode) for card, mode in self.targets.items()},
            "steps": [asdict(step) for step in self.steps],
            "blast": asdict(self.blast),
            "blockers": [asdict(holder) for holder in self.blockers],
            "holders_incomplete": list(self.incomplete),
            "undo": {card: str(mode) for card, mode in self.undo.items()},
            "reload_seconds_before": list(self.reloads.seconds),
            "road": asdict(self.road),
            "notes": list(self.notes),
        }


def lines(plan: Plan) -> list[str]:
    """The plan as sentences, in the order a careful reader asks: what, how, whom it hits, what is in the way, undo."""
    if plan.empty:
        return [f"Nothing to do: {targets_text(plan.targets)} already.", *plan.notes]
    out = [f"To reach {targets_text(plan.targets)}:"]
    out += [f"  {number}. {text}" for number, text in enumerate(step_texts(plan), 1)]
    blast = plan.blast
    out.append(
        f"Disturbs {len(blast.cards)} card{'s' * (len(blast.cards) != 1)} ({span(blast.cards)}): {_devices_text(plan)}."
    )
    if blast.reload:
        out.append(f"Reloads the driver: no process may use any card of this node; {plan.reloads}.")
    if blast.bystanders:
        out.append(f"Not asked for but reloaded too, and set back to their modes: {span(blast.bystanders)}.")
    out += [f"Blocked by {holder_text(holder)}." for holder in plan.blockers]
    out += [f"View of holders incomplete: {why}." for why in plan.incomplete]
    return [*out, _undo_text(plan), *plan.notes]


def _devices_text(plan: Plan) -> str:
    before, after = plan.blast.devices_before, plan.blast.devices_after
    what = f"logical device{'s' * (after != 1)}"
    if plan.start is not None and not plan.start.driver_loaded:
        return f"there are no devices without the driver; {after} {what} will be there"
    if before == after:
        return f"{before} {what} before, {after} after"
    return f"{before} logical device{'s' * (before != 1)} become {after}"


def _undo_text(plan: Plan) -> str:
    """What leads back: `restore` from a switch, and from a restore the switch to what is there now, if anything is."""
    if plan.purpose == "set":
        return f"Undo: `dieplace partition restore` leads back to {targets_text(plan.undo)}."
    if plan.start is not None and not plan.start.driver_loaded:
        return "Undo: none, this itself leads out of an interrupted switch."
    back = {card: mode for card, mode in plan.undo.items() if plan.targets.get(card, mode) != mode}
    if not back:
        return "Undo: none is needed, every card keeps its mode."
    commands = [f"`{command}`" for command in _set_commands(plan, back)]
    return f"Undo: {', then '.join(commands)} {'leads' if len(commands) == 1 else 'lead'} back to {targets_text(back)}."


def _set_commands(plan: Plan, modes: dict[str, Mode]) -> list[str]:
    """`dieplace partition set ...`, one a mode, with what that asks for: its cards, leave for unlisted modes."""
    by_mode: dict[Mode, list[str]] = {}
    for card, mode in modes.items():
        by_mode.setdefault(mode, []).append(card)
    parts = {card.id: card.part for card in plan.before.cards}
    whole = len(by_mode) == 1 and set(modes) == set(parts)
    made = []
    for mode, cards in by_mode.items():
        words = ["dieplace partition set", str(mode), *([] if whole else [f"--card {card}" for card in cards])]
        listed = all(validated(parts.get(card), mode) for card in cards)
        made.append(" ".join([*words, *([] if listed else ["--allow-unvalidated"])]))
    return made


def step_texts(plan: Plan) -> list[str]:
    """One text a step, but one only for a run of compute steps that a reload will probably make unnecessary."""
    texts: list[str] = []
    runs: dict[str, list[str]] = {}
    for step in plan.steps:
        if step.kind == "set-compute" and plan.reload and step.value:
            if step.value not in runs:
                texts.append(step.value)
            runs.setdefault(step.value, []).append(step.target)
        else:
            texts.append(step.text)
    return [
        f"set compute mode {text} on {span(tuple(runs[text]))} where the load has not chosen it, {plan.road.compute}"
        if text in runs
        else text
        for text in texts
    ]


def targets_text(targets: dict[str, Mode]) -> str:
    """`DPX/NPS2 on 8 cards`, or the modes with their cards where they differ."""
    by_mode: dict[str, list[str]] = {}
    for card, mode in targets.items():
        by_mode.setdefault(str(mode), []).append(card)
    parts = [f"{mode} on {len(cards)} card{'s' * (len(cards) != 1)}" for mode, cards in by_mode.items()]
    if len(by_mode) > 1:
        parts = [f"{mode} on {span(tuple(cards))}" for mode, cards in by_mode.items()]
    return " and ".join(parts) or "no known state"


def span(cards: tuple[str, ...]) -> str:
    """`gpu0 ... gpu7` for a long list, all names for a short one."""
    return ", ".join(cards) if len(cards) <= 4 else f"{cards[0]} ... {cards[-1]}"


def holder_text(holder: Holder) -> str:
    """`pid 812 (python3), attached to KFD`, with the detail that says what to do."""
    who = (
        f"pid {holder.pid} ({holder.name or 'name unreadable'})" if holder.pid is not None else holder.name or "unknown"
    )
    kinds = {
        "compute": "attached to KFD",
        "drm": "has a render or card node open",
        "ghost": "attached to KFD with no open descriptor: only its exit frees the card, restart it",
        "module": "a kernel module that uses the driver",
        "unreadable": "cannot be inspected",
    }
    text = f"{who}, {kinds.get(holder.kind, holder.kind)}"
    return f"{text} ({holder.detail})" if holder.detail else text
