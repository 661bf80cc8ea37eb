"""What the decode kernels share on the device: bounded rows, 128-bit loads, dot products, reductions over lanes.

Everything here runs while a kernel is traced: arguments and results are FlyDSL values unless they are plain ints.
A wave has 64 lanes. A *group* is the 16, 32 or 64 neighbouring lanes that share one row; there are 64 / `lanes`.
"""

from __future__ import annotations

from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.cache_bits import BUFFER_BITS
from dieplace.codegen.flydsl_names import STREAM, flyc, fx, pointer, range_constexpr

WAVE = 64
# The longest bounded run, and an index of a 16-byte item past the end of every run: such loads return zero. A row's
# offset may be added to it without leaving 31 bits of bytes.
MAX_RUN_BYTES = 0x3FFFFFF0
NOWHERE = MAX_RUN_BYTES // 16


def wave_index() -> Any:
    """Index of this wave in its workgroup, known to the compiler as the same on every lane."""
    return fn.readfirstlane(fx.thread_idx.x // WAVE)


def lane_index() -> Any:
    """Lane 0 to 63 in the wave."""
    return fx.thread_idx.x % WAVE


def uniform_load(address: Any) -> Any:
    """The Int32 at a uniform address, known to the compiler as uniform: descriptors may be made of it."""
    return fn.readfirstlane(address.load())


def split(index: Any, by: int) -> tuple[Any, Any]:
    """(index // by, index % by) of an index that is not negative: without the corrections of a signed division."""
    unsigned = fx.Uint32(index)
    return fx.Int32(unsigned // by), fx.Int32(unsigned % by)


def bounded(start: Any, nbytes: Any, items: int) -> Any:
    """A run of `nbytes` from the uniform address `start` as a list of items of `items` elements.

    The hardware checks each load against the run: past its end it reads zero and costs no traffic.
    """
    limit = fx.Int64(nbytes)
    view = fx.make_view(fx.rocdl.make_buffer_ptr(start, limit), fx.make_layout(1 << 30, 1))
    return fx.logical_divide(view, fx.make_layout(items, 1))


def load_items(run: Any, index: Any, dtype: Any, items: int, name: str = "keep") -> Any:
    """Item `index` of a bounded run as a Vector of `items` values; `name` is a row of `cache_bits`."""
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy(dtype.width * items, BUFFER_BITS[name]), dtype)
    registers = fx.make_rmem_tensor(items, dtype)
    fx.copy_atom_call(atom, fx.slice(run, (None, index)), registers)
    return registers.load()


def load_vector(address: Any, once: bool = False) -> Any:
    """Eight bf16 at an address of 16-byte elements (`pointer(t, fx.Int128)`), 64-bit addressed; `once` streams them."""
    return fx.generic_load(address, dtype=fx.Int32, count=4, nontemporal=once).bitcast(fx.BFloat16)


def store_items(run: Any, index: Any, values: Any, dtype: Any, items: int) -> None:
    """Write `items` values as item `index` of a bounded run; past its end nothing is written."""
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy(dtype.width * items, 0), dtype)
    registers = fx.make_rmem_tensor(items, dtype)
    registers.store(values)
    fx.copy_atom_call(atom, registers, fx.slice(run, (None, index)))


def shared(allocator: Any, dtype: Any, *shape: int) -> Any:
    """An array of the workgroup in LDS, row-major, of the kernel's one `fx.SharedAllocator()`."""
    count = 1
    strides: list[int] = []
    for extent in reversed(shape):
        strides.insert(0, count)
        count *= extent
    array = allocator.allocate(fx.Array[dtype, count, 16]).peek()
    return array.view(fx.make_layout(shape if len(shape) > 1 else count, tuple(strides) if len(shape) > 1 else 1))


def pairs(values: Any) -> list[Any]:
    """A Vector of floats as Vectors of two, the operands of the packed fp32 instructions."""
    return [pair(values[i], values[i + 1]) for i in range(0, values.numel, 2)]


def pair(a: Any, b: Any) -> Any:
    """Two Float32 as one packed operand."""
    return fx.Vector.from_elements([a, b], fx.Float32)


def zero_pairs(count: int) -> list[Any]:
    """`count` packed accumulators of zero."""
    return [fx.Vector.filled(2, 0.0, fx.Float32) for _ in range(count)]


def fold(accumulator: Any) -> Any:
    """The sum of a packed accumulator's two halves."""
    return accumulator[0] + accumulator[1]


def choose_lanes(items: int) -> int:
    """Lanes a row for `items` 16-byte items: the widest of 64, 32, 16 within a tenth of the best use of lanes."""
    use = {lanes: items / (-(-items // lanes) * lanes) for lanes in (64, 32, 16)}
    return next(lanes for lanes, share in use.items() if share >= 0.9 * max(use.values()))


def gather_sums(partials: list[Any], lanes: int) -> tuple[list[tuple[Any, Any]], Any]:
    """Sum each of the per-lane partials over its group and leave one finished sum on each lane.

    Returns ([(sum, index), ...], group): a lane's sum is that of `partials[index]` over its group; an index that is not
    below `len(partials)` comes with a sum of no use. Each entry of the list finishes up to `lanes` partials. Two lane
    exchanges fold two partials into one register: n sums cost about 3n instructions, separate reductions 11n.
    """
    values = list(partials)
    values += [fx.Float32(0.0)] * (-len(values) % (lanes // 16))
    for distance in (32, 16):
        if lanes > distance:
            swapped = [fn.permlane_swap(values[i], values[i + 1], distance) for i in range(0, len(values), 2)]
            values = [a + b for a, b in swapped]
    lane = lane_index()
    column, row = lane % 16, lane // 16
    # Which partial of a register's 1, 2 or 4 a row of 16 lanes holds after the exchanges.
    share, group = {
        64: ((row % 2) * 2 + row // 2, fx.Int32(0)),
        32: (row % 2, row // 2),
        16: (fx.Int32(0), row),
    }[lanes]
    finished = []
    for first in range(0, len(values), 16):
        totals = [fn.coop.warp_sum(value, width=16) for value in values[first : first + 16]]
        finished.append((pick(column, totals), (column + first) * (lanes // 16) + share))
    return finished, group


def pick(index: Any, values: list[Any]) -> Any:
    """`values[index]` by a tree of selects on the bits of `index`: one lane mask a bit, not one a value.

    Masks are loop-invariant and would fill the scalar registers. An index past the list gives any of the values.
    """
    bit = 0
    while len(values) > 1:
        odd = ((index >> bit) & 1) == 1
        paired = [odd.select(values[i + 1], values[i]) for i in range(0, len(values) - 1, 2)]
        values = paired + values[len(paired) * 2 :]
        bit += 1
    return values[0]


__all__ = [
    "MAX_RUN_BYTES",
    "NOWHERE",
    "STREAM",
    "WAVE",
    "bounded",
    "choose_lanes",
    "flyc",
    "fold",
    "fx",
    "gather_sums",
    "lane_index",
    "load_items",
    "load_vector",
    "pair",
    "pairs",
    "pick",
    "pointer",
    "range_constexpr",
    "shared",
    "split",
    "store_items",
    "uniform_load",
    "wave_index",
    "zero_pairs",
]
