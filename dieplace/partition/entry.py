"""Plan, apply, restore: what Python and the command call. Each goes through the session of a Machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dieplace.backends.base import Backend, require
from dieplace.errors import ApplyFailed, NotVerified, Unsupported, UsageError
from dieplace.machine import Machine
from dieplace.modes import Mode
from dieplace.partition.blocking import Report, blockers
from dieplace.partition.control import Control, Limits, check_unit
from dieplace.partition.decide import refuse_impossible, steps_between
from dieplace.partition.execute import Outcome, execute, require_privilege
from dieplace.partition.facts import NodeFacts
from dieplace.partition.journal import Journal, Record, live_wishes
from dieplace.partition.journal import standing as journal_standing
from dieplace.partition.meanwhile import judged_at_rest
from dieplace.partition.plan import Plan
from dieplace.partition.profile import resolve, select
from dieplace.partition.verify import mismatches, modes_of
from dieplace.partition.versions import told_with_versions
from dieplace.partition.words import modes_for, read_word

Wanted = str | Mode | Mapping[str, str | Mode]


def plan(
    machine: Machine,
    mode: Wanted,
    cards: Sequence[str] | str | None = None,
    *,
    allow_unvalidated: bool = False,
    stop_services: Sequence[str] = (),
    rocm_path: str | None = None,
) -> Plan:
    """Steps from the node as it is to `mode` on `cards` (all by default); changes nothing.

    `mode` is one mode (by name, or `1/NPS2` by index), or a map from cards to modes by name. Raises UsageError (unknown
    word), NoSuchDevice, NoSuchMode, Unsupported (guest, read-only mode files, mixed hives) before any step exists.
    """
    session = machine.require_session("plan a partition change")
    control = control_of(session, rocm_path)
    control.pin({card.bdf: card.id for card in machine.cards})
    facts = control.read()
    if isinstance(mode, Mapping):
        if cards is not None:
            raise UsageError("name cards either in the map or by cards=, not both")
        wanted = resolve(facts, {key: _mode(word) for key, word in mode.items()})
    else:
        chosen = (cards,) if isinstance(cards, str) else cards
        with judged_at_rest(control):
            wanted = modes_for(facts, select(facts, chosen), mode if isinstance(mode, Mode) else read_word(mode))
    made = build(
        control, facts, wanted, allow_unvalidated=allow_unvalidated, units=tuple(map(check_unit, stop_services))
    )
    return replace(made, session=session, rocm_path=rocm_path)


def build(
    control: Control,
    facts: NodeFacts,
    wanted: Mapping[str, Mode],
    *,
    allow_unvalidated: bool = False,
    units: tuple[str, ...] = (),
    clear_pending: bool = False,
    purpose: str = "set",
    start: NodeFacts | None = None,
) -> Plan:
    """A plan from facts; `start` is the node now where `facts` are the record of an earlier one (driver not loaded)."""
    with judged_at_rest(control), told_with_versions(control):
        return _build(control, facts, wanted, allow_unvalidated, units, clear_pending, purpose, start)


def _build(
    control: Control,
    facts: NodeFacts,
    wanted: Mapping[str, Mode],
    allow_unvalidated: bool,
    units: tuple[str, ...],
    clear_pending: bool,
    purpose: str,
    start: NodeFacts | None,
) -> Plan:
    record = Record(control.store)
    now = start or facts
    if not facts.driver_loaded and start is None:
        raise Unsupported(
            "the amdgpu driver is not loaded, so there is nothing to plan from",
            hint="load it with 'modprobe amdgpu', or undo an interrupted switch with 'dieplace partition restore'",
        )
    notes = refuse_impossible(facts, wanted, allow_unvalidated=allow_unvalidated)
    road = control.road()
    pending = {wish.scope: wish.memory for wish in live_wishes(record, now)}
    steps, targets, blast = steps_between(
        facts, wanted, pending=pending, clear_pending=clear_pending, stop_units=units, roads=(road.memory, road.compute)
    )
    if blast.reload and now.reload_why_not:
        raise Unsupported(f"the driver cannot be reloaded from here: {now.reload_why_not}", hint="run it on the host")
    for unit in units:
        if steps and control.unit_active(unit) is None:
            raise Unsupported(f"cannot stop {unit}: this node has no systemd to ask", hint="leave --stop-service out")
    holders = control.holders() if steps else None
    return Plan(
        source=control.source,
        targets=targets,
        steps=steps,
        blast=blast,
        before=facts,
        road=road,
        reloads=record.reloads(),
        blockers=blockers(holders, blast.cards, reload=blast.reload, units=units) if holders else (),
        incomplete=holders.incomplete if holders else (),
        undo=modes_of(facts),
        notes=(*notes, *(road.notes if steps else ()), *journal_standing(record, now)),
        stop_units=units,
        purpose=purpose,
        start=start,
    )


def apply(plan: Plan, *, wait_s: float = 0.0, progress: Report | None = None, limits: Limits | None = None) -> Machine:
    """Carry a plan out and return the new Machine; the old one is stale. Raises Busy, NotAllowed, StaleMachine,
    Unsupported (nothing changed), or RolledBack, Pending, NotVerified (`facts["outcome"]` says how it stands)."""
    session = _session(plan)
    carry_out(plan, control_of(session, plan.rocm_path), wait_s=wait_s, progress=progress, limits=limits)
    return session.snapshot()


def carry_out(
    plan: Plan,
    control: Control,
    *,
    wait_s: float = 0.0,
    progress: Report | None = None,
    limits: Limits | None = None,
) -> Outcome:
    """`apply` for a given control, returning the outcome with its notes."""
    control.pin({card.bdf: card.id for card in plan.before.cards})
    report = progress or (lambda text: None)
    with told_with_versions(control):
        if plan.empty and plan.purpose == "restore":
            return _settle(plan, control, report, wait_s)
        return execute(plan, control, Record(control.store), wait_s=wait_s, report=report, limits=limits)


def plan_restore(control: Control) -> Plan:
    """The plan that leads back to the state before the last switch, also from an interrupted one.

    Unsupported without a journal. Unlike `plan` it may start from an absent driver and resolves pending memory modes.
    """
    journal = _journal(control)
    control.pin({card.bdf: card.id for card in journal.before.cards})
    facts = control.read()
    if facts.driver_loaded:
        made = build(
            control, facts, _wanted(journal, facts), allow_unvalidated=True, clear_pending=True, purpose="restore"
        )
    else:
        record = replace(journal.before, driver_loaded=False)
        made = build(
            control, record, journal.undo, allow_unvalidated=True, clear_pending=True, purpose="restore", start=facts
        )
    return replace(made, restore_to=journal.before)


def restore(
    machine: Machine | None = None,
    *,
    wait_s: float = 0.0,
    progress: Report | None = None,
    limits: Limits | None = None,
    rocm_path: str | None = None,
) -> Machine:
    """Lead the node back to its state before the last switch and return the new Machine.

    Without a machine it is this node, or the one that DIEPLACE_BACKEND names. Raises Unsupported where no switch is on
    record, else like `apply`.
    """
    session = _session_to_restore(machine)
    control = control_of(session, rocm_path)
    carry_out(plan_restore(control), control, wait_s=wait_s, progress=progress, limits=limits)
    return session.snapshot()


@contextlib.contextmanager
def partitioned(
    plan: Plan, *, wait_s: float = 0.0, progress: Report | None = None, limits: Limits | None = None
) -> Iterator[Machine]:
    """Apply a plan, yield the new Machine, and lead its cards back on leaving, exceptions included."""
    session = _session(plan)
    machine = apply(plan, wait_s=wait_s, progress=progress, limits=limits)
    try:
        yield machine
    finally:
        control = control_of(session, plan.rocm_path)
        control.pin({card.bdf: card.id for card in plan.before.cards})
        now = control.read()
        if not now.driver_loaded:  # a switch inside failed between unload and load: its own journal leads out of that
            carry_out(plan_restore(control), control, wait_s=wait_s, progress=progress, limits=limits)
            now = control.read()
        back = build(
            control, now, modes_of(plan.before), allow_unvalidated=True, units=plan.stop_units,
            clear_pending=True, purpose="restore",
        )  # fmt: skip
        back = replace(back, restore_to=plan.before)
        if not (plan.empty and back.empty):
            carry_out(back, control, wait_s=wait_s, progress=progress, limits=limits)


def standing(machine: Machine) -> tuple[str, ...]:
    """Sentences about an unfinished switch or a pending memory mode; empty where there is nothing to say."""
    session = machine.session
    if session is None or "partitioning" not in session.groups:
        return ()
    control = control_of(session, None)
    return journal_standing(Record(control.store), control.read())


def control_of(session: Backend, rocm_path: str | None) -> Control:
    """The control of a backend that can partition; Unsupported otherwise."""
    control: Control = require(session, "partitioning").partition_control(rocm_path)
    return control


def _session_to_restore(machine: Machine | None) -> Backend:
    """Not probed and not checked for freshness: an interrupted switch may have left no driver to probe."""
    if machine is None:
        from dieplace.discover import make_backend

        return make_backend(os.environ.get("DIEPLACE_BACKEND") or "amd")
    return machine.session or machine.require_session("restore the partition mode")


def _settle(plan: Plan, control: Control, report: Report, wait_s: float) -> Outcome:
    """A restore that finds the old modes in place: check them, start units that stayed stopped, close the record."""
    require_privilege(plan, control)
    record = Record(control.store)
    with control.store.lock(wait_s, control.clock):
        facts = control.read(links=True)
        wrong = mismatches(facts, plan.targets, plan.restore_to)
        if wrong:
            raise NotVerified(
                f"the modes are as before, but the node is not: {'; '.join(wrong)}",
                hint="see the kernel log; a driver reload or a reboot may be needed",
                outcome="not-verified",
            )
        journal = record.journal()
        late = []
        for unit in journal.stopped_units if journal else ():
            answer = control.start_unit(unit)
            report(f"{unit} started again" if answer.ok else f"{unit} did not start: {answer}")
            late += [] if answer.ok else [unit]
        if late:
            raise ApplyFailed(f"the node is as before, but {', '.join(late)} did not start", outcome="done")
        record.forget_journal()
        alive = live_wishes(record, facts)
        record.set_wishes([wish for wish in record.wishes() if wish in alive])
    return Outcome("already", facts)


def _journal(control: Control) -> Journal:
    journal = Record(control.store).journal()
    if journal is None:
        raise Unsupported(
            "no partition switch is on record for this node, so there is nothing to restore",
            hint="'dieplace partition set MODE' leads to any mode",
        )
    return journal


def _wanted(journal: Journal, facts: NodeFacts) -> dict[str, Mode]:
    return {facts.card(card.bdf).id: card.mode for card in journal.before.cards if card.mode is not None}


def _session(plan: Plan) -> Backend:
    if plan.session is None:
        raise Unsupported("this plan has no session to apply it through", hint="make it with machine.plan()")
    return plan.session


def _mode(word: str | Mode) -> Mode:
    return word if isinstance(word, Mode) else Mode.parse(word)
