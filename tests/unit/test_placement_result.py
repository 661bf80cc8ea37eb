"""The committed figures of placement on two H200s, and that nothing is measured where torch may move segments."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dieplace.errors import UsageError
from dieplace.experiments import link, weight_swap_devices
from dieplace.experiments.registry import Options

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2"


def test_the_figures_hold_their_bounds() -> None:
    """10,000 allocations at most 1.1 times plain torch; a module placed at 0.9 or more of `.to()`; one pointer."""
    found = json.loads((RESULTS / "placement.json").read_text())
    assert found["schema"] == "dieplace/placement-figures/1" and found["origin"] == "measured"
    assert found["devices"] == ["NVIDIA H200"] * 2 and found["failed"] == 0
    figures: dict[str, object] = {}
    for row in found["figures"]:
        figures |= row
    assert figures["local_over_plain"] <= 1.1  # type: ignore[operator]
    assert figures["place_gb_per_s"] >= 0.9 * figures["to_gb_per_s"]  # type: ignore[operator]
    assert figures["address_is_equal"] is True
    probed = [row for row in found["figures"] if "evidence" in row]
    assert {row["name"] for row in probed} >= {"far.weight", "near.weight", "flags", "kv"}
    assert all((row["evidence"], row["differs"]) == ("probed", None) for row in probed)


@pytest.mark.parametrize(
    "run", [partial(link.run, "nvidia"), partial(weight_swap_devices.run_live, "nvidia")], ids=["link", "weight-swap"]
)
def test_measured_arms_refuse_expandable_segments(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UsageError, match="expandable segments on"):
        next(run(Options(), print))
