"""mode: the same decode step in SPX/NPS1, DPX/NPS1 and DPX/NPS2, each mode a block, compared afterwards.

The card is switched by the code that `dieplace partition` uses: a plan for each block before the first change, then
apply, verify and measure block by block, and the first mode again at the end and after any failure. The emulated
backend does so on a private node; on AMD cards it asks first, as `partition set` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dieplace.errors import Declined, Unsupported, UsageError
from dieplace.experiments.modelled import Spec, block_on, prepare, refuse_elsewhere
from dieplace.experiments.private_node import FIRST_MODE, private_node
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.machine import Machine
from dieplace.modes import Mode
from dieplace.run import Run

if TYPE_CHECKING:
    from dieplace.partition import Plan

BLOCKS = {"spx-nps1": "SPX/NPS1", "dpx-nps1": "DPX/NPS1", "dpx-nps2": "DPX/NPS2"}
LEFT_OUT = "left_out"
# What one block takes on the machine as it is then: its name, its mode, and the machine right after the switch.
Take = Callable[[Machine, str, str], Run]


@dataclass(frozen=True)
class Blocks:
    """The blocks that can be taken, in order, by name and mode, and why each of the others cannot."""

    modes: Mapping[str, str]
    left_out: Mapping[str, str]


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run a mode, as each is done.

    Raises before any change: Unsupported where no mode can be taken, Declined on AMD without consent, Busy, NotAllowed.
    A switch that fails raises as `partition set` does, after the first mode was restored; runs given before it stand.
    """
    refuse_elsewhere("mode", backend, cannot(backend), options)
    refuse_arms("mode", options)
    if backend == "emulated":
        take = _modelled(options, progress)
        with private_node(FIRST_MODE, cards=options.cards) as machine:
            progress(f"{FIRST_MODE}: a private emulated node")
            yield from each_mode(machine, options, progress, take)
        return
    from dieplace.discover import discover
    from dieplace.experiments.mode_child import refuse_other_forms, take_in_child

    refuse_other_forms(options)
    if not options.consent:
        raise Declined("the modes of real cards are switched only after a yes", hint="answer the question, or use -y")
    machine = discover(backend)
    yield from each_mode(machine, options, progress, take_in_child(options, progress))


def _modelled(options: Options, progress: Progress) -> Take:
    specs = [Spec("local")]
    work = prepare(specs, options, progress)

    def take(machine: Machine, block: str, mode: str) -> Run:
        return block_on(machine, "mode", (block, mode), specs, work, options, progress)

    return take


def each_mode(machine: Machine, options: Options, progress: Progress, take: Take) -> Iterator[Run]:
    """Switch to each block's mode, take it, and lead the node back to its first modes whatever happens."""
    found = blocks_of(machine, options)
    _require_ready(machine, found, options)
    before = {card.id: str(card.mode) for card in machine.cards}
    with _led_back(machine, progress) as node:
        for block, mode in found.modes.items():
            switched = _switch(node.machine, mode, options, progress)
            node.machine = switched.machine
            done = take(node.machine, block, mode)
            yield _told(done, found, switched, before)


def blocks_of(machine: Machine, options: Options) -> Blocks:
    """Which modes this node can take, asked of the plans themselves; nothing is changed.

    A mode that the card does not offer, that a cloud has frozen, or that AMD does not list and nobody allowed, is left
    out with that reason.
    """
    modes, left_out = {}, {}
    for block, mode in BLOCKS.items():
        try:
            _plan(machine, mode, options)
        except Unsupported as error:
            left_out[block] = f"{error.message}: {error.hint}" if error.hint else error.message
        else:
            modes[block] = mode
    if not modes:
        raise Unsupported(
            f"mode has no block to run here: {'; '.join(dict.fromkeys(left_out.values()))}",
            hint="see: dieplace partition show",
        )
    return Blocks(modes, left_out)


def _require_ready(machine: Machine, found: Blocks, options: Options) -> None:
    """Busy or NotAllowed for any of the switches, before the first of them."""
    from dieplace.partition.blocking import busy
    from dieplace.partition.entry import control_of
    from dieplace.partition.execute import require_privilege

    control = control_of(machine.require_session("switch modes"), None)
    for mode in found.modes.values():
        made = _plan(machine, mode, options)
        if made.empty:
            continue
        require_privilege(made, control)
        if made.blockers or made.incomplete:
            raise busy(made.blockers, made.incomplete)


def switches(backend: str, options: Options) -> Sequence[str]:
    """Lines of the plans from the node's modes to each block's; none where only a private node is switched."""
    if backend == "emulated" or cannot(backend) is not None:
        return ()
    from dieplace.discover import discover
    from dieplace.partition.plan import lines

    machine = discover(backend)
    found = blocks_of(machine, options)
    told = [f"left out: {block}: {why}" for block, why in found.left_out.items()]
    for block, mode in found.modes.items():
        made = _plan(machine, mode, options)
        told += [f"block {block}:", *(f"  {line}" for line in lines(made))]
    return [*told, "then back to the modes of now, also after a failure"]


def _plan(machine: Machine, mode: str, options: Options) -> Plan:
    from dieplace.partition import plan

    return plan(machine, mode, allow_unvalidated=options.allow_unvalidated)


@dataclass(frozen=True)
class _Switched:
    machine: Machine
    steps: tuple[str, ...]
    notes: tuple[str, ...]
    listed: bool


def _switch(machine: Machine, mode: str, options: Options, progress: Progress) -> _Switched:
    from dieplace.partition import apply
    from dieplace.partition.plan import step_texts
    from dieplace.partition.support import validated

    made = _plan(machine, mode, options)
    steps = () if made.empty else tuple(step_texts(made))
    there = apply(made)
    progress(f"{mode}: {'switched and verified' if steps else 'as it was'}")
    listed = all(validated(card.part, Mode.parse(mode)) for card in there.cards)
    return _Switched(there, steps, made.notes, listed)


@dataclass
class _Node:
    machine: Machine


@contextmanager
def _led_back(machine: Machine, progress: Progress) -> Iterator[_Node]:
    """A plan to the modes of now, which changes nothing itself, and whose leaving restores and verifies them."""
    from dieplace.partition import partitioned, plan

    now = {card.id: card.mode for card in machine.cards if card.mode is not None}
    if not now:
        raise UsageError("no card says its mode", hint="see: dieplace partition show")
    node, session = _Node(machine), machine.require_session("switch modes")
    try:
        with partitioned(plan(machine, now, allow_unvalidated=True)) as same:
            node.machine = same
            yield node
    finally:
        if {card.id: card.mode for card in session.snapshot().cards} == now:
            progress("the first modes again, read back")


def steps_asked(backend: str, options: Options) -> int:
    """Steps of a run: of each block that will be taken three (switched, placed, timed; on cards switched and measured),
    one back to the first modes, and one of a private node."""
    if backend != "emulated":
        if cannot(backend) is not None:
            return 0
        from dieplace.discover import discover

        return 1 + 2 * len(blocks_of(discover(backend), options).modes)
    with private_node(FIRST_MODE) as machine:
        return 2 + 3 * len(blocks_of(machine, options).modes)


def _told(run_: Run, found: Blocks, switched: _Switched, before: Mapping[str, str]) -> Run:
    how = {"first_modes": dict(before), "steps": list(switched.steps), "notes": list(switched.notes), "verified": True}
    unlisted = () if switched.listed else (f"AMD does not list {BLOCKS[run_.block]} as supported on this part",)
    facts = {**run_.facts, "switch": how, LEFT_OUT: dict(found.left_out)}
    return replace(run_, facts=facts, notes=(*run_.notes, *unlisted))


def cannot(backend: str) -> str | None:
    """None where there are partition modes and a step can be timed in them; elsewhere one sentence why not."""
    if backend == "emulated":
        return None
    if backend == "nvidia":
        return "NVIDIA GPUs have no SPX or DPX modes, and MIG is left alone"
    if backend == "cpu":
        return "host memory has no partition modes"
    from dieplace.experiments.mode_child import cannot_here

    return cannot_here(backend)


EXPERIMENT = Experiment(
    name="mode",
    summary="SPX/NPS1, DPX/NPS1 and DPX/NPS2: the same step in each mode of the card",
    factors={"block": ", ".join(BLOCKS)},
    run=run,
    cannot=cannot,
    steps=2 + 3 * len(BLOCKS),
    steps_asked=steps_asked,
    blocks=tuple(BLOCKS),
    switches=switches,
)
