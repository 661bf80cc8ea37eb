"""When a driver that was loaded is really ready: more than its module saying "live"."""

from __future__ import annotations

from collections.abc import Callable

from dieplace.errors import NotVerified
from dieplace.modes import partitions_of
from dieplace.partition.control import Control, Limits
from dieplace.partition.facts import CardFacts, NodeFacts


def wait_ready(control: Control, before: NodeFacts, limits: Limits, report: Callable[[str], None]) -> NodeFacts:
    """Facts of a node whose driver is really ready; NotVerified with what is missing after `ready_s` seconds.

    `initstate` "live" is not enough: every card bound and readable, the expected devices with their render nodes, and
    a topology that no longer changes between two reads.
    """
    started = control.clock.now()
    last, told = None, -1
    while True:
        facts = control.read()
        missing = not_ready(facts, before)
        if not missing and last == facts.generation:
            return facts
        last = facts.generation
        elapsed = control.clock.now() - started
        if elapsed >= limits.ready_s:
            raise NotVerified(
                f"not ready {elapsed:.0f} s after loading: {'; '.join(missing) or 'the topology keeps changing'}",
                hint="see the kernel log; 'dieplace partition show' tells when it is, and"
                " 'dieplace partition restore' leads back",
            )
        if int(elapsed) // 5 != told:
            told = int(elapsed) // 5
            report(f"waiting for the driver, {elapsed:.0f} s: {missing[0] if missing else 'topology settling'}")
        control.clock.sleep(limits.poll_s)


def not_ready(facts: NodeFacts, before: NodeFacts) -> list[str]:
    """What a loaded driver still lacks, compared with the cards there were before."""
    if not facts.driver_loaded:
        return ["the driver is not loaded"]
    missing = [] if facts.module_state in (None, "live") else [f"the module is {facts.module_state}"]
    present = {card.bdf: card for card in facts.cards}
    for earlier in before.cards:
        card = present.get(earlier.bdf)
        if card is None or card.driver != earlier.driver:
            missing.append(f"{earlier.id} ({earlier.bdf}) is not bound")
        elif earlier.driver == "amdgpu" and (card.in_reset or card.mode is None):
            missing.append(f"the mode of {card.id} is not readable")
        elif earlier.driver == "amdgpu":
            missing += _devices_missing(card, earlier)
    return missing


def _devices_missing(card: CardFacts, earlier: CardFacts) -> list[str]:
    xccs = earlier.xccs or card.xccs
    expected = partitions_of(card.compute or "SPX", xccs) if xccs else None
    out = []
    if expected is not None and len(card.devices) != expected:
        out.append(f"{card.id} shows {len(card.devices)} of {expected} devices")
    out += [f"{card.id} lacks renderD{d.render_minor}" for d in card.devices if not d.render_present]
    return out
