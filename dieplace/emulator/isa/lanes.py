"""DPP: a vector instruction whose first source comes from another lane.

Controls and the handling of invalid lanes follow the AMD Instinct MI300 ISA guide, section "Data Parallel Processing":
a source lane that does not exist or is inactive reads 0 when `bound_ctrl` is given, else the destination lane keeps
its value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import BANKS, Source
from dieplace.emulator.isa.state import LANES
from dieplace.emulator.isa.table import Layout, Step
from dieplace.emulator.isa.targets import make_target
from dieplace.emulator.isa.vrun import Operation, finish, general_run

DPP_CONTROLS = frozenset({
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
    "wave_shl", "wave_shr", "wave_rol", "wave_ror",
})  # fmt: skip
DPP_MODIFIERS = DPP_CONTROLS | {"row_mask", "bank_mask", "bound_ctrl"}
LANE = np.arange(LANES)


def source_lanes(inst: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the lane it reads, and whether that lane exists."""
    controls = [name for name in inst.modifiers if name in DPP_CONTROLS]
    if len(controls) != 1:
        raise inst.unknown(f"exactly one DPP control is needed, found {controls}")
    control = controls[0]
    row, place = LANE & ~15, LANE & 15
    exists = np.ones(LANES, bool)
    if control == "quad_perm":
        return (LANE & ~3) + np.array(inst.bits("quad_perm", 4, 0))[LANE & 3], exists
    if control == "row_mirror":
        return row + 15 - place, exists
    if control == "row_half_mirror":
        return (LANE & ~7) + 7 - (LANE & 7), exists
    amount = inst.number(control)
    if control in ("row_shl", "row_shr"):
        moved = place + amount if control == "row_shl" else place - amount
        return row + (moved & 15), (moved >= 0) & (moved <= 15)
    if control == "row_ror":
        return row + (place - amount & 15), exists
    if control == "row_newbcast":
        return row + amount, exists
    if control == "row_bcast":
        return _broadcast(inst, amount)
    step = {"wave_shl": 1, "wave_rol": 1, "wave_shr": -1, "wave_ror": -1}[control]
    if amount != 1:
        raise inst.unknown(f"{control} moves by 1 only")
    moved = LANE + step
    return moved & 63, exists if "ro" in control else (moved >= 0) & (moved < LANES)


def _broadcast(inst: Instruction, amount: int) -> tuple[np.ndarray, np.ndarray]:
    """`row_bcast:15` gives each row the last lane of the row before, `row_bcast:31` gives the upper half lane 31."""
    if amount == 15:
        return np.maximum((LANE & ~15) - 1, 0), LANE >= 16
    if amount == 31:
        return np.full(LANES, 31), LANE >= 32
    raise inst.unknown("row_bcast is 15 or 31")


def build_dpp(inst: Instruction, layout: Layout, op: Operation, sources: list[Source]) -> Step:
    """Build the DPP form of a vector operation."""
    origin, exists = source_lanes(inst)
    rows, banks = inst.number("row_mask", 0xF), inst.number("bank_mask", 0xF)
    enabled = ((rows >> (LANE >> 4)) & 1).astype(bool) & ((banks >> ((LANE >> 2) & 3)) & 1).astype(bool)
    zero = "bound_ctrl" in inst.modifiers
    moved = [permuted(sources[0], origin, exists), *sources[1:]]
    whole = enabled if zero else enabled & exists

    def lanes(g: Group) -> Any:
        if g.full:
            return None if whole.all() else whole
        mask = g.mask & enabled
        return mask if zero else mask & (g.mask[:, origin] & exists)

    targets = [make_target(inst, layout, o, k) for o, k in zip(inst.operands, op.dst, strict=False)]
    return finish(inst, op, moved, targets, general_run(moved, targets, op.fn, lanes), lanes)


def permuted(source: Source, origin: np.ndarray, exists: np.ndarray) -> Source:
    """A source read through a lane permutation; lanes without a valid origin read 0."""
    nowhere = None if exists.all() else ~exists

    def through(values: Any, g: Group) -> Any:
        moved = np.broadcast_to(values, (g.n, LANES))[:, origin]
        if nowhere is not None:
            moved[:, nowhere] = 0
        if not g.full:
            moved[~g.mask[:, origin]] = 0
        return moved

    def taint(g: Group) -> Any:
        bits = source.taint(g)
        return None if bits is None else through(bits, g)

    kind = "f32" if source.kind in BANKS and source.kind == "f32" else source.kind
    return Source(kind, source.keys, lambda g: through(source.value(g), g), taint, False)
