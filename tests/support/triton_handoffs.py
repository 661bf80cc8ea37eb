"""Hand-offs by Triton's interpreter, run in a child process with TRITON_INTERPRET=1; prints one JSON object.

A "graph" is a list of launches recorded once, with all their host numbers, and replayed by `timing.Eager`: what a
captured graph does to host numbers. The interpreter runs one launch after the other, so that the two shards' launches
stand in an order in which each wait finds its words, or, for the faults, does not.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dieplace.backends.torch_timing import Eager
from dieplace.errors import DieplaceError
from dieplace.kernels import exchange, registry

WIDTH, POISON = 300, -77
run = partial(registry.run, backend="triton", strict=True)


def pair(width: int = WIDTH, slots: int = 4) -> exchange.Exchange:
    def make(side: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    return exchange.between(("a", "b"), make, slots=slots, width=width, spin_limit=50)


def sums(found: exchange.Exchange, slots: range, x: list[Tensor], out: list[list[Tensor]]) -> list[Any]:
    """Both shards' launches of a step: in each slot both put, then both add."""
    launches: list[Any] = []
    for number, slot in enumerate(slots):
        launches += [partial(side.put, slot, x[i]) for i, side in enumerate(found.sides)]
        launches += [partial(side.sum, slot, x[i], out[i][number]) for i, side in enumerate(found.sides)]
    return launches + [side.next for side in found.sides]


def three_replays(poisoned: bool) -> list[list[float]]:
    """The largest and smallest output of each replay, for inputs 1, 2, 3 on one side and ten times as much there."""
    found = pair()
    x = [torch.zeros(WIDTH) for _ in range(2)]
    out = [[torch.zeros(WIDTH) for _ in range(2)] for _ in range(2)]
    graph = Eager(tuple(sums(found, found.program(2), x, out)))
    seen = []
    for value in (1.0, 2.0, 3.0):
        x[0].fill_(value), x[1].fill_(10 * value)
        if poisoned:
            for side in found.sides:
                side.inboxes.fill_(POISON)
        graph.replay()
        found.require_arrival()
        results = torch.stack([t for side in out for t in side])
        seen.append([float(results.min()), float(results.max())])
    return seen


def baked(counted: bool) -> dict[str, Any]:
    """The fault: the add comes before its words do. A baked-in tag takes the last replay's words at once."""
    found = pair()
    a, b = found.sides
    x, out, epoch = torch.zeros(WIDTH), torch.zeros(WIDTH), {"epoch": a.epoch} if counted else {}
    put = partial(run, "handoff_put", {"x": x, "mailbox": b.inboxes[0], **epoch}, {"tag": 1})
    own = {"own": torch.zeros(WIDTH), "mailbox": b.inboxes[0], "out": out, "status": b.status, "record": b.record}
    add = partial(run, "handoff_sum", {**own, **epoch}, {"tag": 1, "spin_limit": 50})
    x.fill_(1.0)
    for launch in (put, add, a.next):
        launch()
    x.fill_(2.0)
    Eager((add, put, a.next)).replay()  # a fast consumer: it waits before this replay's words are there
    return {"status": b.status.tolist(), "record": b.record.tolist(), "out": float(out[0]), "told": told(found)}


def told(found: exchange.Exchange) -> str | None:
    try:
        found.require_arrival()
    except DieplaceError as error:
        return str(error)
    return None


def two_graphs() -> dict[str, Any]:
    """Two graphs of one set: in turn they are right; shards that replay them in different order are told."""
    found = pair()
    x = [torch.ones(WIDTH), 10 * torch.ones(WIDTH)]
    outs = [[[torch.zeros(WIDTH) for _ in range(2)] for _ in range(2)] for _ in range(2)]
    launches = [sums(found, found.program(2), x, out) for out in outs]
    graphs = [Eager(tuple(one)) for one in launches]
    right = []
    for number in (0, 1, 1, 0):
        x[0].fill_(number + 1.0), x[1].fill_(10.0 * (number + 1))
        graphs[number].replay()
        right.append(float(outs[number][1][0].max()))
    found.require_arrival()
    mine, other = launches[0], launches[1]
    # Side a replays the first graph, side b the second: each puts, and each waits for what the other never sends.
    Eager((mine[0], other[1], mine[2], other[3])).replay()
    crossed = told(found)
    found.reset()
    graphs[0].replay()
    found.require_arrival()
    try:
        found.program(1)
    except DieplaceError as error:
        single = str(error)
    return {"right": right, "crossed": crossed, "single": single, "after": float(outs[0][0][0].min())}


def writer_then_poller() -> dict[str, Any]:
    """Flags on lines of their own, set and awaited over three steps; then one that never comes."""
    lines = torch.full((5, 32), 3, dtype=torch.int32)
    flags, epoch = lines[:, 0], torch.tensor([0x7FFFFFFF - 63], dtype=torch.int32)
    status, record = torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    values = []
    for _ in range(3):
        run("flag_set", {"flag": flags, "epoch": epoch}, {"value": 9})
        run("flag_wait", {"flag": flags, "status": status, "epoch": epoch, "record": record}, {"value": 9})
        values.append(int(flags[4]))
        run("epoch_next", {"epoch": epoch}, {})
    good = status.tolist()
    flags[3] = 5
    attrs = {"value": 9, "spin_limit": 20}
    run("flag_wait", {"flag": flags, "status": status, "epoch": epoch, "record": record}, attrs)
    return {
        "values": values,
        "good": good,
        "status": status.tolist(),
        "record": record.tolist(),
        "rest": lines[:, 1:].unique().tolist(),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "replays": three_replays(poisoned=False),
                "poisoned": three_replays(poisoned=True),
                "baked": baked(counted=False),
                "counted": baked(counted=True),
                "two_graphs": two_graphs(),
                "flags": writer_then_poller(),
            }
        )
    )
