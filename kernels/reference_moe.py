"""float64 references: router top-k, clamped SwiGLU experts, the weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.kernels.reference import Attrs, Expected, Operands, linear, mx_weight, wide
from dieplace.kernels.sizes import ContractError


def router_topk(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Stable descending order; NaN sorts last among minus infinities by its index."""
    logits = wide(operands["logits"])
    ranked = torch.where(torch.isnan(logits), -torch.inf, logits)
    order = _nan_last(ranked, torch.isnan(logits))[:, : operands["ids"].shape[1]]
    chosen = ranked.gather(1, order)
    # Nothing finite to weigh: equal shares, never NaN.
    hopeless = torch.isneginf(chosen).all(-1, keepdim=True)
    weights = torch.softmax(torch.where(hopeless, 0.0, chosen), dim=-1)
    count = (~torch.isfinite(logits)).sum().reshape(1)
    return {"ids": Expected(order), "weights": Expected(weights, weights), "nonfinite": Expected(count)}


def swiglu(gate: Expected, up: Expected, alpha: float, limit: float) -> Expected:
    """(up + 1) * gate * sigmoid(alpha * gate): gate clamped from above only, up from both sides."""
    g, u = gate.value.clamp(max=limit), up.value.clamp(-limit, limit)
    active = g * torch.sigmoid(alpha * g)
    value = (u + 1) * active
    # d(active)/dg stays below 1.1 for alpha 1.702, so errors of either side pass through bounded.
    size = value.abs() + 1.1 * gate.size * (u + 1).abs() + active.abs() * up.size
    return Expected(value, size)


def expert_gate_up(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Each slot's own expert on its token."""
    x, ids = wide(operands["x"]), _ids(operands, operands["blocks"].shape[0])
    weights = _dequantised(operands, ids)
    values, sizes = [], []
    for slot, expert in enumerate(ids.flatten().tolist()):
        both = linear(x[slot // ids.shape[1]][None], weights[expert], wide(operands["bias"][expert]))
        gate, up = (Expected(both.value[:, i::2], both.size[:, i::2]) for i in (0, 1))
        result = swiglu(gate, up, attrs["alpha"], attrs["limit"])
        values.append(result.value[0])
        sizes.append(result.size[0])
    shape = (*ids.shape, -1)
    return {"out": Expected(torch.stack(values).reshape(shape), torch.stack(sizes).reshape(shape))}


def expert_down(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Sum over a token's experts of weight * (W x + bias)."""
    x, ids, share = wide(operands["x"]), _ids(operands, operands["blocks"].shape[0]), wide(operands["weights"])
    weights = _dequantised(operands, ids)
    value = torch.zeros(ids.shape[0], operands["out"].shape[1], dtype=torch.float64)
    size = torch.zeros_like(value)
    for token in range(ids.shape[0]):
        for j, expert in enumerate(ids[token].tolist()):
            bias = None if operands["bias"] is None else wide(operands["bias"][expert])
            part = linear(x[token, j][None], weights[expert], bias)
            value[token] += share[token, j] * part.value[0]
            size[token] += share[token, j].abs() * part.size[0]
    return {"out": Expected(value, size)}


def _dequantised(operands: Operands, ids: Tensor) -> dict[int, Tensor]:
    return {e: mx_weight(operands["blocks"][e], operands["scales"][e]) for e in set(ids.flatten().tolist())}


def _ids(operands: Operands, experts: int) -> Tensor:
    ids = operands["ids"].cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= experts:
        raise ContractError(f"an expert id is not within 0..{experts - 1}: {ids.flatten().tolist()}")
    return ids


def _nan_last(ranked: Tensor, is_nan: Tensor) -> Tensor:
    """Indices in descending order, lowest index first among equals, NaN behind a true minus infinity."""
    order = torch.argsort(is_nan.to(torch.int8), dim=-1, stable=True)
    inner = torch.argsort(ranked.gather(1, order), dim=-1, descending=True, stable=True)
    return order.gather(1, inner)
