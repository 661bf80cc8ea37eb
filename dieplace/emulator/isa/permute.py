"""Values moving between lanes: readlane, writelane, swizzle, bpermute, permute, permlane swaps, mbcnt."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.lanes import LANE
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.salu import scalar_source, scalar_target
from dieplace.emulator.isa.state import I64, LANES, U32
from dieplace.emulator.isa.table import Layout, Step, add, bound, mask_of
from dieplace.emulator.isa.targets import assign
from dieplace.emulator.isa.valu import define


def _expect(inst: Instruction, count: int) -> None:
    if len(inst.operands) != count:
        raise inst.unknown(f"{len(inst.operands)} operands where {count} are expected")


# ---- one lane to a scalar and back


def _build_readlane(inst: Instruction, layout: Layout) -> Step:
    _expect(inst, 3)
    src = layout.register(inst, inst.operands[1], "va", 1)
    lane, lane_keys = scalar_source(inst, layout, inst.operands[2], "u32")
    return _lane_read(inst, layout, src, lambda g: np.asarray(lane(g) & U32(63)).astype(I64), lane_keys)


def _first_active(g: Group) -> np.ndarray:
    """The lowest active lane of each wave; lane 0 when none is active (MI300 ISA guide, V_READFIRSTLANE)."""
    return np.zeros(g.n, I64) if g.full else np.argmax(g.mask, axis=1)


def _build_readfirstlane(inst: Instruction, layout: Layout) -> Step:
    _expect(inst, 2)
    src = layout.register(inst, inst.operands[1], "va", 1)
    return _lane_read(inst, layout, src, _first_active, ())


def _lane_read(inst: Instruction, layout: Layout, src: int, lane: Any, lane_keys: tuple[int, ...]) -> Step:
    write, keys = scalar_target(inst, layout, inst.operands[0], "u32")

    def pick(g: Group, values: np.ndarray) -> np.ndarray:
        place = lane(g)
        return values[:, int(place)] if place.ndim == 0 else values[np.arange(g.n), place]

    def run(g: Group) -> None:
        write(g, pick(g, g.u[src]))

    def slow(g: Group) -> None:
        g.require_written(lane_keys, "the lane number", lanes=False)
        bits = g.taint(src)
        own = None if bits is None else pick(g, bits)
        origin = g.st.origin(src) if bits is not None else None
        run(g)
        g.set_scalar_taint(keys[0], own, origin)

    return Step(inst, "valu", run, slow, mask_of((src, *lane_keys)), mask_of(keys))


def _build_writelane(inst: Instruction, layout: Layout) -> Step:
    _expect(inst, 3)
    dst = layout.register(inst, inst.operands[0], "va", 1)
    value, value_keys = scalar_source(inst, layout, inst.operands[1], "u32")
    lane, lane_keys = scalar_source(inst, layout, inst.operands[2], "u32")

    def run(g: Group) -> None:
        g.u[dst][np.arange(g.n), np.asarray(lane(g) & U32(63)).astype(I64)] = value(g)

    def slow(g: Group) -> None:
        g.require_written(lane_keys, "the lane number", lanes=False)
        bits = next((b for b in map(g.taint, value_keys) if b is not None), None)
        mask = np.arange(LANES) == np.broadcast_to(np.asarray(lane(g) & U32(63)), (g.n,))[:, None]
        run(g)
        g.set_taint(dst, bits, mask, g.st.origin(value_keys[0]) if bits is not None else None)

    return Step(inst, "valu", run, slow, mask_of((dst, *value_keys, *lane_keys)), mask_of((dst,)))


# ---- fixed permutations


def swizzle_lanes(inst: Instruction) -> np.ndarray:
    """Source lane of each lane for ds_swizzle_b32 (LLVM AMDGPU operand syntax, "swizzle")."""
    pattern = inst.modifiers.get("offset", 0)
    if isinstance(pattern, int):
        return _swizzle_code(inst, pattern)
    if not isinstance(pattern, str):
        raise inst.unknown(f"swizzle {pattern!r} is not known")
    kind, *rest = [part.strip() for part in pattern[len("swizzle(") : -1].split(",")]
    if kind == "BITMASK_PERM":
        return _swizzle_code(inst, _bitmask(inst, rest[0].strip('"')))
    numbers = [int(part, 0) for part in rest]
    if kind == "QUAD_PERM":
        return (LANE & ~3) + np.array(numbers)[LANE & 3]
    if kind == "SWAP":
        return LANE ^ numbers[0]
    if kind == "REVERSE":
        return LANE ^ (numbers[0] - 1)
    if kind == "BROADCAST":
        return (LANE & ~(numbers[0] - 1)) + numbers[1]
    raise inst.unknown(f"swizzle mode {kind} is not known")


def _bitmask(inst: Instruction, text: str) -> int:
    keep = take = flip = 0
    for place, char in enumerate(reversed(text)):
        if char not in "01pi":
            raise inst.unknown(f"swizzle mask {text!r}")
        keep |= (char in "pi") << place
        take |= (char == "1") << place
        flip |= (char == "i") << place
    return keep | take << 5 | flip << 10


def _swizzle_code(inst: Instruction, code: int) -> np.ndarray:
    """Quad mode has bit 15 set; else and-, or- and xor-masks within each 32 lanes (MI300 ISA guide, DS_SWIZZLE_B32)."""
    if code & 0xE000 == 0x8000:
        return (LANE & ~3) + np.array([code >> 2 * k & 3 for k in range(4)])[LANE & 3]
    if code & 0x8000:
        raise inst.unknown(f"swizzle code {code:#x} is not modelled")
    inner = ((LANE & 31 & code & 31) | (code >> 5 & 31)) ^ (code >> 10 & 31)
    return (LANE & 32) | inner


def _build_swizzle(inst: Instruction, layout: Layout) -> Step:
    _expect(inst, 2)
    origin = swizzle_lanes(inst)
    return _moved(inst, layout, 1, lambda g: origin, ())


def _build_bpermute(inst: Instruction, layout: Layout) -> Step:
    """ds_bpermute_b32: every lane reads the lane named by its address / 4."""
    _expect(inst, 3)
    key = layout.register(inst, inst.operands[1], "v", 1)
    offset = U32(inst.number("offset"))

    def origin(g: Group) -> np.ndarray:
        return ((g.u[key] + offset) >> U32(2) & U32(63)).astype(I64)

    return _moved(inst, layout, 2, origin, (key,))


def _moved(inst: Instruction, layout: Layout, place: int, origin: Any, addresses: tuple[int, ...]) -> Step:
    """Every active lane reads a register from another lane; inactive source lanes give 0."""
    dst = layout.register(inst, inst.operands[0], "va", 1)
    src = layout.register(inst, inst.operands[place], "va", 1)

    def through(g: Group, values: np.ndarray) -> np.ndarray:
        lanes = origin(g)
        moved = values[:, lanes] if lanes.ndim == 1 else np.take_along_axis(values, lanes, axis=1)
        if not g.full:
            live = g.mask[:, lanes] if lanes.ndim == 1 else np.take_along_axis(g.mask, lanes, axis=1)
            moved = np.where(live, moved, U32(0))
        return moved

    def run(g: Group) -> None:
        assign(g.u[dst], through(g, g.u[src]), g.lanes)

    def slow(g: Group) -> None:
        g.require_written(addresses, "the lane address")
        bits = g.taint(src)
        own = None if bits is None else through(g, bits)
        name = g.st.origin(src) if bits is not None else None
        run(g)
        g.set_taint(dst, own, g.lanes, name)

    return Step(inst, "lds", run, slow, mask_of((src, *addresses)), mask_of((dst,)))


def _build_permute(inst: Instruction, layout: Layout) -> Step:
    """ds_permute_b32: every active lane pushes to the lane named by its address; of two writers the higher lane
    wins.
    """
    _expect(inst, 3)
    dst = layout.register(inst, inst.operands[0], "va", 1)
    key = layout.register(inst, inst.operands[1], "v", 1)
    src = layout.register(inst, inst.operands[2], "va", 1)
    offset = U32(inst.number("offset"))

    def push(g: Group, values: np.ndarray) -> np.ndarray:
        target = ((g.u[key] + offset) >> U32(2) & U32(63)).astype(I64)
        out = np.zeros((g.n, LANES), U32)
        waves = np.arange(g.n)
        for lane in range(LANES):
            live = waves if g.full else waves[g.mask[:, lane]]
            out[live, target[live, lane]] = values[live, lane]
        return out

    def run(g: Group) -> None:
        assign(g.u[dst], push(g, g.u[src]), g.lanes)

    def slow(g: Group) -> None:
        g.require_written((key,), "the lane address")
        bits = g.taint(src)
        own = None if bits is None else push(g, bits)
        name = g.st.origin(src) if bits is not None else None
        run(g)
        g.set_taint(dst, own, g.lanes, name)

    return Step(inst, "lds", run, slow, mask_of((src, key)), mask_of((dst,)))


# ---- gfx950 swaps between two registers


def _build_swap(inst: Instruction, layout: Layout, width: int) -> Step:
    """v_permlane{16,32}_swap: odd rows of vdst and even rows of src trade places (LLVM,
    `llvm.amdgcn.permlane16.swap`).
    """
    _expect(inst, 2)
    a, b = (layout.register(inst, operand, "v", 1) for operand in inst.operands)
    high = (LANE & width) != 0
    low_lanes, high_lanes = LANE[~high], LANE[high]

    def swapped(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one, two = first.copy(), second.copy()
        one[:, high_lanes] = second[:, low_lanes]
        two[:, low_lanes] = first[:, high_lanes]
        return one, two

    def run(g: Group) -> None:
        one, two = swapped(g.u[a], g.u[b])
        assign(g.u[a], one, g.lanes)
        assign(g.u[b], two, g.lanes)

    def slow(g: Group) -> None:
        bits = [g.taint(key) for key in (a, b)]
        names = [g.st.origin(key) for key, own in zip((a, b), bits, strict=True) if own is not None]
        zero = np.zeros((g.n, LANES), U32)
        moved = swapped(*(zero if own is None else own for own in bits))
        run(g)
        for key, own in zip((a, b), moved, strict=True):
            g.set_taint(key, own, g.lanes, names[0] if names else None)

    return Step(inst, "valu", run, slow, mask_of((a, b)), mask_of((a, b)))


def _build_plain_swap(inst: Instruction, layout: Layout) -> Step:
    """v_swap_b32 exchanges two registers."""
    _expect(inst, 2)
    a, b = (layout.register(inst, operand, "v", 1) for operand in inst.operands)

    def run(g: Group) -> None:
        one = g.u[a].copy()
        assign(g.u[a], g.u[b].copy(), g.lanes)
        assign(g.u[b], one, g.lanes)

    def slow(g: Group) -> None:
        bits, names = [g.taint(key) for key in (a, b)], [g.st.origin(key) for key in (a, b)]
        bits = [None if own is None else own.copy() for own in bits]
        run(g)
        g.set_taint(a, bits[1], g.lanes, names[1])
        g.set_taint(b, bits[0], g.lanes, names[0])

    return Step(inst, "valu", run, slow, mask_of((a, b)), mask_of((a, b)))


# ---- counting lanes below


def _mbcnt(low: bool) -> Any:
    below = [(1 << min(lane, 32)) - 1 if low else ((1 << max(lane - 32, 0)) - 1) for lane in range(LANES)]
    masks = np.array(below, np.uint64).astype(U32)[None, :]
    return lambda mask, base: np.bitwise_count(mask & masks).astype(U32) + base


define("v_mbcnt_lo_u32_b32", "u32", "u32 u32", _mbcnt(True))
define("v_mbcnt_hi_u32_b32", "u32", "u32 u32", _mbcnt(False))
add("v_readlane_b32", "valu", _build_readlane)
add("v_writelane_b32", "valu", _build_writelane)
add("v_readfirstlane_b32", "valu", _build_readfirstlane)
add("ds_swizzle_b32", "lds", _build_swizzle, ("offset",))
add("ds_bpermute_b32", "lds", _build_bpermute, ("offset",))
add("ds_permute_b32", "lds", _build_permute, ("offset",))
for _width in (16, 32):
    for _suffix in ("", "_e32", "_e64"):
        add(f"v_permlane{_width}_swap_b32{_suffix}", "valu",
            bound(_build_swap, _width))  # fmt: skip
add("v_swap_b32 v_swap_b32_e32", "valu", _build_plain_swap)
