"""Scalar ALU: one value a wave, condition code SCC (AMD Instinct MI300 ISA guide, SOP1, SOP2, SOPK, SOPC).

Scalar registers are uint32 columns [n]; 64-bit operands are aligned pairs and live in the state as uint64 already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import SCC_KEY, Group, narrow
from dieplace.emulator.isa.operands import CONST, EXEC, SGPR, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.state import ALL_BITS, I32, I64, U32, U64
from dieplace.emulator.isa.table import Layout, Run, Step, add, bound, mask_of

WORDS = {"u32": 1, "i32": 1, "u64": 2, "i64": 2}
DTYPES: dict[str, Any] = {"u32": U32, "i32": I32, "u64": U64, "i64": I64}
Fetch = Callable[[Group], Any]


@dataclass(frozen=True)
class Scalar:
    """What one scalar instruction does.

    `fn(*sources)` (with the SCC column appended when `reads_scc`) returns the result, or (result, SCC) when `scc` is
    "given"; "nonzero" derives SCC from the result, "" leaves it. `dst` may be "" for comparisons: fn returns SCC.
    """

    dst: str
    src: tuple[str, ...]
    fn: Callable[..., Any]
    scc: str = ""
    reads_scc: bool = False
    reads_dst: bool = False
    taint: str = "any"


def scalar_source(inst: Instruction, layout: Layout, operand: Operand, kind: str) -> tuple[Fetch, tuple[int, ...]]:
    """Fetch of a scalar operand as [n] (or a numpy scalar), and the registers it reads."""
    dtype = DTYPES[kind]
    if operand.is_modified:
        raise inst.unknown(f"operand {operand.text!r}: no modifier on scalar operands")
    if operand.text in ("scc", "src_scc"):
        return lambda g: g.scc.astype(dtype), (SCC_KEY,)
    words = WORDS[kind]
    key = layout.key(inst, operand, kind, words if operand.kind != "const" else 1)
    if operand.kind in "va":
        raise inst.unknown(f"operand {operand.text!r} is a vector register")
    if key >= CONST:
        raw = U32(key & 0xFFFFFFFF) if words == 1 else U64(key & 0xFFFFFFFFFFFFFFFF)
        value = raw.view(dtype)
        return lambda g: value, ()
    if words == 1:
        return (lambda g: g.u[key][:, 0].view(dtype)) if dtype is not U32 else (lambda g: g.u[key][:, 0]), (key,)
    if (key - SGPR) & 1:
        raise inst.unknown(f"operand {operand.text!r}: a 64-bit scalar operand starts at an even register")
    pair = key - SGPR >> 1
    return lambda g: g.s64[pair].view(dtype), (key, key + 1)


def scalar_target(inst: Instruction, layout: Layout, operand: Operand, kind: str) -> tuple[Any, tuple[int, ...]]:
    """Writer of a scalar destination and the registers it writes."""
    dtype = DTYPES[kind]
    key = layout.register(inst, operand, "s", WORDS[kind])
    if WORDS[kind] == 1:

        def write(g: Group, value: Any) -> None:
            g.u[key][:, 0] = value if dtype is U32 else np.asarray(value, dtype).view(U32)

        return write, (key,)
    if (key - SGPR) & 1:
        raise inst.unknown(f"operand {operand.text!r}: a 64-bit scalar operand starts at an even register")
    pair = key - SGPR >> 1

    def write_pair(g: Group, value: Any) -> None:
        g.s64[pair][...] = value if dtype is U64 else np.asarray(value, dtype).view(U64)

    return write_pair, (key, key + 1)


def build_scalar(inst: Instruction, layout: Layout, op: Scalar) -> Step:
    """Build one scalar ALU instruction."""
    operands = list(inst.operands)
    given = operands[1:] if op.dst else operands
    if op.reads_dst:
        given = [operands[0], *given]
    if len(given) != len(op.src):
        raise inst.unknown(f"{len(given)} source operands where {len(op.src)} are expected")
    sources = [scalar_source(inst, layout, operand, kind) for operand, kind in zip(given, op.src, strict=True)]
    fetches = [fetch for fetch, _ in sources]
    reads = [key for _, keys in sources for key in keys] + ([SCC_KEY] if op.reads_scc else [])
    write, writes = scalar_target(inst, layout, operands[0], op.dst) if op.dst else (None, ())
    run = _runner(op, fetches, write)
    if SGPR + EXEC in writes or SGPR + EXEC + 1 in writes:
        run = _refreshing(run)
    all_writes = (*writes, SCC_KEY) if op.scc or not op.dst else writes
    slow = _tracking(op, run, sources, writes, reads)
    return Step(inst, "salu", run, slow, mask_of(reads), mask_of(all_writes))


def _refreshing(run: Run) -> Run:
    def refreshing(g: Group) -> None:
        run(g)
        g.refresh()

    return refreshing


def _runner(op: Scalar, fetches: list[Fetch], write: Any) -> Run:
    fn, one, two = op.fn, len(fetches) == 1, len(fetches) == 2
    first, second = fetches[0] if fetches else None, fetches[1] if two else None

    def values(g: Group) -> Any:
        if op.reads_scc:
            return fn(*[fetch(g) for fetch in fetches], g.scc)
        if two and first is not None and second is not None:
            return fn(first(g), second(g))
        return fn(first(g)) if one and first is not None else fn(*[fetch(g) for fetch in fetches])

    if not op.dst:

        def compare(g: Group) -> None:
            g.scc[...] = values(g)

        return compare
    if op.scc == "given":

        def with_scc(g: Group) -> None:
            result, scc = values(g)
            write(g, result)
            g.scc[...] = scc

        return with_scc
    if op.scc == "nonzero":

        def with_nonzero(g: Group) -> None:
            result = values(g)
            write(g, result)
            g.scc[...] = result != 0

        return with_nonzero

    def plain(g: Group) -> None:
        write(g, values(g))

    return plain


# ---- never-written bits


def _tracking(op: Scalar, run: Run, sources: list[Any], writes: tuple[int, ...], reads: list[int]) -> Run:
    reads_mask = mask_of(reads)
    all_mask = reads_mask | mask_of(writes) | (1 << SCC_KEY if op.scc or not op.dst else 0)

    def slow(g: Group) -> None:
        if not g.st.tainted & all_mask:
            run(g)
            return
        bits, origin = _result_taint(g, op, sources, reads) if g.st.tainted & reads_mask else (None, None)
        run(g)
        any_wave = None if bits is None else np.where(np.broadcast_to(bits != 0, (g.n,)), ALL_BITS, U32(0))
        if writes:
            halves = (None, None) if bits is None else (narrow(np.broadcast_to(bits, (g.n,)).astype(U64)))
            for key, half in zip(writes, halves, strict=False):
                g.set_scalar_taint(key, half, origin)
            if SGPR + EXEC in writes or SGPR + EXEC + 1 in writes:
                g.require_written(writes, "EXEC", lanes=False)
        if op.scc or not op.dst:
            g.set_scalar_taint(SCC_KEY, any_wave, origin)

    return slow


def _result_taint(g: Group, op: Scalar, sources: list[Any], reads: list[int]) -> tuple[Any, str | None]:
    """uint64 [n] of never-written result bits: bitwise for logic, everything otherwise."""
    masks = []
    for _, keys in sources:
        low = g.taint(keys[0]) if keys else None
        high = g.taint(keys[1]) if len(keys) > 1 else None
        masks.append(_joined(low, high))
    found = [key for key in reads if g.taint(key) is not None]
    if not found:
        return None, None
    origin = g.st.origin(found[0])
    if op.taint in ("and", "or", "andn2", "orn2") and SCC_KEY not in found:
        (a, b), (ta, tb) = (np.asarray(fetch(g)).astype(U64) for fetch, _ in sources), masks
        if op.taint in ("or", "orn2"):
            a = ~a
        if op.taint in ("or", "andn2"):
            b = ~b
        return (ta & b) | (tb & a) | (ta & tb), origin
    if op.taint == "move" and SCC_KEY not in found:
        return masks[0], origin
    if op.taint in ("xor", "bits", "nand", "nor", "xnor") and SCC_KEY not in found:
        return np.bitwise_or.reduce(np.broadcast_arrays(*masks, np.zeros(g.n, U64))), origin
    if op.taint == "select" and SCC_KEY not in found:
        return np.where(g.scc, masks[0], masks[1]), origin
    if op.taint in ("shift", "through") and (op.taint == "through" or not np.any(masks[1])):
        return _shadow(g, op, sources, masks), origin
    if op.taint == "up":
        total = np.zeros(g.n, U64)
        for bits in masks:
            total |= bits
        if SCC_KEY in found:
            total |= U64(1)
        return total | (~total + U64(1)), origin
    touched = np.zeros(g.n, bool)
    for key in found:
        bits = g.taint(key)
        touched |= bits[:, 0] != 0
    return np.where(touched, U64(0xFFFFFFFFFFFFFFFF), U64(0)), origin


def _shadow(g: Group, op: Scalar, sources: list[Any], masks: list[Any]) -> Any:
    """The function on never-written bits instead of values: on the first operand of a shift, on all of a packing."""
    values = []
    for number, ((fetch, _), kind, bits) in enumerate(zip(sources, op.src, masks, strict=True)):
        raw: Any = U32 if WORDS[kind] == 1 else U64
        if op.taint == "shift" and number:
            values.append(fetch(g))
        else:
            values.append(np.broadcast_to(bits, (g.n,)).astype(raw).view(DTYPES[kind]))
    result = np.asarray(op.fn(*values))
    return result.view(U32 if result.dtype.itemsize == 4 else U64).astype(U64)


def _joined(low: Any, high: Any) -> Any:
    value: Any = U64(0)
    if low is not None:
        value = value | low[:, 0].astype(U64)
    if high is not None:
        value = value | high[:, 0].astype(U64) << U64(32)
    return value


def scalar(names: str, dst: str, src: str, fn: Callable[..., Any], scc: str = "", **how: Any) -> None:
    """Register a scalar operation under each of the space-separated mnemonics."""
    op = Scalar(dst, tuple(src.split()), fn, scc, **how)
    add(names, "salu", bound(build_scalar, op))
