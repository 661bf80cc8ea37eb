"""A frozen description of work: stages, their operands by role, and the hand-offs between them.

Kernels make it, backends run it, the clock times it. Bytes are distinct bytes, decimal where printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dieplace.errors import UsageError

ROLES = ("weights", "kv_cache", "sync_flag", "activation")


@dataclass(frozen=True)
class Operand:
    """One buffer that a stage reads or writes; `nbytes` is distinct bytes touched per token, over all shards."""

    name: str
    role: str
    nbytes: int
    written: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}")


@dataclass(frozen=True)
class Handoff:
    """A value passed between workgroups: `packed` has value and tag in one word, `release` polls a word of its own."""

    name: str
    kind: str  # "packed" or "release"
    payload_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """One step of a layer or of the token; `kernel` is a registry name once kernels exist, else None.

    `launches` start the stage's kernels, all of its repeats, on the current device; without them the stage is a
    description. They are no part of equality, of printing or of what is written down.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    handoff: Handoff | None = None
    kernel: str | None = None
    repeats: int = 1  # times per token (layers)
    launches: tuple[Callable[[], object], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Workload:
    """A decode step: `stages` in order; `shards` 1 or 2; `bytes_from` says where the byte counts come from."""

    name: str
    stages: tuple[Stage, ...]
    shards: int = 1
    tokens: int = 1
    context_tokens: int = 1024
    layers: int = 1
    bytes_from: str = "model shapes"
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def of_launches(cls, name: str, launches: Sequence[Callable[[], object]]) -> Workload:
        """Work that is nothing but launches in order: one stage of the same name, no bytes told."""
        return cls(name, (Stage(name, launches=tuple(launches)),), bytes_from="not counted")

    def launches(self) -> tuple[Callable[[], object], ...]:
        """All launches in order; UsageError for a description, which has none."""
        found = tuple(launch for stage in self.stages for launch in stage.launches)
        if not found:
            raise UsageError(
                f"workload {self.name!r} describes bytes and has no launches", hint="give its stages launches"
            )
        return found

    def bytes_by_role(self) -> dict[str, int]:
        """Distinct bytes per token and role, repeats counted."""
        total = dict.fromkeys(ROLES, 0)
        for stage in self.stages:
            for operand in stage.operands:
                total[operand.role] += operand.nbytes * stage.repeats
        return total
