"""Tables of the experiments page agree with the committed results, and hold figures computed here from the files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from dieplace.errors import UsageError
from dieplace.experiments import readme_more
from dieplace.experiments.readme_tables import TABLES, filled, results_folder

DOCS = Path(__file__).resolve().parents[2] / "docs"
GPUS = results_folder() / "nvidia-h200-x2"


@pytest.mark.parametrize(
    ("page", "names"), [("experiments", ("mode", "kernel-speed-h200")), ("flags", ("flags-h200", "shards-h200"))]
)
def test_a_page_holds_the_tables_of_the_results(page: str, names: tuple[str, ...]) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert {f"<!-- table: {name} -->" for name in names} <= set(text.splitlines())
    assert filled(text) == text, f"run: python -m dieplace.experiments.readme_tables docs/{page}.md"


def test_kernel_speeds_are_medians_over_the_runs_own_ceiling() -> None:
    """The figures that the measurement must show: 0.92 of the ceiling for bf16, no slower than torch.mv; 0.50; 0.30."""
    table = TABLES["kernel-speed-h200"]()
    cases = {case["name"]: case for case in json.loads((GPUS / "kernel-speed.json").read_text())["cases"]}
    rate = {name: case["bytes_per_launch"] / statistics.median(case["samples_ns"]) for name, case in cases.items()}
    ceiling = rate["streaming read"]
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    for name, words in readme_more._SPEED_ROWS.items():
        assert rows[words].endswith(f"| {rate[name]:,.0f} | {rate[name] / ceiling:.2f} |")
    assert rate["gemv_bf16 1 GiB"] >= max(0.92 * ceiling, rate["torch.mv bf16 1 GiB"])
    assert rate["gemv_mxfp4 524288x4096"] >= 0.5 * ceiling and rate["layer, Triton ops"] >= 0.3 * ceiling
    assert "one NVIDIA H200" in table and "nothing about an MI355X" in table


def test_modes_say_modelled_and_hold_the_reference_values() -> None:
    """679.3 us with all memory local and 731.4 us in SPX/NPS1 are the reference's printed check values."""
    table = TABLES["mode"]()
    assert "modelled" in table and "| SPX/NPS1 | 1 | no | 731.4 |" in table
    assert "| DPX/NPS1 | 2 | without one | 731.4 |" in table and "| DPX/NPS2 | 2 | with a reload | 679.3 |" in table


def test_flags_are_medians_of_round_trips() -> None:
    table = TABLES["flags-h200"]()
    points = json.loads((GPUS / "flags" / "gpu0-gpu1.json").read_text())["points"]
    for point in points:
        told = statistics.median(point["quantities"]["round_trip_ns"]["samples"]) / 1000
        start = f"| {point['factors']['pollers']} | {point['factors']['pollers_on']} |"
        (row,) = [line for line in table.splitlines() if line.startswith(start)]
        assert f"| {told:.2f} " in row
    assert "not the MI355X" in table


def test_two_shards_are_medians_and_the_prediction_is_their_own() -> None:
    """The prediction by hand: local + moved bytes x (1 / far - 1 / near), at the rates that the run recorded."""
    table = TABLES["shards-h200"]()
    body = json.loads((GPUS / "weight-swap" / "gpu0-gpu1-shards2.json").read_text())
    times = {p["arm"]: statistics.median(p["quantities"]["layer_us"]["samples"]) for p in body["points"]}
    moved = body["points"][1]["factors"]["moved_bytes_per_layer"]
    rates = body["facts"]["prediction"]
    by_hand = times["local"] + moved * (1 / rates["far_gb_per_s"] - 1 / rates["near_gb_per_s"]) / 1000
    (row,) = [line for line in table.splitlines() if line.startswith("| swapped")]
    assert f"| {moved / 1e6:.1f} | {times['swapped']:.1f} |" in row
    assert row.endswith(f"| {by_hand:.1f} | {by_hand / times['swapped']:.2f} |")
    assert abs(by_hand / times["swapped"] - 1) < 0.15


def test_a_measurement_that_lacks_a_case_is_told(tmp_path: Path) -> None:
    (tmp_path / "nvidia-h200-x2").mkdir()
    body = json.loads((GPUS / "kernel-speed.json").read_text())
    body["cases"] = [case for case in body["cases"] if case["name"] != "layer, torch ops"]
    (tmp_path / "nvidia-h200-x2" / "kernel-speed.json").write_text(json.dumps(body))
    with pytest.raises(UsageError, match="no case 'layer, torch ops'"):
        readme_more.kernel_speed_table(tmp_path)
