"""flags: the emulated run from the kernel's ISA, and the measured one's arithmetic on a rig of known times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from dieplace.errors import KernelFault, Unsupported, UsageError
from dieplace.experiments import flags, flags_emulated
from dieplace.experiments.harness import Plan
from dieplace.experiments.registry import Options, get
from dieplace.kernels.arrival import require_rounds
from dieplace.run import Run

PLAN = Plan(seed=3, warmups=1, min_blocks=20, max_blocks=20)
HOME_NS = {"consumer": 2000.0, "producer": 2600.0, "host": 4000.0}


class Rig:
    """Round trips of known length: by home, and a tenth more for each doubling of the pollers."""

    def __init__(self) -> None:
        self.noise = random.Random(1)

    def truth(self, arm: flags.Arm) -> float:
        return HOME_NS[arm.home] * (1 + 0.1 * (arm.pollers.bit_length() - 1))

    def round_trip(self, arm: flags.Arm) -> Callable[[], float]:
        return lambda: self.truth(arm) * self.noise.lognormvariate(0, 0.002)

    def residency(self, home: str) -> Mapping[str, Any]:
        return {"evidence": "probed", "bytes_by_role_and_domain": {"sync_flag": {home: 128}}}


@pytest.fixture(scope="module")
def emulated() -> Run:
    (run,) = get("flags").run("emulated", Options(), lambda words: None)
    return run


def test_arms_are_every_home_and_number_of_pollers_on_one_device_and_on_both() -> None:
    names = [arm.name for arm in flags.arms()]
    assert len(set(names)) == len(names) == 3 * 7 + 3 * 3
    assert names[0] == "consumer 1" and "host 32+32" in names
    both = [arm for arm in flags.arms() if arm.near]
    assert {(arm.near, arm.far) for arm in both} == {(1, 1), (4, 4), (32, 32)}


def test_half_is_half_and_ratios_are_of_pairs() -> None:
    rig = Rig()
    points, measured = flags.points_of(rig, PLAN)
    by_arm = {point.arm: point for point in points}
    assert len(measured.order) == 20
    for arm in flags.arms():
        found = by_arm[arm.name].quantities
        assert found["round_trip_ns"].value == pytest.approx(rig.truth(arm), rel=0.01)
        assert len(found["round_trip_ns"].samples) == 20
        assert found["half_round_trip_ns"].value == pytest.approx(found["round_trip_ns"].value / 2)
        assert "half of the round trip" in found["half_round_trip_ns"].method
        if arm.home != "consumer":
            expected = HOME_NS[arm.home] / HOME_NS["consumer"]
            assert found["time_over_consumer"].value == pytest.approx(expected, rel=0.01)
            assert found["time_over_consumer"].low <= expected * 1.01
        if arm.pollers > 1:
            assert found["time_over_one_poller"].value == pytest.approx(rig.truth(arm) / HOME_NS[arm.home], rel=0.01)
    first = by_arm[flags.arms()[0].name].quantities
    assert first["time_over_consumer"].method.startswith("A/A control")
    assert first["time_over_consumer"].value == pytest.approx(1, abs=0.01)
    assert by_arm["host 32+32"].factors["pollers"] == 64
    assert by_arm["host 32+32"].factors["pollers_on"] == "both devices"


def test_a_party_that_gave_up_is_named_with_what_it_saw() -> None:
    """The fault: a reader that stopped after two of four rounds, and a writer whose last acknowledgement never came."""
    stamps, flag, acks = torch.ones(3, 4, dtype=torch.int64), torch.zeros(32), torch.zeros(64, dtype=torch.int32)
    flag[0], acks[0], acks[32] = 13, 13, 13
    require_rounds(stamps, flag, acks, first=10, parties=range(3), waiter="gpu0/p0")
    stamps[2, 2:] = 0
    with pytest.raises(KernelFault, match=r"gpu1/p0, block 2, waited for the flag to hold 12: it holds 13"):
        require_rounds(stamps, flag, acks, first=10, parties=range(1, 3), waiter="gpu1/p0")
    acks[32] = 12
    with pytest.raises(KernelFault, match=r"block 0, waited for acknowledgement \[1\] to hold 13: it holds 12"):
        require_rounds(stamps, flag, acks, first=10, parties=range(1), waiter="gpu0/p0")
    stamps[0, 3] = 0
    acks[0], acks[32] = 12, 11
    with pytest.raises(
        KernelFault, match=r"acknowledgement \[0\] to hold 12: it holds 12|\[1\] to hold 12: it holds 11"
    ):
        require_rounds(stamps, flag, acks, first=10, parties=range(1), waiter="gpu0/p0")


def test_every_combination_ran_from_the_isa_and_the_clock_tells_what_it_can(emulated: Run) -> None:
    assert emulated.origin == "modelled" and len(emulated.points) == 2 * 3 * 3
    assert all(point.factors["runs_from_isa"] == 4 for point in emulated.points)
    assert emulated.code_hash and "agent-scope" in emulated.facts["planted_fault"]["reported"]
    known = {p.arm: p.quantities["handoff_us"] for p in emulated.points if p.quantities["handoff_us"].value is not None}
    # mi355x-model: local hand-off of set A 0.651 us, a far step 98 ns, 27 ns for each further wave on a far line.
    assert {arm: round(float(q.value or 0), 3) for arm, q in known.items()} == {
        "consumer coarse 1": 0.651,
        "producer coarse 1": 0.749,
        "producer coarse 2": 0.776,
        "producer coarse 4": 0.83,
    }
    assert known["consumer coarse 1"].by_set["C"] == 0.85
    unknown = [q for p in emulated.points for q in p.quantities.values() if q.value is None]
    assert unknown and all(q.why for q in unknown)
    for point in emulated.points:
        where = "gpu0/mem1" if point.factors["home"] == "consumer" else "gpu0/mem0"
        assert point.residency_before["bytes_by_role_and_domain"]["sync_flag"] == {where: 128}


def test_a_round_seen_out_of_turn_is_a_fault() -> None:
    written, seen = torch.tensor([10, 20, 30, 40]), torch.tensor([[12, 22, 32, 42]])
    last = flags_emulated.FIRST + 3
    flags_emulated.require_order(written, seen, [last], 0)
    for wrong in ([[9, 22, 32, 42]], [[12, 31, 32, 42]]):
        with pytest.raises(KernelFault, match="seed 0"):
            flags_emulated.require_order(written, torch.tensor(wrong), [last], 0)
    with pytest.raises(KernelFault):
        flags_emulated.require_order(written, seen, [last - 1], 0)


def test_what_flags_has_no_use_for_is_refused() -> None:
    experiment = get("flags")
    for options in (Options(arms=("local",)), Options(context_tokens=8192), Options(bytes_from="counted")):
        with pytest.raises(UsageError):
            next(iter(experiment.run("emulated", options, print)))
    for backend in ("cpu", "amd"):
        with pytest.raises(Unsupported, match="flags cannot run"):
            next(iter(experiment.run(backend, Options(), print)))
