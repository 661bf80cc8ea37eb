"""Source operands of vector instructions: how a group's values and never-written bits are fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group, unpack, wide
from dieplace.emulator.isa.operands import CONST, SGPR, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import LANES, U32, U64
from dieplace.emulator.isa.table import Layout

BANKS = {"u32": "u", "b32": "u", "i32": "i", "f32": "f"}
HALF = {"u16": np.uint16, "b16": np.uint16, "i16": np.int16, "f16": np.float16, "bf16": np.uint16}
WIDE = {"u64": np.uint64, "i64": np.int64, "f64": np.float64}
WORDS = {**dict.fromkeys(BANKS, 1), **dict.fromkeys(HALF, 1), **dict.fromkeys(WIDE, 2), "mask": 2}

Fetch = Callable[[Group], Any]


@dataclass(frozen=True)
class Source:
    """One source operand as built: its keys, how to fetch its value, and how to fetch its never-written bits."""

    kind: str
    keys: tuple[int, ...]
    value: Fetch
    taint: Fetch
    plain: bool


def make_source(inst: Instruction, layout: Layout, operand: Operand, kind: str, half: int = 0) -> Source:
    """Build a source operand of type `kind`, with its sign and absolute-value modifiers."""
    words = WORDS[kind]
    key = layout.key(inst, operand, kind, words if operand.kind != "const" else 1)
    keys = (key, key + 1) if words == 2 and operand.kind != "const" else (key,)
    value = _value_of(key, kind, half)
    plain = kind in BANKS and not operand.is_modified
    if operand.is_modified:
        value = _modified(inst, operand, kind, value)
    return Source(kind, keys, value, _taint_of(key, kind, half), plain)


def _value_of(key: int, kind: str, half: int) -> Fetch:
    if kind in BANKS:
        bank = BANKS[kind]
        return {"u": lambda g: g.u[key], "i": lambda g: g.i[key], "f": lambda g: g.f[key]}[bank]
    if kind in HALF:
        place = 2 * key + half
        dtype: Any = HALF[kind]
        if key >= CONST:
            constant = np.uint16(key >> 16 * half & 0xFFFF).view(dtype)
            return lambda g: constant
        return lambda g: g.h[place].view(dtype)
    if kind == "mask":
        return _mask_value(key)
    dtype = WIDE[kind]
    if key >= CONST:
        number = U64(key & 0xFFFFFFFFFFFFFFFF).view(dtype)
        return lambda g: number
    if key >= SGPR:
        pair = key - SGPR >> 1
        return lambda g: g.s64[pair].view(dtype)[:, None]
    return lambda g: wide(g.u[key], g.u[key + 1]).view(dtype)


def _mask_value(key: int) -> Fetch:
    if key >= CONST:
        lanes_set = np.array([(key >> lane) & 1 for lane in range(LANES)], bool)[None, :]
        return lambda g: lanes_set
    pair = key - SGPR >> 1
    return lambda g: unpack(g.s64[pair])


def _modified(inst: Instruction, operand: Operand, kind: str, value: Fetch) -> Fetch:
    """Sign and absolute value act on the bits, so NaNs and zeros keep their payload (MI300 ISA guide, VOP3)."""
    if kind not in ("f32", "f16", "f64", "b32", "b16") or operand.sext:
        raise inst.unknown(f"operand {operand.text!r}: a sign modifier on a {kind} operand")
    unsigned: Any = {"f32": U32, "b32": U32, "f16": np.uint16, "b16": np.uint16, "f64": U64}[kind]
    width = np.dtype(unsigned).itemsize * 8
    sign = unsigned(1 << (width - 1))
    clear, flip = unsigned(sign - 1), operand.negate
    dtype = {"f32": np.float32, "b32": U32, "f16": np.float16, "b16": np.uint16, "f64": np.float64}[kind]

    def fetch(g: Group) -> Any:
        bits = value(g).view(unsigned)
        if operand.absolute:
            bits = bits & clear
        if flip:
            bits = bits ^ sign
        return bits.view(dtype)

    return fetch


def _taint_of(key: int, kind: str, half: int) -> Fetch:
    if key >= CONST:
        return lambda g: None
    if kind in BANKS:
        return lambda g: g.taint(key)
    if kind in HALF:
        shift = U32(16 * half)

        def half_taint(g: Group) -> Any:
            bits = g.taint(key)
            return None if bits is None else (bits >> shift) & U32(0xFFFF)

        return half_taint

    def pair_taint(g: Group) -> Any:
        low, high = g.taint(key), g.taint(key + 1)
        if low is None and high is None:
            return None
        both = wide(U32(0) if low is None else low, U32(0) if high is None else high)
        return unpack(both[:, 0]).astype(U32) if kind == "mask" else both

    return pair_taint
