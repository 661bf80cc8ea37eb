"""float64 references: matrix-vector products in bf16 and MX formats, the dense MLP, the head."""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.kernels.quantize import mxfp8_dequantize, mxfp8_quantize
from dieplace.kernels.reference import Attrs, Expected, Operands, linear, mx_weight, wide

_CHUNK_ROWS = 8192  # rows of a head widened at once: 201,088 x 2,880 in float64 would take 4.6 GB


def gemv_bf16(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """x W^T + bias."""
    return {"out": _chunked(wide(operands["x"]), operands["weight"], operands["bias"])}


def gemv_mxfp4(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """x W^T + bias with W from MXFP4."""
    return {"out": _mx_linear(wide(operands["x"]), operands)}


def gemv_mxfp4_mxfp8(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The same with x from MXFP8."""
    return {"out": _mx_linear(mxfp8_dequantize(operands["x"].cpu(), operands["x_scales"].cpu()), operands)}


def quantize_mxfp8(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Codes and scale bytes, exact."""
    codes, scales = mxfp8_quantize(operands["x"].cpu())
    return {"out": Expected(codes), "scales": Expected(scales)}


def mlp_gate_up(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """silu(gate) * up."""
    x = wide(operands["x"])
    return {"out": _silu_product(*(linear(x, wide(operands[name]), None) for name in ("gate", "up")))}


def mlp_gate_up_mxfp4(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """silu(gate) * up with MXFP4 weights."""
    x = wide(operands["x"])
    sides = (linear(x, mx_weight(operands[f"{n}_blocks"], operands[f"{n}_scales"]), None) for n in ("gate", "up"))
    return {"out": _silu_product(*sides)}


def head_argmax(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Logits, and the first largest among the true vocabulary; NaN counts as minus infinity."""
    logits = _chunked(wide(operands["x"]), operands["weight"], None)
    ranked = logits.value[:, : attrs["vocab"]].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    value, token = first_largest(ranked)
    return {"logits": logits, "value": Expected(value), "token": Expected(token + attrs["offset"])}


def first_largest(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of each row and its lowest index; torch.max promises no order among ties."""
    value = ranked.amax(-1)
    return value, (ranked == value[:, None]).to(torch.int8).argmax(-1)


def _mx_linear(x: Tensor, operands: Operands) -> Expected:
    bias = None if operands["bias"] is None else wide(operands["bias"])
    return linear(x, mx_weight(operands["blocks"], operands["scales"]), bias)


def _chunked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Expected:
    parts = []
    for start in range(0, weight.shape[0], _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        parts.append(linear(x, wide(weight[rows]), None if bias is None else wide(bias[rows])))
    return Expected(torch.cat([p.value for p in parts], -1), torch.cat([p.size for p in parts], -1))


def _silu_product(gate: Expected, up: Expected) -> Expected:
    value = torch.nn.functional.silu(gate.value) * up.value
    # silu's slope is at most 1.1, so an error of the gate passes through times that and |up|.
    size = value.abs() + 1.1 * gate.size * up.value.abs() + torch.nn.functional.silu(gate.value).abs() * up.size
    return Expected(value, size)
