"""From what is and what is wanted to the steps between: pure decisions, all refusals before any step exists.

Order, scope and what a reload does to compute modes: driver files aqua_vanjaram.c (automatic mode at load) and
amdgpu_gmc.c (memory request stored on the hive, applied at unload); AMD's partition guide for the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dieplace.errors import Busy, NoSuchMode, Unsupported
from dieplace.modes import Mode, partitions_of
from dieplace.partition.facts import CardFacts, NodeFacts
from dieplace.partition.plan import Blast, Step, span
from dieplace.partition.support import VALIDATED_SINCE, driver_word, kernel_accepts, offered_modes, validated


def refuse_impossible(facts: NodeFacts, wanted: Mapping[str, Mode], *, allow_unvalidated: bool) -> tuple[str, ...]:
    """Raise for the first card that cannot or must not take its mode; return notes on what is only expected to work."""
    notes: dict[str, None] = {}
    for name, mode in wanted.items():
        card = facts.card(name)
        _refuse_card(card)
        if mode == card.mode:
            continue
        notes.update(dict.fromkeys(_refuse_mode(card, mode, allow_unvalidated)))
    if memory_changes(facts, wanted):
        _refuse_foreign_cards(facts)
    _refuse_mixed_hives(facts, wanted)
    return tuple(notes)


def _refuse_card(card: CardFacts) -> None:
    if card.guest:
        raise Unsupported(
            f"{card.id} ({card.bdf}) is a virtual function: a guest cannot set a partition mode",
            hint="ask whoever runs the host, and see the mode with 'dieplace partition show'",
        )
    if card.driver != "amdgpu":
        raise Unsupported(
            f"{card.id} ({card.bdf}) is bound to {card.driver or 'no driver'}, not to amdgpu",
            hint="give it back to amdgpu first; a switch now would break the virtual machine that uses it",
        )
    if card.in_reset:
        raise Busy(f"{card.id} ({card.bdf}) is in reset", hint="try again when the reset has ended", holders=[])
    if card.mode is None:
        whys = "; ".join(f"{key}: {why}" for key, why in card.whys.items()) or "no reason given"
        raise Unsupported(
            f"{card.id} ({card.bdf}) does not say its mode ({whys}), and an unknown mode is unsafe to change",
            hint="see the kernel log; a reboot makes the driver choose again",
        )


def _refuse_mode(card: CardFacts, mode: Mode, allow_unvalidated: bool) -> list[str]:
    word = driver_word(card, mode)
    offered = [str(m) for m in offered_modes(card)]
    if word is False or (word is None and not kernel_accepts(card.part, mode) and not allow_unvalidated):
        raise NoSuchMode(
            f"{card.id} ({card.part or 'part not known'}) cannot become {mode}",
            hint=f"it offers {', '.join(offered) or 'nothing'}; now {card.mode}",
            asked=str(mode),
            offered=offered,
            card=card.id,
        )
    frozen = [kind for kind, differs, writable in (
        ("memory", mode.memory != card.memory, card.memory_writable),
        ("compute", mode.compute != card.compute, card.compute_writable),
    ) if differs and not writable]  # fmt: skip
    if frozen:
        raise Unsupported(
            f"the {frozen[0]} mode of {card.id} ({card.bdf}) cannot be changed here: the driver's file is read-only",
            hint="managed clouds fix it; ask the provider for a machine in that mode",
            offered=offered,
        )
    if not validated(card.part, mode) and not allow_unvalidated:
        listed = [m for m in offered if validated(card.part, Mode.parse(m))]
        raise NoSuchMode(
            f"the driver offers {mode} on {card.id}, but AMD does not list it for {card.part or 'this part'}",
            hint=f"AMD lists {', '.join(listed) or 'no mode of it'}; --allow-unvalidated takes it all the same",
            asked=str(mode),
            offered=offered,
            card=card.id,
        )
    return _mode_notes(card, mode, word)


def _mode_notes(card: CardFacts, mode: Mode, word: bool | None) -> list[str]:
    notes = []
    if word is None:
        notes.append(
            f"Whether the loaded driver combines {mode.compute} with {mode.memory} is asked of it before the first "
            "write; here it is expected from the kernel's source."
        )
    if not validated(card.part, mode):
        notes.append(f"AMD does not list {mode} as supported on {card.part or 'this part'}.")
    since = VALIDATED_SINCE.get((card.part or "", str(mode)))
    return [*notes, f"AMD lists {mode} on {card.part} since {since}."] if since else notes


def _refuse_foreign_cards(facts: NodeFacts) -> None:
    """Which hive a card belongs to is known only while amdgpu drives it: none may be elsewhere when a hive changes."""
    for card in facts.cards:
        if card.driver != "amdgpu":
            raise Unsupported(
                f"{card.id} ({card.bdf}) is bound to {card.driver or 'no driver'}, so nobody knows whether it belongs"
                " to a hive whose memory mode would change",
                hint="give it back to amdgpu first",
            )


def _refuse_mixed_hives(facts: NodeFacts, wanted: Mapping[str, Mode]) -> None:
    """A memory mode belongs to a whole hive: one mode for all its cards (amdgpu_xgmi.c; gpu-operator issue 316)."""
    for scope in {facts.card(name).scope for name in wanted}:
        members = [card for card in facts.cards if card.scope == scope]
        memories = {card.id: wanted[card.id].memory if card.id in wanted else card.memory for card in members}
        if len(set(memories.values())) > 1:
            listed = ", ".join(f"{name} {memory}" for name, memory in memories.items())
            raise Unsupported(
                f"one memory mode holds for the whole {scope}, but the request comes to {listed}",
                hint=f"ask for {span(tuple(memories))} together, or keep their memory mode",
                cards=list(memories),
            )


def steps_between(
    facts: NodeFacts,
    wanted: Mapping[str, Mode],
    *,
    pending: Mapping[str, str],
    clear_pending: bool,
    stop_units: Sequence[str],
    roads: tuple[str, str],
) -> tuple[tuple[Step, ...], dict[str, Mode], Blast]:
    """Steps, the end state to verify on every card, and the blast radius.

    `pending` maps a scope (a hive, or a card without one) to a memory wish that may be recorded in the driver. Any
    reload applies it, so one that differs from the target is overwritten or, with `clear_pending`, reloaded away.
    """
    changing = memory_changes(facts, wanted)
    stuck = {s: w for s, w in pending.items() if clear_pending and s not in changing and _memory_of(facts, s) != w}
    reload = bool(changing or stuck or not facts.driver_loaded)
    targets = dict(wanted)
    if reload:
        targets |= {c.id: c.mode for c in facts.cards if c.id not in wanted and c.mode is not None}
    steps: list[Step] = []
    if not facts.driver_loaded:
        # Only the load tells which memory mode the cards are in, so what follows is planned and skipped where needless.
        steps.append(Step("load", "amdgpu", "load the driver, which is absent, and wait until every card is ready"))
        changing = {facts.card(name).scope: mode.memory for name, mode in wanted.items()}
    elif stuck:
        steps += _reload_steps("applies the pending memory mode, which only a load can resolve")
        # A scope that no card has any more (a hive that KFD lost) gets no second wish: the load resolves the first.
        present = sorted(scope for scope in stuck if _memory_of(facts, scope))
        steps += [_memory_step(facts, scope, _memory_of(facts, scope) or "", roads[0]) for scope in present]
    steps += [_memory_step(facts, scope, word, roads[0]) for scope, word in sorted(changing.items())]
    if changing or stuck:
        steps += _reload_steps("the memory mode becomes real")
    steps += _compute_steps(facts, targets, reload, roads[1])
    blast = _blast(facts, wanted, targets, reload)
    if not steps:
        return (), targets, blast
    check = Step("verify", "node", f"read back modes, device counts and bytes on {span(tuple(targets))}")
    stop = [Step("stop-unit", unit, f"stop {unit} if it runs") for unit in stop_units]
    start = [Step("start-unit", unit, f"start {unit} again if it ran") for unit in stop_units]
    return (*stop, *steps, check, *start), targets, blast


def memory_changes(facts: NodeFacts, wanted: Mapping[str, Mode]) -> dict[str, str]:
    """Scope (hive or lone card) to the memory mode it must get, only where it differs now."""
    return {
        facts.card(name).scope: mode.memory for name, mode in wanted.items() if mode.memory != facts.card(name).memory
    }


def _memory_of(facts: NodeFacts, scope: str) -> str | None:
    return next((card.memory for card in facts.cards if card.scope == scope), None)


def _memory_step(facts: NodeFacts, scope: str, word: str, road: str) -> Step:
    first = next(card for card in facts.cards if card.scope == scope)
    count = sum(card.scope == scope for card in facts.cards)
    text = (
        f"record memory mode {word} on {first.id} ({first.bdf}) for {count} card{'s' * (count != 1)} of {scope}, {road}"
    )
    return Step("set-memory", scope, text, bdf=first.bdf, value=word)


def _reload_steps(why: str) -> list[Step]:
    return [
        Step("unload", "amdgpu", f"unload the driver ({why})"),
        Step("load", "amdgpu", "load the driver and wait until every card is ready"),
    ]


def _compute_steps(facts: NodeFacts, targets: Mapping[str, Mode], reload: bool, road: str) -> list[Step]:
    steps = []
    for card in facts.cards:
        mode = targets.get(card.id)
        if mode is None or (not reload and mode.compute == card.compute):
            continue
        only = " where the load has not chosen it" if reload else ""
        text = f"set compute mode {mode.compute} on {card.id} ({card.bdf}){only}, {road}"
        steps.append(Step("set-compute", card.id, text, bdf=card.bdf, value=mode.compute))
    return steps


def _blast(facts: NodeFacts, wanted: Mapping[str, Mode], targets: Mapping[str, Mode], reload: bool) -> Blast:
    changed = [c.id for c in facts.cards if c.id in targets and (reload or targets[c.id] != c.mode)]
    after = sum(
        partitions_of(targets[c.id].compute, c.xccs) if c.id in targets and c.xccs else len(c.devices)
        for c in facts.cards
    )
    bystanders = tuple(c.id for c in facts.cards if reload and c.id not in wanted)
    return Blast(tuple(changed), bystanders, reload, facts.device_count, after)
