"""Launches of several ranks that go wrong in every way: one answer, the right ranks lost, nobody waits for ever.

The ranks are real processes that talk over a real TCPStore; only torchrun is left out (`test_ranks_torchrun.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import SCENARIOS

from dieplace.cli.main import main

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario, run once."""
    folder = tmp_path_factory.mktemp("launches")
    words = [sys.executable, str(SUPPORT / "forked_ranks.py"), str(folder)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == set(SCENARIOS)
    return found


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "DIEPLACE"))}


def _answer(launch: dict[str, Any], speaker: int = 0) -> dict[str, Any]:
    """The one JSON value, which one rank printed."""
    assert [rank for rank, text in enumerate(launch["out"]) if text] == [speaker], launch["err"]
    answer: dict[str, Any] = json.loads(launch["out"][speaker])
    return answer


def _states(answer: dict[str, Any]) -> dict[int, Any]:
    return {rank["rank"]: (rank["state"], rank["exit_code"]) for rank in answer["ranks"]}


def test_all_well(launches: dict[str, Any]) -> None:
    launch = launches["plain"]
    answer = _answer(launch)
    assert launch["codes"] == [0] * 4 and answer["ok"] and answer["lost"] == []
    folder = Path(launch["folder"])
    assert sorted(p.name for p in folder.iterdir()) == [
        "card.json",
        "rank-0",
        "rank-1",
        "rank-2",
        "rank-3",
        "report.html",
    ]
    assert (folder / "rank-3" / "gpu3.json").is_file()
    run = json.loads((folder / "card.json").read_text())
    assert [(p["factors"]["rank"], p["factors"]["card"]) for p in run["points"]] == [(r, f"gpu{r}") for r in range(4)]


def test_the_slow_card_is_named(launches: dict[str, Any]) -> None:
    (verdict,) = _answer(launches["slow card"])["verdicts"]
    assert verdict.startswith("measured: host0 gpu2 (rank 2) is an outlier, ")


def test_cards_of_two_nodes_are_told_apart(launches: dict[str, Any]) -> None:
    answer = _answer(launches["two nodes"])
    assert [(r["host"], r["cards"]) for r in answer["ranks"]] == [
        (f"host{node}", [f"gpu{card}"]) for node in range(2) for card in range(3)
    ]
    assert "6 cards" in answer["verdicts"][0]
    assert (Path(launches["two nodes"]["folder"]) / "hosts.txt").read_text().startswith("host0 ")


def test_a_typed_error_of_one_rank_is_told_and_the_rest_is_merged(launches: dict[str, Any]) -> None:
    answer = _answer(launches["typed error"])
    assert launches["typed error"]["codes"] == [3, 3, 0, 0] and not answer["ok"]
    assert _states(answer)[1] == ("lost", 3) and answer["ranks"][1]["why"] == "this card has no stub"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("same error everywhere", 3, "this card has no stub"),
        ("unknown name", 2, "no experiment is called 'nothing'"),
        ("unknown option", 2, "No such option '--nothing'"),
        ("nothing to go on with", 2, "there is no folder"),
        ("unlike errors", 3, "rank 0 (host0 gpu0) is lost (exit code 9)"),
    ],
)
def test_where_no_rank_measured_one_error_is_told_once(
    launches: dict[str, Any], name: str, code: int, words: str
) -> None:
    answer = _answer(launches[name])
    assert set(launches[name]["codes"]) == {code} and words in answer["error"]["message"]
    assert "Traceback" not in "".join(launches[name]["err"])


@pytest.mark.parametrize(
    ("name", "lost", "code", "codes"),
    [
        ("child killed", 3, 137, [3, 0, 0, 137]),
        ("leader's child ends with 86", 0, 86, [86, 0, 0, 0]),
        ("ends after saving", 1, 7, [3, 7, 0, 0]),
    ],
)
def test_the_exit_code_of_a_lost_rank_is_seen(
    launches: dict[str, Any], name: str, lost: int, code: int, codes: list[int]
) -> None:
    answer = _answer(launches[name])
    assert launches[name]["codes"] == codes and answer["lost"] == [lost]
    assert _states(answer) == {rank: ("lost", code) if rank == lost else ("measured", 0) for rank in range(4)}
    run = json.loads(Path(answer["runs"][0]).read_text())
    assert [p["factors"]["rank"] for p in run["points"]] == [rank for rank in range(4) if rank != lost]


def test_a_slow_rank_is_waited_for(launches: dict[str, Any]) -> None:
    assert launches["slow rank"]["codes"] == [0] * 4
    assert _answer(launches["slow rank"])["lost"] == [] and launches["slow rank"]["took_s"] > 1.5


def test_a_hung_rank_is_stopped_and_named(launches: dict[str, Any]) -> None:
    answer = _answer(launches["hung rank"])
    assert launches["hung rank"]["codes"] == [3, 137, 0, 0] and answer["lost"] == [1]
    assert answer["ranks"][1]["why"].startswith("stopped after 1 s without an end, where rank ")


@pytest.mark.parametrize(("name", "lost", "speaker"), [("leader killed", 0, 1), ("rank killed", 2, 0)])
def test_a_killed_rank_is_lost_without_a_code_and_the_next_one_merges(
    launches: dict[str, Any], name: str, lost: int, speaker: int
) -> None:
    answer = _answer(launches[name], speaker)
    assert launches[name]["codes"][lost] == -9 and launches[name]["codes"][speaker] == 3
    assert answer["lost"] == [lost] and answer["ranks"][lost]["exit_code"] is None
    assert "torchrun's own report" in answer["ranks"][lost]["exit_code_why"]


def test_ctrl_c_merges_what_was_measured(launches: dict[str, Any]) -> None:
    launch = launches["Ctrl-C"]
    assert launch["codes"] == [130, 130, 130, 0] and launch["took_s"] < 15  # three slept 30 s
    assert _states(_answer(launch))[3] == ("measured", 0)
    assert "go on with the same command and --resume" in launch["err"][0]


def test_gone_on_with_only_the_missing_rank_measures_again(launches: dict[str, Any]) -> None:
    launch = launches["gone on with"]
    answer = _answer(launch)
    assert launch["codes"] == [0] * 4 and answer["lost"] == []
    assert ["measuring" in text for text in launch["err"]] == [False] * 4  # only rank 0 shows progress, and had a run
    run = json.loads(Path(answer["runs"][0]).read_text())
    assert [p["factors"]["rank"] for p in run["points"]] == [0, 1, 2, 3]
    launch_ids = {
        json.loads(path.read_text())["facts"]["rank"]["launch_id"]
        for path in Path(launch["folder"]).glob("rank-*/*.json")
    }
    assert launch_ids == {run["facts"]["launch_id"]}


def test_without_torchrun_no_rank_stays_behind(launches: dict[str, Any]) -> None:
    launch = launches["store dies"]
    assert launch["codes"] == [3] * 4 and launch["took_s"] < 15
    assert _answer(launch)["error"]["word"] == "store-gone"


def test_what_the_ranks_left_is_shown_where_nothing_was_merged(
    launches: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(launches["rank killed"]["folder"])
    (folder / "card.json").unlink()
    assert main(["--json", "bench", "show", str(folder)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "rank 2 is lost: it left no run here" in shown["verdicts"]
