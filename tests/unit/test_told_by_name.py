"""Errors and tables that say which file, which unit, and why there is nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dieplace.cli import main as frame
from dieplace.fit import OBJECT_BYTES
from dieplace.partition.plan import Reloads

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def test_of_several_files_the_one_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text('{"schema": "something/1"}')
    broken.write_text('{"schema": "dieplace/run/1"}')
    run = RESULTS / "emulated-mi355x" / "weight-swap" / "dpx-nps2.json"
    for bad in (other, broken):
        for words in (["show"], ["report", "--out", str(tmp_path / "page.html")]):
            assert frame.main(["bench", *words, str(run), str(bad)]) == 2
            assert str(bad) in capsys.readouterr().err


@pytest.mark.parametrize("metric", ["latency", "bandwidth", "distance"])
def test_a_node_without_devices_says_why_there_is_no_matrix(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--backend", "cpu", "topo", "-m", metric]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no device on this node" in out and "no matrix is drawn" in out and "columns:" not in out


def test_a_folder_with_one_run_of_another_vendor_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RESULTS / "nvidia-h200-x2" / "link" / "gpu0-gpu1.json"
    shutil.copy(run, tmp_path)
    words = ["--backend", "replayed", "--node", str(tmp_path), "topo"]
    assert frame.main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cards"]) == 2
    shutil.copy(run, tmp_path / "second.json")
    assert frame.main(words) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "gpu0-gpu1.json") in told and "modprobe" not in told
    (tmp_path / "empty").mkdir()
    assert frame.main([*words[:3], str(tmp_path / "empty"), "topo"]) == 2
    told = capsys.readouterr().err
    assert "modprobe" not in told and "dieplace env --record FILE" in told


def test_place_plan_says_its_unit_and_what_small_buffers_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """500 lines of 128 bytes are 0.1 MB, and take an object of 2 MiB each."""
    spec = tmp_path / "spec.toml"
    flags = 'role = "sync_flag"\nbytes = 128\ndevice = "gpu0/p0"\ncount = 500\n'
    whole = f'role = "weights"\nbytes = {4 * OBJECT_BYTES}\ndevice = "gpu0/p0"\n'
    spec.write_text(f"version = 1\n[[buffers]]\n{flags}[[buffers]]\n{whole}")
    assert frame.main(["--backend", "emulated", "place", "plan", str(spec)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GB a domain and a device would hold" in out
    assert f"sync_flag: 0.1 MB in 500 buffers take {500 * 2 * 1024 * 1024 / 1e6:,.1f} MB" in out
    assert "weights:" not in out


def test_reloads_are_told_as_one_would() -> None:
    assert str(Reloads((1.2,))) == "the one reload before on this host took 1 s"
    assert str(Reloads((1.2, 1.4))) == "earlier reloads took 1 s (n=2)"
    assert str(Reloads((20.0, 50.2, 31.0))) == "earlier reloads took 20 to 50 s (n=3)"
