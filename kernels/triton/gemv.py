"""GEMV for 1 to 8 tokens: bf16 and MXFP4 weights with bias, and the dense gate/up pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton import mx_launch
from dieplace.kernels.triton.launch import INTERPRETED, nibble_decode, on_device_of, tokens_of, triton_op
from dieplace.kernels.triton.nibbles import rows_dot
from dieplace.kernels.triton.numbers import narrow, widen
from dieplace.kernels.triton.overlap import let_next_start, overlap_options, wait_for_previous

# The interpreter runs programs one after the other: few large ones.
INTERPRETED_ROWS = 64
Operands = Mapping[str, torch.Tensor | None]


@triton.jit
def dense_rows_dot(
    weight, x_base, x_row, rows, row_ok, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[TP, BN] fp32 dot products of bf16 rows with x; every weight is read once, evicted first."""
    token = tl.arange(0, TP)
    total = tl.zeros((TP, BN, BK), tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        inside = columns < K
        w = tl.load(
            weight + rows[:, None].to(tl.int64) * K + columns[None, :],
            mask=row_ok[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(
            x_base + token[:, None] * x_row + columns[None, :],
            mask=(token[:, None] < T) & inside[None, :],
            other=0.0,
        )
        total += widen(w)[None, :, :] * widen(x)[:, None, :]
    return tl.sum(total, axis=2)


@triton.jit
def _store_rows(out, bias, result, rows, row_ok, N, T: tl.constexpr, TP: tl.constexpr, HAS_BIAS: tl.constexpr):
    token = tl.arange(0, TP)
    if HAS_BIAS:
        result += widen(tl.load(bias + rows, mask=row_ok, other=0.0))[None, :]
    tl.store(
        out + token[:, None] * N + rows[None, :],
        narrow(result, out.dtype.element_ty),
        mask=(token[:, None] < T) & row_ok[None, :],
    )


@triton.jit
def _gemv_bf16(
    x, weight, bias, out, N, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    result = dense_rows_dot(weight, x, K, rows, rows < N, K, T, TP, BN, BK)
    _store_rows(out, bias, result, rows, rows < N, N, T, TP, HAS_BIAS)


@triton.jit(do_not_specialize=["words_in_row"])
def _gemv_mxfp4(
    x, blocks, scales, bias, out, N, words_in_row, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, HAS_BIAS: tl.constexpr, DECODE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    at = rows.to(tl.int64)
    result = rows_dot(blocks, scales, x, K, at, rows < N, words_in_row, K, T, TP, BN, BW, DECODE)
    _store_rows(out, bias, result, rows, rows < N, N, T, TP, HAS_BIAS)


@triton.jit
def _mlp_gate_up(
    x, gate, up, out, N, K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    g = dense_rows_dot(gate, x, K, rows, rows < N, K, T, TP, BN, BK)
    u = dense_rows_dot(up, x, K, rows, rows < N, K, T, TP, BN, BK)
    _store_rows(out, out, g / (1.0 + tl.exp(-g)) * u, rows, rows < N, N, T, TP, False)


def dense_tile(rows: int, tokens_padded: int) -> dict[str, int]:
    """Block sizes of a bf16 row dot: a warp and 512 weights where rows are many, a whole row to four warps else."""
    if INTERPRETED:
        return {"BN": INTERPRETED_ROWS, "BK": 512, "num_warps": 1}
    if tokens_padded > 2:
        return {"BN": 1, "BK": 512, "num_warps": 4}
    if rows < 1024:
        return {"BN": 1, "BK": 4096, "num_warps": 4}
    return {"BN": 2 // tokens_padded if rows >= 16384 else 1, "BK": 512, "num_warps": 1}


def mxfp4_tile(rows: int, tokens_padded: int) -> dict[str, int]:
    """Block sizes of an MXFP4 row dot: one warp, 64 words (512 weights) wide, 1 to 4 rows (see `rows_dot`)."""
    rows_in_tile = INTERPRETED_ROWS if INTERPRETED else 4 if rows >= 16384 else 2 if rows >= 4096 else 1
    return {"BN": rows_in_tile if INTERPRETED else max(1, rows_in_tile // tokens_padded), "BW": 64, "num_warps": 1}


@triton_op
def gemv_bf16(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,N) = x(T,K) @ weight(N,K).T + bias; fp32 accumulation, one rounding."""
    x, weight, bias, out = (operands.get(name) for name in ("x", "weight", "bias", "out"))
    assert x is not None and weight is not None and out is not None
    (tokens, padded), (rows, width) = tokens_of(x), weight.shape
    tile = dense_tile(rows, padded)
    with on_device_of(x, stream):
        _gemv_bf16[(triton.cdiv(rows, tile["BN"]),)](
            x, weight, out if bias is None else bias, out, rows, K=width, T=tokens, TP=padded,
            HAS_BIAS=bias is not None, **tile, **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def gemv_mxfp4(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,N) = x(T,K) @ dequantised(blocks, scales).T + bias; scale byte 0 is 2^-127, 255 is NaN."""
    x, blocks, scales, bias, out = (operands.get(name) for name in ("x", "blocks", "scales", "bias", "out"))
    assert x is not None and blocks is not None and scales is not None and out is not None
    (tokens, padded), rows, width = tokens_of(x), blocks.shape[0], blocks.shape[1] * 32
    tile = mxfp4_tile(rows, padded)
    with on_device_of(x, stream):
        if mx_launch.fits(x, scales):
            mx_launch.gemv(x, blocks, scales, bias, out, overlap)
            return
        _gemv_mxfp4[(triton.cdiv(rows, tile["BN"]),)](
            x, blocks.view(torch.int32), scales, out if bias is None else bias, out, rows, width // 8, K=width,
            T=tokens, TP=padded, HAS_BIAS=bias is not None, DECODE=nibble_decode(), **tile,
            **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def mlp_gate_up(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None) -> None:
    """out(T,I) = silu(x @ gate.T) * (x @ up.T) in fp32, one rounding."""
    x, gate, up, out = (operands[name] for name in ("x", "gate", "up", "out"))
    assert x is not None and gate is not None and up is not None and out is not None
    (tokens, padded), (rows, width) = tokens_of(x), gate.shape
    tile = dense_tile(rows, padded)
    with on_device_of(x, stream):
        _mlp_gate_up[(triton.cdiv(rows, tile["BN"]),)](x, gate, up, out, rows, K=width, T=tokens, TP=padded, **tile)
