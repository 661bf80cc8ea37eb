"""`gemv_mxfp4`, `expert_gate_up` and `expert_down` of one token on NVIDIA matrix units (see `mx_rows`).

U row pairs of a program are asked for before anything is waited for. Where a factor of a row is too large for bf16 the
result is not finite, and the program does its rows once more, exactly.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dieplace.kernels.triton.mx_rows import (
    lanes_and_words,
    let_next_start,
    load_bias,
    load_rows,
    load_x,
    make_ring,
    not_finite,
    pair_dot,
    request,
    take,
    wait_for_previous,
    warps_and_sides,
)


@gluon.jit
def gemv(
    x, blocks, scales, bias, out, N, K: gl.constexpr, U: gl.constexpr, W: gl.constexpr, HAS_BIAS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """U row pairs a warp."""
    let_next_start(OVERLAP)
    lane, word = lanes_and_words(W)
    warp, side = warps_and_sides(lane, word, W)
    first = (gl.program_id(0) * W + lane // 32) * (2 * U)
    at = (gl.program_id(0) * W + warp) * (2 * U) + side
    rows, starts = (), ()
    for u in gl.static_range(U):
        rows = rows + (load_rows(blocks, scales, first + 2 * u, N, lane, word, K),)  # noqa: RUF005
        starts = starts + (load_bias(bias, first + 2 * u, N, lane, word, HAS_BIAS),)  # noqa: RUF005
    wait_for_previous(OVERLAP)
    held = load_x(x, lane, word, K, W, 0)
    wrong = 0
    for u in gl.static_range(U):
        dots = pair_dot(rows[u], held, starts[u], lane, word, K, W, False)
        wrong |= not_finite(dots)
        gl.store(out + at + 2 * u, dots.to(out.dtype.element_ty), mask=at + 2 * u < N)
    if wrong != 0:
        _gemv_exact(blocks, scales, bias, out, N, first, at, U, held, lane, word, K, W, HAS_BIAS)


@gluon.jit
def _gemv_exact(
    blocks, scales, bias, out, N, first, at, PAIRS, held, lane, word, K: gl.constexpr, W: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    for i in range(PAIRS):
        exact = load_rows(blocks, scales, first + 2 * i, N, lane, word, K)
        start = load_bias(bias, first + 2 * i, N, lane, word, HAS_BIAS)
        dots = pair_dot(exact, held, start, lane, word, K, W, True)
        gl.store(out + at + 2 * i, dots.to(out.dtype.element_ty), mask=at + 2 * i < N)


@gluon.jit(do_not_specialize=["PAIRS"])
def gemv_long(
    x, blocks, scales, bias, out, N, PAIRS, K: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr,
    HAS_BIAS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """PAIRS row pairs a warp, SLOTS - 1 of them asked for ahead: matrices of very many rows."""
    let_next_start(OVERLAP)
    lane, word = lanes_and_words(W)
    warp, side = warps_and_sides(lane, word, W)
    first = (gl.program_id(0) * W + lane // 32) * (2 * PAIRS)
    at = (gl.program_id(0) * W + warp) * (2 * PAIRS) + side
    ring = make_ring(SLOTS, K, W)
    for i in gl.static_range(SLOTS - 1):
        request(ring, i, blocks, scales, first + 2 * i, gl.where(i < PAIRS, N, 0), lane, word, K)
    wait_for_previous(OVERLAP)
    held = load_x(x, lane, word, K, W, 0)
    wrong = 0
    for i in range(PAIRS):
        ahead = i + SLOTS - 1
        request(ring, ahead % SLOTS, blocks, scales, first + 2 * ahead, gl.where(ahead < PAIRS, N, 0), lane, word, K)
        start = load_bias(bias, first + 2 * i, N, lane, word, HAS_BIAS)
        async_copy.wait_group(SLOTS - 1)
        rows = take(ring, i % SLOTS, first + 2 * i, lane, word, K)
        dots = pair_dot(rows, held, start, lane, word, K, W, False)
        wrong |= not_finite(dots)
        gl.store(out + at + 2 * i, dots.to(out.dtype.element_ty), mask=at + 2 * i < N)
    if wrong != 0:
        _gemv_exact(blocks, scales, bias, out, N, first, at, PAIRS, held, lane, word, K, W, HAS_BIAS)


@gluon.jit
def gate_up(
    x, ids, blocks, scales, bias, out, alpha, limit, H: gl.constexpr, INNER: gl.constexpr, U: gl.constexpr,
    W: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As `gemv` for one chosen expert a column of programs; a row pair is the gate and up of one output."""
    lane, word = lanes_and_words(W)
    warp, side = warps_and_sides(lane, word, W)
    first = (gl.program_id(0) * W + lane // 32) * (2 * U)
    at = (gl.program_id(0) * W + warp) * (2 * U) + side
    # The launch before may write the ids, and the next one reads them before it waits.
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    base = gl.load(ids + gl.program_id(1)).to(gl.int64) * (2 * INNER)
    blocks += base * (H // 8)
    scales += base * (H // 32)
    bias += base
    out += gl.program_id(1) * INNER
    rows, starts = (), ()
    for u in gl.static_range(U):
        rows = rows + (load_rows(blocks, scales, first + 2 * u, 2 * INNER, lane, word, H),)  # noqa: RUF005
        starts = starts + (load_bias(bias, first + 2 * u, 2 * INNER, lane, word, True),)  # noqa: RUF005
    held = load_x(x, lane, word, H, W, 0)
    wrong = 0
    for u in gl.static_range(U):
        both = pair_dot(rows[u], held, starts[u], lane, word, H, W, False)
        wrong |= not_finite(both)
        _store_swiglu(out, both, at + 2 * u, alpha, limit, INNER)
    if wrong != 0:
        for i in range(U):
            exact = load_rows(blocks, scales, first + 2 * i, 2 * INNER, lane, word, H)
            start = load_bias(bias, first + 2 * i, 2 * INNER, lane, word, True)
            both = pair_dot(exact, held, start, lane, word, H, W, True)
            _store_swiglu(out, both, at + 2 * i, alpha, limit, INNER)


@gluon.jit
def _store_swiglu(out, both, at, alpha, limit, INNER: gl.constexpr):
    """Rows alternate gate, up; only the gate's upper side is clamped, up on both (as in `experts`)."""
    gate, up = gl.split(both)
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    result = (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    column, _ = gl.split(at // 2)
    column = gl.convert_layout(column, result.type.layout)
    gl.store(out + column, result.to(gl.bfloat16), mask=column < INNER)


@gluon.jit
def down(
    x, ids, weights, blocks, scales, bias, out, H: gl.constexpr, INNER: gl.constexpr, C: gl.constexpr,
    U: gl.constexpr, W: gl.constexpr, HAS_BIAS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """U row pairs of the output a program: warp w multiplies the rows of the w-th of C chosen experts."""
    let_next_start(OVERLAP)
    lane, word = lanes_and_words(W)
    warp, _ = warps_and_sides(lane, word, W)
    place = lane // 32
    first = gl.program_id(0) * (2 * U)
    # Not what the launch before writes: `gate_up` lets this one start only once its own ids are there.
    base = gl.load(ids + place, mask=place < C, other=0, cache_modifier=".cg").to(gl.int64) * H
    share = gl.load(weights + warp, mask=warp < C, other=0.0, cache_modifier=".cg")
    blocks = blocks + base * (INNER // 8)
    scales = scales + base * (INNER // 32)
    bias = bias + base
    end = gl.where(place < C, H, 0)
    rows, starts = (), ()
    for u in gl.static_range(U):
        rows = rows + (load_rows(blocks, scales, first + 2 * u + 0 * lane, end, lane, word, INNER),)  # noqa: RUF005
        starts = starts + (load_bias(bias, first + 2 * u + 0 * lane, end, lane, word, HAS_BIAS),)  # noqa: RUF005
    wait_for_previous(OVERLAP)
    held = load_x(x, lane, word, INNER, W, INNER // 2)
    wrong = 0
    for u in gl.static_range(U):
        dots = pair_dot(rows[u], held, starts[u], lane, word, INNER, W, False)
        total = gl.sum(gl.where(warp < C, share * dots, 0.0), 0)
        wrong |= not_finite(total)
        _store_pair(out, total, first + 2 * u, H)
    if wrong != 0:
        for i in range(U):
            exact = load_rows(blocks, scales, first + 2 * i + 0 * lane, end, lane, word, INNER)
            start = load_bias(bias, first + 2 * i + 0 * lane, end, lane, word, HAS_BIAS)
            dots = pair_dot(exact, held, start, lane, word, INNER, W, True)
            _store_pair(out, gl.sum(gl.where(warp < C, share * dots, 0.0), 0), first + 2 * i, H)


@gluon.jit
def _store_pair(out, total, row, H: gl.constexpr):
    at = row + gl.arange(0, 2, total.type.layout)
    gl.store(out + at, total.to(out.dtype.element_ty), mask=at < H)
