"""Committed measured steps of two H200s keep the rules of a measurement, recomputed here from their samples."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dieplace.experiments.readme_tables import results_folder
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Run

RESULTS = results_folder() / "nvidia-h200-x2"
NAMES = ("weight-swap/gpu0-gpu1", "placement/gpu0-gpu1", "context/gpu0-gpu1", "verify/gpu0-gpu1")
ROLES = {"weights", "kv_cache", "sync_flag"}


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def cases(run: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Points of each case, the local arm first."""
    for _, points in itertools.groupby(run["points"], key=lambda point: point["factors"].get("case")):
        yield list(points)


def value(point: dict[str, Any], quantity: str) -> float:
    return float(point["quantities"][quantity]["value"])


def samples(point: dict[str, Any], quantity: str = "layer_us") -> list[float]:
    return list(point["quantities"][quantity]["samples"])


def wrong(run: dict[str, Any]) -> Iterator[str]:
    """Every rule of a measurement that a run breaks; numbers are recomputed from samples, bytes and rates."""
    rates = run["facts"]["prediction"]
    misses = run["facts"]["prediction"].get("misses", {})
    if not run["facts"]["same_result_in_all_arms"] or run["seed"] is None or run["code_hash"] is None:
        yield "results, seed or code"
    for key in ("telemetry_before", "telemetry_after"):
        if len(run["facts"][key]["gpus"]) != 2 or not run["conditions"]["driver_version"]:
            yield f"{key} is missing"
    for points in cases(run):
        local, base = points[0], samples(points[0])
        hashes = {run["facts"]["code_hash_by_arm"][point["arm"]] for point in points}
        if len(hashes) != 1 or None in hashes:
            yield f"code of {local['arm']}"
        again = [b / a for a, b in zip(base, samples(local, "control_layer_us"), strict=True)]
        if abs(statistics.median(again) - 1) > 0.01:
            yield f"control of {local['arm']}"
        for point in points:
            yield from _wrong_point(point, base, rates, misses)


def _wrong_point(
    point: dict[str, Any], base: list[float], rates: dict[str, Any], misses: dict[str, str]
) -> Iterator[str]:
    arm, far_roles = point["arm"], set(point["factors"]["roles_moved"])
    if point["factors"]["cache"] != "cold" or len(samples(point)) < 10:
        yield f"{arm} is warm or short"
    for when in ("residency_before", "residency_after"):
        found = point[when]
        if found["moved_evidence"] != "probed" or found["evidence"] != "accounted":
            yield f"evidence of {arm}"
        for role, homes in found["bytes_by_role_and_domain"].items():
            whole = "interleave" not in arm
            if whole and role in ROLES and set(homes) != {"gpu1/mem0" if role in far_roles else "gpu0/mem0"}:
                yield f"{role} of {arm} lies in {homes}"
    if not far_roles:
        return
    measured, local = statistics.median(samples(point)), statistics.median(base)
    ratio = statistics.median(b / a for a, b in zip(base, samples(point), strict=True))
    if value(point, "penalty") != pytest.approx(ratio - 1, abs=1e-9):
        yield f"penalty of {arm}"
    moved, near, far = point["factors"]["moved_bytes_per_layer"], rates["near_gb_per_s"], rates["far_gb_per_s"]
    predicted = local + moved * (1 / far - 1 / near) / 1000
    if value(point, "predicted_us") != pytest.approx(predicted, rel=1e-9):
        yield f"prediction of {arm}"
    told = misses.get(arm)
    if abs(predicted / measured - 1) > 0.15 and not (told and told in point["notes"]):
        yield f"{arm} is off by {predicted / measured - 1:+.0%} and no reason is given"


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_holds(name: str) -> None:
    run = load(name)
    assert list(wrong(run)) == []
    check_shape(Run.from_json(run), name)


def spoil(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> list[str]:
    """What `wrong` says of the placement run after a change to it and to its first far point."""
    run = copy.deepcopy(load("placement/gpu0-gpu1"))
    change(run, run["points"][-1])
    return list(wrong(run))


def test_each_rule_catches_its_fault() -> None:
    def slow_control(run: dict[str, Any], far: dict[str, Any]) -> None:
        again = run["points"][0]["quantities"]["control_layer_us"]
        again["samples"] = [s * 1.02 for s in again["samples"]]

    def other_code(run: dict[str, Any], far: dict[str, Any]) -> None:
        run["facts"]["code_hash_by_arm"][far["arm"]] = "0000"

    def declared(run: dict[str, Any], far: dict[str, Any]) -> None:
        far["residency_after"]["moved_evidence"] = "accounted"

    def stayed(run: dict[str, Any], far: dict[str, Any]) -> None:
        far["residency_before"]["bytes_by_role_and_domain"]["kv_cache"] = {"gpu0/mem0": 1}

    def quicker(run: dict[str, Any], far: dict[str, Any]) -> None:
        run["facts"]["prediction"]["misses"] = {}
        time = far["quantities"]["layer_us"]
        time["samples"] = [s * 0.8 for s in time["samples"]]

    assert any("control" in said for said in spoil(slow_control))
    assert any("code" in said for said in spoil(other_code))
    assert any("evidence" in said for said in spoil(declared))
    assert any("kv_cache" in said for said in spoil(stayed))
    assert any("no reason is given" in said for said in spoil(quicker))


def test_placement_has_all_eight_and_flags_cost_more_far_than_near() -> None:
    run = load("placement/gpu0-gpu1")
    assert len({frozenset(point["factors"]["roles_moved"]) for point in run["points"]}) == 8
    by_arm = {point["arm"]: point for point in run["points"]}
    penalty = {arm: value(point, "penalty") for arm, point in by_arm.items() if "penalty" in point["quantities"]}
    assert len(penalty) == 7 and penalty["flags far"] > 0 and penalty["kv far"] > 0
    assert penalty["weights far"] > 10 * penalty["flags far"]
    assert penalty["weights+kv+flags far"] == max(penalty.values())


def test_a_far_cache_costs_more_with_more_context() -> None:
    """As bytes grow eightfold and fourfold, and with them what is added in us."""
    run = load("context/gpu0-gpu1")
    added = []
    for points in cases(run):
        by_arm = {point["arm"].partition(" ")[2]: point for point in points}
        added.append(value(by_arm["kv far"], "layer_us") - value(by_arm["local"], "layer_us"))
        assert by_arm["kv far"]["factors"]["moved_bytes_per_layer"] == points[0]["factors"]["context_tokens"] * 2048
    assert added[1] == pytest.approx(8 * added[0], rel=0.35) and added[2] == pytest.approx(4 * added[1], rel=0.35)


def test_rounds_read_the_union_of_their_experts() -> None:
    run = load("verify/gpu0-gpu1")
    read = [points[0]["factors"]["experts_read_per_layer"] for points in cases(run)]
    assert read[0] == 4 and all(4 <= experts <= 4 * tokens for experts, tokens in zip(read, (1, 2, 4, 8), strict=True))
    assert read == sorted(read)
    expert = 3 * 2880 * 2880 * 17 / 32 + 3 * 2880 * 2  # gate, up and down in MXFP4, biases in bf16
    moved = [points[1]["factors"]["moved_bytes_per_layer"] for points in cases(run)]
    for one, tokens in zip(moved, read, strict=True):
        assert one - moved[0] == pytest.approx((tokens - 4) * expert, rel=1e-6, abs=1)


def test_spread_weights_are_predicted_by_reads_at_the_same_time() -> None:
    run = load("weight-swap/gpu0-gpu1")
    spread = [point for point in run["points"] if point["arm"].startswith("interleave")]
    assert {point["arm"] for point in spread} == {"interleave-2/8", "interleave-4/8"}
    for point in spread:
        assert abs(value(point, "predicted_together_over_measured") - 1) < 0.15
        assert value(point, "predicted_together_us") < value(point, "predicted_us")
