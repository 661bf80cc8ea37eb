"""FlyDSL kernels for tests, one of each kind that a decode step needs; written for the tests, not for speed.

Makers return `@flyc.jit` launchers. Shapes are Python numbers baked in while tracing.
"""

from __future__ import annotations

from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.flydsl_names import WAVE, AtomicOrdering, ReductionOp, const_expr, flyc, fx, range_constexpr

LOG2E = 1.4426950408889634
MONOTONIC = AtomicOrdering.Monotonic
STREAM = fx.Stream(None)


def vector_add() -> Any:
    """c[i] = a[i] + b[i] for i < n; any n."""

    @flyc.kernel
    def add(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, n: fx.Int32):
        i = fx.block_idx.x * 256 + fx.thread_idx.x
        if i < n:
            C[i] = A[i] + B[i]

    @flyc.jit
    def launch(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, n: fx.Int32, stream: fx.Stream = STREAM):
        add(A, B, C, n).launch(grid=((n + 255) // 256, 1, 1), block=(256, 1, 1), stream=stream)

    return launch


def gemv_bf16(n: int, k: int, *, cache: int = 0, buffered: bool = True, rolled: bool = False) -> Any:
    """y[n] = w[n, k] x[k]; one wave a row, 8 values a lane and step; k a multiple of 512."""
    steps = k // 512

    @flyc.kernel
    def gemv(W: fx.Tensor, X: fx.Tensor, Y: fx.Tensor):
        lane, row = fx.thread_idx.x % WAVE, fx.block_idx.x * 4 + fx.thread_idx.x // WAVE
        if const_expr(buffered):
            w_all, x_all = fx.rocdl.make_buffer_tensor(W), fx.rocdl.make_buffer_tensor(X)
            w_atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(cache), fx.BFloat16)
            x_atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.BFloat16)
        else:
            w_all, x_all = W, X
            w_atom = x_atom = fx.make_copy_atom(fx.UniversalCopy128b(), fx.BFloat16)
        ws = fx.logical_divide(fx.slice(w_all, (row, None)), fx.make_layout(8, 1))
        xs = fx.logical_divide(x_all, fx.make_layout(8, 1))
        total = fx.Float32(0.0)
        if const_expr(rolled):
            for s in range(steps):
                a, b = fx.make_rmem_tensor(8, fx.BFloat16), fx.make_rmem_tensor(8, fx.BFloat16)
                fx.copy_atom_call(w_atom, fx.slice(ws, (None, lane + s * WAVE)), a)
                fx.copy_atom_call(x_atom, fx.slice(xs, (None, lane + s * WAVE)), b)
                total = total + (a.load().to(fx.Float32) * b.load().to(fx.Float32)).reduce(ReductionOp.ADD)
        else:
            for s in range_constexpr(steps):
                a, b = fx.make_rmem_tensor(8, fx.BFloat16), fx.make_rmem_tensor(8, fx.BFloat16)
                fx.copy_atom_call(w_atom, fx.slice(ws, (None, lane + s * WAVE)), a)
                fx.copy_atom_call(x_atom, fx.slice(xs, (None, lane + s * WAVE)), b)
                total = total + (a.load().to(fx.Float32) * b.load().to(fx.Float32)).reduce(ReductionOp.ADD)
        total = fn.coop.warp_sum(total)
        if lane == 0:
            Y[row] = total

    @flyc.jit
    def launch(W: fx.Tensor, X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        gemv(W, X, Y).launch(grid=(n // 4, 1, 1), block=(256, 1, 1), stream=stream)

    return launch


def gemv_mxfp4(n: int, k: int) -> Any:
    """y[n] from packed fp4 (int32 words of 8) and e8m0 bytes; one wave a row, one 32-value block a lane and step."""
    blocks = k // 32
    steps = -(-blocks // WAVE)

    @flyc.kernel
    def gemv(W: fx.Tensor, S: fx.Tensor, X: fx.Tensor, Y: fx.Tensor):
        lane, row = fx.thread_idx.x % WAVE, fx.block_idx.x * 4 + fx.thread_idx.x // WAVE
        w_all, s_all, x_all = (fx.rocdl.make_buffer_tensor(t) for t in (W, S, X))
        ws = fx.logical_divide(fx.slice(w_all, (row, None)), fx.make_layout(4, 1))
        ss = fx.logical_divide(fx.slice(s_all, (row, None)), fx.make_layout(1, 1))
        xs = fx.logical_divide(x_all, fx.make_layout(8, 1))
        four, byte = (
            fx.make_copy_atom(fx.rocdl.BufferCopy128b(2), fx.Int32),
            fx.make_copy_atom(fx.rocdl.BufferCopy8b(), fx.Uint8),
        )
        eight = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.BFloat16)
        total = fx.Float32(0.0)
        for s in range_constexpr(steps):
            block = lane + s * WAVE
            if block < blocks:
                w, e = fx.make_rmem_tensor(4, fx.Int32), fx.make_rmem_tensor(1, fx.Uint8)
                fx.copy_atom_call(four, fx.slice(ws, (None, block)), w)
                fx.copy_atom_call(byte, fx.slice(ss, (None, block)), e)
                scale = fn.exponent_scale(fn.u8(e.load()[0]))
                words = w.load()
                part = fx.Float32(0.0)
                for d in range_constexpr(4):
                    x = fx.make_rmem_tensor(8, fx.BFloat16)
                    fx.copy_atom_call(eight, fx.slice(xs, (None, block * 4 + d)), x)
                    xf = x.load().to(fx.Float32)
                    for b in range_constexpr(4):
                        pair = fn.cvt_scalef32_pk_f32_fp4(words[d], scale, b)
                        part = fx.fma(pair[0], xf[2 * b], part)
                        part = fx.fma(pair[1], xf[2 * b + 1], part)
                total = total + part
        total = fn.coop.warp_sum(total)
        if lane == 0:
            Y[row] = total

    @flyc.jit
    def launch(W: fx.Tensor, S: fx.Tensor, X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        gemv(W, S, X, Y).launch(grid=(n // 4, 1, 1), block=(256, 1, 1), stream=stream)

    return launch


def gemv_mfma_bf16(n: int, k: int) -> Any:
    """y[n] by 16x16x32 matrix instructions: 16 rows a wave, x in every column."""

    @flyc.kernel
    def gemv(W: fx.Tensor, X: fx.Tensor, Y: fx.Tensor):
        lane, row = fx.thread_idx.x, fx.block_idx.x * 16
        w_all, x_all = fx.rocdl.make_buffer_tensor(W), fx.rocdl.make_buffer_tensor(X)
        eight = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.BFloat16)
        ws = fx.logical_divide(fx.slice(w_all, (row + lane % 16, None)), fx.make_layout(8, 1))
        xs = fx.logical_divide(x_all, fx.make_layout(8, 1))
        total = fx.Vector.filled(4, 0.0, fx.Float32)
        for step in range(k // 32):
            at = fx.Int32(step) * 4 + lane // 16
            a, b = fx.make_rmem_tensor(8, fx.BFloat16), fx.make_rmem_tensor(8, fx.BFloat16)
            fx.copy_atom_call(eight, fx.slice(ws, (None, at)), a)
            fx.copy_atom_call(eight, fx.slice(xs, (None, at)), b)
            total = fn.mfma_f32_16x16x32_bf16(a.load(), b.load(), total)
        if lane % 16 == 0:
            for j in range_constexpr(4):
                Y[row + (lane // 16) * 4 + j] = total[j]

    @flyc.jit
    def launch(W: fx.Tensor, X: fx.Tensor, Y: fx.Tensor, stream: fx.Stream = STREAM):
        gemv(W, X, Y).launch(grid=(n // 16, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return launch


def gemv_mfma_mxfp4(n: int, k: int) -> Any:
    """y[n] from fp4 weights and fp4 activations by the block-scaled 16x16x128 matrix instruction."""

    @flyc.kernel
    def gemv(W: fx.Tensor, WS: fx.Tensor, X: fx.Tensor, XS: fx.Tensor, Y: fx.Tensor):
        lane, row = fx.thread_idx.x, fx.block_idx.x * 16
        w_all, ws_all, x_all, xs_all = (fx.rocdl.make_buffer_tensor(t) for t in (W, WS, X, XS))
        four, byte = (
            fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Int32),
            fx.make_copy_atom(fx.rocdl.BufferCopy8b(), fx.Uint8),
        )
        w4 = fx.logical_divide(fx.slice(w_all, (row + lane % 16, None)), fx.make_layout(4, 1))
        s1 = fx.logical_divide(fx.slice(ws_all, (row + lane % 16, None)), fx.make_layout(1, 1))
        x4 = fx.logical_divide(x_all, fx.make_layout(4, 1))
        t1 = fx.logical_divide(xs_all, fx.make_layout(1, 1))
        total = fx.Vector.filled(4, 0.0, fx.Float32)
        for step in range(k // 128):
            at = fx.Int32(step) * 4 + lane // 16
            w, x = fx.make_rmem_tensor(4, fx.Int32), fx.make_rmem_tensor(4, fx.Int32)
            e, t = fx.make_rmem_tensor(1, fx.Uint8), fx.make_rmem_tensor(1, fx.Uint8)
            fx.copy_atom_call(four, fx.slice(w4, (None, at)), w)
            fx.copy_atom_call(four, fx.slice(x4, (None, at)), x)
            fx.copy_atom_call(byte, fx.slice(s1, (None, at)), e)
            fx.copy_atom_call(byte, fx.slice(t1, (None, at)), t)
            total = fn.mfma_scale_f32_16x16x128_f8f6f4(
                _widen(w.load()), _widen(x.load()), total, fn.u8(e.load()[0]), fn.u8(t.load()[0])
            )
        if lane % 16 == 0:
            for j in range_constexpr(4):
                Y[row + (lane // 16) * 4 + j] = total[j]

    @flyc.jit
    def launch(
        W: fx.Tensor,
        WS: fx.Tensor,
        X: fx.Tensor,
        XS: fx.Tensor,
        Y: fx.Tensor,
        stream: fx.Stream = STREAM,
    ):
        gemv(W, WS, X, XS, Y).launch(grid=(n // 16, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return launch


def _widen(words: Any) -> Any:
    zero = fx.Int32(0)
    return fx.Vector.from_elements([words[0], words[1], words[2], words[3], zero, zero, zero, zero], fx.Int32)


def rmsnorm(width: int, *, eps: float = 1e-6) -> Any:
    """y = x / sqrt(mean(x^2) + eps) * g in bf16; one block of 256 a row, width a multiple of 2048."""
    parts = width // 2048
    reduce = fn.coop.BlockReduce[fx.Float32, 256]

    @flyc.kernel
    def norm(X: fx.Tensor, G: fx.Tensor, Y: fx.Tensor):
        tid, row = fx.thread_idx.x, fx.block_idx.x
        x_all, g_all, y_all = (fx.rocdl.make_buffer_tensor(t) for t in (X, G, Y))
        eight = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.BFloat16)
        xs = fx.logical_divide(fx.slice(x_all, (row, None)), fx.make_layout(8, 1))
        ys = fx.logical_divide(fx.slice(y_all, (row, None)), fx.make_layout(8, 1))
        gs = fx.logical_divide(g_all, fx.make_layout(8, 1))
        values = []
        squares = fx.Float32(0.0)
        for p in range_constexpr(parts):
            x = fx.make_rmem_tensor(8, fx.BFloat16)
            fx.copy_atom_call(eight, fx.slice(xs, (None, tid + p * 256)), x)
            value = x.load().to(fx.Float32)
            values.append(value)
            squares = squares + (value * value).reduce(ReductionOp.ADD)
        total = reduce.sum(squares, storage=fx.SharedAllocator().allocate(reduce.SharedStorage).peek())
        scale = fx.rsqrt(total * (1.0 / width) + eps, fastmath="fast")
        for p in range_constexpr(parts):
            g, y = fx.make_rmem_tensor(8, fx.BFloat16), fx.make_rmem_tensor(8, fx.BFloat16)
            fx.copy_atom_call(eight, fx.slice(gs, (None, tid + p * 256)), g)
            y.store((values[p] * scale * g.load().to(fx.Float32)).to(fx.BFloat16))
            fx.copy_atom_call(eight, y, fx.slice(ys, (None, tid + p * 256)))

    @flyc.jit
    def launch(X: fx.Tensor, G: fx.Tensor, Y: fx.Tensor, rows: fx.Int32, stream: fx.Stream = STREAM):
        norm(X, G, Y).launch(grid=(rows, 1, 1), block=(256, 1, 1), stream=stream)

    return launch


def attention_split(head_dim: int = 64) -> Any:
    """One wave a (head, split): scores by wave sums, online softmax; writes value, maximum and sum of each split."""

    @flyc.kernel
    def split(
        Q: fx.Tensor, K: fx.Tensor, V: fx.Tensor, OUT: fx.Tensor, M: fx.Tensor, L: fx.Tensor,
        length: fx.Int32, chunk: fx.Int32, scale: fx.Float32,
    ):  # fmt: skip
        head, part, lane = fx.block_idx.x, fx.block_idx.y, fx.thread_idx.x
        q = Q[head, lane] * scale
        start = part * chunk
        count = fx.max(fx.min(start + chunk, length) - start, fx.Int32(0))
        top, total, acc = fx.Float32(-1e30), fx.Float32(0.0), fx.Float32(0.0)
        for step in range(count):
            at = start + fx.Int32(step)
            score = fn.coop.warp_sum(q * K[at, head, lane]) * LOG2E
            new = fx.max(top, score)
            shrink = fx.exp2(top - new, fastmath="fast")
            weight = fx.exp2(score - new, fastmath="fast")
            top = new
            total = total * shrink + weight
            acc = acc * shrink + weight * V[at, head, lane]
        OUT[part, head, lane] = acc
        if lane == 0:
            M[part, head] = top
            L[part, head] = total

    @flyc.jit
    def launch(
        Q: fx.Tensor, K: fx.Tensor, V: fx.Tensor, OUT: fx.Tensor, M: fx.Tensor, L: fx.Tensor,
        length: fx.Int32, chunk: fx.Int32, scale: fx.Float32, heads: fx.Int32, splits: fx.Int32,
        stream: fx.Stream = STREAM,
    ):  # fmt: skip
        split(Q, K, V, OUT, M, L, length, chunk, scale).launch(
            grid=(heads, splits, 1), block=(head_dim, 1, 1), stream=stream
        )

    return launch


def attention_merge(head_dim: int = 64) -> Any:
    """The splits of `attention_split` put together."""

    @flyc.kernel
    def merge(OUT: fx.Tensor, M: fx.Tensor, L: fx.Tensor, Y: fx.Tensor, splits: fx.Int32):
        head, lane = fx.block_idx.x, fx.thread_idx.x
        top = fx.Float32(-1e30)
        for s in range(splits):
            top = fx.max(top, M[fx.Int32(s), head])
        total, acc = fx.Float32(0.0), fx.Float32(0.0)
        for s in range(splits):
            weight = fx.exp2(M[fx.Int32(s), head] - top, fastmath="fast")
            total = total + L[fx.Int32(s), head] * weight
            acc = acc + OUT[fx.Int32(s), head, lane] * weight
        Y[head, lane] = acc / total

    @flyc.jit
    def launch(
        OUT: fx.Tensor, M: fx.Tensor, L: fx.Tensor, Y: fx.Tensor, splits: fx.Int32, heads: fx.Int32,
        stream: fx.Stream = STREAM,
    ):  # fmt: skip
        merge(OUT, M, L, Y, splits).launch(grid=(heads, 1, 1), block=(head_dim, 1, 1), stream=stream)

    return launch


def top_k(experts: int = 128, k: int = 4) -> Any:
    """Indices and softmax weights of the k largest logits, lowest index first among equals; experts = 128."""
    parts = experts // WAVE

    @flyc.kernel
    def pick(X: fx.Tensor, IDX: fx.Tensor, P: fx.Tensor):
        lane, token = fx.thread_idx.x, fx.block_idx.x
        values = [X[token, lane + p * WAVE] for p in range_constexpr(parts)]
        best = values[0]
        for p in range_constexpr(1, parts):
            best = fx.max(best, values[p])
        top = fn.coop.warp_max(best)
        weights, total = [], fx.Float32(0.0)
        for _ in range_constexpr(k):
            value, index = values[0], lane
            for p in range_constexpr(1, parts):
                more = values[p] > value
                value = more.select(values[p], value)
                index = more.select(lane + p * WAVE, index)
            for step in range_constexpr(6):
                other = fx.shuffle_xor(value, 1 << step, WAVE)
                at = fx.shuffle_xor(index, 1 << step, WAVE)
                take = (other > value) | ((other == value) & (at < index))
                value = take.select(other, value)
                index = take.select(at, index)
            weight = fx.exp2((value - top) * LOG2E, fastmath="fast")
            weights.append((index, weight))
            total = total + weight
            for p in range_constexpr(parts):
                values[p] = (index == lane + p * WAVE).select(fx.Float32(float("-inf")), values[p])
        if lane == 0:
            for r in range_constexpr(k):
                IDX[token, r] = weights[r][0]
                P[token, r] = weights[r][1] / total

    @flyc.jit
    def launch(X: fx.Tensor, IDX: fx.Tensor, P: fx.Tensor, tokens: fx.Int32, stream: fx.Stream = STREAM):
        pick(X, IDX, P).launch(grid=(tokens, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return launch


def chase() -> Any:
    """One lane follows next[] for `hops`; writes ticks, where it ended, and its XCC_ID."""

    @flyc.kernel
    def follow(N: fx.Tensor, R: fx.Tensor, hops: fx.Int32):
        if fx.thread_idx.x == 0:
            at = fx.Int32(0)
            start = fn.memtime()
            for _ in range(hops):
                at = fx.generic_load(fx.get_iter(N) + at)
            R[0] = fn.memtime() - start
            R[1] = fx.Int64(at)
            R[2] = fx.Int64(fn.xcc_id())

    @flyc.jit
    def launch(N: fx.Tensor, R: fx.Tensor, hops: fx.Int32, stream: fx.Stream = STREAM):
        follow(N, R, hops).launch(grid=(1, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return launch


def stream_read(*, cache: int = 2, unroll: int = 4) -> Any:
    """Xor of everything a thread reads, 16 bytes a lane; `blocks` is passed because grid_dim needs bitcode."""

    @flyc.kernel
    def read(S: fx.Tensor, OUT: fx.Tensor, turns: fx.Int32, blocks: fx.Int32):
        thread = fx.block_idx.x * 256 + fx.thread_idx.x
        fours = fx.logical_divide(fx.rocdl.make_buffer_tensor(S), fx.make_layout(4, 1))
        atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(cache), fx.Int32)
        folded = fx.Int32(0)
        for turn in range(turns):
            loaded = []
            for u in range_constexpr(unroll):
                r = fx.make_rmem_tensor(4, fx.Int32)
                fx.copy_atom_call(atom, fx.slice(fours, (None, thread + (turn * unroll + u) * blocks * 256)), r)
                loaded.append(r)
            for u in range_constexpr(unroll):
                v = loaded[u].load()
                folded = folded ^ v[0] ^ v[1] ^ v[2] ^ v[3]
        OUT[thread] = folded

    @flyc.jit
    def launch(S: fx.Tensor, OUT: fx.Tensor, turns: fx.Int32, blocks: fx.Int32, stream: fx.Stream = STREAM):
        read(S, OUT, turns, blocks).launch(grid=(blocks, 1, 1), block=(256, 1, 1), stream=stream)

    return launch


def block_sums(count: int) -> Any:
    """The sums of parts of `count` elements, one block each, through LDS; any count up to 1024."""
    threads = -(-count // WAVE) * WAVE
    reduce = fn.coop.BlockReduce[fx.Float32, threads]

    @flyc.kernel
    def total(X: fx.Tensor, Y: fx.Tensor):
        tid = fx.thread_idx.x
        value = fx.Float32(0.0)
        if tid < count:
            value = X[fx.block_idx.x * count + tid]
        result = reduce.sum(value, storage=fx.SharedAllocator().allocate(reduce.SharedStorage).peek())
        if tid == 0:
            Y[fx.block_idx.x] = result

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, blocks: fx.Int32, stream: fx.Stream = STREAM):
        total(X, Y).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream)

    return launch


def wave_reduce(kind: str, width: int) -> Any:
    """Every lane's result of a sum or maximum over groups of `width` lanes."""

    @flyc.kernel
    def reduce(X: fx.Tensor, Y: fx.Tensor):
        at = fx.block_idx.x * WAVE + fx.thread_idx.x
        op = fn.coop.warp_sum if kind == "sum" else fn.coop.warp_max
        Y[at] = op(X[at], width=width)

    @flyc.jit
    def launch(X: fx.Tensor, Y: fx.Tensor, blocks: fx.Int32, stream: fx.Stream = STREAM):
        reduce(X, Y).launch(grid=(blocks, 1, 1), block=(WAVE, 1, 1), stream=stream)

    return launch
