"""The chosen experts: gate/up with clamped SwiGLU, and down with the weighted sum; each expert is read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dieplace.kernels.triton import mx_launch
from dieplace.kernels.triton.gemv import INTERPRETED_ROWS
from dieplace.kernels.triton.launch import INTERPRETED, nibble_decode, on_device_of, tokens_of, triton_op
from dieplace.kernels.triton.nibbles import rows_dot
from dieplace.kernels.triton.numbers import narrow, widen
from dieplace.kernels.triton.overlap import let_next_start, overlap_options, wait_for_previous

Operands = Mapping[str, torch.Tensor | None]
# Experts a token that `mx_launch.down` gives a warp each: warps are powers of two, and one too many would read past x.
_ONE_WARP_EACH = (1, 2, 4, 8)


@triton.jit
def _first_slot(ids, slot, expert, S: tl.constexpr, SP: tl.constexpr):
    """Whether no earlier slot chose the same expert: only that slot reads the expert's weights."""
    other = tl.arange(0, SP)
    earlier = tl.load(ids + other, mask=other < S, other=-1) == expert
    return tl.sum(tl.where(earlier & (other < slot), 1, 0), axis=0) == 0


@triton.jit
def _slot_of(ids, expert, T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """[TP] place among the K chosen at which each token uses `expert`, or -1."""
    token, place = tl.arange(0, TP), tl.arange(0, KP)
    ok = (token[:, None] < T) & (place[None, :] < K)
    used = tl.load(ids + token[:, None] * K + place[None, :], mask=ok, other=-1) == expert
    return tl.max(tl.where(used, place[None, :], -1), axis=1)


@triton.jit(do_not_specialize=["words_in_row"])
def _expert_gate_up(
    x, ids, blocks, scales, bias, out, alpha, limit, words_in_row, H: tl.constexpr, INNER: tl.constexpr,
    T: tl.constexpr,
    TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DECODE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    slot = tl.program_id(1)
    expert = tl.load(ids + slot)
    if _first_slot(ids, slot, expert, T * K, SP):
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        row_ok = rows < 2 * INNER
        at = expert.to(tl.int64) * (2 * INNER) + rows
        both = rows_dot(blocks, scales, x, H, at, row_ok, words_in_row, H, T, TP, BN, BW, DECODE)
        both += widen(tl.load(bias + at, mask=row_ok, other=0.0))[None, :]
        # Rows alternate gate, up (GPT-OSS checkpoints); only the gate's upper side is clamped, up on both.
        gate, up = tl.split(tl.reshape(both, (TP, BN // 2, 2)))
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        token = tl.arange(0, TP)
        place = _slot_of(ids, expert, T, TP, K, KP)
        column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(
            out + (token * K + place)[:, None] * INNER + column[None, :],
            narrow(result, tl.bfloat16),
            mask=(place >= 0)[:, None] & (column < INNER)[None, :],
        )


@triton.jit(do_not_specialize=["words_in_row"])
def _expert_down(
    x, ids, weights, blocks, scales, bias, out, words_in_row, H: tl.constexpr, INNER: tl.constexpr, T: tl.constexpr,
    TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    HAS_BIAS: tl.constexpr, DECODE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    row_ok = rows < H
    token = tl.arange(0, TP)
    total = tl.zeros((TP, BN), tl.float32)
    # One token's experts are distinct: unrolled, so that all their loads are in flight at once.
    if T == 1:
        for slot in tl.static_range(K):
            at = tl.load(ids + slot).to(tl.int64) * H + rows
            part = rows_dot(blocks, scales, x + slot * INNER, 0, at, row_ok, words_in_row, INNER, 1, 1, BN, BW, DECODE)
            if HAS_BIAS:
                part += widen(tl.load(bias + at, mask=row_ok, other=0.0))[None, :]
            total += tl.load(weights + slot) * part
    else:
        for slot in range(T * K):
            expert = tl.load(ids + slot)
            if _first_slot(ids, slot, expert, T * K, SP):
                place = _slot_of(ids, expert, T, TP, K, KP)
                used = place >= 0
                share = tl.load(weights + token * K + place, mask=used, other=0.0)
                at = expert.to(tl.int64) * H + rows
                # Tokens that do not use this expert read row 0 and are dropped by their share below.
                row = (token * K + tl.where(used, place, 0)) * INNER
                part = _gathered_dot(blocks, scales, x, row, used, at, row_ok, words_in_row, INNER, TP, BN, BW, DECODE)
                if HAS_BIAS:
                    part += widen(tl.load(bias + at, mask=row_ok, other=0.0))[None, :]
                total += tl.where(used[:, None], share[:, None] * part, 0.0)
    tl.store(
        out + token[:, None] * H + rows[None, :],
        narrow(total, out.dtype.element_ty),
        mask=(token[:, None] < T) & row_ok[None, :],
    )


@triton.jit
def _gathered_dot(
    blocks, scales, x, x_at, used, rows, row_ok, words_in_row, K: tl.constexpr, TP: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """As `rows_dot`, with a row offset of x for each token."""
    total = tl.zeros((TP, BN), tl.float32)
    for one in tl.static_range(TP):
        mine = tl.arange(0, TP) == one
        offset = tl.sum(tl.where(mine, x_at, 0), axis=0)
        wanted = tl.sum(tl.where(mine & used, 1, 0), axis=0) > 0
        if wanted:
            dot = rows_dot(blocks, scales, x + offset, 0, rows, row_ok, words_in_row, K, 1, 1, BN, BW, DECODE)
            total += tl.where(mine[:, None], dot, 0.0)
    return total


def _tile(rows: int, tokens_padded: int) -> dict[str, int]:
    if INTERPRETED:
        return {"BN": INTERPRETED_ROWS, "BW": 64, "num_warps": 1}
    return {"BN": max(2, rows // tokens_padded), "BW": 64, "num_warps": 1}


@triton_op
def expert_gate_up(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,k,I) = (up + 1) * gate * sigmoid(alpha * gate) of each token's chosen experts, clamped at `limit`."""
    names = ("x", "ids", "blocks", "scales", "bias", "out")
    x, ids, blocks, scales, bias, out = (operands[name] for name in names)
    assert x is not None and ids is not None and blocks is not None and out is not None
    assert scales is not None and bias is not None
    (tokens, padded), chosen, inner = tokens_of(x), ids.shape[1], out.shape[2]
    alpha, limit = float(attrs.get("alpha", 1.702)), float(attrs.get("limit", 7.0))
    tile = _tile(4, padded)
    with on_device_of(x, stream):
        if mx_launch.fits(x, scales):
            mx_launch.gate_up(x, ids, blocks, scales, bias, out, alpha, limit, overlap)
            return
        _expert_gate_up[(triton.cdiv(2 * inner, tile["BN"]), tokens * chosen)](
            x, ids, blocks.view(torch.int32), scales, bias, out, alpha, limit, x.shape[1] // 8, H=x.shape[1],
            INNER=inner, T=tokens, TP=padded, K=chosen, KP=triton.next_power_of_2(chosen),
            SP=triton.next_power_of_2(tokens * chosen), DECODE=nibble_decode(), **tile, **overlap_options(overlap),
        )  # fmt: skip


@triton_op
def expert_down(operands: Operands, attrs: Mapping[str, Any], *, stream: Any = None, overlap: bool = False) -> None:
    """out(T,H) = sum over the chosen of weight * (W_expert @ x + bias), in fp32 with one rounding."""
    x, ids, weights, blocks, scales = (operands[name] for name in ("x", "ids", "weights", "blocks", "scales"))
    bias, out = operands.get("bias"), operands["out"]
    assert x is not None and ids is not None and blocks is not None and out is not None
    (tokens, padded), chosen, inner = tokens_of(x), ids.shape[1], x.shape[2]
    assert weights is not None and scales is not None
    tile = _tile(1, padded) | ({} if INTERPRETED else {"BN": 1})
    with on_device_of(x, stream):
        if mx_launch.fits(x, scales) and chosen in _ONE_WARP_EACH:
            mx_launch.down(x, ids, weights, blocks, scales, bias, out, overlap)
            return
        _expert_down[(triton.cdiv(out.shape[1], tile["BN"]),)](
            x, ids, weights, blocks.view(torch.int32), scales, out if bias is None else bias, out, inner // 8,
            H=out.shape[1], INNER=inner, T=tokens, TP=padded, K=chosen, KP=triton.next_power_of_2(chosen),
            SP=triton.next_power_of_2(tokens * chosen), HAS_BIAS=bias is not None, DECODE=nibble_decode(), **tile,
            **overlap_options(overlap),
        )  # fmt: skip
