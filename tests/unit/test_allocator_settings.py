"""Expandable segments: found through each variable that torch reads, never changed, refused in measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dieplace.allocator_settings import VARIABLES, expandable_segments, require_fixed_segments
from dieplace.errors import UsageError


def fake_torch(memory: object) -> SimpleNamespace:
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, memory=memory)
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments:True"])
def test_each_variable_is_found_named_and_left_alone(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert not expandable_segments().on
    require_fixed_segments()
    monkeypatch.setenv(name, value)
    assert expandable_segments().on
    with pytest.raises(UsageError, match=name):
        require_fixed_segments()
    assert os.environ[name] == value


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "roundup_power2_divisions:4", "expandable_segments"]
)
def test_other_settings_are_off(value: str) -> None:
    assert not expandable_segments({"PYTORCH_ALLOC_CONF": value}).on


def test_torch_is_asked_where_it_tells() -> None:
    told = SimpleNamespace(_snapshot=lambda: {"allocator_settings": {"expandable_segments": True}})
    found = expandable_segments({}, fake_torch(told))
    assert found.on and found.source == "torch's allocator settings"


@pytest.mark.parametrize("memory", [SimpleNamespace(), SimpleNamespace(_snapshot=dict), None])
def test_a_torch_that_does_not_tell_is_no_error(memory: object) -> None:
    assert not expandable_segments({}, fake_torch(memory)).on


def test_torch_is_not_loaded_to_ask() -> None:
    code = (
        "import sys; from dieplace.allocator_settings import expandable_segments as e; e(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", VARIABLES)
def test_doctor_says_on_and_names_the_variable(name: str, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(tmp_path), name: "expandable_segments:True"}
    command = [sys.executable, "-m", "dieplace.cli", "--backend", "emulated", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    (row,) = [row for row in json.loads(done.stdout)["checks"] if row["what"] == "torch allocator"]
    assert row["works"] is False and f"{name}=expandable_segments:True" in row["why"]
