"""LDS: loads, stores, atomics, and the bounds and never-written checks that they share (MI300 ISA guide, DS)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dieplace.emulator.isa.atomics import apply_atomic
from dieplace.emulator.isa.faults import Misaligned, OutOfBounds, ReservedValue
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.registers import deliver, gather, track_load, track_store
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.state import I64
from dieplace.emulator.isa.table import Layout, Step, add, bound, mask_of

OFFSET = ("offset",)
PAIR = ("offset0", "offset1")


def lds_places(g: Group, inst: Instruction, address: np.ndarray, size: int, alignment: int) -> np.ndarray:
    """Flat byte positions, int64 [N], of active lanes' LDS addresses [n, 64]; checks bounds and alignment."""
    whole = np.broadcast_to(address, (g.n, 64)) + g.lds_base
    places = whole.reshape(-1) if g.full else whole[g.active]
    if not len(places):
        return places
    own = np.broadcast_to(address, (g.n, 64))
    offsets = own.reshape(-1) if g.full else own[g.active]
    if int(offsets.min()) < 0 or int(offsets.max()) + size > g.st.lds_bytes:
        bad = int(np.argmax((offsets < 0) | (offsets + size > g.st.lds_bytes)))
        raise OutOfBounds(
            f"LDS byte {int(offsets[bad])}, {size} bytes, is outside the workgroup's {g.st.lds_bytes} bytes of LDS",
            hint="bound the index, or allocate more LDS", address=int(offsets[bad]), size_bytes=size, buffer="LDS",
            **Request(g, inst, offsets, size).place(bad),
        )  # fmt: skip
    if alignment > 1 and int(np.bitwise_or.reduce(offsets)) & (alignment - 1):
        bad = int(np.argmax((offsets & (alignment - 1)) != 0))
        raise Misaligned(
            f"LDS byte {int(offsets[bad])} is not a multiple of {alignment}", hint="align the LDS array",
            address=int(offsets[bad]), alignment_bytes=alignment, **Request(g, inst, offsets, size).place(bad),
        )  # fmt: skip
    return places


def lds_read(g: Group, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """uint32 [N, words] and never-written bits."""
    taint = g.st.lds_taint_bytes.read(places, size)
    return g.st.lds_bytes_store.read(places, size), taint if taint.any() else None


def lds_write(g: Group, places: np.ndarray, size: int, data: np.ndarray, taint: np.ndarray | None = None) -> None:
    """Store uint32 [N, words]; never-written bits travel with the data."""
    if len(places):
        g.st.lds_bytes_store.write(places, size, data)
        g.st.lds_taint_bytes.write(places, size, np.zeros_like(data) if taint is None else taint)


def lds_origin(g: Group, inst: Instruction) -> str:
    """Words for a value loaded from LDS that nothing has written."""
    return f"LDS that was never written, read in line {inst.line}: `{inst.text}`"


def _address(inst: Instruction, layout: Layout, place: int, offset: int) -> tuple[int, Any]:
    key = layout.register(inst, inst.operands[place], "v", 1)
    return key, lambda g: g.u[key].astype(I64) + offset


def _expect(inst: Instruction, count: int) -> None:
    if len(inst.operands) != count:
        raise inst.unknown(f"{len(inst.operands)} operands where {count} are expected")
    if "gds" in inst.modifiers:
        raise inst.unknown("gds is not modelled")


def _build_read(inst: Instruction, layout: Layout, size: int, signed: bool, half: int | None) -> Step:
    _expect(inst, 2)
    words = max(1, size // 4)
    dst = layout.register(inst, inst.operands[0], "va", words)
    key, address = _address(inst, layout, 1, inst.number("offset"))

    def run(g: Group) -> None:
        data, taint = lds_read(g, lds_places(g, inst, address(g), size, min(size, 4)), size)
        deliver(g, dst, data, taint, size, signed, half, lambda: lds_origin(g, inst))

    keys = tuple(range(dst, dst + words))
    return Step(inst, "lds", run, track_load(run, (key,), keys, half), mask_of((key,)), mask_of(keys))


def _build_write(inst: Instruction, layout: Layout, size: int, half: int) -> Step:
    _expect(inst, 2)
    words = max(1, size // 4)
    key, address = _address(inst, layout, 0, inst.number("offset"))
    src = layout.register(inst, inst.operands[1], "va", words)

    def run(g: Group, taint: Any = None) -> None:
        places = lds_places(g, inst, address(g), size, min(size, 4))
        lds_write(g, places, size, gather(g, src, words, half), taint)

    keys = tuple(range(src, src + words))
    return Step(inst, "lds", run, track_store(run, (key,), keys, words, half), mask_of((key, *keys)))


def _build_read2(inst: Instruction, layout: Layout, size: int, stride: int) -> Step:
    _expect(inst, 2)
    words = size // 4
    dst = layout.register(inst, inst.operands[0], "va", 2 * words)
    key, address = _address(inst, layout, 1, 0)
    steps = [inst.number(name) * size * stride for name in PAIR]

    def run(g: Group) -> None:
        start = address(g)
        parts = [lds_read(g, lds_places(g, inst, start + step, size, 4), size) for step in steps]
        taint = None
        if any(bits is not None for _, bits in parts):
            taint = np.hstack([np.zeros_like(data) if bits is None else bits for data, bits in parts])
        both = np.hstack([data for data, _ in parts])
        deliver(g, dst, both, taint, 2 * size, False, None, lambda: lds_origin(g, inst))

    keys = tuple(range(dst, dst + 2 * words))
    return Step(inst, "lds", run, track_load(run, (key,), keys, None), mask_of((key,)), mask_of(keys))


def _build_write2(inst: Instruction, layout: Layout, size: int, stride: int) -> Step:
    _expect(inst, 3)
    words = size // 4
    key, address = _address(inst, layout, 0, 0)
    sources = [layout.register(inst, operand, "va", words) for operand in inst.operands[1:]]
    steps = [inst.number(name) * size * stride for name in PAIR]

    def run(g: Group, taint: Any = None) -> None:
        start = address(g)
        for number, (src, step) in enumerate(zip(sources, steps, strict=True)):
            places = lds_places(g, inst, start + step, size, 4)
            own = None if taint is None else taint[:, number * words : (number + 1) * words]
            lds_write(g, places, size, gather(g, src, words, 0), own)

    keys = tuple(k for src in sources for k in range(src, src + words))
    return Step(inst, "lds", run, track_store(run, (key,), keys, 2 * words, 0), mask_of((key, *keys)))


def _build_atomic(inst: Instruction, layout: Layout, operation: str, size: int, returns: bool) -> Step:
    words, parts = size // 4, 2 if operation == "cmpswap" else 1
    _expect(inst, 1 + parts + returns)
    operands = inst.operands[1:] if returns else inst.operands
    key = layout.register(inst, operands[0], "v", 1)
    offset = inst.number("offset")
    sources = [layout.register(inst, operand, "va", words) for operand in operands[1:]]
    if operation == "cmpswap":  # DS_CMPST names the compare value first
        sources.reverse()
    dst = layout.register(inst, inst.operands[0], "va", words) if returns else -1

    def run(g: Group) -> None:
        places = lds_places(g, inst, g.u[key].astype(I64) + offset, size, size)
        data = np.hstack([gather(g, src, words, 0) for src in sources])
        taint = g.st.lds_taint_bytes.read(places, size)
        old = apply_atomic(g.st.lds_bytes_store, operation, places, size, data)
        if taint.any():
            raise g.st.never_written_memory("the LDS atomic", lds_origin(g, inst))
        if returns:
            deliver(g, dst, old, None, size, False, None, lambda: lds_origin(g, inst))

    keys = tuple(k for src in sources for k in range(src, src + words))
    writes = tuple(range(dst, dst + words)) if returns else ()
    slow = track_load(run, (key, *keys), writes, None)
    return Step(inst, "lds", run, slow, mask_of((key, *keys)), mask_of(writes))


READS = {"b32": (4, False), "b64": (8, False), "b96": (12, False), "b128": (16, False), "u8": (1, False),
         "i8": (1, True), "u16": (2, False), "i16": (2, True)}  # fmt: skip
WRITES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def _build_transpose(inst: Instruction, layout: Layout) -> Step:
    """ds_read_b64_tr_b16: each 16 lanes read a 4 x 16 matrix of 16-bit values by rows and receive it by columns.

    Value e of lane l is value l % 4 of lane 4 * e + l % 16 // 4 of the same 16 (FlyDSL's flash attention for gfx950).
    The MI350 ISA guide asks for all lanes to be active.
    """
    _expect(inst, 2)
    dst = layout.register(inst, inst.operands[0], "va", 2)
    key, address = _address(inst, layout, 1, inst.number("offset"))
    lane, value = np.arange(64)[:, None], np.arange(4)[None, :]
    origin, place = (lane & ~15) + 4 * value + (lane & 15) // 4, np.broadcast_to(lane & 3, (64, 4))

    def turned(g: Group, words: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(words).view(np.uint16).reshape(g.n, 64, 4)
        return np.ascontiguousarray(halves[:, origin, place]).view(np.uint32).reshape(-1, 2)

    def run(g: Group) -> None:
        if not g.full:
            raise ReservedValue("a transposing LDS read needs every lane active", hint="run it outside conditions")
        data, taint = lds_read(g, lds_places(g, inst, address(g), 8, 8), 8)
        bits = None if taint is None else turned(g, taint)
        deliver(g, dst, turned(g, data), bits, 8, False, None, lambda: lds_origin(g, inst))

    return Step(
        inst, "lds", run, track_load(run, (key,), (dst, dst + 1), None), mask_of((key,)), mask_of((dst, dst + 1))
    )


def _define() -> None:
    add("ds_read_b64_tr_b16", "lds", _build_transpose, OFFSET)
    for name, (size, signed) in READS.items():
        add(f"ds_read_{name}", "lds", bound(_build_read, size, signed, None), OFFSET)
    for name, (size, signed) in {"u8_d16": (1, False), "i8_d16": (1, True), "u16_d16": (2, False)}.items():
        for half, suffix in ((0, ""), (1, "_hi")):
            add(f"ds_read_{name}{suffix}", "lds",
                bound(_build_read, size, signed, half), OFFSET)  # fmt: skip
    for name, size in WRITES.items():
        add(f"ds_write_{name}", "lds", bound(_build_write, size, 0), OFFSET)
    for name, size in (("b8_d16_hi", 1), ("b16_d16_hi", 2)):
        add(f"ds_write_{name}", "lds", bound(_build_write, size, 1), OFFSET)
    for size in (4, 8):
        for stride, suffix in ((1, ""), (64, "st64")):
            add(f"ds_read2{suffix}_b{8 * size}", "lds",
                bound(_build_read2, size, stride), PAIR)  # fmt: skip
            add(f"ds_write2{suffix}_b{8 * size}", "lds",
                bound(_build_write2, size, stride), PAIR)  # fmt: skip


# DS mnemonics: (name without return, name with return, operation, bytes).
_INTEGER = (("add", "u", "add"), ("sub", "u", "sub"), ("rsub", "u", "rsub"), ("inc", "u", "inc"), ("dec", "u", "dec"),
            ("min", "i", "smin"), ("max", "i", "smax"), ("min", "u", "umin"), ("max", "u", "umax"), ("and", "b", "and"),
            ("or", "b", "or"), ("xor", "b", "xor"), ("cmpst", "b", "cmpswap"))  # fmt: skip
_FLOAT = (("add", "f32", "fadd_f32", 4), ("add", "f64", "fadd_f64", 8), ("min", "f32", "fmin_f32", 4),
          ("max", "f32", "fmax_f32", 4), ("min", "f64", "fmin_f64", 8), ("max", "f64", "fmax_f64", 8),
          ("pk_add", "f16", "pk_add_f16", 4), ("pk_add", "bf16", "pk_add_bf16", 4))  # fmt: skip


def _define_atomics() -> None:
    names = [(verb, f"{sign}{8 * size}", operation, size) for verb, sign, operation in _INTEGER for size in (4, 8)]
    for verb, kind, operation, size in [*names, *_FLOAT]:
        for returns, middle in ((False, ""), (True, "_rtn")):
            add(f"ds_{verb}{middle}_{kind}", "lds",
                bound(_build_atomic, operation, size, returns), OFFSET)  # fmt: skip
    for size in (4, 8):
        add(f"ds_wrxchg_rtn_b{8 * size}", "lds",
            bound(_build_atomic, "swap", size, True), OFFSET)  # fmt: skip


_define()
_define_atomics()
