"""The committed runs of flags and of two shards on two H200s hold what they must show; figures are computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dieplace.run import Point, Quantity, Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2"
SHARDS = sorted((RESULTS / "weight-swap").glob("*shards2*.json"))


@pytest.fixture(scope="module")
def flags() -> Run:
    return Run.load(RESULTS / "flags" / "gpu0-gpu1.json")


def samples(point: Point, name: str) -> Any:
    return np.array(point.quantities[name].samples)


def interval(quantity: Quantity) -> tuple[float, float, float]:
    assert quantity.value is not None and quantity.low is not None and quantity.high is not None
    return quantity.low, quantity.value, quantity.high


def test_flags_have_every_combination_with_all_samples(flags: Run) -> None:
    assert (flags.experiment, flags.block, flags.origin, flags.source) == ("flags", "gpu0-gpu1", "measured", "live")
    found = {(p.factors["home"], p.factors["pollers"], p.factors["pollers_on"]) for p in flags.points}
    homes = ("consumer", "producer", "host")
    assert found == {(h, n, "the other device") for h in homes for n in (1, 2, 4, 8, 16, 32, 64)} | {
        (h, n, "both devices") for h in homes for n in (2, 8, 64)
    }
    for point in flags.points:
        trips = samples(point, "round_trip_ns")
        low, value, high = interval(point.quantities["round_trip_ns"])
        assert len(trips) >= 20 and value == pytest.approx(float(np.median(trips))) and low <= value <= high
        assert point.quantities["half_round_trip_ns"].value == pytest.approx(value / 2)
    assert flags.code_hash is not None and flags.seed is not None


def test_flags_are_where_they_are_said_to_be(flags: Run) -> None:
    """Probed by latency in device memory; pinned host memory by what the driver says of its address."""
    for point in flags.points:
        for found in (point.residency_before, point.residency_after):
            assert found is not None
            (where,) = found["bytes_by_role_and_domain"]["sync_flag"]
            home = point.factors["home"]
            assert where == {"consumer": "gpu1/mem0", "producer": "gpu0/mem0", "host": "host"}[home]
            assert found["moved_evidence"] == ("accounted" if home == "host" else "probed")


def test_ratios_of_flags_are_medians_of_pairs(flags: Run) -> None:
    by_arm = {point.arm: point for point in flags.points}
    base = by_arm["consumer 1"]
    control = samples(base, "control_round_trip_ns") / samples(base, "round_trip_ns")
    assert abs(float(np.median(control)) - 1) <= 0.01
    checked = 0
    for point in flags.points:
        over = point.quantities.get("time_over_consumer")
        if over is None or over.method.startswith("A/A"):
            continue
        same = by_arm[point.arm.replace(point.factors["home"], "consumer")]
        pairs = samples(point, "round_trip_ns") / samples(same, "round_trip_ns")
        low, value, high = interval(over)
        assert value == pytest.approx(float(np.median(pairs))) and low <= value <= high
        checked += 1
    assert checked == 20


def test_a_flag_belongs_to_its_poller(flags: Run) -> None:
    """What the design rests on, as far as two H200s show it: polling across costs more, polling host memory most."""
    trip = {point.arm: interval(point.quantities["round_trip_ns"]) for point in flags.points}
    for pollers in (1, 2, 4, 8, 16, 32, 64):
        near, far, host = (trip[f"{home} {pollers}"] for home in ("consumer", "producer", "host"))
        assert near[2] < far[0] and far[2] < host[0]
    assert trip["consumer 64"][1] < 1.5 * trip["consumer 1"][1] < trip["host 64"][1]


def test_the_run_of_two_shards_is_committed() -> None:
    assert "gpu0-gpu1-shards2.json" in [path.name for path in SHARDS]


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: path.stem)
def test_two_shards_show_what_a_penalty_needs(path: Path) -> None:
    run = Run.load(path)
    assert run.workload["shards"] == 2 and run.origin == "measured" and run.block == "gpu0-gpu1-shards2"
    assert run.facts["same_result_in_all_arms"]
    by_gpu = run.facts["code_hash_by_gpu"]
    assert len({tuple(sorted(hashes.items())) for hashes in by_gpu.values()}) == 1
    assert all(value for hashes in by_gpu.values() for value in hashes.values())
    agreement = run.facts["agreement_with_one_shard"]
    assert 0 <= agreement["worst_share_of_largest"] <= agreement["limit"] <= 2.0**-6
    for point in run.points:
        assert point.factors["cache"] == "cold"
        for found in (point.residency_before, point.residency_after):
            assert found is not None and found["moved_evidence"] == "probed" and found["evidence"] == "accounted"
            assert found["probe"]["agrees"] and found["probe"]["windows"] > 3000
            homes = found["bytes_by_role_and_domain"]
            assert homes["sync_flag"]["gpu0/mem0"] == homes["sync_flag"]["gpu1/mem0"], "mailboxes stay with both"
    swapped, local = run.point("swapped"), run.point("local")
    assert swapped.residency_before is not None and local.residency_before is not None
    assert swapped.residency_before["probe"]["far"] == swapped.residency_before["probe"]["windows"]
    assert local.residency_before["probe"]["far"] == 0


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: path.stem)
def test_the_penalty_of_two_shards_is_the_median_of_pairs_and_was_predicted(path: Path) -> None:
    run = Run.load(path)
    local = run.point("local")
    base = samples(local, "layer_us")
    control = interval(local.quantities["time_over_local"])
    assert 0.99 <= control[1] <= 1.01
    assert control[1] == pytest.approx(float(np.median(samples(local, "control_layer_us") / base)))
    rates = run.facts["prediction"]
    for point in run.points[1:]:
        times = samples(point, "layer_us")
        ratio = float(np.median(times / base))
        low, value, high = interval(point.quantities["penalty"])
        assert value == pytest.approx(ratio - 1) and low <= value <= high and low > 0
        moved = point.factors["moved_bytes_per_layer"]
        expected = np.median(base) + moved * (1 / rates["far_gb_per_s"] - 1 / rates["near_gb_per_s"]) / 1000
        assert point.quantities["predicted_us"].value == pytest.approx(float(expected))
        if point.arm == "swapped":
            assert abs(float(expected) / float(np.median(times)) - 1) <= 0.15
    # Half of a layer's weights and a bit: router and norms are on both. MXFP4: 4.25 bits a weight.
    dense = 2880 * (64 + 2 * 8) * 64 + 64 * 64 * 2880
    experts = 4 * 3 * 2880 * 2880
    half = (dense + experts) * 4.25 / 8 / 2
    assert run.point("swapped").factors["moved_bytes_per_layer"] == pytest.approx(half, rel=0.04)
