"""Global and flat memory instructions: addresses from VGPRs and SGPRs (AMD Instinct MI300 ISA guide, FLAT)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dieplace.emulator.isa.group import Group, wide
from dieplace.emulator.isa.lds import lds_places, lds_write
from dieplace.emulator.isa.operands import M0, SGPR, Operand
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.registers import deliver, gather, gather_taint, track_load
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.state import I64, LANES
from dieplace.emulator.isa.table import Layout, Run, Step, add, bound, mask_of

CACHE = ("sc0", "sc1", "nt")
MODIFIERS = ("offset", *CACHE)

# Load suffix: bytes, sign-extended, half of the register that a d16 form writes.
LOADS: dict[str, tuple[int, bool, int | None]] = {
    "ubyte": (1, False, None), "sbyte": (1, True, None), "ushort": (2, False, None), "sshort": (2, True, None),
    "dword": (4, False, None), "dwordx2": (8, False, None), "dwordx3": (12, False, None), "dwordx4": (16, False, None),
    "ubyte_d16": (1, False, 0), "ubyte_d16_hi": (1, False, 1), "sbyte_d16": (1, True, 0), "sbyte_d16_hi": (1, True, 1),
    "short_d16": (2, False, 0), "short_d16_hi": (2, False, 1),
}  # fmt: skip
STORES: dict[str, tuple[int, int]] = {
    "byte": (1, 0), "short": (2, 0), "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
    "byte_d16_hi": (1, 1), "short_d16_hi": (2, 1),
}  # fmt: skip
# Atomic suffix: operation of the memory port, bytes of the memory word.
ATOMICS: dict[str, tuple[str, int]] = {
    **{f"{name}{suffix}": (name, size)
       for name in ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec")
       for suffix, size in (("", 4), ("_x2", 8))},
    "add_f32": ("fadd_f32", 4), "add_f64": ("fadd_f64", 8), "min_f64": ("fmin_f64", 8), "max_f64": ("fmax_f64", 8),
    "pk_add_f16": ("pk_add_f16", 4), "pk_add_bf16": ("pk_add_bf16", 4),
}  # fmt: skip

Address = Callable[[Group], np.ndarray]


def global_address(inst: Instruction, layout: Layout, vaddr: Operand, saddr: Operand | None) -> tuple[Address, tuple]:
    """int64 [n, 64] addresses and the registers they come from: `v[0:1], off` or `v0, s[2:3]`, plus the offset."""
    offset = inst.number("offset")
    if saddr is None or saddr.kind == "off":
        key = layout.register(inst, vaddr, "v", 2)
        return lambda g: wide(g.u[key], g.u[key + 1]).view(I64) + offset, (key, key + 1)
    base = layout.register(inst, saddr, "s", 2)
    pair = base - SGPR >> 1
    key = layout.register(inst, vaddr, "v", 1)
    return lambda g: (g.s64[pair].view(I64) + offset)[:, None] + g.u[key], (key, base, base + 1)


def elements(g: Group, address: np.ndarray) -> np.ndarray:
    """Addresses of the active lanes in (wave, lane) order."""
    if address.shape != (g.n, LANES):
        address = np.broadcast_to(address, (g.n, LANES))
    return address.reshape(-1) if g.full else address[g.active]


def remember(g: Group, request: Request, data: np.ndarray) -> None:
    """Keep the last load of each instruction, for the diagnosis of a stall."""
    g.st.recent[request.inst.line] = (request, data, g.st.clock.now)


def loaded_origin(g: Group, request: Request, taint: np.ndarray | None) -> str:
    """Words for never-written memory: the buffer and the first such address."""
    element = 0 if taint is None else int(np.argmax(taint.any(axis=1)))
    address = int(request.address[element])
    table = getattr(g.st.memory, "table", None)
    where = table.describe(address) if table is not None else f"at {address:#x}"
    return f"memory {where} that was never written, read in line {request.inst.line}: `{request.inst.text}`"


def _build_load(inst: Instruction, layout: Layout, suffix: str, flat: bool) -> Step:
    size, signed, half = LOADS[suffix]
    _expect(inst, 2 if flat else 3)
    words = max(1, size // 4)
    dst = layout.register(inst, inst.operands[0], "va", words)
    address, keys = global_address(inst, layout, inst.operands[1], None if flat else inst.operands[2])

    def run(g: Group) -> None:
        request = Request(g, inst, elements(g, address(g)), size)
        data, taint = g.st.memory.load(request)
        remember(g, request, data)
        deliver(g, dst, data, taint, size, signed, half, lambda: loaded_origin(g, request, taint))

    writes = tuple(range(dst, dst + words))
    return Step(inst, "vmem_load", run, track_load(run, keys, writes, half), mask_of(keys), mask_of(writes),
                preemptible=inst.sc0 or inst.sc1 or inst.nt)  # fmt: skip


def track_memory_store(run: Run, addresses: tuple[int, ...], data: tuple[int, ...], size: int, half: int) -> Run:
    """The tracking form of a store to memory: address and every stored bit must be written."""
    mask = mask_of((*addresses, *data))
    low = (1 << 8 * min(size, 4)) - 1

    def slow(g: Group) -> None:
        if g.st.tainted & mask:
            g.require_written(addresses, "the address")
            taint = gather_taint(g, data, half)
            if taint is not None and (taint & low).any():
                column = int(np.argmax((taint & low).any(axis=0)))
                raise g.st.never_written("the stored value", data[column])
        run(g)

    return slow


def _build_store(inst: Instruction, layout: Layout, suffix: str, flat: bool) -> Step:
    size, half = STORES[suffix]
    _expect(inst, 2 if flat else 3)
    words = max(1, size // 4)
    address, keys = global_address(inst, layout, inst.operands[0], None if flat else inst.operands[2])
    src = layout.register(inst, inst.operands[1], "va", words)

    def run(g: Group) -> None:
        store_in_order(g, Request(g, inst, elements(g, address(g)), size), gather(g, src, words, half))

    data = tuple(range(src, src + words))
    slow = track_memory_store(run, keys, data, size, half)
    return Step(inst, "vmem_store", run, slow, mask_of((*keys, *data)), preemptible=True)


def _build_atomic(inst: Instruction, layout: Layout, suffix: str, flat: bool) -> Step:
    operation, size = ATOMICS[suffix]
    words = size // 4
    parts = 2 if operation == "cmpswap" else 1
    fixed = 2 if flat else 3
    returns = len(inst.operands) == fixed + 1
    if returns != inst.sc0:
        raise inst.unknown("an atomic returns its old value exactly when sc0 is set")
    _expect(inst, fixed + returns)
    operands = inst.operands[1:] if returns else inst.operands
    address, keys = global_address(inst, layout, operands[0], None if flat else operands[2])
    src = layout.register(inst, operands[1], "va", parts * words)
    dst = layout.register(inst, inst.operands[0], "va", words) if returns else -1

    def run(g: Group) -> None:
        run_atomic(g, Request(g, inst, elements(g, address(g)), size), operation, src, parts * words, dst)

    return atomic_step(inst, run, keys, src, parts * words, size, dst)


def run_atomic(g: Group, request: Request, operation: str, src: int, words: int, dst: int, data: Any = None) -> None:
    """Hand an atomic to the port and put the old values away when `dst` is a register."""
    data = gather(g, src, words) if data is None else data
    order = seeded_order(g, len(request.address))
    if order is None:
        old, taint = g.st.memory.atomic(request, operation, data, dst >= 0)
    else:
        asked, data = reordered(request, order), data[order]
        found, bits = g.st.memory.atomic(asked, operation, data, dst >= 0)
        old, taint = np.empty_like(found), None if bits is None else np.empty_like(bits)
        old[order] = found
        if taint is not None:
            taint[order] = bits
    if taint is not None and dst < 0 and operation != "swap":
        raise g.st.never_written_memory("the atomic", loaded_origin(g, request, taint))
    if dst >= 0:
        remember(g, request, old)
        deliver(g, dst, old, taint, request.size, False, None, lambda: loaded_origin(g, request, taint))


def seeded_order(g: Group, count: int) -> np.ndarray | None:
    """In a seeded run, the order in which the waves of a group reach memory; None for the order of their slots."""
    choose = g.st.choose
    if choose is None or g.n == 1 or count < 2:
        return None
    rank = np.array(choose.sample(range(g.n), g.n))
    position = np.repeat(np.arange(g.n), LANES) if g.full else g.active[0]
    return np.argsort(rank[position], kind="stable") if len(position) == count else None


def reordered(request: Request, order: np.ndarray) -> Request:
    """The same request with its elements in another order."""
    g = request.group
    position = np.repeat(np.arange(g.n), LANES) if g.full else g.active[0]
    lanes = np.tile(np.arange(LANES), g.n) if g.full else g.active[1]
    return Request(g, request.inst, request.address[order], request.size, places=(position[order], lanes[order]))


def store_in_order(g: Group, request: Request, data: np.ndarray) -> None:
    """Hand a store to the port; of two waves that store to one address, a seeded run lets either be last."""
    order = seeded_order(g, len(request.address))
    if order is None:
        g.st.memory.store(request, data)
    else:
        g.st.memory.store(reordered(request, order), data[order])


def atomic_step(inst: Instruction, run: Run, keys: tuple[int, ...], src: int, words: int, size: int, dst: int) -> Step:
    """The step of an atomic: address and operands must be written."""
    data = tuple(range(src, src + words))
    writes = tuple(range(dst, dst + size // 4)) if dst >= 0 else ()
    checked = track_memory_store(run, keys, data, size, 0)
    cleared = track_load(checked, (), writes, None)
    return Step(inst, "atomic", run, cleared, mask_of((*keys, *data)), mask_of(writes), preemptible=True)


def _build_to_lds(inst: Instruction, layout: Layout, size: int) -> Step:
    """global_load_lds_*: each lane's data goes to LDS at M0 + offset + lane * size."""
    _expect(inst, 2)
    address, keys = global_address(inst, layout, inst.operands[0], inst.operands[1])

    def run(g: Group) -> None:
        load_to_lds(g, Request(g, inst, elements(g, address(g)), size))

    return Step(inst, "vmem_load", run, track_load(run, (*keys, SGPR + M0), (), None), mask_of((*keys, SGPR + M0)))


def load_to_lds(g: Group, request: Request, zeros: np.ndarray | None = None) -> None:
    """Load from memory to LDS; `zeros` marks elements that are out of a descriptor's range and store 0."""
    inst, size = request.inst, request.size
    data, taint = g.st.memory.load(request)
    if zeros is not None:
        data, taint = spread(data, zeros), None if taint is None else spread(taint, zeros)
    start = g.u[SGPR + M0].astype(I64) + inst.number("offset") + np.arange(LANES) * max(size, 4)
    places = lds_places(g, inst, start, max(size, 4), 4)
    lds_write(g, places, max(size, 4), data, taint)


def spread(part: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Element data for all elements, 0 where `zeros` is true."""
    whole = np.zeros((len(zeros), part.shape[1]), part.dtype)
    whole[~zeros] = part
    return whole


def _expect(inst: Instruction, count: int) -> None:
    if len(inst.operands) != count:
        raise inst.unknown(f"{len(inst.operands)} operands where {count} are expected")


def _build_cache(inst: Instruction, layout: Layout, method: str) -> Step:
    _expect(inst, 0)

    def run(g: Group) -> None:
        getattr(g.st.memory, method)(Request.of_waves(g, inst))

    return Step(inst, "cache", run, preemptible=True)


def _define() -> None:
    for space, flat in (("global", False), ("flat", True)):
        for suffix in LOADS:
            add(f"{space}_load_{suffix}", "vmem_load",
                bound(_build_load, suffix, flat), MODIFIERS)  # fmt: skip
        for suffix in STORES:
            add(f"{space}_store_{suffix}", "vmem_store",
                bound(_build_store, suffix, flat), MODIFIERS)  # fmt: skip
        for suffix in ATOMICS:
            add(f"{space}_atomic_{suffix}", "atomic",
                bound(_build_atomic, suffix, flat), MODIFIERS)  # fmt: skip
    for suffix, size in (("ubyte", 1), ("ushort", 2), ("dword", 4), ("dwordx3", 12), ("dwordx4", 16)):
        add(f"global_load_lds_{suffix}", "vmem_load",
            bound(_build_to_lds, size), MODIFIERS)  # fmt: skip
    add("buffer_wbl2", "cache", bound(_build_cache, "writeback"), CACHE)
    add("buffer_inv", "cache", bound(_build_cache, "invalidate"), CACHE)


_define()
