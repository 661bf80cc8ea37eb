"""The measuring loop on simulated arms, and the cold/warm rule on the published cache sizes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dieplace.errors import UsageError
from dieplace.experiments.harness import CONTROL, Plan, measure
from dieplace.experiments.rotation import LAST_CACHE_BYTES, buffers_needed, rotation
from dieplace.experiments.statistics import verdict


class Bench:
    """A simulated device: arms with their true times, slow drift, noise; counts what it is asked."""

    def __init__(self, seed: int, drift: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.drift = drift
        self.taken = 0

    def arm(self, scale: float):
        def sample() -> float:
            self.taken += 1
            return scale * (1 + self.drift * self.taken) * self.random.lognormvariate(0, 0.01)

        return sample


def test_finds_the_effect_and_no_other_under_drift() -> None:
    bench = Bench(1, drift=0.002)  # 30 % over the run: an unpaired comparison of halves would report it
    arms = {"local": bench.arm(100), "swapped": bench.arm(128), "same": bench.arm(100)}
    found = measure(arms, Plan(seed=3, min_blocks=30, max_blocks=60, half_width=0.0001))
    swapped = found.against_first("swapped")
    assert verdict(swapped, control=found.control).kind == "slower"
    assert swapped.value == pytest.approx(1.28, abs=0.02)
    assert verdict(found.against_first("same"), control=found.control).kind == "no difference"
    assert verdict(found.control).kind == "no difference"


def test_blocks_are_shuffled_from_the_seed_and_complete() -> None:
    plan = Plan(seed=9, max_blocks=40, half_width=0.0)
    runs = [measure({"a": lambda: 1.0, "b": lambda: 2.0}, plan) for _ in range(2)]
    assert runs[0].order == runs[1].order
    assert (
        measure({"a": lambda: 1.0, "b": lambda: 2.0}, Plan(seed=10, max_blocks=40, half_width=0.0)).order
        != runs[0].order
    )
    assert all(sorted(block) == sorted(["a", "b", CONTROL]) for block in runs[0].order)
    firsts = Counter(block[0] for block in runs[0].order)
    assert set(firsts) == {"a", "b", CONTROL}  # nobody always goes first


def test_stops_when_narrow_when_spent_and_at_the_limit() -> None:
    quiet = {"a": lambda: 1.0, "b": lambda: 1.5}
    narrow = measure(quiet, Plan(seed=1, min_blocks=20))
    assert len(narrow.order) == 20 and "within" in narrow.stopped
    clock = iter(range(10_000))
    bench = Bench(2)
    noisy = {"a": bench.arm(1.0), "b": bench.arm(1.0)}
    spent = measure(noisy, Plan(seed=1, half_width=0.0, budget_s=12), now=lambda: float(next(clock)))
    assert len(spent.order) == 13 and "budget" in spent.stopped
    most = measure(noisy, Plan(seed=1, half_width=0.0, max_blocks=25))
    assert len(most.order) == 25 and "most allowed" in most.stopped


def test_interrupt_keeps_whole_blocks_only() -> None:
    calls = 0

    def fails_late() -> float:
        nonlocal calls
        calls += 1
        if calls == 3 + 8:  # three warm-ups, then the eighth block
            raise KeyboardInterrupt
        return 2.0

    found = measure({"a": lambda: 1.0, "b": fails_late}, Plan(seed=4))
    assert found.stopped == "interrupted"
    assert {len(values) for values in found.samples.values()} == {7} and len(found.order) == 7


def test_warmups_are_kept_apart() -> None:
    values = iter([50.0, 20.0, 10.0])
    found = measure({"a": lambda: next(values, 1.0), "b": lambda: 1.0}, Plan(seed=1, max_blocks=20))
    assert found.warmups["a"] == (50.0, 20.0, 10.0)
    assert set(found.samples["a"]) == {1.0}


def test_one_arm_is_no_comparison() -> None:
    with pytest.raises(UsageError, match="two arms"):
        measure({"a": lambda: 1.0}, Plan(seed=1))


def test_rotation_of_the_published_sizes() -> None:
    """Case h1: H200 (60 MiB) with 8 MiB needs 15 buffers; MI355X (256 MiB) with 29.49 MB needs 19."""
    assert buffers_needed(8 << 20, LAST_CACHE_BYTES["H200"]) == 15
    assert buffers_needed(29_491_200, LAST_CACHE_BYTES["MI355X"]) == 19
    raised = rotation(8 << 20, 60 << 20, 4)
    assert raised.cold and raised.iterations == 15 and raised.buffers == 15
    kept = rotation(8 << 20, 60 << 20, 4, fixed=True)
    assert not kept.cold and kept.words.startswith("warm") and kept.iterations == 4
    assert rotation(1 << 30, 60 << 20, 10).buffers == 1
    with pytest.raises(UsageError):
        buffers_needed(0, 1)
