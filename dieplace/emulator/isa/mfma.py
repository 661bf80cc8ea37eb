"""Matrix fused multiply-add: products are exact, sums are float64, rounded once to the result type.

Hardware rounds in an order of its own. Layouts and formats are in `mfma_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa.formats import BF8, FP8, block_scale
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.mfma_layout import (
    F8F6F4,
    Decode,
    Shape,
    bf16_lanes,
    bytes_of,
    f16_lanes,
    f32_lanes,
    f64_lanes,
    i8_lanes,
    places,
    places_f64,
    to_matrix,
    to_wide_matrix,
)
from dieplace.emulator.isa.operands import CONST
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import ALL_BITS, F32, F64, I32, LANES, U32
from dieplace.emulator.isa.table import Layout, Step, add, bound, mask_of


def _words(g: Group, key: int, count: int) -> np.ndarray:
    return np.stack([np.broadcast_to(g.u[key + k], (g.n, LANES)) for k in range(count)], axis=-1)


@dataclass(frozen=True)
class Matrix:
    """One MFMA instruction as built."""

    shape: Shape
    a: tuple[int, int, Decode]  # key, registers, decode
    b: tuple[int, int, Decode]
    c: int
    d: int
    result: Any  # numpy type of C and D
    scales: tuple[Any, Any] | None = None  # of the f8f6f4 forms: one E8M0 byte for 32 neighbours in k
    octets: tuple[bool, bool] | None = None  # of the f8f6f4 forms: is A, is B of an 8-bit format


def _addend(g: Group, matrix: Matrix, count: int) -> np.ndarray:
    """C as [registers, n, 64] of the result type; an inline constant fills it."""
    wide = matrix.result is F64
    if matrix.c >= CONST:
        bits = np.array([matrix.c & 0xFFFFFFFF], U32)
        constant = np.array([matrix.c & 0xFFFFFFFFFFFFFFFF], np.uint64).view(F64) if wide else bits.view(matrix.result)
        return np.broadcast_to(constant, (count, g.n, LANES))
    if wide:
        return np.stack([_words(g, matrix.c + 2 * k, 2).view(F64)[..., 0] for k in range(count)])
    return np.stack([g.u[matrix.c + k].view(matrix.result) for k in range(count)])


def _side(g: Group, matrix: Matrix, side: int) -> np.ndarray:
    """A or B as float64 [n, blocks, rows, k], block scales applied."""
    shape = matrix.shape
    key, count, decode = (matrix.a, matrix.b)[side]
    rows = (shape.m, shape.n)[side]
    lanes = decode(_words(g, key, count))
    if matrix.octets is None:
        return to_matrix(shape, lanes, rows)
    found = to_wide_matrix(shape, lanes, rows, matrix.octets[side])
    if matrix.scales is not None:
        scale = to_matrix(shape, matrix.scales[side](g)[..., None], rows)
        found = found * np.repeat(scale, 32, axis=-1)
    return found


def multiply(g: Group, matrix: Matrix) -> list[np.ndarray]:
    """Result registers, each [n, 64]."""
    shape = matrix.shape
    left, right = _side(g, matrix, 0), _side(g, matrix, 1)
    product = left @ right.swapaxes(-1, -2)
    block, row, column = places_f64() if matrix.result is F64 else places(shape)
    picked = product[:, block, row, column]
    addend = _addend(g, matrix, picked.shape[1])
    total = [picked[:, r] + addend[r].astype(F64) for r in range(picked.shape[1])]
    if matrix.result is I32:
        return [(np.asarray(t).astype(np.int64) & 0xFFFFFFFF).astype(U32).view(I32) for t in total]
    return [t.astype(matrix.result) for t in total]


def _step(inst: Instruction, matrix: Matrix, extra: tuple[int, ...] = ()) -> Step:
    """MFMA ignores EXEC: every lane takes part and is written (MI300 ISA guide, "Matrix arithmetic instructions")."""
    count = matrix.shape.accumulators * (2 if matrix.result is F64 else 1)
    writes = tuple(range(matrix.d, matrix.d + count))
    sources = [key + k for key, words, _ in (matrix.a, matrix.b) for k in range(words)]
    added = [matrix.c + k for k in range(count)] if matrix.c < CONST else []
    reads = mask_of((*sources, *added, *extra))

    def run(g: Group) -> None:
        for r, value in enumerate(multiply(g, matrix)):
            if matrix.result is F64:
                halves = np.ascontiguousarray(value).view(U32).reshape(*value.shape, 2)
                g.u[matrix.d + 2 * r][...], g.u[matrix.d + 2 * r + 1][...] = halves[..., 0], halves[..., 1]
            else:
                g.u[matrix.d + r][...] = np.ascontiguousarray(value).view(U32)

    def slow(g: Group) -> None:
        if not g.st.tainted & (reads | mask_of(writes)):
            run(g)
            return
        bits, origin = _taint(g, matrix, count, extra)
        run(g)
        for r, key in enumerate(writes):
            g.set_taint(key, bits[r], None, origin)

    return Step(inst, "mfma", run, slow, reads, mask_of(writes))


def _taint(g: Group, matrix: Matrix, count: int, extra: tuple[int, ...]) -> tuple[np.ndarray, str | None]:
    """A result is never-written when anything in its row of A, column of B or its addend is."""
    shape = matrix.shape
    sides, origin = [], None
    for key, words, _ in (matrix.a, matrix.b):
        lanes = np.zeros((g.n, LANES), bool)
        for k in (*range(key, key + words), *extra):
            bits = g.taint(k)
            if bits is not None:
                lanes |= bits != 0
                origin = origin or g.st.origin(k)
        sides.append(lanes)
    row_bad: Any = to_matrix(shape, sides[0][..., None], shape.m).any(axis=-1)
    column_bad: Any = to_matrix(shape, sides[1][..., None], shape.n).any(axis=-1)
    block, row, column = places_f64() if matrix.result is F64 else places(shape)
    bad = (row_bad[:, block, row] | column_bad[:, block, column]).swapaxes(0, 1)
    out = np.where(np.repeat(bad, 2, axis=0) if matrix.result is F64 else bad, ALL_BITS, U32(0))
    for r in range(count):
        bits = g.taint(matrix.c + r) if matrix.c < CONST else None
        if bits is not None:
            out[r] |= np.where(bits != 0, ALL_BITS, U32(0))
            origin = origin or g.st.origin(matrix.c + r)
    return out, origin


# ---- building


def _operand(inst: Instruction, layout: Layout, place: int, words: int) -> int:
    return layout.register(inst, inst.operands[place], "va", words)


def _build(inst: Instruction, layout: Layout, shape: Shape, decode: tuple[Decode, Decode], result: Any) -> Step:
    if len(inst.operands) != 4:
        raise inst.unknown("a matrix instruction takes four operands")
    if any(inst.number(name) for name in inst.modifiers):
        raise inst.unknown("cbsz, abid and blgp other than 0 are modelled for the f8f6f4 forms only")
    a = (_operand(inst, layout, 1, shape.words), shape.words, decode[0])
    b = (_operand(inst, layout, 2, shape.words), shape.words, decode[1])
    return _finish(inst, layout, Matrix(shape, a, b, 0, 0, result))


def _finish(inst: Instruction, layout: Layout, matrix: Matrix, extra: tuple[int, ...] = ()) -> Step:
    count = matrix.shape.accumulators * (2 if matrix.result is F64 else 1)
    addend = inst.operands[3]
    kind = {F32: "f32", I32: "i32", F64: "f64"}[matrix.result]
    c = layout.key(inst, addend, kind) if addend.kind == "const" else _operand(inst, layout, 3, count)
    d = _operand(inst, layout, 0, count)
    return _step(
        inst, Matrix(matrix.shape, matrix.a, matrix.b, c, d, matrix.result, matrix.scales, matrix.octets), extra
    )


def _build_f8f6f4(inst: Instruction, layout: Layout, m: int, k: int, scaled: bool) -> Step:
    if len(inst.operands) != (6 if scaled else 4):
        raise inst.unknown(f"{len(inst.operands)} operands where {6 if scaled else 4} are expected")
    sides, octets = [], []
    for place, name in ((1, "cbsz"), (2, "blgp")):
        code = inst.number(name)
        if code not in F8F6F4:
            raise inst.unknown(f"{name}:{code} names no format")
        decode, words = F8F6F4[code]
        held = inst.operands[place].count
        if held not in (words, 8):
            raise inst.unknown(f"operand {inst.operands[place].text!r}: this format takes {words} registers")
        sides.append((_operand(inst, layout, place, held), words, decode))
        octets.append(words == 8)
    scales, keys = _scales(inst, layout) if scaled else (None, ())
    shape = Shape(m, m, k, 1, 8)
    return _finish(inst, layout, Matrix(shape, sides[0], sides[1], 0, 0, F32, scales, (octets[0], octets[1])), keys)


def _scales(inst: Instruction, layout: Layout) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """The E8M0 byte of each lane's 32 values: byte op_sel + 2 * op_sel_hi of the scale operand."""
    low, high = inst.bits("op_sel", 2, 0), inst.bits("op_sel_hi", 2, 1)
    fetches, keys = [], []
    for side in (0, 1):
        key = layout.key(inst, inst.operands[4 + side])
        shift = U32(8 * ((low[side] & 1) + 2 * (high[side] & 1)))

        def fetch(g: Group, key: int = key, shift: Any = shift) -> np.ndarray:
            return block_scale(np.broadcast_to(g.u[key] >> shift & U32(255), (g.n, LANES)))

        fetches.append(fetch)
        keys.append(key)
    return (fetches[0], fetches[1]), tuple(key for key in keys if key < CONST)


# Name of the operand type: decode of A, of B, bytes of one value in a lane, result type.
_TYPES: dict[str, tuple[Decode, Decode, Any]] = {
    "f16": (f16_lanes, f16_lanes, F32), "bf16": (bf16_lanes, bf16_lanes, F32), "bf16_1k": (bf16_lanes, bf16_lanes,
    F32), "f32": (f32_lanes, f32_lanes, F32), "xf32": (f32_lanes, f32_lanes, F32), "f64": (f64_lanes, f64_lanes, F64),
    "i8": (i8_lanes, i8_lanes, I32), "fp8_fp8": (bytes_of(FP8), bytes_of(FP8), F32), "fp8_bf8": (bytes_of(FP8),
    bytes_of(BF8), F32), "bf8_fp8": (bytes_of(BF8), bytes_of(FP8), F32), "bf8_bf8": (bytes_of(BF8), bytes_of(BF8), F32),
}  # fmt: skip

# m, k, blocks, registers of A and B, operand types, spelling of the block count (LLVM, VOP3PInstructions.td for
# gfx950).
_FORMS: list[tuple[int, int, int, int, str]] = [
    (16, 32, 1, 4, "f16 bf16"), (32, 16, 1, 4, "f16 bf16"), (16, 16, 1, 2, "f16 bf16"), (32, 8, 1, 2, "f16 bf16"),
    (4, 4, 16, 2, "f16 bf16"), (16, 4, 4, 2, "f16 bf16"), (32, 4, 2, 2, "f16 bf16"),
    (16, 4, 1, 1, "f32"), (32, 2, 1, 1, "f32"), (4, 1, 16, 1, "f32"), (16, 1, 4, 1, "f32"), (32, 1, 2, 1, "f32"),
    (16, 64, 1, 4, "i8"), (32, 32, 1, 4, "i8"), (16, 32, 1, 2, "i8 fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8"),
    (32, 16, 1, 2, "i8 fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8"), (4, 4, 16, 1, "i8"), (16, 4, 4, 1, "i8"), (32, 4, 2, 1, "i8"),
    (16, 4, 1, 2, "f64"),
]  # fmt: skip
_MODIFIERS = ("cbsz", "abid", "blgp")


def _names(m: int, k: int, blocks: int, kind: str) -> str:
    result = "i32" if kind == "i8" else "f64" if kind == "f64" else "f32"
    stem = f"v_mfma_{result}_{m}x{m}x{k}"
    spelled = f"{stem}_{blocks}b_{kind}" if blocks > 1 else f"{stem}_{kind}"
    older = f"{stem}{kind}" if kind != "f64" else f"{stem}f64"
    if kind == "bf16" and k in (4, 8, 16) and not (m == 32 and k == 16):
        older += "_1k"
    return f"{spelled} {older}"


def _define() -> None:
    for m, k, blocks, words, kinds in _FORMS:
        for kind in kinds.split():
            decode_a, decode_b, result = _TYPES[kind]
            shape = Shape(m, m, k, blocks, words)
            add(_names(m, k, blocks, kind), "mfma",
                bound(_build, shape, (decode_a, decode_b), result),
                _MODIFIERS)  # fmt: skip
    for m, k in ((16, 128), (32, 64)):
        add(f"v_mfma_f32_{m}x{m}x{k}_f8f6f4", "mfma",
            bound(_build_f8f6f4, m, k, False), ("cbsz", "blgp"))  # fmt: skip
        add(f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4", "mfma",
            bound(_build_f8f6f4, m, k, True),
            ("cbsz", "blgp", "op_sel", "op_sel_hi"))  # fmt: skip


_define()
