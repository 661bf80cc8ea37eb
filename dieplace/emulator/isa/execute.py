"""Running blocks on groups: the inner loop, the switch to taint tracking, and faults that name their instruction."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.faults import IsaFault
from dieplace.emulator.isa.group import Group, TaintAppeared, select
from dieplace.emulator.isa.program import Block
from dieplace.emulator.isa.state import LaunchState

CACHED_GROUPS = 64


class GroupCache:
    """Groups over evenly spaced waves of one launch, kept because their views stay valid."""

    def __init__(self, st: LaunchState) -> None:
        self.st = st
        self.groups: dict[tuple[int, int, int], Group] = {}

    def group(self, waves: np.ndarray) -> Group:
        """The group of these sorted wave slots, with EXEC-dependent values up to date."""
        selection = select(waves, self.st.waves)
        if not isinstance(selection, slice):
            return Group(self.st, waves, selection)
        key = (selection.start, selection.stop, selection.step)
        found = self.groups.get(key)
        if found is None:
            if len(self.groups) >= CACHED_GROUPS:
                self.groups.clear()
            found = self.groups[key] = Group(self.st, waves, selection)
        else:
            found.refresh()
        return found


def execute(block: Block, g: Group) -> None:
    """Run every step of a block on a group; a fault leaves with the instruction's line and text."""
    slow = bool(g.st.tainted & block.touched)
    runs: Any = block.slow if slow else block.fast
    number = 0
    while True:
        run = None
        try:
            for run in runs[number:] if number else runs:
                run(g)
            return
        except TaintAppeared:
            listed = block.slow if slow else block.fast
            number = _position(listed, run, number) + 1
            runs, slow = block.slow, True
        except IsaFault as fault:
            step = block.run_steps[_position(block.slow if slow else block.fast, run, number)]
            raise locate(fault, g, step) from None


def _position(runs: list[Any], run: Any, start: int) -> int:
    """Where a run stands in its list: each step builds functions of its own, so identity decides."""
    for number in range(start, len(runs)):
        if runs[number] is run:
            return number
    raise AssertionError("a run outside its block")


def locate(fault: IsaFault, g: Group, step: Any) -> IsaFault:
    """The fault with kernel, line, text, and the wave when there is only one it can be."""
    if fault.is_located:
        return fault
    facts: dict[str, Any] = {name: fault.facts[name] for name in ("workgroup", "wave", "lane") if name in fault.facts}
    if not facts and g.n == 1:
        wave = int(g.waves[0])
        facts = {"workgroup": int(g.st.workgroup[wave]), "wave": int(g.st.wave_in_workgroup[wave])}
    return fault.located(g.st.program.name, step.inst.line, step.inst.text, **facts)
