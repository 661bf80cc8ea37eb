"""Check cases of norms, rotation with KV append, and decode attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, product

import torch
from torch import Tensor

from dieplace.kernels.cases_values import BF16, F32, VALUES, Case, poisoned, values


def rmsnorm() -> Iterator[Case]:
    sizes = [(1, 64), (1, 2880), (3, 2880), (8, 96), (2, 1024), (1, 5120), (5, 8), (4, 520)]
    plan = product((False, True), sizes, ("before_cast", "after_cast"))
    for seed, ((has_residual, (t, h), order), kind) in enumerate(zip(plan, cycle(VALUES), strict=False)):
        weight = values("normal", (h,), seed + 1, F32 if order == "before_cast" and seed % 4 else BF16)
        yield Case(
            f"T={t} H={h} {order} {kind}{' residual' if has_residual else ''}",
            {
                "x": values(kind, (t, h), seed),
                "residual": values("normal", (t, h), seed + 2) if has_residual else None,
                "weight": weight,
                "out": poisoned((t, h)),
                "residual_out": poisoned((t, h)) if has_residual else None,
            },
            {"eps": 1e-5 if order == "before_cast" else 1e-6, "order": order},
        )


_HEADS = [(64, 8, 64), (12, 2, 64), (6, 3, 32), (48, 2, 64), (40, 8, 128), (5, 1, 64), (8, 8, 16)]


def qk_norm() -> Iterator[Case]:
    for seed, ((hq, hkv, d), t, kind) in enumerate(zip(cycle(_HEADS), cycle((1, 8, 3)), VALUES * 4, strict=False)):
        yield Case(
            f"T={t} heads={hq}/{hkv} D={d} {kind}",
            {
                "qkv": values(kind, (t, (hq + 2 * hkv) * d), seed),
                "q_weight": values("normal", (d,), seed + 1),
                "k_weight": values("normal", (d,), seed + 2),
            },
            {"q_heads": hq, "kv_heads": hkv, "head_dim": d, "eps": 1e-6},
        )


def rope() -> Iterator[Case]:
    slots = ([0], [-1], [7, -1, 3], [5, 6, 7, 8], [-1, 0], [11])
    for seed, ((hq, hkv, d), chosen) in enumerate(islice(zip(cycle(_HEADS), cycle(slots), strict=False), 21)):
        t, half = len(chosen), d // 2 if seed % 3 else d // 4
        angle = torch.rand(16, half, generator=torch.Generator().manual_seed(seed)) * 6.28
        yield Case(
            f"T={t} heads={hq}/{hkv} D={d} rotary={2 * half} slots={chosen}",
            {
                "qkv": values(VALUES[seed % 3], (t, (hq + 2 * hkv) * d), seed),
                "cos": angle.cos() * 1.3466,
                "sin": angle.sin() * 1.3466,
                "positions": torch.arange(t, dtype=torch.int32) + 15 - t,
                "slots": torch.tensor(chosen, dtype=torch.int32),
                "q_out": poisoned((t, hq, d)),
                "k_cache": values("normal", (12, hkv, d), seed + 1),
                "v_cache": values("normal", (12, hkv, d), seed + 2),
            },
            {"q_heads": hq, "kv_heads": hkv, "head_dim": d},
        )


_CONTEXTS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 200, 3, 64, 0, 257]


def attention_split() -> Iterator[Case]:
    plan = zip(
        cycle(_HEADS), _CONTEXTS * 2, cycle((0, 128, 3)), cycle((1, 2, 4, 8, 32)), cycle((16, 512)), strict=False
    )
    for seed, ((hq, hkv, d), length, window, splits, page) in enumerate(islice(plan, 26)):
        t = 1 + seed % 3
        lengths = [max(0, length - (t - 1 - i)) for i in range(t)]
        pages = -(-max(1, length) // page) + 1  # one page more than needed, filled with a value that must not be read
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        kind = VALUES[seed % len(VALUES)] if seed % 4 else "normal"
        q = values("equal" if kind == "large" else kind, (t, hq, d), seed)
        k, v = (values("normal", (pages, page, hkv, d), seed + n) for n in (1, 2))
        for cache in (k, v):
            _spoil(cache, table, length, page)
        yield Case(
            f"T={t} heads={hq}/{hkv} D={d} context={length} window={window} splits={splits} page={page} {kind}",
            {
                "q": q,
                "k_cache": k,
                "v_cache": v,
                "page_table": table,
                "lengths": torch.tensor(lengths, dtype=torch.int32),
                "partial": poisoned((t, hq, splits, d), F32),
                "partial_lse": poisoned((t, hq, splits), F32),
            },
            {"scale": d**-0.5, "window": window, "splits": splits},
        )


def _spoil(cache: Tensor, table: Tensor, length: int, page: int) -> None:
    """NaN wherever no key lives: reading it would show."""
    for position in range(length, table.numel() * page):
        cache[int(table[position // page]), position % page] = torch.nan


def attention_merge() -> Iterator[Case]:
    plan = zip(cycle(_HEADS), cycle((1, 2, 4, 8, 32)), cycle((1, 3, 8)), cycle((None, BF16, F32)), strict=False)
    for seed, ((hq, _, d), splits, t, sinks) in enumerate(islice(plan, 24)):
        lse = values("normal", (t, hq, splits), seed, F32) * (1 + 30 * (seed % 2))
        partial = values("normal", (t, hq, splits, d), seed + 1, F32)
        empty = torch.rand(t, hq, splits, generator=torch.Generator().manual_seed(seed)) < (0.5 if seed % 3 else 0.0)
        empty[0, 0] |= seed % 5 == 1  # a row that saw nothing at all
        yield Case(
            f"T={t} HQ={hq} splits={splits} D={d} sinks={sinks}",
            {
                "partial": torch.where(empty[..., None], 0.0, partial),
                "partial_lse": torch.where(empty, -torch.inf, lse),
                "sinks": None if sinks is None else values("normal", (hq,), seed + 2, sinks),
                "out": poisoned((t, hq, d)),
                "lse": poisoned((t, hq), F32),
            },
            {},
        )
