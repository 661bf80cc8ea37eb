"""How a vector operation runs on a group: the general form, the fast forms, and the form that tracks never-written
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import EXEC, SGPR
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.sources import BANKS, HALF, WIDE, Source
from dieplace.emulator.isa.state import ALL_BITS, LANES, U32, U64
from dieplace.emulator.isa.table import Run, Step, mask_of
from dieplace.emulator.isa.targets import Target

Function = Callable[..., Any]
FLOATS = frozenset({"f32", "f16", "f64"})
VOP3 = frozenset({"clamp", "mul", "div", "op_sel"})


@dataclass(frozen=True)
class Operation:
    """What one vector instruction does; `taint` is the rule for never-written bits.

    "any": one such bit taints everything; "move" (with `data` operand positions): the function moves bits; "and", "or":
    bit by bit; "bits": on bits in the same place; "up": on bits at or below it; "pair": two 16-bit results.
    """

    name: str
    dst: tuple[str, ...]
    src: tuple[str, ...]
    fn: Function
    taint: str = "any"
    data: tuple[int, ...] = ()
    reads_dst: bool = False
    keep_high: bool = False
    saturate: Function | None = None


Lanes = Callable[[Group], Any]


def active_lanes(g: Group) -> Any:
    """The write mask of most instructions: None when every lane is active."""
    return None if g.full else g.mask


def finish(
    inst: Instruction,
    op: Operation,
    sources: list[Source],
    targets: list[Target],
    run: Run,
    lanes: Lanes = active_lanes,
) -> Step:
    """The step with its reads, writes and taint-tracking variant."""
    reads = mask_of(key for source in sources for key in source.keys)
    writes = mask_of(key for target in targets for key in target.keys)
    if any(EXEC + SGPR in target.keys for target in targets):
        run = then_refresh(run)
    return Step(inst, "valu", run, slow_run(op, sources, targets, run, lanes), reads, writes)


def then_refresh(run: Run) -> Run:
    """`run`, then recompute what depends on EXEC."""

    def refreshing(g: Group) -> None:
        run(g)
        g.refresh()

    return refreshing


def general_run(sources: list[Source], targets: list[Target], fn: Function, lanes: Lanes = active_lanes) -> Run:
    """Fetch, compute, write; results are complete before any destination changes."""
    fetches = [source.value for source in sources]
    if len(targets) == 1:
        write = targets[0].write

        def run_one(g: Group) -> None:
            write(g, fn(*[fetch(g) for fetch in fetches]), lanes(g))

        return run_one
    writes = [target.write for target in targets]

    def run_many(g: Group) -> None:
        mask = lanes(g)
        for write, value in zip(writes, fn(*[fetch(g) for fetch in fetches]), strict=True):
            write(g, value, mask)

    return run_many


def simple_run(sources: list[Source], targets: list[Target], fn: Function) -> Run | None:
    """The fast form for plain 32-bit operands of one bank and an elementwise numpy function; None where it does not
    fit.
    """
    if len(targets) != 1 or targets[0].kind not in BANKS or not all(source.plain for source in sources):
        return None
    kinds = {BANKS[source.kind] for source in sources} | {BANKS[targets[0].kind]}
    if len(kinds) != 1 or not isinstance(fn, np.ufunc) or len(sources) > 2:
        return None
    bank, d = kinds.pop(), targets[0].keys[0]
    keys = [source.keys[0] for source in sources]
    return _unary(fn, bank, keys[0], d) if len(keys) == 1 else _binary(fn, bank, keys[0], keys[1], d)


def _unary(fn: np.ufunc, bank: str, a: int, d: int) -> Run:
    def run(g: Group) -> None:
        values = getattr(g, bank)
        if g.full:
            fn(values[a], out=values[d])
        else:
            np.copyto(values[d], fn(values[a]), where=g.mask)

    return run


def _binary(fn: np.ufunc, bank: str, a: int, b: int, d: int) -> Run:
    def run_f(g: Group) -> None:
        values = g.f
        if g.full:
            fn(values[a], values[b], out=values[d])
        else:
            np.copyto(values[d], fn(values[a], values[b]), where=g.mask)

    def run_u(g: Group) -> None:
        values = g.u
        if g.full:
            fn(values[a], values[b], out=values[d])
        else:
            np.copyto(values[d], fn(values[a], values[b]), where=g.mask)

    def run_i(g: Group) -> None:
        values = g.i
        if g.full:
            fn(values[a], values[b], out=values[d])
        else:
            np.copyto(values[d], fn(values[a], values[b]), where=g.mask)

    return {"f": run_f, "u": run_u, "i": run_i}[bank]


def with_output_modifiers(inst: Instruction, op: Operation) -> Function:
    """The function followed by `mul:`, `div:` and `clamp`; integer operations clamp only where saturation is
    defined.
    """
    clamp, scale = "clamp" in inst.modifiers, 1.0
    if "mul" in inst.modifiers or "div" in inst.modifiers:
        factor = (inst.number("mul", 0), inst.number("div", 0))
        if factor not in ((2, 0), (4, 0), (0, 2)):
            raise inst.unknown("output modifier must be mul:2, mul:4 or div:2")
        scale = float(factor[0]) if factor[0] else 0.5
    if not clamp and scale == 1.0:
        return op.fn
    if op.dst[0] not in FLOATS:
        if op.saturate is None or scale != 1.0:
            raise inst.unknown(f"output modifier on {op.dst[0]} result")
        return op.saturate
    fn = op.fn

    def modified(*values: Any) -> Any:
        result = fn(*values) * np.asarray(scale, np.float32).astype(fn_dtype)
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(fn_dtype) if clamp else result

    fn_dtype = {"f32": np.float32, "f16": np.float16, "f64": np.float64}[op.dst[0]]
    return modified


def slow_run(op: Operation, sources: list[Source], targets: list[Target], run: Run, lanes: Lanes = active_lanes) -> Run:
    """`run` with tracking: taints of the sources decide those of the destinations, in the lanes that are written."""
    reads = mask_of(key for source in sources for key in source.keys)
    writes = mask_of(key for target in targets for key in target.keys)

    def slow(g: Group) -> None:
        tainted = g.st.tainted
        if not tainted & (reads | writes):
            run(g)
            return
        bits, origin = source_taint(g, op, sources) if tainted & reads else (None, None)
        mask = lanes(g)
        run(g)
        for target in targets:
            own = bits if bits is None or target is targets[0] else np.where(np.not_equal(bits, 0), ALL_BITS, 0)
            target.taint(g, own, mask, origin)

    return slow


def source_taint(g: Group, op: Operation, sources: list[Source]) -> tuple[Any, str | None]:
    """Never-written bits of the result, in the width of the first destination, and where they come from."""
    taints = [source.taint(g) for source in sources]
    keys = [key for source, bits in zip(sources, taints, strict=True) if bits is not None for key in source.keys]
    if not keys:
        return None, None
    origin = next((g.st.origin(key) for key in keys if g.taint(key) is not None), None)
    if op.taint == "move" and all(bits is None for number, bits in enumerate(taints) if number not in op.data):
        shadow = [_shadow(bits, source) if number in op.data else source.value(g)
                  for number, (bits, source) in enumerate(zip(taints, sources, strict=True))]  # fmt: skip
        return np.asarray(op.fn(*shadow)), origin
    if op.taint in ("and", "or"):
        return _logic_taint(g, op, sources, taints), origin
    if op.taint in ("up", "bits"):
        return _carried(g, op, taints), origin
    if op.taint == "pair":
        return _paired(g, taints), origin
    touched = np.zeros((g.n, LANES), bool)
    for bits in taints:
        if bits is not None:
            touched |= bits != 0
    return np.where(touched, U64(0xFFFFFFFFFFFFFFFF) if op.dst[0] in WIDE else ALL_BITS, 0), origin


def _shadow(bits: Any, source: Source) -> Any:
    dtype: Any = WIDE.get(source.kind) or HALF.get(source.kind) or U32
    if source.kind in BANKS:
        dtype = {"u": np.uint32, "i": np.int32, "f": np.float32}[BANKS[source.kind]]
    size = np.dtype(dtype).itemsize
    raw: Any = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    return raw(0).view(dtype) if bits is None else np.asarray(bits).astype(raw).view(dtype)


def _carried(g: Group, op: Operation, taints: list[Any]) -> Any:
    """Sums and low products: a result bit depends on operand bits at or below it; bitwise operations: on equal
    places.
    """
    kind: Any = U64 if op.dst[0] in WIDE else U32
    total = np.zeros((g.n, LANES), kind)
    for source, bits in zip(op.src, taints, strict=True):
        if bits is not None:
            total |= np.asarray(bits != 0 if source == "mask" else bits).astype(kind)
    return total if op.taint == "bits" else total | (~total + kind(1))


def _paired(g: Group, taints: list[Any]) -> Any:
    """The first half of the sources makes the low 16 bits, the second half the high ones."""
    total = np.zeros((g.n, LANES), U32)
    for number, bits in enumerate(taints):
        if bits is not None:
            field = U32(0xFFFF) if number < len(taints) // 2 else U32(0xFFFF0000)
            total |= np.where(np.asarray(bits) != 0, field, U32(0))
    return total


def _logic_taint(g: Group, op: Operation, sources: list[Source], taints: list[Any]) -> Any:
    """A never-written bit does not matter where the other operand decides the result."""
    (a, b), (ta, tb) = (source.value(g) for source in sources), (U32(0) if t is None else t for t in taints)
    if op.taint == "or":
        a, b = ~a, ~b
    return (ta & b) | (tb & a) | (ta & tb)
