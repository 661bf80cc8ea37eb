"""Destination operands of vector instructions: how results and their never-written bits are put away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group, narrow, pack
from dieplace.emulator.isa.operands import EXEC, SGPR, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import BANKS, HALF, WORDS
from dieplace.emulator.isa.state import U32, U64
from dieplace.emulator.isa.table import Layout


@dataclass(frozen=True)
class Target:
    """One destination: `write(g, value, mask)` with mask None for all lanes, and `taint(g, bits, mask, origin)`."""

    kind: str
    keys: tuple[int, ...]
    write: Callable[[Group, Any, Any], None]
    taint: Callable[[Group, Any, Any, str | None], None]
    shift: int = 0


def make_target(
    inst: Instruction, layout: Layout, operand: Operand, kind: str, half: int = 0, keep_high: bool = False
) -> Target:
    """Build a destination of type `kind`."""
    if kind == "mask":
        key = layout.register(inst, operand, "s", 2)
        return _mask_target(key)
    key = layout.register(inst, operand, "va", WORDS[kind])
    if kind in BANKS:
        return Target(kind, (key,), _word_writer(key, kind), _word_tainter((key,)))
    if kind in HALF:
        return _half_target(key, kind, half, keep_high)

    def write(g: Group, value: Any, mask: Any) -> None:
        for offset, part in enumerate(narrow(value)):
            assign(g.u[key + offset], part, mask)

    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        low, high = (None, None) if bits is None else narrow(np.asarray(bits, U64))
        g.set_taint(key, low, mask, origin)
        g.set_taint(key + 1, high, mask, origin)

    return Target(kind, (key, key + 1), write, taint)


def assign(row: np.ndarray, value: Any, mask: Any) -> None:
    """Write `value` into a row where `mask` is true (None: everywhere)."""
    if mask is None:
        row[...] = value
    else:
        np.copyto(row, value, where=mask, casting="same_kind")


def _word_writer(key: int, kind: str) -> Callable[[Group, Any, Any], None]:
    bank = BANKS[kind]
    if bank == "f":
        return lambda g, value, mask: assign(g.f[key], value, mask)
    if bank == "i":
        return lambda g, value, mask: assign(g.i[key], value, mask)
    return lambda g, value, mask: assign(g.u[key], value, mask)


def _word_tainter(keys: tuple[int, ...]) -> Callable[[Group, Any, Any, str | None], None]:
    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        for key in keys:
            g.set_taint(key, bits, mask, origin)

    return taint


def _half_target(key: int, kind: str, half: int, keep_high: bool) -> Target:
    """16-bit results clear the other half on GFX9, except op_sel's upper half and the operations that keep it."""
    kept = U32(0x0000FFFF) if half else (U32(0xFFFF0000) if keep_high else U32(0))
    shift = U32(16 * half)

    def write(g: Group, value: Any, mask: Any) -> None:
        bits = np.asarray(value, HALF[kind]).view(np.uint16).astype(U32) << shift
        row = g.u[key]
        assign(row, bits | (row & kept) if kept else bits, mask)

    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        new = U32(0) if bits is None else (np.asarray(bits, U32) & U32(0xFFFF)) << shift
        old = g.taint(key)
        if kept and old is not None:
            new = new | (old & kept)
        g.set_taint(key, new, mask, origin)

    return Target(kind, (key,), write, taint, 16 * half)


def _mask_target(key: int) -> Target:
    """A lane mask: inactive lanes read 0 (MI300 ISA guide, V_CMP and carry-out)."""
    pair = key - SGPR >> 1

    def write(g: Group, value: Any, mask: Any) -> None:
        g.s64[pair][...] = pack(value if mask is None else value & mask, g.n)

    def taint(g: Group, bits: Any, mask: Any, origin: str | None) -> None:
        if bits is None:
            low = high = None
        else:
            tainted = np.asarray(bits) != 0
            low, high = narrow(pack(tainted if mask is None else tainted & mask, g.n))
        g.set_scalar_taint(key, low, origin)
        g.set_scalar_taint(key + 1, high, origin)
        if key == SGPR + EXEC:
            g.require_written((key, key + 1), "EXEC", lanes=False)

    return Target("mask", (key, key + 1), write, taint)
