"""Check cases of hand-offs, flags and probes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from dieplace.kernels.cases_values import BF16, F32, VALUES, Case, poisoned, values

_LENGTHS = [1, 2, 63, 64, 65, 100, 255, 256, 257, 1000, 2880, 5760, 8, 31, 33, 127, 128, 129, 500, 2879, 3]


def handoff_put() -> Iterator[Case]:
    for seed, (n, kind) in enumerate(zip(_LENGTHS, cycle(VALUES), strict=False)):
        x = values(kind, (n,), seed, F32)
        yield Case(f"N={n} {kind}", {"x": x, "mailbox": poisoned((n,), torch.int64)}, {"tag": 1 + seed * 10**8})


def handoff_sum() -> Iterator[Case]:
    for seed, (n, kind) in enumerate(zip(_LENGTHS, cycle(VALUES), strict=False)):
        tag, sent = 1 + seed * 10**8, values("normal", (n,), seed + 1, F32)
        mailbox = (tag << 32) | (sent.view(torch.int32).to(torch.int64) & 0xFFFFFFFF)
        outputs = {"out": poisoned((n,), BF16 if seed % 2 else F32), "status": torch.zeros(2, dtype=torch.int32)}
        residual = values("normal", (n,), seed + 2) if seed % 3 else None
        own = values(kind, (n,), seed, F32)
        yield Case(f"N={n} {kind}", {"own": own, "mailbox": mailbox, "residual": residual, **outputs}, {"tag": tag})


def _flags(n: int, value: int) -> Tensor:
    return torch.full((n, 32), value, dtype=torch.int32)[:, 0]  # a flag a line of 128 bytes


def flag_set() -> Iterator[Case]:
    for n in range(1, 22):
        yield Case(f"F={n}", {"flag": _flags(n, 0)}, {"value": n * 100 + 1})


def flag_wait() -> Iterator[Case]:
    """All flags up, or some that stay behind, each with a value of its own; what a status held before stays in it."""
    for n in range(1, 22):
        flag, status = _flags(n, n + 5), torch.tensor([3 * n, 7 * n], dtype=torch.int32)
        late = list(range(0, n, 3)) if n % 4 else []
        for index in late:
            flag[index] = 1000 + index
        label = f"F={n} late={len(late)}"
        yield Case(label, {"flag": flag, "status": status}, {"value": n + 5, "spin_limit": 64})


def probe_stream() -> Iterator[Case]:
    """Word counts around the reach of a block, odd and even passes."""
    for seed, n in enumerate(
        [4, 8, 252, 256, 260, 1024, 1028, 4096, 4100, 12, 16, 20, 1020, 2048, 2052, 64, 128, 508, 8192, 3000]
    ):
        generator = torch.Generator().manual_seed(seed)
        src = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, generator=generator)
        # Words that no two lanes share and that fold to something: what is not written then shows in the XOR.
        out = torch.randint(1, 2**31 - 1, (256 * (1 + seed % 3),), dtype=torch.int32, generator=generator)
        yield Case(
            f"N={n} blocks={1 + seed % 3} passes={1 + seed % 2}", {"src": src, "out": out}, {"passes": 1 + seed % 2}
        )


def probe_chase() -> Iterator[Case]:
    """One cycle through all elements, in random order, with every cache row."""
    rows = ("keep", "stream_once", "workgroup", "agent", "system")
    for seed, cache in zip(range(20), cycle(rows), strict=False):
        n, hops = 16 * (seed + 1), 2 + 3 * seed
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        following = torch.empty(n, dtype=torch.int32)
        following[order] = order.roll(-1).to(torch.int32)
        attrs = {"hops": hops, "start": seed, "cache": cache}
        yield Case(f"N={n} hops={hops} {cache}", {"following": following, "out": poisoned((4,), torch.int64)}, attrs)


def probe_ping_pong() -> Iterator[Case]:
    """Both parties in one launch, rounds 1 to 20, either scope."""
    for rounds in range(1, 21):
        scope = ("system", "agent")[rounds % 2]
        flags = {name: torch.zeros(32, dtype=torch.int32) for name in ("ping", "pong")}
        attrs = {"rounds": rounds, "first": 1 + 100 * rounds, "spin_limit": 1 << 16, "scope": scope}
        yield Case(f"rounds={rounds} {scope}", {**flags, "out": poisoned((2, 4), torch.int64)}, attrs)
