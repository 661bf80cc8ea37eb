"""float64 references: decode attention over splits of a paged cache, and their merge with sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.kernels.reference import Attrs, Expected, Operands, wide
from dieplace.kernels.sizes import ContractError


def visible(length: int, window: int) -> range:
    """Positions that a row sees: `window` counts the current token; 0 means no window."""
    return range(max(0, length - window) if window else 0, length)


def gather_pages(cache: Tensor, page_table: Tensor, positions: range) -> Tensor:
    """Rows (positions, HKV, D) of a cache (PAGES, PAGE, HKV, D); only pages that hold these positions are read."""
    pages, page = cache.shape[:2]
    if positions.stop > page_table.numel() * page:
        raise ContractError(f"attention_split: {positions.stop} keys do not fit {page_table.numel()} pages of {page}")
    index = torch.arange(positions.start, positions.stop)
    entries = page_table.cpu().long()[index // page]
    if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= pages):
        raise ContractError(f"attention_split: a page table entry is not within 0..{pages - 1}")
    return wide(cache[entries, index % page])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (HQ, D), k and v (n, HKV, D) -> output (HQ, D), log-sum (HQ), magnitude (HQ, D); no key gives 0 and -inf."""
    group = q.shape[0] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    scores = torch.einsum("hd,hnd->hn", q, k) * scale
    sizes = torch.einsum("hd,hnd->hn", q.abs(), k.abs()) * abs(scale)
    lse = torch.logsumexp(scores, dim=-1)
    if not scores.shape[1]:
        return torch.zeros_like(q), lse, torch.zeros_like(q)
    weights = torch.exp(scores - lse[:, None])
    size = torch.einsum("hn,hnd->hd", weights * (1 + sizes), v.abs())
    return torch.einsum("hn,hnd->hd", weights, v), lse, size


def attention(operands: Operands, attrs: Attrs) -> tuple[Tensor, Tensor, Tensor]:
    """Whole attention without splits or sinks: output (T, HQ, D), log-sum (T, HQ), magnitude (T, HQ, D)."""
    rows = []
    for q, length in zip(wide(operands["q"]), operands["lengths"].tolist(), strict=True):
        seen = visible(length, attrs["window"])
        k, v = (gather_pages(operands[name], operands["page_table"], seen) for name in ("k_cache", "v_cache"))
        rows.append(attend(q, k, v, attrs["scale"]))
    output, lse, size = zip(*rows, strict=True)
    return torch.stack(output), torch.stack(lse), torch.stack(size)


def attention_split(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Equal runs of positions per split; a kernel may cut elsewhere, so checks compare the merged result."""
    splits = attrs["splits"]
    partials, sums = [], []
    for q, length in zip(wide(operands["q"]), operands["lengths"].tolist(), strict=True):
        seen = visible(length, attrs["window"])
        step = -(-len(seen) // splits)
        parts = []
        for s in range(splits):
            run = seen[s * step : (s + 1) * step] if step else range(0)
            k, v = (gather_pages(operands[name], operands["page_table"], run) for name in ("k_cache", "v_cache"))
            parts.append(attend(q, k, v, attrs["scale"]))
        partials.append(torch.stack([p[0] for p in parts], dim=1))
        sums.append(torch.stack([p[1] for p in parts], dim=1))
    return {"partial": Expected(torch.stack(partials)), "partial_lse": Expected(torch.stack(sums))}


def attention_merge(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Weighted mean of the splits; the sink joins the denominator once."""
    partial, lse = wide(operands["partial"]), wide(operands["partial_lse"])
    out, total, size = merge(partial, lse, None if operands["sinks"] is None else wide(operands["sinks"]))
    return {"out": Expected(out, size), "lse": Expected(total, lse.abs().nan_to_num(posinf=0).amax(-1) + 1)}


def merge(partial: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """partial (T, HQ, S, D), lse (T, HQ, S) -> output, log-sum, magnitude."""
    terms = lse if sinks is None else torch.cat((lse, sinks[None, :, None].expand(*lse.shape[:2], 1)), dim=-1)
    total = torch.logsumexp(terms, dim=-1)
    weights = torch.exp(lse - total[..., None])
    weights = torch.where(torch.isneginf(lse), 0.0, weights)  # also where all is -inf: -inf - -inf is not a number
    present = weights[..., None] > 0
    spread = 1 + lse.abs().nan_to_num(posinf=0).amax(-1)  # an fp32 log-sum errs in proportion to its size
    size = (weights[..., None] * torch.where(present, partial, 0).abs()).sum(2) * spread[..., None]
    return (weights[..., None] * torch.where(present, partial, 0)).sum(2), total, size
