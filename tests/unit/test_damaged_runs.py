"""Run files with any part missing or of another kind: told in a sentence, never a traceback, by every bench command."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dieplace.cli import main as frame

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
FOLDER = RESULTS / "emulated-mi355x" / "weight-swap"
LIVE = RESULTS / "nvidia-h200-x2"
JUNK: list[Any] = [None, True, -1, 0, 1e308, 10**400, "", "text", "</script>", [], [None], {}, {"a": 1}, [[["x"]]]]


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths_of(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths_of(item, (*at, index))
    return found


def damaged(whole: dict[str, Any], draw: random.Random, paths: list[tuple[Any, ...]]) -> dict[str, Any]:
    made = copy.deepcopy(whole)
    for _ in range(draw.choice([1, 1, 1, 2])):
        *way, last = draw.choice(paths)
        inside = made
        try:
            for step in way:
                inside = inside[step]
            if draw.random() < 0.4:
                del inside[last]
            else:
                inside[last] = draw.choice(JUNK)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took that part away
    return made


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(FOLDER / "dpx-nps2.json", marks=pytest.mark.slow),
        FOLDER / "spx-nps1.json",
        pytest.param(LIVE / "placement" / "gpu0-gpu1.json", marks=pytest.mark.slow),
        pytest.param(LIVE / "link" / "gpu0-gpu1.json", marks=pytest.mark.slow),
    ],
    ids=["dpx-nps2", "spx-nps1", "live weight-swap", "live link"],
)
def test_any_damage_is_a_sentence(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = json.loads(file.read_text())
    whole_other = LIVE / "link" / "gpu0-gpu1.json" if whole["origin"] == "measured" else FOLDER / "dpx-nps1.json"
    paths = paths_of(whole)
    # parts near the root decide most; a run has thousands of numbers deep inside
    shallow = [path for path in paths if len(path) <= 4]
    draw = random.Random(f"{file.parent.name} {file.stem}")
    codes: dict[int, int] = {}
    for number in range(250):
        Path("run.json").write_text(json.dumps(damaged(whole, draw, shallow if number % 2 else paths)))
        words = draw.choice(
            [
                ["bench", "show", "run.json"],
                ["bench", "show", "run.json", "--json"],
                ["bench", "report", "run.json", "--out", "r.html"],
                ["bench", "report", "run.json", str(whole_other), "--md", "--out", "r.md"],
                ["bench", "compare", "run.json", str(file), "--fail-on", "1"],
            ]
        )
        code = frame.main(words)
        out, err = capsys.readouterr()
        assert code in (0, 1, 2, 3) and "Traceback" not in err, (words, err)
        if "--json" in words:
            json.loads(out, parse_constant=lambda word: pytest.fail(word))
        codes[code] = codes.get(code, 0) + 1
    assert codes.get(2, 0) > 25 and codes.get(0, 0) > 25  # both kinds were met
