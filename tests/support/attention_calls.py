"""Decode attention of one token through the registry: split, then merge, on any kernel backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dieplace.kernels import reference_attention, registry


class Attended(NamedTuple):
    """out (HQ, D) as the kernels round it, log-sum (HQ), and `fine` (HQ, D): the fp32 partials merged in float64."""

    out: torch.Tensor
    lse: torch.Tensor
    fine: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    length: int | None = None,
    window: int = 0,
    splits: int = 4,
    sinks: torch.Tensor | None = None,
    page_table: list[int] | None = None,
    backend: str = "reference",
) -> Attended:
    """One token: q (HQ, D), contiguous k, v (n, HKV, D) or pages (PAGES, PAGE, HKV, D)."""
    if k.ndim == 3:
        k, v, page_table = k[None], v[None], [0]
    length = k.shape[0] * k.shape[1] if length is None else length
    hq, d = q.shape
    split: dict[str, Any] = {
        "q": q[None].to(torch.bfloat16),
        "k_cache": k.to(torch.bfloat16).contiguous(),
        "v_cache": v.to(torch.bfloat16).contiguous(),
        "page_table": torch.tensor(page_table, dtype=torch.int32),
        "lengths": torch.tensor([length], dtype=torch.int32),
        "partial": torch.full((1, hq, splits, d), torch.nan),
        "partial_lse": torch.full((1, hq, splits), torch.nan),
    }
    attrs = {"scale": d**-0.5, "window": window, "splits": splits}
    registry.run("attention_split", split, attrs, backend=backend, strict=True)
    merged: dict[str, Any] = {
        "partial": split["partial"],
        "partial_lse": split["partial_lse"],
        "sinks": None if sinks is None else sinks.to(torch.float32),
        "out": torch.full((1, hq, d), torch.nan, dtype=torch.bfloat16),
        "lse": torch.full((1, hq), torch.nan),
    }
    registry.run("attention_merge", merged, {}, backend=backend, strict=True)
    fine, _, _ = reference_attention.merge(
        split["partial"].double(), split["partial_lse"].double(), None if sinks is None else sinks.double()
    )
    return Attended(merged["out"][0].double(), merged["lse"][0].double(), fine[0])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
