"""Carrying out a plan from the command line: show it, ask, switch, say how it ended."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import click

from dieplace.cli import render
from dieplace.cli.partition_show import devices_table
from dieplace.cli.table import Prose, wrapped
from dieplace.errors import Busy, StaleMachine
from dieplace.partition.blocking import busy
from dieplace.partition.control import Control, Limits
from dieplace.partition.entry import carry_out
from dieplace.partition.execute import Outcome, require_privilege
from dieplace.partition.journal import Record, standing
from dieplace.partition.meanwhile import judged_at_rest
from dieplace.partition.plan import Plan, lines, targets_text

_POLL_S = 0.2


def answer_plan(ctx: click.Context, made: Plan) -> None:
    """Print a plan and nothing else."""
    payload = {"plan": made.to_json(), "changes": not made.empty}
    render.answer(
        ctx, "partition-plan/1", payload, source=made.source, table=lambda: [Prose(line) for line in lines(made)]
    )


def switch(
    ctx: click.Context,
    make: Callable[[], Plan],
    control: Control,
    limits: Limits,
    *,
    dry_run: bool,
    yes: bool,
    wait_s: float,
) -> None:
    """Plan, show, ask, carry out and answer. A node that changed while this waited for another switch is planned for
    again, once, and shown and asked about again."""
    made = _shown(ctx, _planned(make, control, wait_s), control, dry_run=dry_run, yes=yes, wait_s=wait_s)
    if dry_run:
        return
    try:
        outcome = _carry_out(ctx, made, control, limits, wait_s)
    except StaleMachine:
        if not wait_s:
            raise
        render.say(ctx, "the node changed while this command waited: planning again")
        made = _shown(ctx, _planned(make, control, wait_s), control, dry_run=False, yes=yes, wait_s=wait_s)
        outcome = _carry_out(ctx, made, control, limits, wait_s)
    _answer_outcome(ctx, made, control, outcome)


def _planned(make: Callable[[], Plan], control: Control, wait_s: float) -> Plan:
    """The plan; where another switch has the node half reloaded just now, after waiting for it."""
    deadline = control.clock.now() + wait_s
    while True:
        try:
            with judged_at_rest(control):
                return make()
        except Busy as error:
            if not error.facts.get("switching") or control.clock.now() >= deadline:
                raise
        control.clock.sleep(_POLL_S)


def _shown(ctx: click.Context, made: Plan, control: Control, *, dry_run: bool, yes: bool, wait_s: float) -> Plan:
    made = replace(made, command=_command_as_root())
    if dry_run:
        answer_plan(ctx, made)
    elif not made.empty:
        require_privilege(made, control)
        if (made.blockers or made.incomplete) and not wait_s:
            raise busy(made.blockers, made.incomplete)
        for line in lines(made):
            # Nobody should answer a question about a plan that -q has hidden.
            render.say(ctx, wrapped(line)) if yes else render.note(wrapped(line))
        render.confirm(ctx, f"Switch to {targets_text(made.targets)}?", yes=yes)
    return made


def _carry_out(ctx: click.Context, made: Plan, control: Control, limits: Limits, wait_s: float) -> Outcome:
    started = time.monotonic()

    def say(text: str) -> None:
        render.say(ctx, f"[{time.monotonic() - started:6.1f} s] {text}")

    try:
        return carry_out(made, control, wait_s=wait_s, limits=limits, progress=say)
    except KeyboardInterrupt:
        for line in ("interrupted:", *standing(Record(control.store), control.read())):
            render.note(line)
        raise


def _answer_outcome(ctx: click.Context, made: Plan, control: Control, outcome: Outcome) -> None:
    facts = outcome.facts
    told = standing(Record(control.store), facts)
    verb = "already" if outcome.word == "already" else "verified"
    head = f"{targets_text(made.targets)}: {verb}, {facts.device_count} logical devices."
    payload = {
        "outcome": outcome.word,
        "targets": {card: str(mode) for card, mode in made.targets.items()},
        "devices": [f"{card.id}/p{device.partition}" for card in facts.cards for device in card.devices],
        "said": list(outcome.said),
        "standing": list(told),
    }
    render.answer(
        ctx,
        "partition-set/1",
        payload,
        source=made.source,
        table=lambda: [head, *outcome.said, *told, "", devices_table(facts)],
    )


def _command_as_root() -> str:
    """The command line that was given, for sudo, with the program by absolute path (sudo has a PATH of its own)."""
    program = os.path.abspath(sys.argv[0])
    run = [sys.executable, "-m", "dieplace.cli"] if program.endswith("__main__.py") else [program]
    return shlex.join(["sudo", *run, *sys.argv[1:]])
