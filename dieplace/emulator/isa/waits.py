"""Registers used before the load that fills them has been waited for: a check of the text, not of a run.

The interpreter delivers every load at once, so a missing `s_waitcnt` would never show in a run. The counters are
followed over all paths instead (LLVM AMDGPU usage, "s_waitcnt"): vector memory returns in order and counts in vmcnt,
LDS in order and scalar memory out of order in lgkmcnt. What a register still needs is the largest counter value that
guarantees its arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dieplace.emulator.isa.control import wait_counts
from dieplace.emulator.isa.faults import MissingWait
from dieplace.emulator.isa.table import Step

if TYPE_CHECKING:
    from dieplace.emulator.isa.program import Block, Program

MOST = 64  # counters saturate far below; an older load than this has arrived
VECTOR = frozenset({"vmem_load", "vmem_store", "atomic", "cache"})


@dataclass(frozen=True)
class Hazard:
    """A step that touches a register which a load may not have filled yet."""

    step: Step
    load: Step
    key: int


@dataclass
class Pending:
    """Registers in flight: for each the load, and how many later operations of its counter were issued since."""

    vector: dict[int, tuple[int, Step]] = field(default_factory=dict)
    local: dict[int, tuple[int, Step]] = field(default_factory=dict)
    scalar: dict[int, Step] = field(default_factory=dict)

    def copy(self) -> Pending:
        """An independent copy."""
        return Pending(dict(self.vector), dict(self.local), dict(self.scalar))

    def merge(self, other: Pending) -> bool:
        """Take in what another path leaves in flight, the younger load winning; True when that changed anything."""
        before = (dict(self.vector), dict(self.local), dict(self.scalar))
        for mine, theirs in ((self.vector, other.vector), (self.local, other.local)):
            for key, (age, load) in theirs.items():
                if key not in mine or age < mine[key][0]:
                    mine[key] = (age, load)
        self.scalar.update({key: load for key, load in other.scalar.items() if key not in self.scalar})
        return before != (self.vector, self.local, self.scalar)


def hazards(program: Program) -> list[Hazard]:
    """Every use of a register that some path reaches before the load into it was waited for."""
    entry: dict[int, Pending] = {0: Pending()}
    queue, found = [0], {}
    while queue:
        index = queue.pop()
        block = program.blocks[index]
        state = entry[index].copy()
        for step in block.steps:
            for hazard in _touch(state, step):
                found[(id(hazard.step), hazard.key)] = hazard
            _issue(state, step)
        for target in _targets(block, len(program.blocks)):
            known = entry.get(target)
            if known is None:
                entry[target] = state.copy()
                queue.append(target)
            elif known.merge(state):
                queue.append(target)
    return sorted(found.values(), key=lambda hazard: hazard.step.inst.line)


def require_waits(program: Program) -> None:
    """Raise MissingWait for the first hazard of a program; the answer is kept with the program."""
    if program.hazards is None:
        program.hazards = hazards(program)
    if program.hazards:
        first = program.hazards[0]
        load = first.load.inst
        name = program.register_name(first.key)
        fault = MissingWait(
            f"uses {name} before the load of line {load.line} was waited for: `{load.text}`",
            hint="put s_waitcnt between them; inline assembly that loads must contain its own wait",
            load_line=load.line,
        )
        raise fault.located(program.name, first.step.inst.line, first.step.inst.text)


def _targets(block: Block, count: int) -> list[int]:
    following = [block.index + 1] if block.index + 1 < count else []
    if block.ends == "branch":
        return [block.target] if block.last.taken is None else [block.target, *following]
    return [] if block.ends == "end" else following


def _keys(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _touch(state: Pending, step: Step) -> list[Hazard]:
    """Reads and writes of registers in flight; overwriting by a load of the same kind keeps their order."""
    touched = step.reads | step.writes
    found = []
    for table in (state.vector, state.local):
        for key in [key for key in table if touched >> key & 1]:
            load = table.pop(key)[1]
            if step.reads >> key & 1 or load.kind != step.kind:
                found.append(Hazard(step, load, key))
    for key in [key for key in state.scalar if touched >> key & 1]:
        found.append(Hazard(step, state.scalar.pop(key), key))
    return found


def _issue(state: Pending, step: Step) -> None:
    """Count an operation, or let arrive what a wait guarantees."""
    opcode = step.inst.opcode
    if step.kind == "wait":
        _arrive(state, *wait_counts(step.inst))
    elif step.kind in VECTOR and opcode != "buffer_inv":
        state.vector = {key: (age + 1, load) for key, (age, load) in state.vector.items() if age < MOST}
        state.vector.update({key: (0, step) for key in _keys(step.writes)})
    elif step.kind == "lds":
        state.local = {key: (age + 1, load) for key, (age, load) in state.local.items() if age < MOST}
        state.local.update({key: (0, step) for key in _keys(step.writes)})
    elif step.kind == "smem":
        state.scalar.update({key: step for key in _keys(step.writes)})


def _arrive(state: Pending, vmcnt: int | None, lgkmcnt: int | None) -> None:
    if vmcnt is not None:
        state.vector = {key: entry for key, entry in state.vector.items() if entry[0] < vmcnt}
    if lgkmcnt is not None:
        outstanding = bool(state.scalar)
        if lgkmcnt == 0:
            state.local, state.scalar = {}, {}
        elif not outstanding:
            state.local = {key: entry for key, entry in state.local.items() if entry[0] < lgkmcnt}
