"""Files of ranks, and merged ones, that are damaged or were written by somebody else: told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stub_experiment import made

from dieplace.binding.ranks import Launched
from dieplace.cli import main as frame
from dieplace.errors import UsageError
from dieplace.experiments.rank_end import Launch, with_place
from dieplace.experiments.scale_out_files import merge_folder
from dieplace.run import Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2"
MERGED = next((RESULTS / "scale-out").glob("*.json"))
COMMANDS = (("--json", "bench", "show"), ("bench", "show"), ("bench", "report", "--out", "page.html"))


def changed(path: Path, way: tuple[Any, ...], value: Any) -> None:
    body = inside = json.loads(path.read_text())
    for step in way[:-1]:
        inside = inside[step]
    inside[way[-1]] = value
    path.write_text(json.dumps(body))


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ranks' folders without a merged run."""
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        launched = Launched(rank, 2, rank, 2, 0, "", 0, "x", 0)
        cards = {"cards": [f"gpu{rank}"], "bdfs": ["0000:05:00.0"], "parts": ["MI355X"]}
        run = with_place(made(rank, f"gpu{rank}"), launched, Launch(tmp_path, "one"), cards)
        run.save(tmp_path / f"rank-{rank}" / "run.json")
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", True), ("rank", -1), ("rank", 2), ("world_size", "2"), ("world_size", 10**9), ("node", [["x"]]),
        ("launch_id", {"a": 1}), ("launch_id", None),
        ("cards", 3), ("cards", [None]), ("bdfs", None), ("parts", [1e308]),
    ],
)  # fmt: skip
def test_a_place_that_is_none(launch: Path, key: str, value: Any) -> None:
    assert len(merge_folder(launch)) == 1
    changed(launch / "rank-1" / "run.json", ("facts", "rank", key), value)
    with pytest.raises(UsageError, match="does not say of which rank it is: i"):
        merge_folder(launch)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("conditions", "power_w"), "text"),
        (("seed",), {}),
        (("code_hash",), {}),
        (("points", 0, "stages"), ["../../../x"]),
        (("points", 0, "residency_before"), {"bytes_by_role_and_domain": {"weights": 1}}),
    ],
)
def test_a_part_of_another_kind(
    launch: Path, way: tuple[Any, ...], value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(launch / "rank-0" / "run.json", way, value)
    for words in COMMANDS:
        assert frame.main([*words, str(launch)]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("facts", "ranks"), None),
        (("facts", "ranks", 0, "power_w"), "text"),
        (("facts", "ranks", 0, "parts"), 1),
        (("points", 0, "stages"), ["x"]),
        (("points", 0, "residency_before"), {"bytes_by_role_and_domain": {"weights": 1}}),
    ],
)
def test_a_merged_run(
    tmp_path: Path,
    way: tuple[Any, ...],
    value: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Run.load(MERGED).save(tmp_path / "run.json")
    assert frame.main(["bench", "show", str(path)]) == 0
    changed(path, way, value)
    for words in COMMANDS:
        assert frame.main([*words, str(path)]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_step_without_moved_bytes_is_shown(tmp_path: Path) -> None:
    path = Run.load(next((RESULTS / "context").glob("*.json"))).save(tmp_path / "run.json")
    changed(path, ("points", 1, "factors", "moved_bytes_per_layer"), None)
    assert frame.main(["bench", "show", str(path)]) == 0
