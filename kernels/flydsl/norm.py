"""RMSNorm with residual add, and the per-head norm of queries and keys."""

from __future__ import annotations

from functools import cache
from typing import Any

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.launch import Attrs, KernelOp, Launch, Operands
from dieplace.kernels.flydsl.tiles import (
    STREAM,
    WAVE,
    bounded,
    flyc,
    fx,
    lane_index,
    load_items,
    pointer,
    range_constexpr,
    shared,
    split,
    store_items,
    wave_index,
)

ITEM = 8  # bf16 values in 16 bytes
MAX_WAVES = 16


def sum_of_squares(values: list[Any]) -> Any:
    """This lane's sum of squares over Vectors of fp32."""
    total = fx.Float32(0.0)
    for v in values:
        total = total + (v * v).reduce(fn.ReductionOp.ADD)
    return total


def normalised(value: Any, inverse: Any, weight: Any, order: str) -> Any:
    """In bf16: `before_cast` (GPT-OSS) multiplies the weight in fp32, `after_cast` (Llama, Qwen3) after rounding."""
    unit = value * inverse
    if order == "after_cast":
        unit = unit.to(fx.BFloat16).to(fx.Float32)
    return (unit * weight).to(fx.BFloat16)


def load_weight(run: Any, item: Any, fp32: bool) -> Any:
    """Eight weights as fp32, from a run of bf16 (8 a load) or fp32 (4 a load)."""
    if not fp32:
        return load_items(run, item, fx.BFloat16, ITEM).to(fx.Float32)
    halves = [load_items(run, item * 2 + i, fx.Float32, 4) for i in range(2)]
    return fx.Vector.from_elements([h[i] for h in halves for i in range(4)], fx.Float32)


@cache
def build_rmsnorm(hidden: int, order: str, eps: float, *, residual: bool, fp32_weight: bool) -> Any:
    """Launcher (x, residual, weight, out, residual_out, tokens): one workgroup a token, rows kept in registers.

    x, residual, out, residual_out (tokens, hidden) bf16; weight (hidden) bf16 or fp32. The norm is of the rounded sum,
    as the models' own modules do. `hidden` a multiple of 8.
    """
    items = hidden // ITEM
    waves = min(-(-items // WAVE), MAX_WAVES)
    threads = waves * WAVE
    steps = -(-items // threads)
    with_residual = residual

    @flyc.kernel
    def rmsnorm_kernel(
        x: fx.Tensor, residual: fx.Tensor, weight: fx.Tensor, out: fx.Tensor, residual_out: fx.Tensor
    ) -> None:
        row = fx.Int64(fx.block_idx.x) * hidden
        thread = fx.thread_idx.x
        nbytes = hidden * 2
        x_run = bounded(pointer(x, offset=row), nbytes, ITEM)
        weight_run = bounded(pointer(weight), hidden * (4 if fp32_weight else 2), 4 if fp32_weight else ITEM)
        rows = [load_items(x_run, thread + s * threads, fx.BFloat16, ITEM).to(fx.Float32) for s in range(steps)]
        if fx.const_expr(with_residual):
            add_run = bounded(pointer(residual, offset=row), nbytes, ITEM)
            sum_run = bounded(pointer(residual_out, offset=row), nbytes, ITEM)
            for s in range_constexpr(steps):
                added = rows[s] + load_items(add_run, thread + s * threads, fx.BFloat16, ITEM).to(fx.Float32)
                rounded = added.to(fx.BFloat16)
                store_items(sum_run, thread + s * threads, rounded, fx.BFloat16, ITEM)
                rows[s] = rounded.to(fx.Float32)
        part = shared(fx.SharedAllocator(), fx.Float32, waves)
        mine = fn.coop.warp_sum(sum_of_squares(rows))
        if lane_index() == 0:
            part[wave_index()] = mine
        fx.gpu.barrier()
        total = part[0]
        for w in range_constexpr(1, waves):
            total = total + part[w]
        inverse = fx.rsqrt(total * (1.0 / hidden) + eps, fastmath="fast")
        out_run = bounded(pointer(out, offset=row), nbytes, ITEM)
        for s in range_constexpr(steps):
            scale = load_weight(weight_run, thread + s * threads, fp32_weight)
            store_items(out_run, thread + s * threads, normalised(rows[s], inverse, scale, order), fx.BFloat16, ITEM)

    @flyc.jit
    def rmsnorm(
        x: fx.Tensor,
        residual: fx.Tensor,
        weight: fx.Tensor,
        out: fx.Tensor,
        residual_out: fx.Tensor,
        tokens: fx.Int32,
        stream: fx.Stream = STREAM,
    ) -> None:
        rmsnorm_kernel(x, residual, weight, out, residual_out).launch(
            grid=(tokens, 1, 1), block=(threads, 1, 1), stream=stream
        )

    return rmsnorm


@cache
def build_qk_norm(q_heads: int, kv_heads: int, head_dim: int, eps: float) -> Any:
    """Launcher (qkv, q_weight, k_weight, tokens): each query and key head in place, `head_dim` / 8 lanes a head.

    qkv (tokens, (q_heads + 2 kv_heads) * head_dim) bf16, weights (head_dim) bf16; values are not touched.
    """
    lanes = head_dim // ITEM
    heads = q_heads + kv_heads
    row_elements = (q_heads + 2 * kv_heads) * head_dim

    @flyc.kernel
    def qk_norm_kernel(qkv: fx.Tensor, q_weight: fx.Tensor, k_weight: fx.Tensor) -> None:
        item = fx.block_idx.x * 256 + fx.thread_idx.x
        run = bounded(pointer(qkv, offset=fx.Int64(fx.block_idx.y) * row_elements), heads * head_dim * 2, ITEM)
        head, part = split(item, lanes)
        value = load_items(run, item, fx.BFloat16, ITEM).to(fx.Float32)
        total = fn.coop.warp_sum(sum_of_squares([value]), width=lanes)
        inverse = fx.rsqrt(total * (1.0 / head_dim) + eps, fastmath="fast")
        q_scale, k_scale = (
            load_items(bounded(pointer(w), head_dim * 2, ITEM), part, fx.BFloat16, ITEM).to(fx.Float32)
            for w in (q_weight, k_weight)
        )
        scale = fx.Vector.from_elements(
            [(head < q_heads).select(q_scale[i], k_scale[i]) for i in range(ITEM)], fx.Float32
        )
        store_items(run, item, normalised(value, inverse, scale, "after_cast"), fx.BFloat16, ITEM)

    @flyc.jit
    def qk_norm(
        qkv: fx.Tensor, q_weight: fx.Tensor, k_weight: fx.Tensor, tokens: fx.Int32, stream: fx.Stream = STREAM
    ) -> None:
        grid = (-(-heads * lanes // 256), tokens, 1)
        qk_norm_kernel(qkv, q_weight, k_weight).launch(grid=grid, block=(256, 1, 1), stream=stream)

    return qk_norm


def _plan_rmsnorm(operands: Operands, attrs: Attrs) -> list[Launch]:
    x, residual, weight, out = (operands[name] for name in ("x", "residual", "weight", "out"))
    launcher = build_rmsnorm(
        x.shape[1],
        attrs["order"],
        float(attrs["eps"]),
        residual=residual is not None,
        fp32_weight=str(weight.dtype) == "torch.float32",
    )
    pair = (x, out) if residual is None else (residual, operands["residual_out"])
    return [Launch(launcher, (x, pair[0], weight, out, pair[1], x.shape[0]))]


def _rmsnorm_supports(operands: Operands, attrs: Attrs) -> str | None:
    hidden = operands["x"].shape[1]
    if hidden % ITEM:
        return f"rows of {hidden} values are not whole 16-byte items"
    if attrs["order"] not in ("before_cast", "after_cast"):
        return f"order {attrs['order']!r} is neither before_cast nor after_cast"
    if (operands["residual"] is None) != (operands["residual_out"] is None):
        return "residual and residual_out come together"
    return None if hidden <= ITEM * WAVE * MAX_WAVES * 8 else f"a row of {hidden} values does not fit one workgroup"


def head_supports(operands: Operands, attrs: Attrs) -> str | None:
    """Why a head of this size cannot be laid over lanes, or None."""
    head_dim = attrs["head_dim"]
    lanes = head_dim // ITEM
    if head_dim % ITEM or lanes & (lanes - 1) or not 1 <= lanes <= WAVE:
        return f"head_dim {head_dim} is not 8 times a power of two up to 512"
    return None


def _plan_qk_norm(operands: Operands, attrs: Attrs) -> list[Launch]:
    qkv = operands["qkv"]
    launcher = build_qk_norm(attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"], float(attrs["eps"]))
    return [Launch(launcher, (qkv, operands["q_weight"], operands["k_weight"], qkv.shape[0]))]


rmsnorm = KernelOp(_plan_rmsnorm, _rmsnorm_supports)
qk_norm = KernelOp(_plan_qk_norm, head_supports)
