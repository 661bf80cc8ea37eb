"""What a switch writes down before it acts: the old state, the steps, how far it came, and any pending memory wish.

The driver cannot be asked for a pending memory mode, so this record is the only memory of it (Linux,
amdgpu_gmc.c keeps the request in driver memory; no file shows it, and writing the current mode does not clear it).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from dieplace.errors import Unsupported, UsageError
from dieplace.modes import MEMORY_WORDS, Mode
from dieplace.partition.control import check_unit
from dieplace.partition.facts import NodeFacts
from dieplace.partition.plain import from_plain
from dieplace.partition.plan import Plan, Reloads, Step, targets_text
from dieplace.partition.store import Store

SCHEMA = "dieplace/partition-journal/1"
_JOURNAL, _PENDING, _HISTORY = "journal.json", "pending.json", "history.json"
_HISTORY_LENGTH = 20
_LONGEST_RELOAD_S = 86400.0

# How a finished switch ended. Only "done" and "unchanged" and "rolled-back" were read back and verified.
OUTCOMES = ("done", "unchanged", "rolled-back", "pending", "unknown", "not-verified")


@dataclass(frozen=True)
class Journal:
    """One switch: `before` is the state to restore, `step` the index it is at, `outcome` None while unfinished."""

    before: NodeFacts
    targets: dict[str, Mode]
    steps: tuple[Step, ...]
    boot_id: str | None
    pid: int
    started: str
    purpose: str = "set"
    step: int = -1
    outcome: str | None = None
    detail: str = ""
    stopped_units: tuple[str, ...] = ()

    @property
    def undo(self) -> dict[str, Mode]:
        """Card to the mode it had, where that was readable."""
        return {card.id: card.mode for card in self.before.cards if card.mode is not None}


@dataclass(frozen=True)
class Wish:
    """A memory mode that the driver may have recorded for a scope; `certain` is False between intent and answer."""

    scope: str
    memory: str
    was: str
    boot_id: str | None
    certain: bool
    bdf: str = ""


@dataclass
class Record:
    """The journal, pending wishes and reload history of one node, in one store."""

    store: Store
    _journal: Journal | None = field(default=None, repr=False)

    def journal(self) -> Journal | None:
        """The last switch on record, or None."""
        data = self.store.read(_JOURNAL)
        return None if data is None else _decode(data, self.store)

    def begin(self, plan: Plan) -> Journal:
        """Write the old state and the steps, fsynced, before step one. After an interrupted switch the state before
        *that* stays the one to restore: nobody asked for the state in between."""
        earlier = self.journal()
        settled = earlier is None or earlier.outcome in ("done", "unchanged", "rolled-back")
        before, units = plan.before, tuple[str, ...]()
        if earlier is not None and not settled:
            before = earlier.before
        if plan.restore_to is not None:
            before = plan.restore_to
        if earlier is not None and not settled:
            units = earlier.stopped_units
        journal = Journal(
            before, dict(plan.targets), plan.steps, plan.before.boot_id, os.getpid(), _now(), plan.purpose,
            stopped_units=units,
        )  # fmt: skip
        return self.update(journal)

    def update(self, journal: Journal, **changes: Any) -> Journal:
        """Write the journal with changes and return it."""
        journal = replace(journal, **changes)
        self.store.write(_JOURNAL, _encode(journal))
        return journal

    def forget_journal(self) -> None:
        """Drop the journal: there is nothing left to restore."""
        self.store.remove(_JOURNAL)

    def wishes(self) -> tuple[Wish, ...]:
        """Pending memory wishes on record, of any boot."""
        data = self.store.read(_PENDING)
        if data is None:
            return ()
        try:
            wishes: tuple[Wish, ...] = from_plain(tuple[Wish, ...], data.get("wishes"))
            if any(wish.memory not in MEMORY_WORDS for wish in wishes):
                raise ValueError("a wish for something else than a memory mode")
            return wishes
        except (TypeError, ValueError) as error:
            raise _unreadable(self.store, _PENDING, error) from error

    def set_wishes(self, wishes: Sequence[Wish]) -> None:
        """Replace the pending wishes; none removes the file."""
        if wishes:
            self.store.write(_PENDING, {"schema": SCHEMA, "wishes": [asdict(wish) for wish in wishes]})
        else:
            self.store.remove(_PENDING)

    def put_wish(self, wish: Wish) -> None:
        """Remember one wish. A certain one replaces earlier ones of its scope (the last writer wins in the driver too),
        an uncertain one stands beside them, because the driver may hold either."""
        kept = [w for w in self.wishes() if w.scope != wish.scope or not (wish.certain or w.memory == wish.memory)]
        self.set_wishes([*kept, wish])

    def reloads(self) -> Reloads:
        """Durations of earlier reloads, in seconds; a damaged history is as good as none and stops nobody."""
        try:
            data = self.store.read(_HISTORY) or {}
            seconds = map(float, from_plain(tuple[float | int, ...], data.get("reload_seconds", [])))
            return Reloads(tuple(value for value in seconds if 0 <= value <= _LONGEST_RELOAD_S))
        except (TypeError, ValueError, Unsupported):
            return Reloads()

    def add_reload(self, seconds: float) -> None:
        """Keep one more duration, of the last twenty."""
        kept = [*self.reloads().seconds, round(seconds, 1)][-_HISTORY_LENGTH:]
        self.store.write(_HISTORY, {"schema": SCHEMA, "reload_seconds": kept})


def live_wishes(record: Record, facts: NodeFacts) -> tuple[Wish, ...]:
    """Wishes that may still be in the driver: of this boot (a reboot does not run the driver's remove path, so they are
    lost with it), and not yet seen as the current mode on every card of their scope."""
    return tuple(w for w in record.wishes() if w.boot_id == facts.boot_id and not _came_true(w, facts))


def _came_true(wish: Wish, facts: NodeFacts) -> bool:
    members = [card.memory for card in facts.cards if card.scope == wish.scope]
    return bool(members) and set(members) == {wish.memory}


def standing(record: Record, facts: NodeFacts) -> tuple[str, ...]:
    """What every command must say about earlier switches: an unfinished journal, a pending or lost memory wish."""
    said = []
    journal = record.journal()
    if journal is not None and journal.outcome is None:
        at = journal.steps[journal.step].text if 0 <= journal.step < len(journal.steps) else "before its first step"
        where = f"step {journal.step + 1} of {len(journal.steps)}: {at}" if journal.step >= 0 else at
        reboot = "; the node was rebooted since" if journal.boot_id != facts.boot_id else ""
        said.append(
            f"A switch to {targets_text(journal.targets)} started {journal.started} (pid {journal.pid}) did not finish "
            f"({where}{reboot}). 'dieplace partition restore' leads back to {targets_text(journal.undo)}."
        )
    elif journal is not None and journal.outcome in ("unknown", "not-verified"):
        said.append(f"The last switch ended as {journal.outcome}: {journal.detail}")
    live = live_wishes(record, facts)
    for wish in record.wishes():
        if wish in live:
            sure = "is pending" if wish.certain else "may be pending"
            said.append(
                f"Memory mode {wish.memory} {sure} for {wish.scope} (now {wish.was}): it applies at the next driver "
                "load, whoever causes it. Only a load or a reboot resolves it; 'dieplace partition restore' does."
            )
        elif wish.boot_id != facts.boot_id:
            said.append(f"A pending memory mode {wish.memory} for {wish.scope} was lost by the reboot since.")
    return tuple(said)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _encode(journal: Journal) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        **{field.name: getattr(journal, field.name) for field in fields(journal)},
        "before": journal.before.to_json(),
        "steps": [asdict(step) for step in journal.steps],
        "targets": {card: str(mode) for card, mode in journal.targets.items()},
    }


def _decode(data: dict[str, Any], store: Store) -> Journal:
    body = {key: value for key, value in data.items() if key != "schema"}
    try:
        journal: Journal = from_plain(Journal, body)
        NodeFacts.from_json(body["before"])  # its own conditions too
        if not journal.undo:
            raise ValueError("it names no card with a mode to lead back to")
        for unit in journal.stopped_units:
            check_unit(unit)
        return journal
    except (TypeError, ValueError, UsageError) as error:
        raise _unreadable(store, _JOURNAL, error) from error


def _unreadable(store: Store, name: str, error: Exception) -> Unsupported:
    return Unsupported(
        f"the record of earlier switches, {store.directory / name}, is damaged: {error}",
        hint="look at the node with 'dieplace partition show', then move that file away",
    )
