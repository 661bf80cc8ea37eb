"""`topo --from RUN`: near and far memory of a link run as a matrix, on its own machine only, each value with origin."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from dieplace.cli import main as frame
from dieplace.discover import discover

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2" / "link"
FILE = FOLDER / "gpu0-gpu1.json"
GIB = 1 << 30
HOMES = {("gpu0/p0", "near"): "gpu0/mem0", ("gpu0/p0", "far"): "gpu1/mem0",
         ("gpu1/p0", "near"): "gpu1/mem0", ("gpu1/p0", "far"): "gpu0/mem0"}  # fmt: skip


def expected(metric: str) -> dict[tuple[str, str], float]:
    """Medians of the file's own samples at its largest working set, computed here."""
    what, name = {"latency": ("latency", "latency_ns"), "bandwidth": ("read", "gb_per_s")}[metric]
    found = {}
    for point in json.loads(FILE.read_text())["points"]:
        factors = point["factors"]
        if (factors["what"], factors["directions"], factors["working_set_bytes"]) == (what, "one", GIB):
            samples = point["quantities"][name]["samples"]
            home = HOMES[factors["reader"], point["arm"]]
            # a rate is bytes over the median time: its own median but for ties between two middle samples
            found[factors["reader"], home] = statistics.median(samples)
    assert len(found) == 4
    return found


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert frame.main(list(words)) == code
    out, err = capsys.readouterr()
    return out, err


@pytest.mark.parametrize("metric", ["latency", "bandwidth"])
def test_cells_are_the_medians_of_the_runs_samples(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = expected(metric)
    for source in (FOLDER, FILE):
        out, _ = answer(capsys, "topo", "-m", metric, "--from", str(source), "--json")
        body = json.loads(out)
        known = {(c["initiator"], c["target"]): c for c in body["cells"] if c["value"] is not None}
        assert known.keys() == wanted.keys()
        for pair, cell in known.items():
            assert cell["value"] == pytest.approx(wanted[pair], rel=1e-3)
            assert cell["low"] <= cell["value"] <= cell["high"] and cell["working_set_bytes"] == GIB
            assert cell["origin"] == "measured" and cell["from"] == str(FILE)
        assert all(cell["value_why"] for cell in body["cells"] if cell["value"] is None)


def test_text_shows_the_matrix_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answer(capsys, "topo", "-m", "latency", "--from", str(FOLDER))
    wanted = expected("latency")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("gpu")}
    assert rows["gpu0/p0"][:2] == [f"{wanted['gpu0/p0', f'gpu{i}/mem0']:.0f}" for i in (0, 1)]
    assert rows["gpu1/p0"][:2] == [f"{wanted['gpu1/p0', f'gpu{i}/mem0']:.0f}" for i in (0, 1)]
    assert "latency (ns): row reads from column, measured" in out
    assert "says nothing" in out and "MI355X" in out and max(map(len, out.splitlines())) <= max(80, len(str(FILE)) + 20)


def test_csv_has_values_and_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answer(capsys, "topo", "-m", "bandwidth", "-o", "csv", "--from", str(FILE))
    rows = list(csv.DictReader(io.StringIO(out)))
    far = next(r for r in rows if (r["initiator"], r["target"]) == ("gpu0/p0", "gpu1/mem0"))
    assert float(far["low"]) <= float(far["value"]) <= float(far["high"]) and far["origin"] == "measured"


def test_a_warm_point_never_becomes_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the largest set stays, made warm: no cell, an error that says where to take one."""
    run = json.loads(FILE.read_text())
    for point in run["points"]:
        point["factors"]["cache"] = "warm"
    (tmp_path / "run.json").write_text(json.dumps(run))
    _, err = answer(capsys, "topo", "-m", "latency", "--from", str(tmp_path), code=2)
    assert "holds no latency of memory" in err and "dieplace bench run link" in err


def test_another_machine_is_refused_with_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = str(tmp_path / "node")
    answer(capsys, "--backend", "emulated", "--node", node, "list")
    words = ("--backend", "emulated", "--node", node, "topo", "-m", "latency", "--from", str(FILE), "--json")
    out, _ = answer(capsys, *words, code=2)
    assert json.loads(out)["error"]["differing"] == ["source", "cards.id", "devices.id"]

    run = json.loads(FILE.read_text())
    run["machine"]["cards"][1] |= {"bdf": "0000:00:09.0", "uuid": "GPU-2"}
    run["machine"]["devices"][0]["cus"] = 131
    other = tmp_path / "other.json"
    other.write_text(json.dumps(run))
    there = ("--backend", "replayed", "--node", str(FILE))  # a run file stands for its machine
    out, _ = answer(capsys, *there, "topo", "-m", "latency", "--from", str(other), "--json", code=2)
    # a serial number that one side has left out tells nothing
    assert json.loads(out)["error"]["differing"] == ["cards.gpu1.bdf", "devices.gpu0/p0.cus"]
    answer(capsys, *there, "topo", "-m", "latency", "--from", str(FILE))


def test_reported_and_measured_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On an MI355X node the driver reports links between cards; a run's own cells are of one card. Both, marked."""
    node = str(tmp_path / "node")
    answer(capsys, "--backend", "emulated", "--node", node, "list")
    run: dict[str, Any] = json.loads(FILE.read_text())
    machine = discover("emulated", node=node).to_json()
    run |= {"source": "emulated", "origin": "modelled", "machine": machine}
    run["facts"]["visible"] = []
    for point in run["points"]:
        point["factors"]["home"] = {"near": "gpu0/mem0"}.get(point["arm"], "gpu0/p0")
        for quantity in point["quantities"].values():
            quantity |= {"origin": "modelled", "samples": []}
    (tmp_path / "run.json").write_text(json.dumps(run))
    words = ("--backend", "emulated", "--node", node, "topo", "-m", "bandwidth", "--from", str(tmp_path / "run.json"))
    out, _ = answer(capsys, *words)
    cells = next(line.split() for line in out.splitlines() if line.startswith("gpu0/p0"))
    own, other = cells[1], cells[2]
    assert own.isdigit() and other.endswith("r") and float(other[:-1]) > 0
    assert "modelled and reported" in out and "r  reported by the driver" in out


def test_what_cannot_be_a_matrix_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap = FOLDER.parent / "weight-swap"
    for words, said in (
        (["-m", "distance", "--from", str(FILE)], "a distance is not measured"),
        (["-m", "latency", "--from", str(swap)], "holds no link run"),
        (["-m", "latency", "--from", str(tmp_path)], "there is no run file"),
        (["--from", str(FILE)], "--from needs -m"),
    ):
        _, err = answer(capsys, "topo", *words, code=2)
        assert said in err
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(FILE.read_text())
    _, err = answer(capsys, "topo", "-m", "latency", "--from", str(tmp_path), code=2)
    assert "holds 2 link runs" in err
