"""Check cases of fused ops: their parts' edges, met in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

import torch
from torch import Tensor

from dieplace.kernels.cases_values import BF16, F32, VALUES, Case, poisoned, values

_I32 = torch.int32
_HEADS = [(64, 8, 64), (12, 2, 64), (6, 3, 32), (48, 2, 64), (40, 8, 128), (5, 1, 64), (8, 8, 16)]
# (tokens in the cache with the new one, page size, splits, window)
_CONTEXTS = [
    (1, 16, 1, 0), (15, 16, 4, 0), (16, 16, 4, 0), (17, 16, 2, 3), (64, 64, 16, 0), (129, 16, 8, 128),
    (200, 512, 32, 0), (65, 512, 16, 0), (33, 16, 8, 128), (257, 16, 4, 0),
]  # fmt: skip


def rope_attention() -> Iterator[Case]:
    plan = zip(cycle(_HEADS), _CONTEXTS * 2, cycle((None, BF16, F32)), cycle(VALUES), strict=False)
    for seed, ((hq, hkv, d), (length, page, splits, window), sinks, kind) in enumerate(plan):
        half = d // 2 if seed % 3 else d // 4
        angle = torch.rand(300, half, generator=torch.Generator().manual_seed(seed)) * 6.28
        pages = -(-length // page) + 1  # one page more than needed, filled with a value that must not be read
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(_I32)
        k, v = (values("normal", (pages, page, hkv, d), seed + n) for n in (1, 2))
        skipped = seed % 7 == 6  # slot -1: nothing is appended, the row that is there is seen
        row = length - 1
        for cache in (k, v):
            _spoil(cache, table, length if skipped else row)
        slot = -1 if skipped else int(table[row // page]) * page + row % page
        yield Case(
            f"heads={hq}/{hkv} D={d} rotary={2 * half} context={length} page={page} splits={splits} window={window} "
            f"sinks={sinks} slot={slot} {kind}",
            {
                "qkv": values("equal" if kind == "large" else kind, (1, (hq + 2 * hkv) * d), seed),
                "cos": angle.cos() * 1.3466,
                "sin": angle.sin() * 1.3466,
                "positions": torch.tensor([row], dtype=_I32),
                "slots": torch.tensor([slot], dtype=_I32),
                "page_table": table,
                "lengths": torch.tensor([length], dtype=_I32),
                "sinks": None if sinks is None else values("normal", (hq,), seed + 3, sinks),
                "q_out": poisoned((1, hq, d)),
                "k_cache": k,
                "v_cache": v,
                "partial": poisoned((1, hq, splits, d), F32),
                "partial_lse": poisoned((1, hq, splits), F32),
                "arrived": torch.zeros(hkv, dtype=_I32),
                "out": poisoned((1, hq, d)),
                "lse": poisoned((1, hq), F32),
            },
            {"q_heads": hq, "kv_heads": hkv, "head_dim": d, "scale": d**-0.5, "window": window, "splits": splits},
        )


def _spoil(cache: Tensor, table: Tensor, length: int) -> None:
    """NaN wherever no key lives yet: reading it would show."""
    page = cache.shape[1]
    for position in range(length, table.numel() * page):
        cache[int(table[position // page]), position % page] = torch.nan


def norm_router() -> Iterator[Case]:
    sizes = [(64, 32, 8), (2880, 128, 4), (96, 5, 5), (1440, 33, 2)]
    for seed, (kind, (h, experts, k)) in enumerate(product(VALUES, sizes)):
        order = ("before_cast", "after_cast")[seed % 2]
        residual = values("normal", (1, h), seed + 2) if seed % 3 else None
        outputs = {
            "normed": poisoned((1, h)), "residual_out": None if residual is None else poisoned((1, h)),
            "logits": poisoned((1, experts), F32), "ids": poisoned((1, k), _I32), "weights": poisoned((1, k), F32),
            "nonfinite": poisoned((1,), _I32), "arrived": torch.zeros(1, dtype=_I32),
        }  # fmt: skip
        yield Case(
            f"H={h} E={experts} k={k} {order} {kind}{'' if residual is None else ' residual'}",
            {
                "x": values(kind, (1, h), seed),
                "residual": residual,
                "norm": values("normal", (h,), seed + 1, F32 if seed % 4 == 1 else BF16),
                "router": values("normal", (experts, h), seed + 4),
                "bias": values("normal", (experts,), seed + 5) if seed % 5 else None,
                **outputs,
            },
            {"eps": 1e-5 if order == "before_cast" else 1e-6, "order": order},
        )
