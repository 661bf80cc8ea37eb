"""Run files: strict JSON, null with a why, whole or not at all, and old versions that stay readable."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dieplace.errors import UsageError
from dieplace.experiments.registry import experiment_names, get
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Point, Quantity, Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
MODELLED = RESULTS / "emulated-mi355x"
COMMITTED = sorted(RESULTS.rglob("*.json"))
# The bundles of first light have a test of their own (golden/test_first_light_bundles.py).
MODELLED_RUNS = [p for p in COMMITTED if p.is_relative_to(MODELLED) and "first-light" not in p.parts]


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} in JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def a_run(**changes: Any) -> Run:
    quantity = Quantity("us", "measured", 10.0, 9.5, 10.5, "percentile", samples=(9.5, 10.0, 10.5))
    fields: dict[str, Any] = {
        "experiment": "weight-swap",
        "block": "dpx-nps2",
        "origin": "measured",
        "source": "live",
        "points": (Point("local", {"token_us": quantity}),),
        "conditions": {"backend": "amd"},
        "workload": {"name": "w", "context_tokens": 1024},
        "machine": {},
        "created": "2026-11-30T00:00:00+00:00",
        "seed": 7,
        "code_hash": "abc",
    }
    return Run(**{**fields, **changes})


def whys_missing(value: Any, path: str = "") -> list[str]:
    """Every null of the part that a run writes itself has a `..._why` beside it, or its object has a `whys`."""
    found = []
    if isinstance(value, dict):
        for key, item in value.items():
            if item is None and f"{key}_why" not in value and key not in value.get("whys", {}):
                found.append(f"{path}/{key}")
            found += whys_missing(item, f"{path}/{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += whys_missing(item, f"{path}/{index}")
    return found


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    run = a_run(notes=("a", "b"), label="x", facts={"k": [1, None]})
    path = run.save(tmp_path / "deep" / "r.json")
    assert Run.load(path) == run
    assert Run.load(path).to_json() == strict(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]  # no temporary file left


def test_an_undefined_interval_is_null_with_a_why() -> None:
    """BCa of a tied median is NaN (case j3): the file says null and why."""
    body = Quantity("us", "measured", 11.0, math.nan, math.nan, "BCa", samples=(11.0, 11.0)).to_json()
    assert body["low"] is None and body["high"] is None
    assert "not a finite number" in body["low_why"]
    assert Quantity("us", "measured", math.inf).to_json()["value_why"]
    strict(json.dumps(body, allow_nan=False))


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats()))
def test_no_number_can_put_nan_into_a_file(value: float | None, low: float | None, high: float | None) -> None:
    quantity = Quantity("us", "measured", value, low, high, why="because")
    run = a_run(points=(Point("local", {"token_us": quantity}),))
    again = Run.from_json(strict(json.dumps(run.to_json(), allow_nan=False)))
    found = again.point("local").quantities["token_us"]
    for name, given_number in (("value", value), ("low", low), ("high", high)):
        expected = given_number if given_number is not None and math.isfinite(given_number) else None
        assert getattr(found, name) == expected
    assert whys_missing(run.to_json()["points"]) == []


def test_modelled_numbers_have_no_samples_and_unknown_ones_a_why() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Quantity("us", "modelled", 1.0, samples=(1.0,))
    with pytest.raises(ValueError, match="needs a why"):
        Quantity("us", "measured", None)
    with pytest.raises(ValueError, match="not a finite"):
        Quantity("us", "measured", 1.0, samples=(math.nan,))
    with pytest.raises(ValueError, match="measured, reported, modelled"):
        Quantity("us", "guessed", 1.0)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_reading_a_file_with_nan_is_a_clear_error(tmp_path: Path, word: str) -> None:
    path = a_run().save(tmp_path / "r.json")
    path.write_text(path.read_text().replace('"value": 10.0', f'"value": {word}'))
    with pytest.raises(UsageError, match=f"{word}, which is no JSON number"):
        Run.load(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe\x00", b"[" * 100_000, b'{"schema": 3}'),
        *(
            b'{"schema": "dieplace/run/1"}',
            b'{"schema": "dieplace/run/99"}',
            b'{"schema": "dieplace/run/1", "points": 5}',
        ),
    ],
)
def test_broken_files_are_usage_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        Run.load(path)


def test_missing_and_unwritable_paths_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Run.load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot read"):
        Run.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        a_run().save(tmp_path / "file" / "r.json")


def test_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="dieplace/run/1") as caught:
        Run.from_json({**a_run().to_json(), "schema": "dieplace/run/2"})
    assert caught.value.facts["found"] == "dieplace/run/2"


def test_every_modelled_experiment_has_its_blocks_committed() -> None:
    """Nothing less, nothing else: a block that is renamed or given up must not leave its old figures behind."""
    can = [get(name) for name in experiment_names() if get(name).cannot("emulated") is None]
    wanted = {f"{one.name}/{block}.json" for one in can for block in one.blocks}
    assert {str(path.relative_to(MODELLED)) for path in MODELLED_RUNS} == wanted


@pytest.mark.parametrize("path", MODELLED_RUNS, ids=lambda p: str(p.relative_to(MODELLED)))
def test_committed_results_are_what_their_place_says_and_can_be_shown(path: Path) -> None:
    run = check_shape(Run.load(path), path.name)
    assert (run.experiment, run.block, run.origin) == (path.parent.name, path.stem, "modelled")
    if "context_tokens" in run.workload:  # a decode step; flags alone have no context
        contexts = {point.factors.get("context_tokens", 1024) for point in run.points}
        assert f"context {'/'.join(map(str, sorted(contexts)))}" in run.conditions["workload"]
    for point in run.points:
        residency = point.residency_before
        assert residency is not None and residency["misplaced_bytes"] == 0 and residency["evidence"] == "accounted"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: str(p.relative_to(RESULTS)))
def test_every_committed_result_is_strict_json(path: Path) -> None:
    strict(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("block", ["dpx-nps2", "spx-nps1", "dpx-nps1"])
def test_version_1_files_load_in_every_later_version(block: str) -> None:
    """These files were written by version 1 and are never rewritten; their figures are the reference's check values."""
    path = RESULTS / "emulated-mi355x" / "weight-swap" / f"{block}.json"
    assert strict(path.read_text())["schema"] == "dieplace/run/1"
    run = Run.load(path)
    token = {point.arm: point.quantities["token_us"] for point in run.points}
    expected = {"dpx-nps2": {"local": 679.3, "swapped": 869.5}}.get(block, {"local": 731.4})
    assert {arm: round(q.value or 0, 1) for arm, q in token.items()} == expected
    assert run.origin == "modelled" and all(not q.samples for p in run.points for q in p.quantities.values())
    assert whys_missing({k: v for k, v in run.to_json().items() if k != "machine"}) == []
