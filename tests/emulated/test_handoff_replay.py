"""A step with hand-offs, recorded once and replayed on two dies at once, as a captured graph is (FlyDSL, gfx950 ISA).

aiter PR 3928, DeepGEMM PR 451, torchcomms PR 1177: on replay a wait passed at once and read the last replay's data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dieplace.codegen.launch import Launch, run_with
from dieplace.emulator.execution import concurrent, run
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.errors import KernelFault
from dieplace.kernels import exchange, registry
from dieplace.machine import Domain

DOMAINS = tuple(Domain(f"gpu0/mem{d}", "gpu0", (d,), 1 << 30) for d in (0, 1))
WIDTH = 40
op = partial(registry.run, backend="flydsl", strict=True)


class Shards:
    """Two shards' tensors on two dies, and what each die was launched with, recorded once."""

    def __init__(self, *, spin_limit: int = 200_000, backend: str = "flydsl") -> None:
        self.memory = EmulatedHBM(DOMAINS)
        self.recorded: list[list[Launch]] = [[], []]
        self.set = exchange.between(
            ("p0", "p1"),
            lambda side, shape, dtype: self.new(side, *shape, dtype=getattr(torch, dtype), role="sync_flag"),
            slots=4, width=WIDTH, spin_limit=spin_limit, backend=backend,
        )  # fmt: skip
        self.x = [self.new(d, WIDTH) for d in (0, 1)]
        self.out = [[self.new(d, WIDTH) for _ in range(2)] for d in (0, 1)]

    def new(self, die: int, *shape: int, dtype: torch.dtype = torch.float32, role: str = "activation") -> Tensor:
        return self.memory.empty(shape, dtype, DOMAINS[die].id, role=role).zero_()

    def record(self, die: int, *calls: Callable[[], Any]) -> None:
        """Keep what `calls` would launch on a die, with all host numbers as they are now."""
        with run_with(lambda launch, stream: self.recorded[die].append(launch)):
            for call in calls:
                call()

    def step(self) -> None:
        """Two hand-offs a side, then the counter goes on."""
        for die, (side, out) in enumerate(zip(self.set.sides, self.out, strict=True)):
            for slot in range(2):
                self.record(die, partial(side.put, slot, self.x[die]), partial(side.sum, slot, self.x[die], out[slot]))
            self.record(die, side.next)

    def replay(self, seed: int, value: float) -> list[float]:
        """Both dies at once, in an order drawn from the seed; every output's first value."""
        self.x[0].fill_(value), self.x[1].fill_(10 * value)
        with concurrent(seed=seed):
            for die in (1, 0):
                for launch in self.recorded[die]:
                    run(launch.launcher, *launch.args, device=f"gpu0/p{die}", memory=self.memory)
        return [float(t[0]) for side in self.out for t in side]


@pytest.mark.parametrize("seed", range(3))
def test_outputs_follow_the_input_and_poison_is_never_read(seed: int) -> None:
    shards = Shards()
    shards.step()
    for value in (1.0, 2.0, 3.0):
        assert shards.replay(seed, value) == [11 * value] * 4
        shards.set.require_arrival()
        for side in shards.set.sides:
            side.inboxes.fill_(-77)


def test_a_baked_in_tag_reads_the_last_replay() -> None:
    """The fault: the same hand-off without the counter. Some order of the two dies then takes old words."""
    stale = []
    for seed in range(4):
        shards = Shards()
        for die, side in enumerate(shards.set.sides):
            put = {"x": shards.x[die], "mailbox": side.outboxes[0]}
            add = {"own": shards.x[die], "mailbox": side.inboxes[0], "residual": None, "out": shards.out[die][0],
                   "status": side.status}  # fmt: skip
            shards.record(die, partial(op, "handoff_put", put, {"tag": 1}))
            shards.record(die, partial(op, "handoff_sum", add, {"tag": 1, "spin_limit": 200_000}))
        results = [shards.replay(seed, value)[::2] for value in (1.0, 2.0, 3.0)]
        stale.append(results != [[11.0, 11.0], [22.0, 22.0], [33.0, 33.0]])
        assert all(side.status.tolist() == [0, 0] for side in shards.set.sides), "nobody is told"
    assert any(stale)


def test_a_partner_that_stays_away_is_a_typed_error_and_the_set_is_usable_again() -> None:
    """tt-umd issue 3111: the wait ends, and says flag, expected, last value and block."""
    shards = Shards(spin_limit=3000)
    shards.step()
    kept, shards.recorded[0] = shards.recorded[0], []
    shards.replay(0, 1.0)
    with pytest.raises(
        KernelFault, match=r"p1, block 0, waited for mailbox of slot 0 \[39\] to hold 1: 80 never"
    ) as told:
        shards.set.require_arrival()
    assert told.value.facts["expected"] == 1 and told.value.facts["last_read"] == 0 and told.value.facts["block"] == 0
    shards.recorded[0] = kept
    shards.set.reset()
    for value in (4.0, 5.0):
        assert shards.replay(1, value) == [11 * value] * 4
    shards.set.require_arrival()


@pytest.mark.parametrize("seed", range(2))
def test_tritons_code_objects_hand_over_between_the_dies(seed: int) -> None:
    """The same step by Triton's gfx950 code on both dies at once: a second opinion on scopes and on the counter.

    Triton's own choice of instructions is what is tested: it makes buffer accesses of some loads and stores, and drops
    from them what a hand-off between dies needs.
    """
    from dieplace.emulator.execution import Session
    from dieplace.emulator.triton_launch import triton_kernels

    shards = Shards(backend="triton")
    calls: list[list[Callable[[], Any]]] = [[], []]
    for die, (side, out) in enumerate(zip(shards.set.sides, shards.out, strict=True)):
        for slot in range(2):
            calls[die] += [partial(side.put, slot, shards.x[die]), partial(side.sum, slot, shards.x[die], out[slot])]
        calls[die].append(side.next)
    for value in (1.0, 2.0, 3.0):
        shards.x[0].fill_(value), shards.x[1].fill_(10 * value)
        with triton_kernels(), concurrent(seed=seed):
            for die in (1, 0):
                with Session(device=f"gpu0/p{die}", memory=shards.memory):
                    for call in calls[die]:
                        call()
        assert [float(t[0]) for side in shards.out for t in side] == [11 * value] * 4
        shards.set.require_arrival()
        for side in shards.set.sides:
            side.inboxes.fill_(-77)


def test_tritons_flags_publish_between_the_dies() -> None:
    """Die 0 fills a row and raises a flag on die 1, which waits, and copies the row."""
    from dieplace.emulator.execution import Session
    from dieplace.emulator.triton_launch import triton_kernels
    from dieplace.probes import triton_stream

    shards = Shards(backend="triton")
    flag, status = (shards.new(1, n, dtype=torch.int32, role="sync_flag") for n in (32, 2))
    clock = shards.new(0, 1, dtype=torch.int32, role="sync_flag")
    given, row = (shards.new(0, 4096, dtype=torch.int32) for _ in range(2))
    seen = shards.new(1, 4096, dtype=torch.int32)
    run_triton = partial(registry.run, backend="triton", strict=True)
    for value in (5, 6):
        given.fill_(value)
        with triton_kernels(), concurrent(seed=value):
            with Session(device="gpu0/p1", memory=shards.memory):
                run_triton("flag_wait", {"flag": flag[:1], "status": status}, {"value": value, "spin_limit": 100_000})
                triton_stream.copy(row, seen, device=None)
            with Session(device="gpu0/p0", memory=shards.memory):
                triton_stream.copy(given, row, device=None)
                run_triton("flag_set", {"flag": flag[:1], "epoch": clock}, {"value": value})
        assert status.tolist() == [0, 0] and seen.unique().tolist() == [value]
