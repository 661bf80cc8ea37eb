"""Comparing runs: equal conditions or a named leave, never across origins, and regressions only where noise allows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dieplace.cli import main as frame
from dieplace.conditions import collect
from dieplace.errors import Incomparable, UsageError
from dieplace.experiments.comparing import compare_runs
from dieplace.run import Point, Quantity, Run

LINK = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2" / "link" / "gpu0-gpu1.json"


@cache
def _conditions() -> dict[str, Any]:
    return collect(None, backend="nvidia", source="live", code_hash="a", timer="events", core_clock_mhz=1980.0)


def a_run(scale: float = 1.0, *, seed: int = 0, noise: float = 0.01, origin: str = "measured", **changes: Any) -> Run:
    draw = random.Random(seed)
    samples = tuple(100 * scale * draw.lognormvariate(0, noise) for _ in range(40))
    value = sorted(samples)[20]
    quantity = Quantity("us", origin, value, samples=samples if origin == "measured" else ())
    conditions = _conditions()
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


def steps_run(value: float = 100.0, *, noise: float = 0.02, count: int = 40, seed: int = 0, **changes: Any) -> Run:
    """A measured run with the time of a layer, an A/A ratio and clocks: ten-ns steps, log-normal noise drawn here."""
    draw = random.Random(seed)
    samples = tuple(round(value * draw.lognormvariate(0, noise), 2) for _ in range(count))
    control = changes.pop("control", (1.0, 0.995, 1.005))
    facts = {"clock_share": changes.pop("clock_share", 1.0)}
    quantities = {
        "layer_us": Quantity("us", "measured", sorted(samples)[count // 2], samples=samples),
        "time_over_local": Quantity("x", "measured", *control, "A/A control, percentile"),
    }
    made = a_run(**changes)
    return replace(made, points=(Point("local", quantities, factors={"case": "1K"}),), facts=facts)


def test_two_hundred_pairs_of_one_build_are_no_difference() -> None:
    """Case h9 through `compare`: 2 % noise, 10 ns steps: at most 20 other verdicts, and none fails a limit of 3 %."""
    found = [
        compare_runs(steps_run(seed=2 * n), steps_run(seed=2 * n + 1), fail_on_percent=3) for n in range(200)
    ]  # fmt: skip
    others = [c for c in found if not c.rows[0]["verdict"].startswith("no difference")]
    assert len(others) <= 20 and not any(c.regressions for c in found)


def test_three_percent_is_found_with_its_interval() -> None:
    """Case h9 through `compare`: a true +3 %, 200 times: at least 180 said slower, the truth inside most intervals."""
    rows = [compare_runs(steps_run(seed=2 * n), steps_run(103.0, seed=2 * n + 1)).rows[0] for n in range(200)]
    assert sum(row["verdict"].startswith("slower by") for row in rows) >= 180
    inside = [row["change_low_percent"] <= 3 <= row["change_high_percent"] for row in rows]
    assert sum(inside) >= 180


def test_the_controls_and_clocks_of_both_runs_judge() -> None:
    """A run whose own A/A control is 3 % off, or whose clocks ran low, supports no conclusion: not a regression."""
    slow = steps_run(120.0, seed=2, noise=0.005)
    assert compare_runs(steps_run(seed=1, noise=0.005), slow, fail_on_percent=5).regressions == ["local"]
    for base, run in (
        (steps_run(seed=1, noise=0.005, control=(1.03, 1.02, 1.04)), slow),
        (steps_run(seed=1, noise=0.005), replace(slow, facts={"clock_share": 0.59})),
    ):
        found = compare_runs(base, run, fail_on_percent=5)
        assert found.regressions == [] and found.rows[0]["verdict"].startswith("too noisy to say, because")


def test_link_runs_are_compared_point_by_point_and_a_lower_rate_is_slower() -> None:
    base = Run.load(LINK)

    def slowed(point: Point) -> Point:
        rate = point.quantities.get("gb_per_s")
        if rate is None or point.arm != "far" or point.factors["what"] != "read":
            return point
        samples = tuple(s / 1.25 for s in rate.samples)
        return replace(point, quantities={**point.quantities, "gb_per_s": replace(rate, value=0.0, samples=samples)})

    def middle(point: Point) -> Point:
        rate = point.quantities.get("gb_per_s")
        if rate is None or rate.value != 0.0:
            return point
        value = sorted(rate.samples)[len(rate.samples) // 2]
        return replace(point, quantities={**point.quantities, "gb_per_s": replace(rate, value=value)})

    run = replace(base, points=tuple(middle(slowed(point)) for point in base.points))
    found = compare_runs(base, run, fail_on_percent=10)
    assert len(found.rows) == len(base.points) and len({row["arm"] for row in found.rows}) == len(found.rows)
    changed = [row for row in found.rows if row["change_percent"] and abs(row["change_percent"]) > 1]
    assert changed and all(row["arm"].startswith("far, read") and row["unit"] == "GB/s" for row in changed)
    assert all(row["change_percent"] == pytest.approx(25, abs=0.5) for row in changed)
    assert found.regressions == [row["arm"] for row in changed if row["verdict"].startswith("slower")] != []


def test_a_rate_without_samples_changes_the_right_way_and_concludes_nothing() -> None:
    """Half the rate is twice as long; without samples that is a number and no verdict."""
    rates = [
        replace(a_run(), points=(Point("far", {"gb_per_s": Quantity("GB/s", "measured", v)}),)) for v in (400, 200)
    ]
    (row,) = compare_runs(*rates, fail_on_percent=5).rows
    assert row["change_percent"] == pytest.approx(100) and row["verdict"].startswith(
        "too noisy to say, because one side"
    )


def test_the_command_says_what_differs_and_fails_past_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case h11 at the command: exit 2 naming the keys; --allow prints them above the table; exit 1 past the limit."""
    files = []
    for name, value, changes in (("a", 100.0, {}), ("b", 110.0, {}), ("c", 110.0, {"driver_version": "9"})):
        made = steps_run(value, seed=len(files), noise=0.005, **changes)
        files.append(str(replace(made, workload={"name": "x"}).save(tmp_path / f"{name}.json")))
    a, b, c = files
    assert frame.main(["bench", "compare", a, c]) == 2
    assert "driver_version: None -> 9" in capsys.readouterr().err
    assert frame.main(["bench", "compare", a, c, "--allow", "driver_version"]) == 0
    out = capsys.readouterr().out
    assert out.index("driver_version: None -> 9") < out.index("RUN against BASE, measured") < out.index("slower by 10")
    assert frame.main(["bench", "compare", a, b, "--fail-on", "5", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False and body["regressions"] == ["local"]
    assert body["rows"][0]["change_low_percent"] < 10 < body["rows"][0]["change_high_percent"]
    assert frame.main(["bench", "compare", a, b, "--fail-on", "20"]) == 0
    noisy = replace(steps_run(110.0, noise=0.4, seed=9), workload={"name": "x"}).save(tmp_path / "noisy.json")
    capsys.readouterr()
    assert frame.main(["bench", "compare", a, str(noisy), "--fail-on", "5"]) == 0
    assert "local is held to no limit: too noisy to say" in capsys.readouterr().err
