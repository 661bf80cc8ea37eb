"""A probe's answer; apart from `base.py`, which every start of the command would otherwise have to load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Availability:
    """A probe's answer: yes, or why not and what to do; `versions` are those of the vendor parts found."""

    available: bool
    reason: str
    hint: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
