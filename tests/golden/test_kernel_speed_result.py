"""The committed kernel speeds: every rate and ratio follows from the samples in the file, and the ratios that hold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2" / "kernel-speed.json"


def cases() -> dict[str, dict]:
    body = json.loads(FILE.read_text())
    assert body["origin"] == "measured" and "H200" in body["device"]
    return {case["name"]: case for case in body["cases"]}


def test_rates_and_shares_follow_from_the_samples() -> None:
    found = cases()
    rates = {name: c["bytes_per_launch"] / statistics.median(c["samples_ns"]) for name, c in found.items()}
    ceiling = max(rates["torch copy_"], rates["streaming read"])
    for name, case in found.items():
        assert len(case["samples_ns"]) >= 20
        assert case["gb_per_s"] == pytest.approx(rates[name])
        assert case["of_ceiling"] == pytest.approx(rates[name] / ceiling)
        assert case["of_ceiling"] <= 1  # above 1 a cache would have served it


def test_the_ratios_that_hold() -> None:
    found = cases()
    assert found["gemv_bf16 1 GiB"]["of_ceiling"] >= 0.92
    assert found["gemv_bf16 1 GiB"]["gb_per_s"] >= found["torch.mv bf16 1 GiB"]["gb_per_s"]
    assert found["gemv_mxfp4 524288x4096"]["of_ceiling"] >= 0.50
    assert found["layer, torch ops"]["median_ns"] >= 3 * found["layer, Triton ops"]["median_ns"]
