"""Check cases of hand-offs, flags and probes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

import torch
from torch import Tensor

from dieplace.kernels.cases_values import BF16, F32, VALUES, Case, poisoned, values
from dieplace.kernels.reference_handoff import MASK

_LENGTHS = [1, 2, 63, 64, 65, 100, 255, 256, 257, 1000, 2880, 5760, 8, 31, 33, 127, 128, 129, 500, 2879, 3]


def handoff_put() -> Iterator[Case]:
    for seed, (n, kind) in enumerate(zip(_LENGTHS, cycle(VALUES), strict=False)):
        x = values(kind, (n,), seed, F32)
        epoch = _epoch(seed)
        label = f"N={n} {kind}{_counted(epoch)}"
        operands = {"x": x, "mailbox": poisoned((n,), torch.int64), "epoch": epoch}
        yield Case(label, operands, {"tag": 1 + seed * 10**8})


def handoff_sum() -> Iterator[Case]:
    for seed, (n, kind) in enumerate(zip(_LENGTHS, cycle(VALUES), strict=False)):
        tag, sent, epoch = 1 + seed * 10**8, values("normal", (n,), seed + 1, F32), _epoch(seed)
        arrived = tag if epoch is None else (int(epoch[0]) + tag) & MASK
        mailbox = (arrived << 32) | (sent.view(torch.int32).to(torch.int64) & 0xFFFFFFFF)
        if seed % 4 == 3:  # words that never come: a tag of their own each, the last of which is told
            mailbox[::3] = (torch.arange(len(mailbox[::3])) + 7) << 32 | 0x3F800000
        outputs = {"out": poisoned((n,), BF16 if seed % 2 else F32), "status": torch.zeros(2, dtype=torch.int32)}
        residual = values("normal", (n,), seed + 2) if seed % 3 else None
        own = values(kind, (n,), seed, F32)
        given = {"own": own, "mailbox": mailbox, "residual": residual, "epoch": epoch, "record": _record(seed)}
        attrs = {"tag": tag, "spin_limit": 64}
        yield Case(f"N={n} {kind}{_counted(epoch)}", {**given, **outputs}, attrs)


def _epoch(number: int) -> Tensor | None:
    """No counter, one of a program's start, of some way on, and one that is about to wrap at 31 bits."""
    start = (None, 0, 64 * 4321, MASK - 63)[number % 4]
    return None if start is None else torch.tensor([start], dtype=torch.int32)


def _counted(epoch: Tensor | None) -> str:
    return "" if epoch is None else f" epoch={int(epoch[0])}"


def _record(number: int) -> Tensor | None:
    """None, an empty one, or one that an earlier wait has written, which must stay."""
    kept = (None, [0, 0, 0, 0], [9, 8, 7, 6])[number % 3]
    return None if kept is None else torch.tensor(kept, dtype=torch.int32)


def _flags(n: int, value: int) -> Tensor:
    return torch.full((n, 32), value, dtype=torch.int32)[:, 0]  # a flag a line of 128 bytes


def flag_set() -> Iterator[Case]:
    for n in range(1, 22):
        epoch = _epoch(n)
        yield Case(f"F={n}{_counted(epoch)}", {"flag": _flags(n, 0), "epoch": epoch}, {"value": n * 100 + 1})


def flag_wait() -> Iterator[Case]:
    """All flags up, or some that stay behind, each with a value of its own; what a status held before stays in it."""
    for n in range(1, 22):
        epoch, status = _epoch(n), torch.tensor([3 * n, 7 * n], dtype=torch.int32)
        flag = _flags(n, n + 5 if epoch is None else (int(epoch[0]) + n + 5) & MASK)
        late = list(range(0, n, 3)) if n % 4 else []
        for index in late:
            flag[index] = 1000 + index
        label = f"F={n} late={len(late)}{_counted(epoch)}"
        operands = {"flag": flag, "status": status, "epoch": epoch, "record": _record(n)}
        yield Case(label, operands, {"value": n + 5, "spin_limit": 64})


def epoch_next() -> Iterator[Case]:
    """Counters near both ends of 31 bits, and in between."""
    for number, (start, step) in enumerate(product((0, 1, 64, 4096, MASK - 63, MASK - 64, MASK), (1, 64, 1 << 20))):
        epoch = torch.tensor([start], dtype=torch.int32)
        yield Case(f"{number}: {start} + {step}", {"epoch": epoch}, {"step": step})


def flag_visibility() -> Iterator[Case]:
    """Writer and readers in one launch: 1 to 4 readers, 1 to 8 rounds, either scope; lines hold junk beside words."""
    for number in range(20):
        readers, rounds, scope = 1 + number % 4, 1 + number % 8, ("system", "agent")[number % 3 == 2]
        flag, acks = (torch.arange(n, dtype=torch.int32) % 32 for n in (32, 32 * readers))
        operands: dict[str, Tensor | None] = {
            "flag": flag,
            "acks": acks,
            "stamps": poisoned((1 + readers, rounds), torch.int64),
            "xcc": poisoned((1 + readers,), torch.int32),
        }
        attrs = {"first": 100 * number + 50, "spin_limit": 1 << 16, "scope": scope}
        yield Case(f"{number}: readers={readers} rounds={rounds} {scope}", operands, attrs)


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
