"""Comparing runs: equal conditions or a named leave, never across origins, and regressions only where noise allows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dieplace.conditions import collect
from dieplace.errors import Incomparable, UsageError
from dieplace.experiments.comparing import compare_runs
from dieplace.run import Point, Quantity, Run


def a_run(scale: float = 1.0, *, seed: int = 0, noise: float = 0.01, origin: str = "measured", **changes: Any) -> Run:
    draw = random.Random(seed)
    samples = tuple(100 * scale * draw.lognormvariate(0, noise) for _ in range(40))
    value = sorted(samples)[20]
    quantity = Quantity("us", origin, value, samples=samples if origin == "measured" else ())
    conditions = collect(None, backend="nvidia", source="live", code_hash="a", timer="events", core_clock_mhz=1980.0)
    return Run(
        experiment="weight-swap",
        block="shards-2",
        origin=origin,
        source="live",
        points=(Point("local", {"token_us": quantity}),),
        conditions={**conditions, **changes},
        workload={},
        machine={},
        created="2026-11-30T00:00:00+00:00",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("parts", ["H100"]), ("driver_version", "9"), ("core_clock_mhz", 1400.0), ("code_hash", "b"), ("backend", "amd")],
)
def test_unlike_conditions_are_refused_and_named(key: str, value: Any) -> None:
    """Case h11: device, driver, clocks, code hash."""
    other = a_run(**{key: value})
    with pytest.raises(Incomparable) as caught:
        compare_runs(a_run(), other)
    assert caught.value.exit_code == 2 and caught.value.facts["differing"] == [key]
    assert f"--allow {key}" in str(caught.value.hint)
    found = compare_runs(a_run(), other, allow=[key])
    assert found.differing == [{"key": key, "base": a_run().conditions[key], "run": value}]


def test_one_leave_does_not_cover_another_key() -> None:
    with pytest.raises(Incomparable) as caught:
        compare_runs(a_run(), a_run(code_hash="b", core_clock_mhz=1.0), allow=["code_hash"])
    assert caught.value.facts["differing"] == ["core_clock_mhz"]
    with pytest.raises(UsageError, match="no checked condition"):
        compare_runs(a_run(), a_run(), allow=["colour"])
    with pytest.raises(UsageError, match="no checked condition"):
        compare_runs(a_run(), a_run(), allow=["host_id"])


def test_origins_and_experiments_never_mix() -> None:
    with pytest.raises(Incomparable, match="different kinds"):
        compare_runs(a_run(), a_run(origin="modelled"), allow=["parts", "backend", "source"])


def test_regressions_need_a_verdict_and_the_limit() -> None:
    slow = compare_runs(a_run(seed=1), a_run(1.08, seed=2), fail_on_percent=5)
    assert slow.regressions == ["local"] and slow.rows[0]["verdict"].startswith("slower by 8")
    assert compare_runs(a_run(seed=1), a_run(1.08, seed=2), fail_on_percent=20).regressions == []
    assert compare_runs(a_run(seed=1), a_run(1.08, seed=2)).regressions == []
    same = compare_runs(a_run(seed=1), a_run(seed=2), fail_on_percent=0)
    assert same.regressions == [] and same.rows[0]["verdict"].startswith("no difference")
    noisy = compare_runs(a_run(seed=1, noise=0.4), a_run(1.08, seed=3, noise=0.4), fail_on_percent=1)
    assert noisy.regressions == [] and noisy.rows[0]["verdict"].startswith("too noisy")


def test_an_arm_that_is_missing_is_null_with_a_why() -> None:
    base = a_run()
    lone = Run(**{**base.__dict__, "points": (Point("swapped", dict(base.points[0].quantities)),)})
    gone, new = compare_runs(base, lone).rows
    assert gone["change_percent"] is None and gone["change_percent_why"] == "RUN has no such arm"
    assert (new["arm"], new["base_us"], new["change_percent_why"]) == ("swapped", None, "BASE has no such arm")
    assert new["run_us"] == base.points[0].quantities["token_us"].value
    with pytest.raises(Incomparable, match=r"nothing to hold to it for local \(RUN has no such arm\)"):
        compare_runs(base, lone, fail_on_percent=50)
    other_mode = Run(**{**lone.__dict__, "block": "spx-nps1"})
    assert compare_runs(base, other_mode, fail_on_percent=50).regressions == []
