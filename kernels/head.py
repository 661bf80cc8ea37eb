"""The end of a decode step: final norm, logits of every shard's rows of the vocabulary, and the greedy tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dieplace.kernels.reference_linear import first_largest

if TYPE_CHECKING:
    from dieplace.kernels.decode import DecodeModel


def run_head(model: DecodeModel, hidden: list[Tensor], residual: list[Tensor | None]) -> tuple[Tensor, tuple[int, ...]]:
    """Logits (T, vocabulary) and greedy tokens; of two shards' best the better wins, the lower index on a tie."""
    count, rows = hidden[0].shape[0], model.config.vocabulary // model.shards
    logits, best = [], []
    for shard in range(model.shards):
        x = model.norm("head", None, shard, "norm", hidden[shard], residual[shard])[0]
        out = {
            "logits": model.scratch(shard, "logits", (count, rows), torch.float32),
            "value": model.scratch(shard, "value", (count,), torch.float32),
            "token": model.scratch(shard, "token", (count,), torch.int32),
        }
        _rank(model, shard, x, rows, out)
        logits.append(out["logits"])
        best.append(list(zip(out["value"].tolist(), out["token"].tolist(), strict=True)))
    chosen = tuple(max(options, key=lambda pair: (pair[0], -pair[1]))[1] for options in zip(*best, strict=True))
    return torch.cat(logits, dim=1), chosen


def _rank(model: DecodeModel, shard: int, x: Tensor, rows: int, out: dict[str, Tensor]) -> None:
    """Logits of a shard's rows and the best of them; an MXFP4 head is ranked by torch after its product."""
    weight = model.weights.get(shard, "head")
    if weight is not None:
        operands = {"x": x, "weight": weight, **out}
        model.call("head", None, shard, "head_argmax", operands, {"vocab": rows, "offset": shard * rows})
        return
    parts = {part: model.weights.get(shard, f"head.{part}") for part in ("blocks", "scales")}
    model.call("head", None, shard, "gemv_mxfp4", {"x": x, **parts, "bias": None, "out": out["logits"]})
    value, token = first_largest(out["logits"].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    out["value"].copy_(value)
    out["token"].copy_(token + shard * rows)
