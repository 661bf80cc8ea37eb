"""Buffer memory instructions: a descriptor in four SGPRs, range-checked (AMD Instinct MI300 ISA guide, MUBUF).

Out of the descriptor's range, loads give 0 and stores are dropped, dword by dword; inside it, the address must still
lie in a registered buffer. Swizzled and thread-id descriptors are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dieplace.emulator.isa.faults import ReservedValue
from dieplace.emulator.isa.group import Group
from dieplace.emulator.isa.operands import CONST, M0, SGPR
from dieplace.emulator.isa.parse import Instruction
from dieplace.emulator.isa.registers import deliver, gather, track_load
from dieplace.emulator.isa.request import Request
from dieplace.emulator.isa.state import I64, LANES, U32, U64
from dieplace.emulator.isa.table import Layout, Step, add, bound, mask_of
from dieplace.emulator.isa.vmem import (
    ATOMICS,
    CACHE,
    LOADS,
    STORES,
    atomic_step,
    elements,
    load_to_lds,
    loaded_origin,
    remember,
    run_atomic,
    spread,
    store_in_order,
    track_memory_store,
)

MODIFIERS = ("offset", "offen", "idxen", *CACHE)
BASE_BITS = U64((1 << 48) - 1)
SWIZZLE, ADD_TID = U32(1 << 31), U32(1 << 23)

Located = tuple[np.ndarray, np.ndarray]  # byte addresses and bytes left in range, both int64 [n, 64] or [n, 1]


def buffer_address(inst: Instruction, layout: Layout, place: int) -> tuple[Callable[[Group], Located], tuple[int, ...]]:
    """Addresses of a MUBUF instruction whose operands from `place` on are vaddr, descriptor, soffset."""
    vaddr, descriptor, soffset = inst.operands[place : place + 3]
    offen, idxen = "offen" in inst.modifiers, "idxen" in inst.modifiers
    count = offen + idxen
    if (vaddr.kind == "off") != (count == 0):
        raise inst.unknown("vaddr is `off` exactly when neither offen nor idxen is given")
    key = layout.register(inst, vaddr, "v", count) if count else -1
    base = layout.register(inst, descriptor, "s", 4)
    low, words = base - SGPR >> 1, (base - SGPR >> 1) + 1
    shift = layout.key(inst, soffset)
    fixed = inst.number("offset")

    def locate(g: Group) -> Located:
        first, second = g.s64[low], g.s64[words]
        stride = (first >> U64(48) & U64(0x3FFF)).astype(I64)
        _refuse_special(first, second)
        records = (second & U64(0xFFFFFFFF)).astype(I64)
        more = I64(shift & 0xFFFFFFFF) if shift >= CONST else g.u[shift][:, 0].astype(I64)
        start = (first & BASE_BITS).astype(I64) + more
        offset: Any = np.full((g.n, 1), fixed, I64)
        if offen:
            offset = g.u[key + (1 if idxen else 0)].astype(I64) + fixed
        limit = (records - more)[:, None]
        if not idxen and not stride.any():
            return start[:, None] + offset, limit - offset
        index = g.u[key].astype(I64) if idxen else I64(0)
        left = np.where(index < records[:, None], stride[:, None] - offset, 0)
        left = np.where(stride[:, None] == 0, limit - offset, np.maximum(left, 0))
        return start[:, None] + index * stride[:, None] + offset, left

    keys = tuple(range(key, key + count)) if count else ()
    return locate, (*keys, *range(base, base + 4), *((shift,) if shift < CONST else ()))


def _refuse_special(first: np.ndarray, second: np.ndarray) -> None:
    if ((first >> U64(32)).astype(U32) & SWIZZLE).any() or ((second >> U64(32)).astype(U32) & ADD_TID).any():
        raise ReservedValue(
            "the buffer descriptor asks for swizzled or thread-id addressing, which is not modelled",
            hint="use a plain descriptor (stride 0)",
        )


def in_range(g: Group, located: Located, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Element addresses, and how many bytes of each are in range where that is not all of them."""
    address, left = located
    addresses = elements(g, address)
    if not len(addresses) or int(left.min()) >= size:
        return addresses, None
    available = elements(g, left)
    return (addresses, None) if int(available.min()) >= size else (addresses, np.clip(available, 0, size))


def partial_load(g: Group, inst: Instruction, addresses: np.ndarray, room: np.ndarray, size: int) -> Any:
    """Load dword by dword where only some of each element is in range; the rest is 0."""
    unit, words = min(size, 4), max(1, size // 4)
    data, taint = np.zeros((len(addresses), words), U32), np.zeros((len(addresses), words), U32)
    whole = room >= size
    if whole.any():
        _fetch(g, inst, addresses, whole, size, 0, data, taint)
    for word in range(words):
        inside = (room >= unit * (word + 1)) & ~whole
        if inside.any():
            _fetch(g, inst, addresses + word * 4, inside, unit, word, data, taint)
    return data, taint if taint.any() else None


def _fetch(
    g: Group, inst: Instruction, addresses: Any, inside: Any, size: int, word: int, data: Any, taint: Any
) -> None:
    request = Request(g, inst, addresses[inside], size, places=places_of(g, inside))
    part, bits = g.st.memory.load(request)
    columns = slice(word, word + part.shape[1])
    data[inside, columns] = part
    if bits is not None:
        taint[inside, columns] = bits


def places_of(g: Group, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(wave in group, lane) of some of the active lanes' elements."""
    if g.full:
        flat = np.nonzero(inside)[0]
        return flat // LANES, flat % LANES
    return g.active[0][inside], g.active[1][inside]


def _build_load(inst: Instruction, layout: Layout, suffix: str) -> Step:
    size, signed, half = LOADS[suffix]
    if "lds" in inst.modifiers:
        return _build_load_lds(inst, layout, size, half)
    _expect(inst, 4)
    words = max(1, size // 4)
    dst = layout.register(inst, inst.operands[0], "va", words)
    locate, keys = buffer_address(inst, layout, 1)

    def run(g: Group) -> None:
        addresses, room = in_range(g, locate(g), size)
        request = Request(g, inst, addresses, size)
        if room is None:
            data, taint = g.st.memory.load(request)
        else:
            data, taint = partial_load(g, inst, addresses, room, size)
        remember(g, request, data)
        deliver(g, dst, data, taint, size, signed, half, lambda: loaded_origin(g, request, taint))

    writes = tuple(range(dst, dst + words))
    return Step(inst, "vmem_load", run, track_load(run, keys, writes, half), mask_of(keys), mask_of(writes),
                preemptible=inst.sc0 or inst.sc1 or inst.nt)  # fmt: skip


def _build_load_lds(inst: Instruction, layout: Layout, size: int, half: int | None) -> Step:
    """buffer_load_* ... lds: to LDS at M0 + offset + lane * size; out of range stores 0."""
    _expect(inst, 3)
    if half is not None or size == 8:
        raise inst.unknown("this width cannot go to LDS")
    locate, keys = buffer_address(inst, layout, 0)

    def run(g: Group) -> None:
        addresses, room = in_range(g, locate(g), size)
        if room is None:
            load_to_lds(g, Request(g, inst, addresses, size))
            return
        outside = room < size
        inside = ~outside
        load_to_lds(g, Request(g, inst, addresses[inside], size, places=places_of(g, inside)), outside)

    reads = (*keys, SGPR + M0)
    return Step(inst, "vmem_load", run, track_load(run, reads, (), None), mask_of(reads))


def _build_store(inst: Instruction, layout: Layout, suffix: str) -> Step:
    size, half = STORES[suffix]
    _expect(inst, 4)
    words = max(1, size // 4)
    src = layout.register(inst, inst.operands[0], "va", words)
    locate, keys = buffer_address(inst, layout, 1)

    def run(g: Group) -> None:
        addresses, room = in_range(g, locate(g), size)
        data = gather(g, src, words, half)
        if room is None:
            store_in_order(g, Request(g, inst, addresses, size), data)
            return
        whole, unit = room >= size, min(size, 4)
        g.st.memory.store(Request(g, inst, addresses[whole], size, places=places_of(g, whole)), data[whole])
        for word in range(words):
            inside = (room >= unit * (word + 1)) & ~whole
            if inside.any():
                request = Request(g, inst, addresses[inside] + 4 * word, unit, places=places_of(g, inside))
                g.st.memory.store(request, data[inside, word : word + 1])

    values = tuple(range(src, src + words))
    slow = track_memory_store(run, keys, values, size, half)
    return Step(inst, "vmem_store", run, slow, mask_of((*keys, *values)), preemptible=True)


def _build_atomic(inst: Instruction, layout: Layout, suffix: str) -> Step:
    operation, size = ATOMICS[suffix]
    _expect(inst, 4)
    words = size // 4 * (2 if operation == "cmpswap" else 1)
    src = layout.register(inst, inst.operands[0], "va", words)
    dst = src if inst.sc0 else -1
    locate, keys = buffer_address(inst, layout, 1)

    def run(g: Group) -> None:
        addresses, room = in_range(g, locate(g), size)
        data = gather(g, src, words)
        if room is None:
            run_atomic(g, Request(g, inst, addresses, size), operation, src, words, dst, data)
            return
        inside = room >= size
        request = Request(g, inst, addresses[inside], size, places=places_of(g, inside))
        old, taint = g.st.memory.atomic(request, operation, data[inside], dst >= 0)
        if dst >= 0:
            bits = None if taint is None else spread(taint, ~inside)
            deliver(g, dst, spread(old, ~inside), bits, size, False, None, lambda: loaded_origin(g, request, taint))

    return atomic_step(inst, run, keys, src, words, size, dst)


def _expect(inst: Instruction, count: int) -> None:
    if len(inst.operands) != count:
        raise inst.unknown(f"{len(inst.operands)} operands where {count} are expected")


def _define() -> None:
    for suffix in LOADS:
        add(f"buffer_load_{suffix}", "vmem_load", bound(_build_load, suffix),
            (*MODIFIERS, "lds"))  # fmt: skip
    for suffix in STORES:
        add(f"buffer_store_{suffix}", "vmem_store", bound(_build_store, suffix), MODIFIERS)
    for suffix in ATOMICS:
        add(f"buffer_atomic_{suffix}", "atomic", bound(_build_atomic, suffix), MODIFIERS)


_define()
