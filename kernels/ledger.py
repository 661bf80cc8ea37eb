"""What a step did: every op call with the bytes it touched, by role and by die, and the Workload made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dieplace.workload import ROLES, Handoff, Operand, Stage, Workload


@dataclass(frozen=True)
class Touched:
    """Distinct bytes of one operand in one call, and the places they lie in."""

    name: str
    role: str
    nbytes: int
    written: bool
    places: dict[str, int]


@dataclass(frozen=True)
class Executed:
    """One op call of a step: stage, layer (None outside layers), shard, op, the backend that ran it, its operands.

    `operands` are bytes by contract; `kernels` say what the emulator counted.
    """

    stage: str
    layer: int | None
    shard: int
    op: str
    backend: str
    operands: tuple[Touched, ...]
    kernels: tuple[Any, ...] = ()  # emulator.execution.KernelRecord of every launch, where launches are counted
    code_hashes: tuple[str, ...] = ()


@dataclass
class Ledger:
    """The calls of one step, in order."""

    calls: list[Executed] = field(default_factory=list)
    handoffs: list[tuple[str, Handoff]] = field(default_factory=list)

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of all calls by role; weights, which no two calls of a step share, are distinct bytes."""
        total = dict.fromkeys(ROLES, 0)
        for operand in self._operands():
            total[operand.role] += operand.nbytes
        return total

    def bytes_by_role_and_die(self) -> dict[str, dict[str, int]]:
        """The same, divided over the places the bytes lie in."""
        total: dict[str, Counter[str]] = {role: Counter() for role in ROLES}
        for operand in self._operands():
            total[operand.role].update(operand.places)
        return {role: dict(places) for role, places in total.items()}

    def counted_by_role_and_die(self) -> dict[str, dict[str, int]]:
        """Distinct bytes that emulated launches read and wrote, by role and home die, each launch counted by itself."""
        total: dict[str, Counter[str]] = {role: Counter() for role in ROLES}
        for kernel in (k for call in self.calls for k in call.kernels if k.traffic is not None):
            for role, directions in kernel.traffic.by_role().items():
                for moved in directions:
                    for die, nbytes in moved.distinct_by_die.items():
                        total.setdefault(role, Counter())["host" if die < 0 else f"die{die}"] += nbytes
        return {role: dict(places) for role, places in total.items()}

    def backends(self) -> dict[str, set[str]]:
        """Which backends ran each op: a fallback to the reference shows here."""
        found: dict[str, set[str]] = {}
        for call in self.calls:
            found.setdefault(call.op, set()).add(call.backend)
        return found

    def workload(self, name: str, *, shards: int, tokens: int, context_tokens: int, layers: int) -> Workload:
        """Stages in order of first use with the bytes of the whole step; `repeats` is 1."""
        stages = tuple(self._stage(stage) for stage in dict.fromkeys(call.stage for call in self.calls))
        return Workload(
            name, stages, shards, tokens, context_tokens, layers, bytes_from="an executed step, counted by contract"
        )

    def _stage(self, stage: str) -> Stage:
        operands: dict[tuple[str, str, str, bool], int] = {}
        for call in self.calls:
            if call.stage == stage:
                for o in call.operands:
                    key = (call.op, o.name, o.role, o.written)
                    operands[key] = operands.get(key, 0) + o.nbytes
        made = tuple(Operand(f"{op}.{name}", role, n, written) for (op, name, role, written), n in operands.items())
        handoff = next((h for s, h in self.handoffs if s == stage), None)
        kernels = list(dict.fromkeys(call.op for call in self.calls if call.stage == stage))
        return Stage(stage, made, handoff, kernel=" ".join(kernels))

    def _operands(self) -> Iterable[Touched]:
        return (operand for call in self.calls for operand in call.operands)
