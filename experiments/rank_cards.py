"""Which cards a rank takes: the LOCAL_RANK-th of those visible on its host, and after that it sees no others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dieplace.binding.ranks import Launched
from dieplace.errors import Unsupported
from dieplace.experiments.registry import Experiment

SEEN_BY = ("amd", "nvidia")
WHOLE_NODE = ("first-light",)  # and what switches the modes of real cards


@dataclass(frozen=True)
class Mine:
    """A rank's cards by id and bus address, in order. `identity` tells physical cards apart, empty where none is real.

    `of` is the number of cards of an emulated node. `notes` says what of the host-side binding does not hold.
    """

    cards: tuple[str, ...]
    bdfs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    of: int = 1
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def take(launched: Launched, backend: str, node: str | None, experiment: Experiment) -> Mine:
    """The rank's cards; from here on this process sees no others, and sits near them as `dieplace exec` would put it.

    Call it before any driver starts in this process. Unsupported where the host has too few cards for its ranks, and
    for an experiment that switches the modes of a whole node.
    """
    if experiment.name in WHOLE_NODE or (experiment.switches is not None and backend != "emulated"):
        raise Unsupported(
            f"{experiment.name} is about a whole node and its modes, and here ranks share it",
            hint="run it without torchrun",
        )
    if backend == "emulated":
        return _emulated(launched)
    if backend not in SEEN_BY:
        return Mine(())  # the experiment itself says whether and why it cannot run there
    return _visible(launched, backend, node, experiment, os.environ)


def _emulated(launched: Launched) -> Mine:
    from dieplace.emulator.node.making import MAX_CARDS
    from dieplace.experiments.private_node import PART

    if launched.local_world_size > MAX_CARDS:
        raise _too_few(launched, MAX_CARDS, 1, "an emulated node")
    return Mine((f"gpu{launched.local_rank}",), parts=(PART,), of=launched.local_world_size)


def _visible(
    launched: Launched, backend: str, node: str | None, experiment: Experiment, environ: Mapping[str, str]
) -> Mine:
    from dieplace.binding.bind import carry_out
    from dieplace.binding.prepare import Request, prepare
    from dieplace.binding.visibility import chosen_devices, look

    machine = look(backend, node, environ)
    cards = list(dict.fromkeys(device.card for device in chosen_devices(machine, None)))
    needed = experiment.cards_a_rank.get(backend, 1)
    chosen = choose(cards, launched, needed, experiment.name)
    ready = prepare(Request(devices=tuple(chosen), backend=backend, node=node), environ)[0]
    bound = carry_out(ready.binding, every_thread=True)
    os.environ.update(ready.added)
    found = [machine.machine.card(card) for card in chosen]
    boot = machine.machine.stamp[0] if machine.machine.stamp else None
    return Mine(
        tuple(chosen),
        tuple(card.bdf for card in found),
        tuple(card.part or "unknown" for card in found),
        tuple(f"{boot}/{card.bdf}" for card in found),
        notes=bound.failures,
    )


def choose(cards: list[str], launched: Launched, needed: int, name: str) -> list[str]:
    """The rank's part of the visible cards. Where no more than its part is visible, someone has chosen for it already
    (`dieplace exec --by-rank`): that two ranks then do not share a card is checked when all have told theirs."""
    if len(cards) == needed:
        return cards
    first = launched.local_rank * needed
    if first + needed > len(cards):
        raise _too_few(launched, len(cards), needed, f"with {name} a rank takes {needed}, and this host")
    return cards[first : first + needed]


def _too_few(launched: Launched, there: int, needed: int, who: str) -> Unsupported:
    return Unsupported(
        f"{launched.local_world_size} ranks were started on this host, and {who} has {there} cards",
        hint=f"torchrun --nproc-per-node {there // needed}" if there >= needed else "run it without torchrun",
        ranks=launched.local_world_size,
        cards=there,
    )
