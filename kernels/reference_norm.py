"""float64 references: RMSNorm in both weight orders, per-head norm, RoPE with KV append."""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.kernels.reference import Attrs, Expected, Operands, round_bf16, wide
from dieplace.kernels.sizes import ContractError


def normalise(h: Tensor, weight: Tensor, eps: float, order: str) -> Tensor:
    """RMSNorm over the last axis; `before_cast` multiplies the weight first, `after_cast` after rounding to bf16."""
    unit = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if order == "before_cast":
        return unit * weight
    if order == "after_cast":
        return round_bf16(unit) * weight
    raise ContractError(f"rmsnorm: order is {order!r}", hint="before_cast (GPT-OSS) or after_cast (Llama, Qwen3)")


def rmsnorm(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Residual add in bf16, then the norm of the rounded sum, as the models' own modules do."""
    h = wide(operands["x"])
    if operands["residual"] is not None:
        h = round_bf16(h + wide(operands["residual"]))
    if (operands["residual"] is None) != (operands["residual_out"] is None):
        raise ContractError("rmsnorm: residual and residual_out come together")
    out = normalise(h, wide(operands["weight"]), attrs["eps"], attrs["order"])
    return {"out": Expected(out, out.abs()), "residual_out": Expected(h)}


def qk_norm(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Norm of each query and key head; the value heads are copied."""
    heads = wide(operands["qkv"]).unflatten(-1, (-1, attrs["head_dim"]))
    q, k, v = heads.split((attrs["q_heads"], attrs["kv_heads"], attrs["kv_heads"]), dim=1)
    q = normalise(q, wide(operands["q_weight"]), attrs["eps"], "after_cast")
    k = normalise(k, wide(operands["k_weight"]), attrs["eps"], "after_cast")
    out = torch.cat((q, k, v), dim=1).flatten(1)
    return {"qkv": Expected(out, out.abs())}


def rope_kv_append(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Rotate-half over the first R dimensions; rows whose slot is -1 are rotated but not stored."""
    heads = wide(operands["qkv"]).unflatten(-1, (-1, attrs["head_dim"]))
    q, k, v = heads.split((attrs["q_heads"], attrs["kv_heads"], attrs["kv_heads"]), dim=1)
    positions = operands["positions"].long().cpu()
    cos, sin = (wide(operands[name])[positions][:, None] for name in ("cos", "sin"))
    k_cache, v_cache = wide(operands["k_cache"]).clone(), wide(operands["v_cache"]).clone()
    rotated_k = rotate(k, cos, sin)
    k_size = torch.zeros_like(k_cache)
    for row, slot in enumerate(operands["slots"].tolist()):
        _check_slot(slot, k_cache.shape[0])
        if slot >= 0:
            k_cache[slot], v_cache[slot], k_size[slot] = rotated_k[row], v[row], rotate_size(k, cos, sin)[row]
    return {
        "q_out": Expected(rotate(q, cos, sin), rotate_size(q, cos, sin)),
        "k_cache": Expected(k_cache, k_size),
        "v_cache": Expected(v_cache),
    }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, D), cos and sin (T, 1, R/2): the first R dimensions turn, the rest pass."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate_size(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sums of magnitudes of `rotate`."""
    half = cos.shape[-1]
    first, second, rest = (part.abs() for part in (x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]))
    cos, sin = cos.abs(), sin.abs()
    return torch.cat((first * cos + second * sin, second * cos + first * sin, rest), dim=-1)


def _check_slot(slot: int, slots: int) -> None:
    if not -1 <= slot < slots:
        raise ContractError(f"rope_kv_append: slot {slot} is not within -1..{slots - 1}")
