"""Scalar loads: kernel arguments, and constant memory through the port (AMD Instinct MI300 ISA guide, SMEM)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.faults import OutOfBounds
from dieplace.emulator.isa.group import Group, TaintAppeared
from dieplace.emulator.isa.operands import CONST, SGPR
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.registers import track_load
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.state import I64, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound, mask_of
from dieplace.emulator.isa.vmem import loaded_origin, remember

WIDTHS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def _offset(inst: Instruction, layout: Layout) -> tuple[Any, tuple[int, ...]]:
    """The last operand is a byte offset, immediate or in an SGPR, to which `offset:` is added."""
    operand, extra = inst.operands[2], inst.number("offset")
    key = layout.key(inst, operand)
    if key >= CONST:
        low = key & 0x1FFFFF
        value = (low ^ 0x100000) - 0x100000 if low >> 20 and operand.value < 0 else key & 0xFFFFFFFF
        return lambda g: I64(value + extra), ()
    return lambda g: g.u[key][:, 0].astype(I64) + extra, (key,)


def _build(inst: Instruction, layout: Layout, words: int, is_buffer: bool) -> Step:
    if len(inst.operands) != 3:
        raise inst.unknown("a scalar load takes destination, base and offset")
    dst = layout.register(inst, inst.operands[0], "s", words)
    base = layout.register(inst, inst.operands[1], "s", 4 if is_buffer else 2)
    pair = base - SGPR >> 1
    offset, keys = _offset(inst, layout)

    def run(g: Group) -> None:
        start = g.s64[pair]
        address = (start & U64((1 << 48) - 1)).view(I64) + offset(g) & ~I64(3)
        data, taint = read(g, inst, address, 4 * words)
        if is_buffer:
            inside = (offset(g) + 4 * np.arange(words)[:, None]) < (g.s64[pair + 1] & U64(0xFFFFFFFF)).astype(I64)
            data = np.where(inside.T, data, U32(0))
        put(g, dst, data, taint, lambda request: _origin(g, request, taint), inst, address)

    reads = (base, base + 1, *((base + 2, base + 3) if is_buffer else ()), *keys)
    writes = tuple(range(dst, dst + words))
    slow = track_load(run, reads, writes, None)
    return Step(inst, "smem", run, slow, mask_of(reads), mask_of(writes))


def _origin(g: Group, request: Request, taint: np.ndarray | None) -> str:
    if 0 <= int(request.address[0]) - g.st.kernarg_base < 1 << 24:
        return f"kernel argument bytes beyond the {len(g.st.launch.kernarg)} that were given"
    return loaded_origin(g, request, taint)


def read(g: Group, inst: Instruction, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """uint32 [n, words] at one address a wave: from the kernel arguments or through the port."""
    st = g.st
    first = int(address[0]) - st.kernarg_base
    if 0 <= first < 1 << 24:
        places, order = (address[:1], np.zeros(g.n, np.int64)) if (address == address[0]).all() else (
            np.unique(address, return_inverse=True))  # fmt: skip
        rows = [_kernarg(g, int(place) - st.kernarg_base, size) for place in places]
        missing = np.stack([bits for _, bits in rows])
        return np.stack([words for words, _ in rows])[order], missing[order] if missing.any() else None
    request = Request(g, inst, address, size, scalar=True)
    data, taint = st.memory.load(request)
    remember(g, request, data)
    return data, taint


def _kernarg(g: Group, offset: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Words of the argument segment, and never-written bits for the padding that follows the arguments given."""
    arguments, given = g.st.kernarg, len(g.st.launch.kernarg)
    if offset < 0 or offset + size > len(arguments):
        raise OutOfBounds(
            f"kernel argument byte {offset}, {size} bytes, lies outside the {given} that were given",
            hint="pack every argument of the kernel's metadata",
            address=offset,
            size_bytes=size,
            buffer="kernarg",
        )
    missing = np.zeros(size, np.uint8)
    missing[max(0, given - offset) :] = 0xFF
    return arguments[offset : offset + size].view(U32), missing.view(U32)


def put(g: Group, dst: int, data: np.ndarray, taint: Any, origin: Any, inst: Instruction, address: np.ndarray) -> None:
    """Write words [n, words] to scalar registers."""
    words = data.shape[1]
    if dst & 1 or words & 1:
        for k in range(words):
            g.u[dst + k][:, 0] = data[:, k]
    else:
        pairs = np.ascontiguousarray(data).view(U64)
        first = dst - SGPR >> 1
        for k in range(words // 2):
            g.s64[first + k][...] = pairs[:, k]
    if taint is not None and taint.any():
        request = Request(g, inst, address, 4 * words, scalar=True)
        for k in range(words):
            g.set_scalar_taint(dst + k, taint[:, k], origin(request))
        raise TaintAppeared


def _define() -> None:
    for name, words in WIDTHS.items():
        for prefix, is_buffer in (("s_load", False), ("s_buffer_load", True)):
            add(f"{prefix}_{name}", "smem", bound(_build, words, is_buffer),
                ("offset",))  # fmt: skip


_define()
