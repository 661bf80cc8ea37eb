"""The committed launch of two ranks on two H200s: every point of both cards, and what it says beside the plain run."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from dieplace.experiments import outliers, scale_out_tables
from dieplace.experiments.link import ONE_DEVICE
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Point, Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2"
CARD = RESULTS / "scale-out" / "card.json"
GIB = 1 << 30


@pytest.fixture(scope="module")
def run() -> Run:
    return check_shape(Run.load(CARD), str(CARD))


def _of(run: Run, rank: int, what: str, arm: str = "near") -> Point:
    wanted = {"rank": rank, "what": what, "working_set_bytes": GIB, "directions": "one"}
    (found,) = [p for p in run.points if p.arm == arm and wanted.items() <= p.factors.items()]
    return found


def test_both_ranks_measured_their_own_card_and_the_same_things(run: Run) -> None:
    assert run.origin == "measured" and run.facts["world_size"] == 2 and run.facts["experiment"] == "link"
    assert [(r["rank"], r["cards"], r["state"]) for r in run.facts["ranks"]] == [
        (0, ["gpu0"], "measured"), (1, ["gpu1"], "measured"),
    ]  # fmt: skip
    assert len({r["bdfs"][0] for r in run.facts["ranks"]}) == 2
    per_rank = [{(p.arm, str(sorted(_common(p)))) for p in run.points if p.factors["rank"] == r} for r in (0, 1)]
    assert per_rank[0] == per_rank[1] and len(per_rank[0]) * 2 == len(run.points)


def _common(point: Point) -> list[tuple[str, str]]:
    return [(k, str(v)) for k, v in point.factors.items() if k not in ("rank", "card")]


def test_each_card_alone_is_as_fast_as_in_the_plain_run_of_another_launch(run: Run) -> None:
    """`link/gpu0-gpu1.json` measured gpu0 with both GPUs visible: an independent launch of the same probes."""
    plain = Run.load(RESULTS / "link" / "gpu0-gpu1.json")
    for what, name in (("read", "gb_per_s"), ("latency", "latency_ns")):
        wanted = {"what": what, "working_set_bytes": GIB, "directions": "one", "reader": "gpu0/p0"}
        (base,) = [p for p in plain.points if p.arm == "near" and wanted.items() <= p.factors.items()]
        for rank in (0, 1):
            assert _of(run, rank, what).quantities[name].value == pytest.approx(base.quantities[name].value, rel=0.06)


def test_far_memory_is_null_with_the_reason(run: Run) -> None:
    far = [p for p in run.points if p.arm == "far"]
    assert far and all(q.value is None for p in far for q in p.quantities.values())
    assert {p.quantities["time_over_near"].why for p in far} == {ONE_DEVICE}


def test_standings_follow_from_the_samples_and_two_cards_have_no_outlier(run: Run) -> None:
    for what, name in (("read", "gb_per_s"), ("latency", "latency_ns")):
        samples = [_of(run, rank, what).quantities[name].samples for rank in (0, 1)]
        times = [median([1 / rate for rate in taken] if what == "read" else taken) for taken in samples]
        for rank in (0, 1):
            ratio = _of(run, rank, what).quantities["over_all_cards"].value
            assert ratio == pytest.approx(times[rank] / (sum(times) / 2), rel=1e-9)
    assert {p.factors["outlier"] for p in run.points} == {"unknown"} and outliers.MIN_CARDS > 2
    (verdict,) = scale_out_tables.sentences([run])
    assert (
        verdict.startswith("measured: 2 cards lie within")
        and "of fewer than 4 none can be called the odd one" in verdict
    )


def test_the_file_names_nobodys_hardware() -> None:
    assert not re.search(r"(GPU|MIG)-[0-9a-f]{8}", CARD.read_text())
