"""`dieplace partition`: show, plan, set, apply, assert, export, restore."""

from __future__ import annotations

from collections.abc import Mapping

import click

from dieplace.cli import render
from dieplace.cli.options import backend_name, settings
from dieplace.cli.partition_export import export_for
from dieplace.cli.partition_options import CARDS, CHANGING, PROFILE, ROCM, UNITS, UNVALIDATED
from dieplace.cli.partition_show import show_answer
from dieplace.cli.partition_switch import answer_plan, switch
from dieplace.cli.table import Document
from dieplace.errors import Unsupported, UsageError
from dieplace.exporters import TARGETS as EXPORT_TARGETS
from dieplace.modes import Mode
from dieplace.partition.control import Control, Limits, check_unit
from dieplace.partition.entry import build, control_of, plan_restore
from dieplace.partition.facts import NodeFacts
from dieplace.partition.meanwhile import judged_at_rest
from dieplace.partition.plan import Plan, targets_text
from dieplace.partition.profile import export as export_profile
from dieplace.partition.profile import read_profile, resolve, select
from dieplace.partition.verify import mismatches
from dieplace.partition.words import ByIndex, modes_for, read_word


@click.group()
def partition() -> None:
    """Show, plan, switch and restore partition modes.

    A mode is a compute and a memory mode, such as SPX/NPS1 or DPX/NPS2. `plan` and --dry-run change nothing; `set`
    and `apply` check everything first, verify afterwards, and `restore` leads back.
    """


@partition.command("show")
@click.pass_context
def show_command(ctx: click.Context) -> None:
    """Show each card's mode, what it offers, its devices, and what is pending."""
    control, facts = _node(ctx, None)
    show_answer(ctx, control, facts)


@partition.command("plan")
@click.argument("mode")
@CARDS
@UNVALIDATED
@UNITS
@ROCM
@click.pass_context
def plan_command(
    ctx: click.Context,
    mode: str,
    cards: tuple[str, ...],
    allow_unvalidated: bool,
    units: tuple[str, ...],
    rocm_path: str | None,
) -> None:
    """Print the steps to MODE, whom they disturb, what blocks them and the undo. Changes nothing.

    MODE is DPX/NPS2, or 1/NPS2 with the compute mode's position (from 0) in the driver's own list.
    """
    wanted = read_word(mode)
    control, facts = _node(ctx, rocm_path)
    with judged_at_rest(control):
        answer_plan(ctx, _build(control, facts, _on(facts, cards, wanted), allow_unvalidated, units))


@partition.command("set")
@click.argument("mode")
@CARDS
@UNVALIDATED
@UNITS
@CHANGING
@click.pass_context
def set_command(
    ctx: click.Context,
    mode: str,
    cards: tuple[str, ...],
    allow_unvalidated: bool,
    units: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    wait: float,
    unload_limit: float,
    ready_limit: float,
    rocm_path: str | None,
) -> None:
    """Switch cards to MODE, verify, and remember how to get back.

    MODE is DPX/NPS2, or 1/NPS2 with the compute mode's position (from 0) in the driver's own list.
    """
    wanted = read_word(mode)
    control, _ = _node(ctx, rocm_path)
    limits = Limits(unload_s=unload_limit, ready_s=ready_limit)

    def make() -> Plan:
        now = control.read()
        return _build(control, now, _on(now, cards, wanted), allow_unvalidated, units)

    switch(ctx, make, control, limits, dry_run=dry_run, yes=yes, wait_s=wait)


@partition.command("apply")
@PROFILE
@UNVALIDATED
@UNITS
@CHANGING
@click.pass_context
def apply_command(
    ctx: click.Context,
    path: str,
    profile: str | None,
    allow_unvalidated: bool,
    units: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    wait: float,
    unload_limit: float,
    ready_limit: float,
    rocm_path: str | None,
) -> None:
    """Bring the node to a named mode of a profile; nothing happens where it is so already."""
    entries = read_profile(path).named(profile)
    control, _ = _node(ctx, rocm_path)
    limits = Limits(unload_s=unload_limit, ready_s=ready_limit)

    def make() -> Plan:
        now = control.read()
        return _build(control, now, resolve(now, entries), allow_unvalidated, units)

    switch(ctx, make, control, limits, dry_run=dry_run, yes=yes, wait_s=wait)


@partition.command("assert")
@click.argument("mode", required=False)
@CARDS
@click.option("-f", "--file", "path", metavar="FILE", help="Check a profile instead of MODE.")
@click.option("--profile", metavar="NAME", help="The named mode in it; not needed where there is one.")
@click.pass_context
def assert_command(
    ctx: click.Context, mode: str | None, cards: tuple[str, ...], path: str | None, profile: str | None
) -> None:
    """Exit 0 when the cards are in MODE, 1 when they are not. Changes nothing."""
    if (mode is None) == (path is None):
        raise UsageError("name either a MODE or a profile with -f", hint="dieplace partition assert DPX/NPS2")
    if path is None and profile is not None:
        raise UsageError("--profile names a mode in a file", hint="add -f FILE")
    if path is not None and cards:
        raise UsageError("a profile names its own cards", hint="leave --card out")
    entries = read_profile(path).named(profile) if path is not None else None
    asked = read_word(mode) if mode is not None else None
    control, _ = _node(ctx, None)
    facts = control.read(links=True)
    wanted = resolve(facts, entries) if entries is not None else _on(facts, cards, asked)
    rows = [
        {"card": card, "bdf": facts.card(card).bdf, "asked": str(want), "found": _text(facts.card(card).mode)}
        for card, want in wanted.items()
    ]
    # Counts and bytes too: a card can say DPX with one of its devices lost.
    wrong = mismatches(facts, wanted, facts)
    said = list(wrong) or [f"{targets_text(wanted)}: yes"]
    payload = {"cards": rows, "wrong": list(wrong)}
    render.answer(ctx, "partition-assert/1", payload, source=control.source, ok=not wrong, table=lambda: said)
    if wrong:
        ctx.exit(1)


@partition.command("export")
@click.option("--profile", default="current", show_default=True, metavar="NAME", help="The name to give the mode.")
@click.option(
    "--for",
    "target",
    type=click.Choice(EXPORT_TARGETS),
    help="Write for Slurm (gres.conf), Kubernetes (AMD Device Config Manager) or systemd (a one-shot unit).",
)
@click.pass_context
def export_command(ctx: click.Context, profile: str, target: str | None) -> None:
    """Print the node's modes as a profile that `apply` takes, or for another system to read."""
    if target is not None:
        export_for(ctx, target, profile)
        return
    control, facts = _node(ctx, None)
    text = export_profile(facts, profile)
    payload = {"profile": text, "name": profile, "cards": {card.bdf: str(card.mode) for card in facts.cards}}
    document = Document(text.rstrip("\n"))
    render.answer(ctx, "partition-export/1", payload, source=control.source, table=lambda: [document])


@partition.command("restore")
@CHANGING
@click.pass_context
def restore_command(
    ctx: click.Context,
    dry_run: bool,
    yes: bool,
    wait: float,
    unload_limit: float,
    ready_limit: float,
    rocm_path: str | None,
) -> None:
    """Lead back to the state before the last switch, also an interrupted one."""
    control, _ = _node(ctx, rocm_path, loaded=False)
    limits = Limits(unload_s=unload_limit, ready_s=ready_limit)
    switch(ctx, lambda: plan_restore(control), control, limits, dry_run=dry_run, yes=yes, wait_s=wait)


def _node(ctx: click.Context, rocm_path: str | None, *, loaded: bool = True) -> tuple[Control, NodeFacts]:
    """The control and facts of the chosen node: not probed, because an interrupted switch may have left no driver."""
    from dieplace.discover import make_backend

    chosen = settings(ctx)
    control = control_of(make_backend(_source_name(ctx), node=chosen.node), rocm_path)
    facts = control.read()
    if loaded and not facts.cards and not facts.driver_loaded:
        raise Unsupported(
            "there is no AMD Instinct card on this node, or its driver is not loaded",
            hint="run: dieplace doctor; or try an emulated node with --backend emulated",
        )
    return control, facts


def _source_name(ctx: click.Context) -> str:
    return backend_name(ctx, "amd") or "amd"


def _on(facts: NodeFacts, cards: tuple[str, ...], mode: Mode | ByIndex | None) -> dict[str, Mode]:
    assert mode is not None
    return modes_for(facts, select(facts, cards or None), mode)


def _build(
    control: Control, facts: NodeFacts, wanted: Mapping[str, Mode], allow_unvalidated: bool, units: tuple[str, ...]
) -> Plan:
    checked = tuple(check_unit(unit) for unit in units)
    return build(control, facts, wanted, allow_unvalidated=allow_unvalidated, units=checked)


def _text(mode: Mode | None) -> str | None:
    return str(mode) if mode is not None else None
