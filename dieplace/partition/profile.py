"""TOML profiles: a file of named modes, each a map from cards to a partition mode; `export` writes what `apply` reads.

version = 1

[modes.decode]
all = "DPX/NPS2"

[modes.mixed]                  # cards by id, index, PCI address or UUID
gpu0 = "DPX/NPS1"
"0000:15:00.0" = "SPX/NPS1"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dieplace.errors import Unsupported, UsageError
from dieplace.modes import Mode
from dieplace.partition.facts import NodeFacts

VERSION = 1
_LIMIT_BYTES = 1 << 18
_LIMIT_LINE = 1000  # tomllib takes quadratic time for a long dotted key


@dataclass(frozen=True)
class Profile:
    """The named modes of one file: name to selector to mode; `all` selects every card."""

    modes: dict[str, dict[str, Mode]]

    def named(self, name: str | None) -> dict[str, Mode]:
        """One named mode; with a single one the name may be left out. Anything else is a UsageError."""
        if name is None and len(self.modes) == 1:
            return next(iter(self.modes.values()))
        if name is None or name not in self.modes:
            asked = "no mode was named" if name is None else f"there is no mode {name!r}"
            raise UsageError(f"{asked} in the profile", hint=f"name one of {', '.join(self.modes)}", asked=name)
        return self.modes[name]


def read_profile(path: str | Path) -> Profile:
    """Read a profile file; every problem is a UsageError that names the file."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error
    if len(text) > _LIMIT_BYTES:
        raise UsageError(f"{path} is larger than a profile can be ({_LIMIT_BYTES} bytes)")
    try:
        return parse_profile(text.decode())
    except (UsageError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def parse_profile(text: str) -> Profile:
    """A profile from TOML text; unknown words are errors, never defaults."""
    if max(map(len, text.split("\n"))) > _LIMIT_LINE:
        raise UsageError(f"a line is longer than {_LIMIT_LINE} characters", hint="a profile has one short line a card")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise UsageError(f"not TOML: {error}") from error
    unknown = sorted(set(data) - {"version", "modes"})
    if unknown:
        raise UsageError(f"unknown word {unknown[0]!r}", hint="a profile holds `version` and `[modes.NAME]` tables")
    if data.get("version") != VERSION or type(data.get("version")) is not int:  # neither true nor 1.0
        raise UsageError(f"version is {data.get('version')!r}", hint=f"write `version = {VERSION}`")
    modes = data.get("modes")
    if not isinstance(modes, dict) or not modes:
        raise UsageError(
            "no modes", hint='write at least one table, for example `[modes.decode]` with `all = "DPX/NPS2"`'
        )
    return Profile({name: _one(name, entries) for name, entries in modes.items()})


def _one(name: str, entries: object) -> dict[str, Mode]:
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f"mode {name!r} names no cards", hint='write `all = "DPX/NPS2"` or one line a card')
    for selector, text in entries.items():
        if not isinstance(text, str):
            raise UsageError(
                f"mode {name!r}: {selector} is {text!r}", hint='write a mode in quotes, such as "DPX/NPS2"'
            )
    return {selector: Mode.parse(text) for selector, text in entries.items()}


def resolve(facts: NodeFacts, entries: Mapping[str, Mode]) -> dict[str, Mode]:
    """Selectors to cards; a card selected twice is refused, also when both say the same."""
    wanted: dict[str, Mode] = {}
    chosen_by: dict[str, str] = {}
    for selector, mode in entries.items():
        for card in select(facts, (selector,)):
            if card in wanted:
                raise UsageError(
                    f"{card} is selected twice, by {chosen_by[card]!r} and by {selector!r}",
                    hint="name every card once",
                    card=card,
                )
            wanted[card], chosen_by[card] = mode, selector
    return wanted


def select(facts: NodeFacts, selectors: Sequence[str] | None) -> tuple[str, ...]:
    """Card ids for selectors, each once, in node order; None or `all` is every card."""
    if selectors is None:
        return tuple(card.id for card in facts.cards)
    chosen = set()
    for selector in selectors:
        chosen |= {c.id for c in facts.cards} if selector == "all" else {facts.card(str(selector)).id}
    return tuple(card.id for card in facts.cards if card.id in chosen)


def export(facts: NodeFacts, name: str = "current") -> str:
    """The node's modes as a profile that `apply` takes; cards whose mode is not readable are an error, not left out."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(f"{name!r} cannot name a mode in a profile", hint="letters, digits, _ and - only")
    for card in facts.cards:
        if card.mode is None:
            raise Unsupported(f"cannot export: the mode of {card.id} is not readable ({'; '.join(card.whys.values())})")
    rows = [f'"{card.bdf}" = "{card.mode}"  # {card.id}' for card in facts.cards]
    return "\n".join([f"version = {VERSION}", "", f"[modes.{name}]", *rows, ""])
