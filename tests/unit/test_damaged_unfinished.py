"""Damaged files of an unfinished run, or ones that somebody else wrote: told in a sentence, never gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dieplace.errors import UsageError
from dieplace.experiments.harness import CONTROL, Measured, Plan, measure
from dieplace.experiments.registry import Options
from dieplace.experiments.unfinished import OPTIONS, Unfinished, continued

BLOCK = ("a", "b", CONTROL)
WHOLE = Measured(1, {"a": (1.0,), "b": (2.0,), CONTROL: (1.0,)}, {"a": (), "b": ()}, (BLOCK,), "under way")
NONE = {"stopped": "done", "order": (), "samples": {"a": (), "b": (), CONTROL: ()}}


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "unfinished").write_text("")
    with pytest.raises(UsageError, match="cannot keep what is measured"):
        Unfinished(tmp_path, {"seed": 1}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [("arms", 1), ("arms", [1]), ("context_tokens", "1024"), ("shards", True), ("model", None), ("precision", [])],
)
def test_options_of_another_kind(tmp_path: Path, key: str, value: Any) -> None:
    options = Options()
    identity = {"experiment": "verify", **{name: getattr(options, name) for name in OPTIONS}}
    Unfinished(tmp_path, identity, {}).close()
    assert continued(tmp_path, "verify", options, ()) == options
    path = tmp_path / "unfinished" / "run.json"
    body = json.loads(path.read_text())
    body["identity"][key] = value
    path.write_text(json.dumps(body))
    with pytest.raises(UsageError, match=f"its {key} is"):
        continued(tmp_path, "verify", options, ())


@pytest.mark.parametrize(
    "sittings", ["1", "[1]", "[{}]", '[{"conditions": []}]', '[{"conditions": {"a": NaN}}]', "[1e400]"]
)
def test_sittings(tmp_path: Path, sittings: str) -> None:
    Unfinished(tmp_path, {"seed": 1}, {}).close()
    path = tmp_path / "unfinished" / "run.json"
    path.write_text(path.read_text().replace('[{"conditions": {}}]', sittings))
    with pytest.raises(UsageError, match=r"run\.json cannot be gone on with"):
        Unfinished(tmp_path, {"seed": 1}, {})


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": {"a": (1.0,), "b": (-1.0,), CONTROL: (1.0,)}},
        {"samples": {"a": (1.0,), "b": (10**400,), CONTROL: (1.0,)}},
        {"samples": {"a": (1.0,), CONTROL: (1.0,)}},
        {"order": (("a", "b"),)},
        {"order": (("a", "b", "b"),)},
        {"warmups": {"a": ()}},
        {"warmups": {"a": (), "b": (0.0,)}},
        {"sittings": (5,)},
        {"spent_s": -1.0},
        NONE,
    ],
)
def test_blocks_that_do_not_fit_together(tmp_path: Path, changed: dict[str, Any]) -> None:
    work = Unfinished(tmp_path, {"seed": 1}, {})
    work.keeper("", "ab")(WHOLE)
    assert work.earlier("", "ab") == WHOLE
    work.keeper("", "ab")(replace(WHOLE, **changed))
    with pytest.raises(UsageError, match=r"case-only\.json cannot be gone on with"):
        work.earlier("", "ab")
    work.close()


def test_blocks_that_are_done_must_be_of_the_same_arms() -> None:
    with pytest.raises(UsageError, match="measured earlier"):
        measure({"a": lambda: 1.0, "c": lambda: 1.0}, Plan(seed=1), earlier=replace(WHOLE, stopped="done"))
