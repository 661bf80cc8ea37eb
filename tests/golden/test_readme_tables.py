"""README and committed results agree: the tables between its markers are what the results give today."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from dieplace.errors import UsageError
from dieplace.experiments.readme_tables import (
    TABLES,
    filled,
    published_table,
    results_folder,
    weight_swap_table,
)

README = Path(__file__).resolve().parents[2] / "README.md"


def test_readme_holds_the_tables_of_the_results() -> None:
    page = README.read_text(encoding="utf-8")
    assert "<!-- table: weight-swap -->" in page and "<!-- table: published -->" in page
    assert filled(page) == page, "run: python -m dieplace.experiments.readme_tables README.md"


def test_a_stale_or_wrong_table_is_found() -> None:
    good = f"a\n<!-- table: weight-swap -->\n{weight_swap_table()}\n<!-- end table -->\nb\n"
    assert filled(good) == good
    stale = good.replace("679", "680")
    assert stale != good and filled(stale) == good
    with pytest.raises(UsageError, match="no table is called"):
        filled("<!-- table: colours -->\n<!-- end table -->")
    with pytest.raises(UsageError, match="no end"):
        filled("<!-- table: published -->\n")


def test_tables_say_modelled_and_hold_the_check_values() -> None:
    """Token times of sets A (B to C) are the reference's printed check values, rounded."""
    table = weight_swap_table()
    assert "| dpx-nps2 | local | 679 (650 to 722) | 0.0 | 0.0 |" in table
    assert "| dpx-nps2 | swapped | 869 (827 to 869) | 28.0 (14.6 to 28.0) | 14.6 |" in table
    assert "| spx-nps1 | local | 731 (700 to 770) | 7.7 (6.6 to 7.8) | 6.6 |" in table
    assert all("modelled" in TABLES[name]() for name in ("weight-swap", "published"))


def test_measured_tables_say_what_they_are_and_hold_the_files_own_medians() -> None:
    """Medians of the samples in the files, computed here, stand in the tables, which never claim an MI355X."""
    results = results_folder() / "nvidia-h200-x2"
    for name, path, arm, quantity, unit in (
        ("link", "link/gpu0-gpu1.json", "far", "latency_ns", "{:.0f} ns"),
        ("weight-swap-h200", "weight-swap/gpu0-gpu1.json", "swapped", "layer_us", "| {:.1f} |"),
    ):
        table = TABLES[name]()
        assert "measured on 2 x H200: it validates the harness and the code, not the MI355X" in table
        points = json.loads((results / path).read_text())["points"]
        found = [p for p in points if p["arm"] == arm and p["factors"].get("working_set_bytes", 1 << 30) == 1 << 30]
        assert unit.format(statistics.median(found[0]["quantities"][quantity]["samples"])) in table


def test_committed_measurements_hold_what_is_said_of_them() -> None:
    """Same code in all arms, A/A within 1 %, weights probed, prediction within 15 %, copy at 0.95 of Tensor.copy_."""
    results = results_folder() / "nvidia-h200-x2"
    swap = json.loads((results / "weight-swap" / "gpu0-gpu1.json").read_text())
    local, swapped = swap["points"][:2]
    assert len(set(swap["facts"]["code_hash_by_arm"].values())) == 1 and swap["facts"]["same_result_in_all_arms"]
    assert abs(local["quantities"]["time_over_local"]["value"] - 1) < 0.01
    assert swapped["residency_before"]["moved_evidence"] == swapped["residency_after"]["moved_evidence"] == "probed"
    assert abs(swapped["quantities"]["predicted_over_measured"]["value"] - 1) < 0.15
    link = json.loads((results / "link" / "gpu0-gpu1.json").read_text())
    for point in link["points"]:
        if point["arm"] == "near Tensor.copy_":  # its time over ours: how much of its rate ours reaches
            assert point["quantities"]["time_over_near"]["low"] >= 0.95
    assert len(published_table().splitlines()) == 2 + 23
