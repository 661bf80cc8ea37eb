"""MXFP4 rows times one token on NVIDIA matrix units: what `gemv_mxfp4` and the experts share there.

Written in Gluon, Triton's form with explicit layouts: lane l of a warp holds blocks l, l + 32, l + 64, ... of a row,
four words each, so that a warp reads 512 bytes in a row, and x stays in the registers in which it is multiplied.
Plain Triton chooses layouts in which every decoded weight crosses shared memory. `mx_ptx` explains the multiplication.

A program that goes through many rows asks for them by asynchronous copies into a ring in shared memory; a lane reads
back only what it asked for itself. W is the number of warps of a program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dieplace.kernels.triton import mx_ptx, overlap

# Renamed between Triton 3.6 and 3.9.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_DIAGONAL, _EXACT, _OPERANDS = (gl.constexpr(t) for t in (mx_ptx.diagonal(), mx_ptx.exact(), mx_ptx.OPERANDS))
_PAIRS, _PAIRS_OPERANDS = gl.constexpr(mx_ptx.PAIRS), gl.constexpr(mx_ptx.PAIRS_OPERANDS)
_NEXT, _PREVIOUS = gl.constexpr(overlap.LET_NEXT_START), gl.constexpr(overlap.WAIT_FOR_PREVIOUS)
_BARRIER = gl.constexpr("bar.sync 0; // $0")
_TOP, _BIAS = gl.constexpr(mx_ptx.LARGEST_SCALE + 1), gl.constexpr(mx_ptx.FACTOR_BIAS)
_TWICE = gl.constexpr(mx_ptx.FACTOR_PAIR)


@gluon.jit
def let_next_start(OVERLAP: gl.constexpr):
    if OVERLAP:
        gl.inline_asm_elementwise(_NEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous(OVERLAP: gl.constexpr):
    if OVERLAP:
        gl.inline_asm_elementwise(_PREVIOUS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lanes_and_words(W: gl.constexpr):
    """[32 W, 1] lane of the program and [1, 4] word of a block, in the layout of everything below."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    return gl.arange(0, 32 * W, gl.SliceLayout(1, L))[:, None], gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def load_x(x, lane, word, K: gl.constexpr, W: gl.constexpr, PER_WARP: gl.constexpr):
    """x as 32-bit words -> the pairs that each lane multiplies: four [32 W, 4] tensors for each 32 blocks.

    PER_WARP words lie between the x of two warps; 0 is one x for all. It is read in whole lines and handed to the lanes
    through shared memory: every program reads the same few lines, and each lane for itself, 64 bytes apart, took 16
    times as many (a copy that passes by the first-level cache made the layer five times as slow on an H200).

    The barrier keeps the loads of weights in front: ptxas moves a load down to where its value is needed, and a
    program then waits for memory once for each 32 blocks instead of once (seen in the code for sm_90, Triton 3.6).
    """
    L: gl.constexpr = (lane + word).type.layout
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, 1], [1, 0])
    row = gl.arange(0, 32 * W, gl.SliceLayout(1, lines))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, lines))[None, :]
    read = ()
    for step in gl.static_range((K // 32 + 31) // 32):
        block = step * 32 + row % 32
        at = x + row // 32 * PER_WARP + block * 16 + column
        read = read + (gl.load(at, mask=block < K // 32, other=0),)  # noqa: RUF005
    gl.inline_asm_elementwise(_BARRIER, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    pieces = ()
    for step in gl.static_range((K // 32 + 31) // 32):
        # Sixteen-byte pieces of a row change places with the row, so that eight lanes meet no bank twice.
        piece = gl.allocate_shared_memory(gl.int32, [32 * W, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
        piece.store(read[step])
        pieces = pieces + (piece,)  # noqa: RUF005
    held = ()
    for step in gl.static_range((K // 32 + 31) // 32):
        for w in gl.static_range(4):
            stored = pieces[step].slice(4 * w, 4, 1).load(L)
            mine = gl.inline_asm_elementwise(_PAIRS, _PAIRS_OPERANDS, [stored], dtype=gl.int32, is_pure=True, pack=4)
            held = held + (mine,)  # noqa: RUF005
    return held


@gluon.jit
def make_ring(SLOTS: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """Shared memory for SLOTS row pairs: words and scale words, one piece for each 32 blocks of each row.

    Separate pieces, because the compiler puts a barrier between two writes that may meet.
    """
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = ()
    for _ in gl.static_range(2 * ((K // 32 + 31) // 32)):
        words = gl.allocate_shared_memory(gl.int32, [SLOTS, 32 * W, 4], L)
        around = gl.allocate_shared_memory(gl.int32, [SLOTS, 32 * W, 1], L)
        ring = ring + (words, around)  # noqa: RUF005
    return ring


@gluon.jit
def request(ring, slot, blocks, scales, row, end, lane, word, K: gl.constexpr):
    """Ask for rows `row` and `row` + 1 into a slot; of rows from `end` on nothing is read and 0 is stored.

    A scale byte comes with the aligned word around it: an asynchronous copy moves four bytes or more.
    """
    STEPS: gl.constexpr = (K // 32 + 31) // 32
    mine = lane % 32
    words = blocks + row.to(gl.int64) * (K // 8) + (mine * 4 + word)
    for r in gl.static_range(2):
        byte = (row + r).to(gl.int64) * (K // 32) + mine
        around = scales.to(gl.pointer_type(gl.int32), bitcast=True) + byte // 4
        for first in gl.static_range(0, K // 32, 32):
            inside = (row + r < end) & (first + mine < K // 32)
            piece = ring[2 * (r * STEPS + first // 32)].index(slot)
            copy_to_shared(piece, words + (r * (K // 8) + first * 4), mask=inside)
            piece = ring[2 * (r * STEPS + first // 32) + 1].index(slot)
            copy_to_shared(piece, around + first // 4, mask=inside)
    async_copy.commit_group()


@gluon.jit
def take(ring, slot, row, lane, word, K: gl.constexpr):
    """(words, scale byte) of each 32 blocks of a slot's two rows."""
    L: gl.constexpr = (lane + word).type.layout
    STEPS: gl.constexpr = (K // 32 + 31) // 32
    held = ()
    for r in gl.static_range(2):
        shift = ((row + r) * (K // 32) + lane % 32) % 4 * 8
        for first in gl.static_range(0, K // 32, 32):
            around = ring[2 * (r * STEPS + first // 32) + 1].index(slot).load(L)
            words = ring[2 * (r * STEPS + first // 32)].index(slot).load(L)
            held = held + (words, ((around >> shift) & 255) + 0 * word)  # noqa: RUF005
    return held


@gluon.jit
def load_rows(blocks, scales, row, end, lane, word, K: gl.constexpr):
    """As `request` and `take`, straight into registers: for programs that ask for all they need at once."""
    STEPS: gl.constexpr = (K // 32 + 31) // 32
    mine = lane % 32
    words = blocks + row.to(gl.int64) * (K // 8) + (mine * 4 + word)
    byte = scales + row.to(gl.int64) * (K // 32) + mine + 0 * word
    held = ()
    for r in gl.static_range(2):
        for step in gl.static_range(STEPS):
            inside = (row + r < end) & (step * 32 + mine < K // 32)
            found = gl.load(words + (r * (K // 8) + step * 128), mask=inside, other=0, eviction_policy="evict_first")
            scale = gl.load(byte + (r * (K // 32) + step * 32), mask=inside, other=0)
            held = held + (found, scale.to(gl.int32))  # noqa: RUF005
    return held


@gluon.jit
def load_bias(bias, row, end, lane, word, HAS_BIAS: gl.constexpr):
    """What the sums of rows `row` and `row` + 1 begin with: the bias, once a row, on the diagonal.

    Loaded at the end, where it is added by rights, it would hold up every program by the time of a read.
    """
    if HAS_BIAS:
        side = word // 2
        first = (lane % 32 == 0) & (word % 2 == 0) & (row + side < end)
        return gl.load(bias + row + side, mask=first, other=0.0).to(gl.float32)
    else:
        return (0 * lane + 0 * word).to(gl.float32)


@gluon.jit
def pair_dot(held, x, start, lane, word, K: gl.constexpr, W: gl.constexpr, EXACT: gl.constexpr):
    """[W, 2] dot products of each warp's two rows, plus what they start with."""
    STEPS: gl.constexpr = (K // 32 + 31) // 32
    total = _multiply(held, x, start, 0, STEPS, EXACT)
    for step in gl.static_range(1, STEPS):
        total += _multiply(held, x, 0.0 * start, step, STEPS, EXACT)
    if not EXACT:
        quad = (lane % 32) // 4
        total = gl.where((lane % 4 == quad // 2) & (word % 2 == quad % 2), total, 0.0)
    return _sum_lanes(total, W)


@gluon.jit
def _multiply(held, x, start, STEP: gl.constexpr, STEPS: gl.constexpr, EXACT: gl.constexpr):
    a, a_byte = held[2 * STEP], held[2 * STEP + 1]
    b, b_byte = held[2 * STEPS + 2 * STEP], held[2 * STEPS + 2 * STEP + 1]
    x0, x1, x2, x3 = x[4 * STEP], x[4 * STEP + 1], x[4 * STEP + 2], x[4 * STEP + 3]
    if EXACT:
        return gl.inline_asm_elementwise(
            _EXACT, _OPERANDS, [a, b, x0, x1, x2, x3, a_byte, b_byte, start], dtype=gl.float32, is_pure=True, pack=4
        )
    else:
        a_factor = (gl.minimum(a_byte, _TOP) + _BIAS) * _TWICE
        b_factor = (gl.minimum(b_byte, _TOP) + _BIAS) * _TWICE
        return gl.inline_asm_elementwise(
            _DIAGONAL, _OPERANDS, [a, b, x0, x1, x2, x3, a_factor, b_factor, start], dtype=gl.float32, is_pure=True,
            pack=4,
        )  # fmt: skip


@gluon.jit
def _sum_lanes(total, W: gl.constexpr):
    return gl.sum(gl.sum(gl.reshape(total, [W, 32, 2, 2]), 3), 1)


@gluon.jit
def warps_and_sides(lane, word, W: gl.constexpr):
    """[W, 1] warp and [1, 2] row of a pair, in the layout of `pair_dot`'s result."""
    L: gl.constexpr = _sum_lanes((lane + word).to(gl.float32), W).type.layout
    return gl.arange(0, W, gl.SliceLayout(1, L))[:, None], gl.arange(0, 2, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def not_finite(value):
    """1 where a value of a tensor of any rank up to 2 is infinite or NaN, else 0: then EXACT must do it again."""
    wrong = gl.where(gl.abs(value) < float("inf"), 0, 1)
    if len(value.shape) == 2:
        wrong = gl.max(wrong, 1)
    return gl.max(wrong, 0)
