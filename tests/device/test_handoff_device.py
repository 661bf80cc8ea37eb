"""Hand-offs between two real GPUs, under real CUDA graphs.

Run by hand: python -m pytest tests/device/test_handoff_device.py -s -rs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from dieplace.errors import KernelFault, UsageError
from dieplace.kernels import exchange, registry
from dieplace.kernels.arrival import require_arrival
from dieplace.kernels.check import check_op

pytestmark = pytest.mark.device
WIDTH, SLOTS = 2880, 8
Calls = Sequence[Callable[[], Any]]
run = partial(registry.run, backend="triton", strict=True)


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.device_count() < 2:
        pytest.skip("two visible GPUs are needed to hand anything over")
    for a, b in ((0, 1), (1, 0)):  # torch enables peer access in a copy between them
        torch.ones(1, device=f"cuda:{a}").to(f"cuda:{b}")


def synchronize() -> None:
    import torch

    for index in (0, 1):
        torch.cuda.synchronize(index)


def graph_of(index: int, calls: Calls) -> Any:
    import torch

    with torch.cuda.device(index):
        stream, graph = torch.cuda.Stream(device=index), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


class Shards:
    """Two GPUs, each with an input, an output a slot, and graphs of two hand-offs."""

    def __init__(self, spin_limit: int = exchange.SPIN_LIMIT) -> None:
        import torch

        def make(side: int, shape: tuple[int, ...], dtype: str) -> Any:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{side}")

        self.set = exchange.between(("gpu0/p0", "gpu1/p0"), make, slots=SLOTS, width=WIDTH, spin_limit=spin_limit)
        self.x = [torch.zeros(WIDTH, device=f"cuda:{i}") for i in (0, 1)]
        self.out = [torch.zeros(SLOTS, WIDTH, device=f"cuda:{i}") for i in (0, 1)]

    def calls(self, slots: range) -> list[Calls]:
        """What each GPU launches in one step over these slots."""
        found: list[Calls] = []
        for i, side in enumerate(self.set.sides):
            mine: list[Callable[[], Any]] = []
            for slot in slots:
                mine += [partial(side.put, slot, self.x[i]), partial(side.sum, slot, self.x[i], self.out[i][slot])]
            found.append([*mine, side.next])
        return found

    def capture(self, slots: range) -> list[Any]:
        """A graph on each GPU; the launches run once before, so that nothing is compiled while somebody waits."""
        calls = self.calls(slots)
        for mine in calls:
            for call in mine:
                call()
        synchronize()
        self.set.reset()
        graphs = [graph_of(i, mine) for i, mine in enumerate(calls)]
        synchronize()
        return graphs

    def replay(self, graphs: Sequence[Any], value: float, *, first: int = 0) -> None:
        """Both GPUs at once; `first` names the one that is started 20 ms before the other."""
        import torch

        self.x[0].fill_(value), self.x[1].fill_(10 * value)
        synchronize()
        for index in (first, 1 - first):
            with torch.cuda.device(index):
                graphs[index].replay()
            time.sleep(0.02)
        synchronize()

    def seen(self, slots: range) -> set[float]:
        return {float(v) for out in self.out for slot in slots for v in out[slot].unique().tolist()}


@pytest.fixture
def shards() -> Iterator[Shards]:
    yield Shards()
    synchronize()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("op", ["handoff_put", "handoff_sum", "flag_set", "flag_wait", "epoch_next", "flag_visibility"])
def test_every_case_of_the_contract(op: str, index: int) -> None:
    found = check_op(op, "triton", device=f"cuda:{index}")
    assert found.ok and found.cases >= 20, [f"{f.case}: {f.reason}" for f in found.failures[:3]]


@pytest.mark.parametrize("first", [0, 1])
def test_outputs_follow_the_input_and_poison_is_never_read(shards: Shards, first: int) -> None:
    slots = shards.set.program(2)
    graphs = shards.capture(slots)
    for value in (1.0, 2.0, 3.0):
        for side in shards.set.sides:
            side.inboxes.fill_(-77)
        shards.replay(graphs, value, first=first)
        shards.set.require_arrival()
        assert shards.seen(slots) == {11 * value}


def test_a_thousand_replays_back_to_back(shards: Shards) -> None:
    """A fast shard never overwrites what a slow one has yet to read; the counters wrap once on the way."""
    import torch

    slots = shards.set.program(2)
    graphs = shards.capture(slots)
    for side in shards.set.sides:
        side.epoch.fill_(0x7FFFFFFF - 500 * exchange.STEP + 1 - exchange.STEP)
    shards.x[0].fill_(1.0), shards.x[1].fill_(10.0)
    synchronize()
    for _ in range(1000):
        for index in (0, 1):
            with torch.cuda.device(index):
                graphs[index].replay()
    synchronize()
    shards.set.require_arrival()
    assert shards.seen(slots) == {11.0}


def test_a_baked_in_tag_reads_the_last_replay(shards: Shards) -> None:
    """The fault: without the counter, a consumer that is started early takes the last replay's words."""
    import torch

    put = {"x": shards.x[0], "mailbox": shards.set.sides[1].inboxes[0]}
    side = shards.set.sides[1]
    add = {"own": torch.zeros(WIDTH, device="cuda:1"), "mailbox": side.inboxes[0], "out": shards.out[1][0],
           "status": side.status}  # fmt: skip
    calls: list[Calls] = [
        [partial(run, "handoff_put", put, {"tag": 1})], [partial(run, "handoff_sum", add, {"tag": 1})]
    ]  # fmt: skip
    for mine in calls:
        mine[0]()
        synchronize()
    graphs = [graph_of(i, mine) for i, mine in enumerate(calls)]
    shards.replay(graphs, 1.0)
    assert float(shards.out[1][0][0]) == 1.0
    shards.replay(graphs, 2.0, first=1)
    assert float(shards.out[1][0][0]) == 1.0, "the old words, not the 2.0 that this replay sent"
    assert side.status.tolist() == [0, 0], "and nobody is told"


def test_two_graphs_of_one_set(shards: Shards) -> None:
    """Right in turn; crossed they end in a time-out that says so, and the set can be used again."""
    programs = [shards.set.program(2), shards.set.program(3)]
    graphs = [shards.capture(slots) for slots in programs]
    for number in (0, 1, 1, 0, 1):
        shards.replay(graphs[number], number + 1.0)
        shards.set.require_arrival()
        assert shards.seen(programs[number]) == {11.0 * (number + 1)}
    quick = Shards(spin_limit=20_000)
    programs = [quick.set.program(2), quick.set.program(3)]
    graphs = [quick.capture(slots) for slots in programs]
    quick.replay([graphs[0][0], graphs[1][1]], 1.0)
    with pytest.raises(KernelFault, match="waited for mailbox of slot"):
        quick.set.require_arrival()
    quick.set.reset()
    quick.replay(graphs[0], 3.0)
    quick.set.require_arrival()
    assert quick.seen(programs[0]) == {33.0}
    with pytest.raises(UsageError, match="do not fit"):
        quick.set.program(4)


def test_a_partner_that_stays_away_ends_in_one_limit(shards: Shards) -> None:
    """tt-umd issue 3111: eight waits, one limit; the error names the mailbox, both values and the block."""
    import torch

    slots = shards.set.program(8)
    graphs = shards.capture(slots)
    started = time.monotonic()
    with torch.cuda.device(1):
        graphs[1].replay()
    synchronize()
    seconds = time.monotonic() - started
    print(f"a step of {len(slots)} hand-offs without a partner ended after {seconds:.2f} s")
    assert seconds < 10
    with pytest.raises(
        KernelFault, match=r"gpu1/p0, block 0, waited for mailbox of slot 0 \[2879\] to hold 1: "
    ) as told:
        shards.set.require_arrival()
    assert told.value.facts["last_read"] == 0


def test_a_flag_publishes_what_was_written_before_it() -> None:
    """GPU 0 writes a payload into GPU 1's memory and raises a flag there; GPU 1 waits and compares, 200 times.

    Nothing is allocated while a kernel waits: memory is mapped for the peer too, which waits for that kernel.
    """
    import torch

    from dieplace.probes import triton_stream

    count = 1 << 16
    payload, seen, wrong = (torch.zeros(count, dtype=torch.int32, device="cuda:1") for _ in range(3))
    expected = torch.zeros(1, dtype=torch.int32, device="cuda:1")
    filled, value = (torch.zeros(n, dtype=torch.int32, device="cuda:0") for n in (count, 1))
    flags = {name: torch.zeros(32, dtype=torch.int32, device=f"cuda:{i}")[:1] for i, name in ((1, "go"), (0, "back"))}
    words = [
        {name: torch.zeros(n, dtype=torch.int32, device=f"cuda:{i}") for name, n in (("epoch", 1), ("status", 2))}
        for i in (0, 1)
    ]
    waited = {"value": 1, "spin_limit": 1 << 24}

    def hand(op: str, index: int, flag: str, attrs: dict[str, int]) -> None:
        kept = {"epoch": words[index]["epoch"], **({"status": words[index]["status"]} if op == "flag_wait" else {})}
        run(op, {"flag": flags[flag], **kept}, attrs)

    def write() -> None:
        value.add_(1)
        filled.copy_(value.expand(count))
        triton_stream.copy(filled, payload, device=0)
        hand("flag_set", 0, "go", {"value": 1})
        hand("flag_wait", 0, "back", waited)
        run("epoch_next", {"epoch": words[0]["epoch"]})

    def read() -> None:
        hand("flag_wait", 1, "go", waited)
        triton_stream.copy(payload, seen, device=1)
        expected.add_(1)
        wrong.add_(seen.ne_(expected))
        hand("flag_set", 1, "back", {"value": 1})
        run("epoch_next", {"epoch": words[1]["epoch"]})

    for compiled in (True, False):
        for flag in flags.values():
            flag.fill_(int(compiled))
        for tensor in (*(t for one in words for t in one.values()), value, expected, wrong):
            tensor.zero_()
        synchronize()
        for _ in range(1 if compiled else 200):
            for index, call in ((1, read), (0, write)):
                with torch.cuda.device(index):
                    call()
            if compiled:  # with the flags up already nobody waits: kernels are compiled and memory is there
                synchronize()
    synchronize()
    for index in (0, 1):
        require_arrival(words[index]["status"], flag="flag", expected=1, waiter=f"gpu{index}")
    assert not wrong.any() and int(expected) == 200
