"""The merged run from ranks' runs, in one process: what is compared, what is told, and from which files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_experiment import made

from dieplace.binding.ranks import Launched
from dieplace.cli.main import main
from dieplace.errors import UsageError
from dieplace.experiments import live_tables, report, scale_out_merge, scale_out_tables
from dieplace.experiments.rank_end import Launch, RankEnd, end_of, with_place
from dieplace.experiments.run_shape import check_shape
from dieplace.experiments.scale_out_files import merge_folder
from dieplace.run import Point, Quantity, Run

LAUNCH = Launch(Path("/nowhere"), "launch-1")


def _cards(*names: str) -> dict[str, Any]:
    return {"cards": list(names), "bdfs": ["0000:05:00.0"], "parts": ["MI355X"], "identity": []}


def _end(rank: int, run: Run | None = None, code: int = 0, why: str | None = None, node: int = 0) -> RankEnd:
    return RankEnd(rank, node, _cards(f"gpu{rank % 8}"), code, why, None, () if run is None else (run,))


def _ends(count: int, *, slow: int | None = None, by: float = 1.1) -> list[RankEnd]:
    return [_end(r, made(r, f"gpu{r % 8}", scale=by if r == slow else 1.0), node=r // 8) for r in range(count)]


def test_points_of_all_ranks_are_kept_with_rank_host_and_card() -> None:
    (run,) = scale_out_merge.merge(_ends(10), LAUNCH)
    assert [(p.factors["rank"], p.factors["host"], p.factors["card"]) for p in run.points] == [
        (r, f"host{r // 8}", f"gpu{r % 8}") for r in range(10)
    ]
    assert [p.quantities["layer_us"].samples for p in run.points] == [
        made(r, f"gpu{r % 8}").points[0].quantities["layer_us"].samples for r in range(10)
    ]
    assert run.block == "card" and {p.factors["on"] for p in run.points} == {"card/p0"}
    assert Run.from_json(run.to_json()).to_json() == run.to_json()


@pytest.mark.parametrize("count", [4, 9])
def test_the_slow_card_is_named_in_the_verdict_and_only_it(count: int) -> None:
    (run,) = scale_out_merge.merge(_ends(count, slow=2), LAUNCH)
    assert [p.factors["card"] for p in run.points if p.factors["outlier"] == "yes"] == ["gpu2"]
    (verdict,) = scale_out_tables.sentences([run])
    assert verdict.startswith("measured: host0 gpu2 (rank 2) is an outlier, ")
    told = float(verdict.split("outlier, ")[1].split(" %")[0])
    assert told == pytest.approx(10, abs=1.5) and f"the median of {count} cards in local" in verdict
    (same,) = scale_out_merge.merge(_ends(count), LAUNCH)
    (verdict,) = scale_out_tables.sentences([same])
    assert verdict.startswith(f"measured: no outlier among {count} cards: they lie within ")


def test_two_cards_show_a_spread_and_no_outlier() -> None:
    (run,) = scale_out_merge.merge(_ends(2, slow=1, by=1.5), LAUNCH)
    (verdict,) = scale_out_tables.sentences([run])
    assert "2 cards lie within" in verdict and "of fewer than 4 none can be called the odd one" in verdict
    assert {p.factors["outlier"] for p in run.points} == {"unknown"}


def test_lost_ranks_are_listed_with_their_codes_and_are_not_compared() -> None:
    ends = [*_ends(4)[:2], _end(2, code=86, why="no word"), _ends(4)[3], RankEnd(4, why="no sign of life")]
    (run,) = scale_out_merge.merge(ends, LAUNCH)
    assert [p.factors["rank"] for p in run.points] == [0, 1, 3]
    told = {rank["rank"]: (rank["state"], rank["exit_code"]) for rank in run.facts["ranks"]}
    assert told == {0: ("measured", 0), 1: ("measured", 0), 2: ("lost", 86), 3: ("measured", 0), 4: ("lost", None)}
    said = scale_out_tables.sentences([run])
    assert "rank 2 on host0 gpu2 is lost (exit code 86): no word" in said
    assert "rank 4 is lost: no sign of life" in said
    assert any("rank 2" in note and "86" in note for note in run.notes)
    with pytest.raises(UsageError, match="no rank measured anything"):
        scale_out_merge.merge([_end(0, code=3, why="refused")], LAUNCH)


def test_a_rank_that_was_stopped_keeps_what_it_has_and_a_crashed_one_does_not() -> None:
    ends = [
        *_ends(2),
        _end(2, made(2, "gpu2"), code=130, why="the launch was ended"),
        _end(3, made(3, "gpu3"), code=70),
    ]
    (run,) = scale_out_merge.merge(ends, LAUNCH)
    assert [p.factors["rank"] for p in run.points] == [0, 1, 2]
    assert run.facts["ranks"][2]["state"] == "cut short"
    notice = {"node": 0, "hostname": "h", "cards": _cards("gpu0"), "ended": True, "code": 0, "why": None}
    empty = end_of(0, {**notice, "error": None, "files": []}, ())
    assert empty.lost and empty.why == "it measured nothing"


def test_ranks_under_unlike_conditions_are_told_and_clocks_are_not_among_them() -> None:
    runs = [made(r, f"gpu{r}") for r in range(4)]
    runs[1] = replace(runs[1], conditions={**runs[1].conditions, "driver_version": "2", "core_clock_mhz": 900.0})
    (run,) = scale_out_merge.merge([_end(r, one) for r, one in enumerate(runs)], LAUNCH)
    (told,) = [note for note in run.notes if "unlike" in note]
    assert "rank 0 and rank 1" in told and "driver_version None and 2" in told and "clock" not in told
    assert run.conditions["driver_version"] is None and "differs" in run.conditions["driver_version_why"]
    assert run.facts["ranks"][1]["core_clock_mhz"] == 900.0
    runs[2] = replace(runs[2], code_hash="other")
    (run,) = scale_out_merge.merge([_end(r, one) for r, one in enumerate(runs)], LAUNCH)
    assert run.code_hash is None and "other, stub" in str(run.code_hash_why)


def _link_like(rank: int, far: bool) -> Run:
    base = made(rank, f"gpu{rank}")
    rate = Quantity("GB/s", "measured", 4000.0, samples=(3990.0, 4000.0, 4010.0))
    none = Quantity("GB/s", "measured", None, why="one device is visible")
    points = []
    for size in (1 << 20, 1 << 30):
        factors = {"what": "read", "reader": f"gpu{rank}/p0", "working_set_bytes": size, "cache": "cold"}
        points += [Point("near", {"gb_per_s": rate}, factors), Point("far", {"gb_per_s": none}, factors)]
    return replace(base, experiment="link", points=tuple(points))


def test_only_the_largest_working_set_of_a_kind_is_in_the_verdict_and_null_stays_null() -> None:
    (run,) = scale_out_merge.merge([_end(r, _link_like(r, False)) for r in range(4)], LAUNCH)
    cards = next(t for t in scale_out_tables.tables([run]) if t.title.startswith("Each card"))
    assert [row["what"] for row in cards.rows] == ["read near 1 GiB"] * 4
    far = [p for p in run.points if p.arm == "far"]
    assert len(far) == 8 and all(p.quantities["over_all_cards"].value is None for p in far)
    assert {p.quantities["over_all_cards"].why for p in far} == {"no other rank has such a point"}


def test_modelled_runs_say_that_they_say_nothing_about_cards() -> None:
    modelled = [replace(made(r, f"gpu{r}"), origin="modelled") for r in range(4)]
    plain = Quantity("us", "modelled", 100.0, 90.0, 110.0, "range over parameter sets")
    runs = [replace(run, points=(Point("local", {"token_us": plain}),)) for run in modelled]
    (run,) = scale_out_merge.merge([_end(r, one) for r, one in enumerate(runs)], LAUNCH)
    assert run.origin == "modelled" and run.notes[0] == scale_out_merge.MODELLED_NOTE
    assert live_tables.is_live([run])
    assert [t.title for t in live_tables.tables([run])] == [
        "Ranks",
        "Spread of the cards in every comparison, modelled",
    ]


def test_report_and_show_name_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = scale_out_merge.merge(_ends(5, slow=4), LAUNCH)
    path = run.save(tmp_path / "card.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    page = report.page([run])
    assert "host0 gpu4 (rank 4) is an outlier" in page and "Each card against all, measured" in page
    assert page.count("host0 gpu4: local") >= 1  # its bar
    assert main(["bench", "show", str(path)]) == 0
    assert "host0 gpu4 (rank 4) is an outlier" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("damage", ["ranks", "factors", "quantities"])
def test_a_damaged_merged_run_is_told_in_a_sentence(tmp_path: Path, capsys: Any, damage: str) -> None:
    (run,) = scale_out_merge.merge(_ends(4), LAUNCH)
    data = run.to_json()
    if damage == "ranks":
        del data["facts"]["ranks"]
    else:
        data["points"][1][damage] = {}
    (tmp_path / "card.json").write_text(json.dumps(data))
    assert main(["bench", "show", str(tmp_path)]) == 2
    assert "is no complete scale-out run" in capsys.readouterr().err


def _placed(run: Run, rank: int, world: int, launch_id: str = "s") -> Run:
    place = Launched(rank, world, rank, world, 0, "h", 1, "id", 0)
    return with_place(run, place, Launch(Path("x"), launch_id), _cards(f"gpu{rank}"))


def test_rank_files_without_a_merged_run_are_merged_when_shown(tmp_path: Path, capsys: Any) -> None:
    """The rank that was merging was killed: what the ranks saved is enough."""
    for rank in (0, 1, 3):
        _placed(made(rank, f"gpu{rank}"), rank, 4).save(tmp_path / f"rank-{rank}" / f"gpu{rank}.json")
    _placed(made(2, "gpu2", scale=9), 2, 4, "older").save(tmp_path / "rank-2" / "gpu2.json")
    (run,) = merge_folder(tmp_path)
    assert [p.factors["rank"] for p in run.points] == [0, 1, 3]
    assert main(["bench", "show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "rank 2 is lost: it left no run here" in shown["verdicts"]
    assert main(["bench", "report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "rank 2" in (tmp_path / "page.html").read_text()


def test_a_folder_of_other_files_is_no_launch(tmp_path: Path) -> None:
    made(0, "gpu0").save(tmp_path / "rank-0" / "gpu0.json")
    with pytest.raises(UsageError, match="does not say of which rank"):
        merge_folder(tmp_path)
    with pytest.raises(UsageError, match="there is no run of a rank"):
        merge_folder(tmp_path / "rank-0")
