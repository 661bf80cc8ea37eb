"""One application of a plan while it runs, and what each step does. Every claim of success is read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dieplace.errors import (
    ApplyFailed,
    BackendError,
    Busy,
    DieplaceError,
    NotAllowed,
    NotVerified,
    Unsupported,
)
from dieplace.partition.blocking import Report, blockers, busy, require_free
from dieplace.partition.control import NOTHING_RECORDED, Answer, Control, Limits, Tick
from dieplace.partition.facts import CardFacts, NodeFacts
from dieplace.partition.journal import Journal, Record, Wish, live_wishes
from dieplace.partition.plan import Plan, Step
from dieplace.partition.ready import wait_ready
from dieplace.partition.verify import mismatches


@dataclass
class Run:
    """The moving parts of one switch; everything that must survive a kill is in `journal` and `record` instead."""

    plan: Plan
    control: Control
    record: Record
    journal: Journal
    lock: int
    report: Report
    limits: Limits
    changed: bool = False  # a mutating call was made, whatever it answered
    reload_tried: bool = False
    hung: bool = False  # an unload that does not end still runs
    gone: bool = False  # the driver was seen unloaded, so nothing in its memory survives
    touched: dict[str, str] = field(default_factory=dict)  # card -> compute mode before the first set
    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Progress for the user now, and a note for the outcome."""
        self.said.append(text)
        self.report(text)

    def ticker(self, doing: str, limit_s: float) -> Tick:
        """Tells the user that a call still blocks."""
        limit = f"at most {limit_s:.0f} s"
        return lambda elapsed_s, what: self.report(f"still {doing}, {elapsed_s:.0f} s of {limit} ({what})")


def do_step(run: Run, step: Step) -> None:
    """Carry out one step; raises a DieplaceError whose class says what kind of failure it was."""
    _STEPS[step.kind](run, step)


def _stop_unit(run: Run, step: Step) -> None:
    active = run.control.unit_active(step.target)
    if not active:
        run.say(f"{step.target} does not run, so it is left alone")
        return
    # Written down first: a kill right after the stop must not leave the unit stopped for good.
    run.journal = run.record.update(run.journal, stopped_units=(*run.journal.stopped_units, step.target))
    answer = run.control.stop_unit(step.target)
    if not answer.ok:
        raise BackendError(f"could not stop {step.target}: {answer}", hint="stop it by hand", code=answer.code)


def _set_memory(run: Run, step: Step) -> None:
    assert step.bdf is not None and step.value is not None
    facts = run.control.read()
    card = _card(facts, step.bdf)
    outstanding = [wish for wish in live_wishes(run.record, facts) if wish.scope == step.target]
    if card.memory == step.value and not outstanding:
        run.say(f"{step.target} is in {step.value} already")
        return
    earlier, changed = run.record.wishes(), run.changed
    wish = Wish(step.target, step.value, card.memory or "unknown", run.plan.before.boot_id, False, step.bdf)
    run.record.put_wish(wish)
    run.changed = True
    answer = run.control.set_memory(step.bdf, step.value)
    if answer.meaning in NOTHING_RECORDED:
        run.changed = changed
        run.record.set_wishes(earlier)
    if not answer.ok:
        raise refusal(answer, f"recording memory mode {step.value} on {card.id} ({card.bdf})", run.control)
    run.record.put_wish(Wish(wish.scope, wish.memory, wish.was, wish.boot_id, True, wish.bdf))
    run.say(f"memory mode {step.value} recorded for {step.target} through {answer.via}")


def _unload(run: Run, step: Step) -> None:
    facts = run.control.read()
    if not facts.driver_loaded:
        run.gone = True
        run.say("the driver is not loaded: somebody else unloaded it")
        return
    if not live_wishes(run.record, facts):
        run.say("no memory mode is waiting (somebody else may have reloaded the driver), so it is not reloaded again")
        return
    require_free(run.plan, run.control, 0.0, run.report)
    run.changed = run.reload_tried = True
    run.report(f"the unload is waited for, {run.limits.unload_s:.0f} s at most")
    answer = run.control.unload(
        run.limits.unload_s, (run.lock,), run.ticker("unloading the driver", run.limits.unload_s)
    )
    facts = run.control.read()
    if not facts.driver_loaded:
        run.gone = True
        return
    if not live_wishes(run.record, facts):
        run.say("the driver was unloaded and loaded again by somebody else")
        return
    if answer.meaning == "busy":
        raise _in_use(run, facts, answer)
    if answer.meaning == "hung":
        run.hung = True
        raise NotVerified(
            f"unloading the driver did not end within {run.limits.unload_s:.0f} s: {answer.detail}",
            hint="it is not killed, because that can hang the host; if it stays so, reboot",
        )
    claim = "claims success, but the driver is still loaded" if answer.ok else f"failed: {answer}"
    raise NotVerified(f"unloading the driver {claim}", hint="see the kernel log")


def _load(run: Run, step: Step) -> None:
    started = run.control.clock.now()
    facts = run.control.read()
    if not facts.driver_loaded:
        run.changed = True
        answer = run.control.load(run.limits.ready_s, (run.lock,), run.ticker("loading the driver", run.limits.ready_s))
        if not answer.ok and not run.control.read().driver_loaded:
            raise NotVerified(
                f"the driver is not loaded: {answer}",
                hint="see the kernel log, load it with 'modprobe amdgpu', then run 'dieplace partition restore'",
            )
    reloaded, run.gone = run.gone or not facts.driver_loaded, False
    if reloaded:
        # Wishes lived in the memory of the driver that went; whether they came true is read, not remembered.
        run.record.set_wishes(())
    facts = wait_ready(run.control, run.plan.before, run.limits, run.report)
    if reloaded:
        run.record.add_reload(run.control.clock.now() - started)
    else:
        alive = live_wishes(run.record, facts)
        run.record.set_wishes([wish for wish in run.record.wishes() if wish in alive])


def _set_compute(run: Run, step: Step) -> None:
    assert step.bdf is not None and step.value is not None
    clock, limits = run.control.clock, run.limits
    give_up, attempts = clock.now() + limits.reset_s, 0
    target = run.plan.targets[step.target]
    while True:
        facts = run.control.read()
        card = _card(facts, step.bdf)
        if card.compute == step.value:
            return
        if card.memory is not None and card.memory != target.memory:
            raise NotVerified(f"{card.id} came back in {card.memory}, not {target.memory}", hint="see the kernel log")
        if card.in_reset:
            answer = Answer("reset", "sysfs", "the card is in reset")
        else:
            run.report(f"set compute mode {step.value} on {card.id} ({card.bdf})")
            changed, run.changed, attempts = run.changed, True, attempts + 1
            answer = run.control.set_compute(step.bdf, step.value)
            if answer.meaning in NOTHING_RECORDED:
                run.changed = changed
            else:
                run.touched.setdefault(card.id, card.compute or "")
        if answer.ok:
            break
        retry = (answer.meaning == "reset" and clock.now() < give_up) or (
            answer.meaning == "busy" and attempts < limits.compute_attempts
        )
        if not retry:
            raise refusal(answer, f"setting {step.value} on {card.id} ({card.bdf})", run.control)
        run.report(f"{card.id}: {answer}, trying again")
        clock.sleep(limits.retry_s)
    now = _card(run.control.read(), step.bdf)
    if now.compute != step.value:
        raise NotVerified(f"{answer.via} claims {step.value} on {now.id}, but it reads {now.compute or 'nothing'}")


def _verify(run: Run, step: Step) -> None:
    deadline = run.control.clock.now() + run.limits.reset_s
    while True:
        wrong = mismatches(run.control.read(links=True), run.plan.targets, run.plan.before)
        if not wrong:
            return
        if run.control.clock.now() >= deadline:
            raise NotVerified(f"the node is not as planned: {'; '.join(wrong)}", wrong=list(wrong))
        run.control.clock.sleep(run.limits.poll_s)


def _start_unit(run: Run, step: Step) -> None:
    """Units are started when the outcome is known, whatever it is: see `conclude`."""


_STEPS: Mapping[str, Callable[[Run, Step], None]] = {
    "stop-unit": _stop_unit,
    "set-memory": _set_memory,
    "unload": _unload,
    "load": _load,
    "set-compute": _set_compute,
    "verify": _verify,
    "start-unit": _start_unit,
}


def refusal(answer: Answer, doing: str, control: Control) -> DieplaceError:
    """The typed error for an answer that is not a success, with the vendor's status kept."""
    facts = {"code": answer.code, "name": answer.name, "via": answer.via}
    text = f"{doing} failed: {answer}"
    match answer.meaning:
        case "busy":
            found = control.holders()
            return Busy(text, hint="see who holds the card", holders=[vars(h) for h in found.holders], **facts)
        case "reset":
            return Busy(text, hint="try again when the reset has ended", holders=[], **facts)
        case "denied":
            return NotAllowed(text, hint="run as root on the host itself", **facts)
        case "refused":
            return Unsupported(text, hint="the driver or the provider does not allow it here", **facts)
        case "broken":
            return ApplyFailed(text, hint="see the kernel log; a reboot may be needed", **facts)
        case _:
            return BackendError(text, hint="the state was read back; see the kernel log", **facts)


def _card(facts: NodeFacts, bdf: str) -> CardFacts:
    for card in facts.cards:
        if card.bdf == bdf:
            return card
    raise NotVerified(f"the card at {bdf} has disappeared", hint="see the kernel log")


def _in_use(run: Run, facts: NodeFacts, answer: Answer) -> Busy:
    """Who keeps the driver from unloading; the module's own use count where nobody can be found."""
    found = run.control.holders()
    left = blockers(found, run.plan.blast.cards, reload=True)
    if left or found.incomplete:
        return busy(left, found.incomplete)
    return Busy(
        f"the driver is in use ({facts.module_refs} references), but nobody was found to hold it: {answer}",
        hint="look for display managers and consoles on the cards",
        holders=[],
    )
