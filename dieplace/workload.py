"""A frozen description of work: stages, their operands by role, and the hand-offs between them.

Kernels make it, backends run it, the clock times it. Bytes are distinct bytes, decimal where printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """One step of a layer or of the token; `kernel` is a registry name once kernels exist, else None."""

    name: str
    operands: tuple[Operand, ...] = ()
    handoff: Handoff | None = None
    kernel: str | None = None
    repeats: int = 1  # times per token (layers)


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

    def bytes_by_role(self) -> dict[str, int]:
        """Distinct bytes per token and role, repeats counted."""
        total = dict.fromkeys(ROLES, 0)
        for stage in self.stages:
            for operand in stage.operands:
                total[operand.role] += operand.nbytes * stage.repeats
        return total
