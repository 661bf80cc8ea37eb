"""`bench show` of the committed steps of two H200s at 80 columns: no word broken, every verdict says than what, and
drift that is in the file is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from dieplace.cli import main as frame
from dieplace.experiments import live_tables
from dieplace.experiments.readme_tables import results_folder
from dieplace.run import Run

RESULTS = results_folder() / "nvidia-h200-x2"


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert frame.main(["bench", "show", str(RESULTS / name)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["weight-swap", "context", "verify", "placement"])
def test_no_word_is_broken_at_eighty_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage, block and word of an arm that the files hold stands whole in its table."""
    text = shown(name, capsys)
    assert max(len(line) for line in text.splitlines() if not line.startswith("runs:")) <= 80
    head, _, rest = text.partition("Where a layer's time goes")
    files = [json.loads(path.read_text()) for path in (RESULTS / name).glob("*.json")]
    for run in files:
        assert len(files) == 1 or head.count(run["block"]) >= len(run["points"])
        for point in run["points"]:
            assert all(word in head for word in point["arm"].split())
    stages = rest.partition("Bytes by role")[0]
    if "columns, in the report" not in stages:
        assert {stage["stage"] for run in files for p in run["points"] for stage in p["stages"]} <= set(stages.split())


def test_stages_of_many_arms_are_shown_with_an_arm_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run = json.loads((RESULTS / "context" / "gpu0-gpu1.json").read_text())
    lines = shown("context", capsys).partition("Where a layer's time goes")[2].splitlines()
    for point in run["points"]:
        (line,) = [one for one in lines[:15] if one.startswith(point["arm"])]
        assert line.removeprefix(point["arm"]).split() == [f"{stage['us']:,.1f}" for stage in point["stages"]]


def test_every_verdict_names_what_it_is_against(capsys: pytest.CaptureFixture[str]) -> None:
    flat = " ".join(shown("context", capsys).split())
    found = re.findall(r"gpu0-gpu1 (\d+K) (?:swapped|kv far) is slower by [^\]]*\] than (\d+K) local", flat)
    assert len(found) == 6 and all(arm == base for arm, base in found)


def test_drift_in_the_file_is_a_sentence_and_none_is_where_none_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((RESULTS / "context" / "gpu0-gpu1.json").read_text())["facts"]["drift"]
    flat = " ".join(shown("context", capsys).split())
    moved = {arm: words for arm, words in told.items() if "drift by" in words}
    assert "8K local" in moved and all(f"{arm}: {words.replace('%', ' %')}" in flat for arm, words in moved.items())
    assert f"{len(moved)} of {len(told)} series" in flat
    run = Run.load(RESULTS / "context" / "gpu0-gpu1.json")
    still: dict[str, Any] = {**run.facts, "drift": dict.fromkeys(told, "no drift")}
    assert not any("series" in line for line in live_tables.sentences([replace(run, facts=still)]))


def test_rounds_are_summed_as_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    from dieplace.experiments import summary

    folder = results_folder() / "emulated-mi355x"
    for name, word in (("verify", "round"), ("weight-swap", "token")):
        runs = [Run.load(path) for path in sorted((folder / name).glob("*.json"))]
        assert summary.stage_rows(runs)[-1]["stage"] == word
