"""Going through partition modes for first light, and back: the same plan, journal, lock and checks as a person's.

Every switch is written down with the state that first light *began* in as the one to restore, so that
`dieplace partition restore` leads there from any moment, a kill included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dieplace.errors import DieplaceError, NotVerified, Unsupported
from dieplace.modes import Mode
from dieplace.partition.control import Answer, Control, Limits, Tick, silent
from dieplace.partition.entry import build, carry_out, plan_restore
from dieplace.partition.facts import NodeFacts
from dieplace.partition.journal import Journal, Record, standing
from dieplace.partition.plan import Plan
from dieplace.partition.support import offered_modes, validated
from dieplace.partition.verify import mismatches, modes_of

Report = Callable[[str], None]
Ask = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Visit:
    """One state to look at: card to mode. `alone` names the card that was switched without the others, if one was."""

    wanted: Mapping[str, Mode]
    alone: str | None = None

    def __str__(self) -> str:
        modes = dict.fromkeys(map(str, self.wanted.values()))
        if self.alone is None:
            return " and ".join(modes)
        return f"{self.wanted[self.alone]} on {self.alone} alone"


@dataclass(frozen=True)
class Switched:
    """One switch as it went, in seconds; None where the driver was not reloaded. `away` is what was told meanwhile."""

    to: str
    seconds: float
    unload_s: float | None = None
    load_s: float | None = None
    ready_s: float | None = None
    away: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Permission:
    """What the caller allowed: `modes` to switch at all, and how."""

    modes: bool = False
    unvalidated: bool = False
    units: tuple[str, ...] = ()
    wait_s: float = 0.0
    limits: Limits = field(default_factory=Limits)


def visits(facts: NodeFacts, *, unvalidated: bool) -> tuple[Visit, ...]:
    """The states to go through, in an order that reloads the driver as seldom as may be.

    Modes that every card offers and AMD lists (all that it offers with `unvalidated`), those of the memory mode now
    first; after DPX with two ranges, one card alone in another compute mode, which needs no reload.
    """
    cards = [card for card in facts.cards if card.mode is not None and card.driver == "amdgpu" and not card.guest]
    if not cards or len(cards) != len(facts.cards):
        return ()
    shared = set(offered_modes(cards[0])).intersection(*(offered_modes(card) for card in cards))
    wanted = [m for m in shared if unvalidated or all(validated(card.part, m) for card in cards)]
    now = {card.mode for card in cards}
    first = cards[0].memory
    order = sorted(wanted, key=lambda m: (m.memory != first, m.memory, m.compute != "DPX", -_size(m)))
    names = [card.id for card in cards]
    found: list[Visit] = []
    for mode in order:
        if now != {mode}:
            found.append(Visit(dict.fromkeys(names, mode)))
        others = [m for m in order if m.memory == mode.memory and m != mode]
        if mode.compute == "DPX" and mode.memory_ranges == 2 and others and len(names) > 1:
            alone = {**dict.fromkeys(names, mode), names[0]: others[-1]}
            found.append(Visit(alone, names[0]))
    return tuple(found)


def _size(mode: Mode) -> int:
    return ("CPX", "QPX", "TPX", "DPX", "SPX").index(mode.compute)


class Watched:
    """A control that notes how long unloading and loading took, and asks something while the driver is away."""

    def __init__(self, inner: Control, while_away: Ask | None = None) -> None:
        self.inner = inner
        self.while_away = while_away
        self.unload_s: float | None = None
        self.load_s: float | None = None
        self.ready_s: float | None = None
        self.away: Mapping[str, Any] | None = None
        self._loaded_at: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def unload(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer:
        """As the control's; then the question for the time without a driver."""
        begun = self.inner.clock.now()
        answer = self.inner.unload(timeout_s, keep_open, tick)
        self.unload_s = self.inner.clock.now() - begun
        if answer.ok and self.while_away is not None:
            self.away = self.while_away()
        return answer

    def load(self, timeout_s: float, keep_open: tuple[int, ...] = (), tick: Tick = silent) -> Answer:
        """As the control's."""
        begun = self.inner.clock.now()
        answer = self.inner.load(timeout_s, keep_open, tick)
        self._loaded_at = self.inner.clock.now()
        self.load_s = self._loaded_at - begun
        return answer

    def read(self, *, links: bool = False) -> NodeFacts:
        """As the control's; the first reading with links after a load is the check that comes when all is ready."""
        if links:
            self._is_ready()
        return self.inner.read(links=links)

    def set_compute(self, bdf: str, word: str) -> Answer:
        """As the control's; a switch sets compute modes only once the driver is ready."""
        self._is_ready()
        return self.inner.set_compute(bdf, word)

    def _is_ready(self) -> None:
        if self._loaded_at is not None and self.ready_s is None:
            self.ready_s = self.inner.clock.now() - self._loaded_at


def plan_visit(control: Control, visit: Visit, start: NodeFacts, permission: Permission) -> Plan:
    """The plan to a state, with the state that first light began in as the one to restore."""
    made = build(
        control, control.read(), visit.wanted, allow_unvalidated=permission.unvalidated, units=permission.units
    )
    return replace(made, restore_to=start)


def enter(
    control: Control,
    visit: Visit,
    start: NodeFacts,
    permission: Permission,
    report: Report,
    while_away: Ask | None = None,
) -> Switched:
    """Switch, verified; raises what `partition set` raises (Busy, RolledBack, ...), and Unsupported without leave."""
    if not permission.modes:
        raise Unsupported("first light has no leave to change modes", hint="--allow-mode-changes")
    plan = plan_visit(control, visit, start, permission)
    watched = Watched(control, while_away if plan.reload else None)
    begun = control.clock.now()
    carry_out(plan, cast(Control, watched), wait_s=permission.wait_s, progress=report, limits=permission.limits)
    taken = control.clock.now() - begun
    return Switched(str(visit), taken, watched.unload_s, watched.load_s, watched.ready_s, watched.away)


def own_journal(control: Control, start: NodeFacts) -> Journal | None:
    """The journal on record, where it is one of this process for this start."""
    journal = Record(control.store).journal()
    mine = journal is not None and journal.pid == os.getpid() and _same(journal.before, start)
    return journal if mine else None


def _same(one: NodeFacts, other: NodeFacts) -> bool:
    return one.boot_id == other.boot_id and modes_of(one) == modes_of(other)


def lead_back(
    control: Control, start: NodeFacts, permission: Permission, report: Report, earlier: Journal | None = None
) -> str:
    """Restore what first light changed, verify every card against `start`, and say how it stands.

    `earlier` is the journal of a person's switch before first light: it goes back on record, so that their own
    `partition restore` still works. NotVerified where the node is not as it was.
    """
    switched = own_journal(control, start) is not None
    if switched:
        carry_out(plan_restore(control), control, wait_s=permission.wait_s, progress=report, limits=permission.limits)
    now = control.read(links=True)
    wrong = mismatches(now, modes_of(start), start)
    if wrong:
        raise NotVerified(
            f"the node is not as first light found it: {'; '.join(wrong)}",
            hint="'dieplace partition restore' leads back; see the kernel log",
            outcome="not-verified",
        )
    if not switched:
        return "no mode was changed; every card read back as it was found"
    if earlier is not None:
        Record(control.store).update(earlier)
    said = "every card is back in the mode it was found in, read back and verified by devices, bytes and links"
    if _order(now) != _order(start):
        said += "; KFD lists the devices in another order than before, until the driver is loaded again"
    return said


def _order(facts: NodeFacts) -> list[tuple[str, int]]:
    """Devices in the order in which KFD numbers them, which HIP's indices follow."""
    found = [(d.kfd_node, card.bdf, d.partition) for card in facts.cards for d in card.devices]
    return [(bdf, partition) for _, bdf, partition in sorted(found)]


def unfinished(control: Control, facts: NodeFacts) -> Sequence[str]:
    """Why no switch may begin: sentences about an earlier one that did not end, or a pending memory mode."""
    try:
        return [text for text in standing(Record(control.store), facts) if "was lost by the reboot" not in text]
    except DieplaceError as error:
        return [error.message]
