"""Modes as a user writes them: `DPX/NPS2`, or `1/NPS2` with the compute mode's position in the driver's list.

AMD's command takes such a position too (its "profile index"). It counts `supported_xcp_configs` from 0, so DPX is 1 on
a card of 8 XCDs and is not there on one of 6; where cards disagree, or the driver gives no list, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dieplace.errors import NoSuchMode, Unsupported, UsageError
from dieplace.modes import MEMORY_WORDS, Mode
from dieplace.partition.facts import NodeFacts

_BY_INDEX = re.compile(r"\s*([0-9]{1,3})\s*(?:[/+_ ]\s*([A-Za-z]+[0-9]+)\s*)?")


@dataclass(frozen=True)
class ByIndex:
    """A compute mode by its position in the driver's list, with a memory mode by name."""

    index: int
    memory: str

    def __str__(self) -> str:
        return f"{self.index}/{self.memory}"


def read_word(text: str) -> Mode | ByIndex:
    """A mode by name or by index; UsageError for anything else. A bare index names no memory mode and is refused."""
    match = _BY_INDEX.fullmatch(text)
    if match is None:
        return Mode.parse(text)
    memory = (match.group(2) or "").upper()
    if memory not in MEMORY_WORDS:
        raise UsageError(
            f"{text!r} names no memory mode" if not memory else f"cannot read {text!r} as a mode",
            hint=f"an index is for the compute mode alone; add one of {', '.join(MEMORY_WORDS)}, for example 1/NPS2",
            asked=text,
        )
    return ByIndex(int(match.group(1)), memory)


def modes_for(facts: NodeFacts, cards: Sequence[str], word: Mode | ByIndex) -> dict[str, Mode]:
    """Card to mode. An index must mean the same mode on every card: UsageError where it does not, NoSuchMode where a
    card's list is shorter, Unsupported where the driver gives none."""
    if isinstance(word, Mode):
        return dict.fromkeys(cards, word)
    named = {name: Mode(_compute_at(facts, name, word), word.memory) for name in cards}
    if len(set(named.values())) > 1:
        told = ", ".join(f"{mode.compute} on {name}" for name, mode in named.items())
        raise UsageError(f"index {word.index} is ambiguous here: {told}", hint="name the compute mode", asked=str(word))
    return named


def _compute_at(facts: NodeFacts, name: str, word: ByIndex) -> str:
    card = facts.card(name)
    modes = card.supported_compute
    if not modes:
        # `available_compute_partition` is no substitute: on newer kernels its positions move with the memory mode.
        raise Unsupported(
            f"the driver lists no supported compute modes for {card.id} (no supported_xcp_configs), so index "
            f"{word.index} means nothing there",
            hint="name the compute mode, for example DPX/NPS2",
        )
    if word.index >= len(modes):
        listed = ", ".join(f"{position} {mode}" for position, mode in enumerate(modes))
        raise NoSuchMode(
            f"{card.id} has no compute mode {word.index}", hint=f"its driver lists {listed}", asked=str(word),
            offered=list(modes), card=card.id,
        )  # fmt: skip
    return modes[word.index]
