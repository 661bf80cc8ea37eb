"""Apply a plan: everything checked first, the old state written down, the steps, then the truth about how it ended.

The end is decided by reading the node, never by what calls claimed: target verified, old state verified, or told as
pending, unknown or not verified.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from dieplace.errors import (
    ApplyFailed,
    BackendError,
    DieplaceError,
    NoSuchMode,
    NotAllowed,
    NotVerified,
    Pending,
    RolledBack,
    StaleMachine,
)
from dieplace.partition.blocking import Report, require_free
from dieplace.partition.control import Control, Limits
from dieplace.partition.facts import NodeFacts
from dieplace.partition.journal import Record, live_wishes
from dieplace.partition.plan import Plan, targets_text
from dieplace.partition.run import Run, do_step
from dieplace.partition.support import driver_word
from dieplace.partition.verify import mismatches, modes_of


@dataclass(frozen=True)
class Outcome:
    """How a switch ended (`word` is `done` or `already`), the node as read afterwards, and what must be said."""

    word: str
    facts: NodeFacts
    said: tuple[str, ...] = ()


def execute(
    plan: Plan,
    control: Control,
    record: Record,
    *,
    wait_s: float = 0.0,
    report: Report = lambda text: None,
    limits: Limits | None = None,
) -> Outcome:
    """Carry a plan out under the lock. Raises Busy, NotAllowed, StaleMachine, Unsupported (nothing changed), or
    RolledBack, Pending, NotVerified (what stands is in the message and in `facts["outcome"]`)."""
    limits = limits or Limits()
    if plan.empty:
        return Outcome("already", plan.before)
    require_privilege(plan, control)
    with record.store.lock(wait_s, control.clock) as lock:
        _require_same_start(plan, control.read())
        _ask_driver(plan, control)
        require_free(plan, control, wait_s, report, units=plan.stop_units)
        _require_same_start(plan, control.read())  # again, because a wait can be long
        run = Run(plan, control, record, record.begin(plan), lock, report, limits)
        failure = _do_steps(run)
        return _conclude(run, failure)


def require_privilege(plan: Plan, control: Control) -> None:
    """NotAllowed with the exact command, where this user may not write mode files."""
    if not control.privileged():
        raise NotAllowed(
            "changing a partition mode needs root",
            hint=f"run: {plan.command}" if plan.command else "run the same command as root",
        )


def _require_same_start(plan: Plan, now: NodeFacts) -> None:
    """The node must be as planned for: another tool may have switched it in between (k8s-gpu-dra-driver PR 88)."""
    if _signature(now) != _signature(plan.start or plan.before):
        raise StaleMachine(
            "the node changed after the plan was made; nothing was written", hint="make the plan again", outcome="stale"
        )


def _signature(facts: NodeFacts) -> tuple[object, ...]:
    cards = tuple((c.bdf, c.compute, c.memory, tuple(d.partition for d in c.devices)) for c in facts.cards)
    return facts.boot_id, facts.generation, facts.driver_loaded, cards


def _ask_driver(plan: Plan, control: Control) -> None:
    """Ask the driver's own table for pairs that reading alone cannot settle."""
    asked: set[tuple[str | None, str]] = set()
    for card in plan.before.cards:
        mode = plan.targets.get(card.id)
        if mode is None or driver_word(card, mode) is not None or (card.part, str(mode)) in asked:
            continue
        asked.add((card.part, str(mode)))
        memories = control.memories_of(card.bdf, mode.compute)
        if memories is not None and mode.memory not in memories:
            raise NoSuchMode(
                f"the loaded driver (version {plan.before.driver_version or 'not stated'}) combines {mode.compute} on "
                f"{card.id} only with {', '.join(memories) or 'no memory mode'}, not with {mode.memory}",
                hint="a newer amdgpu driver may; nothing was changed",
                asked=str(mode),
                offered=[f"{mode.compute}/{memory}" for memory in memories],
            )


def _do_steps(run: Run) -> DieplaceError | None:
    checked = not run.plan.stop_units
    for index, step in enumerate(run.plan.steps):
        try:
            if not checked and step.kind != "stop-unit":
                checked = True
                require_free(run.plan, run.control, 0.0, run.report)
            run.journal = run.record.update(run.journal, step=index)
            if step.kind not in ("set-compute", "start-unit"):  # these report only where they act
                run.report(step.text)
            do_step(run, step)
        except DieplaceError as error:
            return error
        except OSError as error:
            return BackendError(f"step {index + 1} ({step.text}) failed: {error}", code=error.errno)
    return None


def _conclude(run: Run, failure: DieplaceError | None) -> Outcome:
    plan = run.plan
    final = run.control.read(links=True)
    if failure is not None and run.touched and not run.reload_tried and mismatches(final, plan.targets, plan.before):
        final = _take_back(run)
    word = _word(run, final)
    detail = _detail(run, final, word, failure)
    late = _start_units(run, final)
    with contextlib.suppress(DieplaceError):  # how it ended is told even where it cannot be kept
        if word == "done":
            run.record.set_wishes(live_wishes(run.record, final))  # those of an earlier boot, or come true, are over
        if word == "done" and plan.purpose == "restore":
            run.record.forget_journal()
        else:
            run.journal = run.record.update(run.journal, outcome=word, detail=detail, stopped_units=tuple(late))
    if word == "done":
        said = [*run.said, *([f"told on the way: {failure.message}"] if failure else [])]
        if late:
            raise ApplyFailed(
                f"{targets_text(plan.targets)} is verified, but {', '.join(late)} did not start again",
                hint=f"see 'systemctl status {late[0]}'",
                outcome="done",
            )
        return Outcome("done", final, tuple(said))
    raise _told(word, detail, failure, late)


def _take_back(run: Run) -> NodeFacts:
    """Set back the cards whose compute mode this run changed, which needs no reload; how it ended is read."""
    now = modes_of(run.control.read())
    for card in run.plan.before.cards:
        old = run.touched.get(card.id)
        if old and (card.id not in now or now[card.id].compute != old):
            run.say(f"taking {card.id} back to {old}")
            answer = run.control.set_compute(card.bdf, old)
            if not answer.ok:
                run.say(f"{card.id}: {answer}")
    return run.control.read(links=True)


def _word(run: Run, final: NodeFacts) -> str:
    if not final.driver_loaded:
        return "unknown"  # what the next load chooses cannot be read now
    wishes = live_wishes(run.record, final)
    if wishes and run.changed and any(step.kind == "set-memory" for step in run.plan.steps):
        return "pending" if all(wish.certain for wish in wishes) else "unknown"
    if not mismatches(final, run.plan.targets, run.plan.before):
        return "done"
    if not mismatches(final, modes_of(run.plan.before), run.plan.before):
        return "rolled-back" if run.changed else "unchanged"
    return "not-verified"


def _detail(run: Run, final: NodeFacts, word: str, failure: DieplaceError | None) -> str:
    why = failure.message if failure else "a later read showed it"
    if word in ("pending", "unknown") and (wishes := live_wishes(run.record, final)):
        sure = "was accepted" if word == "pending" else "may have been accepted"
        what = "; ".join(f"memory mode {w.memory} {sure} for {w.scope}" for w in wishes)
        return f"{why}. {what} (which cannot be read back), to apply at the next driver load, whoever causes it"
    if word == "rolled-back":
        return f"{why}. The node is back in {targets_text(modes_of(run.plan.before))}, read back and verified"
    if word in ("not-verified", "unknown"):
        wrong = mismatches(final, run.plan.targets, run.plan.before)
        return f"{why}. Now: {'; '.join(wrong) or targets_text(modes_of(final))}"
    return why


def _start_units(run: Run, final: NodeFacts) -> list[str]:
    """Start what this or an interrupted run stopped; units that did not start are returned."""
    late = []
    for unit in dict.fromkeys(run.journal.stopped_units):
        if run.hung or (run.changed and not final.driver_loaded):
            run.say(f"{unit} is not started, because the driver is {'being unloaded' if run.hung else 'not loaded'}")
            late.append(unit)
            continue
        answer = run.control.start_unit(unit)
        run.say(f"{unit} started again" if answer.ok else f"{unit} did not start: {answer}")
        if not answer.ok:
            late.append(unit)
    return late


def _told(word: str, detail: str, failure: DieplaceError | None, late: list[str]) -> DieplaceError:
    rest = {"outcome": word, **(failure.facts if failure else {})}
    rest["outcome"] = word
    tail = f" {', '.join(late)} did not start again." if late else ""
    if word == "unchanged" and failure is not None:
        failure.message = f"{failure.message}{tail}"
        failure.facts["outcome"] = word
        return failure
    undo = "'dieplace partition restore' leads back"
    if word == "rolled-back":
        return RolledBack(detail + tail, hint=failure.hint if failure else None, **rest)
    if word == "pending":
        return Pending(detail + tail, hint=f"{undo}; a reload or a reboot resolves it", **rest)
    hint = "; ".join(part for part in (failure.hint if failure else None, undo) if part)
    return NotVerified(detail + tail, hint=hint, **rest)
