"""The committed bundles of first light read back: trees replay, and answers agree with what the bundle's own raw files
say, read here without the code that answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dieplace.backends.replayed import ReplayedBackend
from dieplace.cli import main as frame
from dieplace.experiments import first_light_bundle as bundles
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_report import page
from dieplace.run import Run

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
FOLDERS = {name: RESULTS / name / "first-light" for name in ("emulated-mi355x", "nvidia-h200-x2")}
EMULATED, H200 = FOLDERS.values()
NODES = "/sys/class/kfd/kfd/topology/nodes"


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())
def test_a_committed_bundle_is_whole_and_small(folder: Path) -> None:
    bundle = bundles.load(folder)
    assert bundle.state == "complete" and bundle.restored is True and bundle.missing == ()
    assert set(bundle.answers) == {q.id for q in QUESTIONS}
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 3 << 20
    for path in folder.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    assert sum(map(len, bundle.runs().values())) == len(list((folder / "runs").glob("*.json")))
    told = "says nothing about any hardware" if folder == EMULATED else "say nothing about an MI355X"
    assert told in " ".join(bundle.notes) and told in page(bundle)


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())
def test_every_tree_and_run_replays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (folder / "tree").glob("*.json"):
        machine = ReplayedBackend(path).snapshot()
        assert machine.source == "replayed" and machine.devices
    assert ReplayedBackend(folder).snapshot().cards
    assert frame.main(["--backend", "replayed", "--node", str(folder), "list"]) == 0
    for path in (folder / "runs").glob("*.json"):
        assert Run.load(path).points
    capsys.readouterr()
    assert frame.main(["bench", "show", str(folder)]) == 0
    shown = capsys.readouterr().out.replace(str(folder), "B")
    assert max(map(len, shown.splitlines())) <= 80
    for question in QUESTIONS:
        assert question.id in shown


def answers() -> dict[str, Any]:
    return {one["question"]: one for one in json.loads((EMULATED / "answers.json").read_text())["answers"]}


def tree(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EMULATED / "tree" / f"{name}.json").read_text())["answers"]["read"]
    return found


def numbers(reads: dict[str, Any], path: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", reads[path], flags=re.M)}


def gpu_nodes(reads: dict[str, Any]) -> dict[int, dict[str, int]]:
    found = {}
    for path in reads:
        match = re.fullmatch(rf"{NODES}/(\d+)/properties", path)
        if match and (properties := numbers(reads, path)).get("simd_count"):
            found[int(match[1])] = properties
    return found


def test_sizes_of_the_ranges_are_those_of_the_recorded_banks() -> None:
    reads = tree("dpx-nps2")
    sizes = sorted(numbers(reads, f"{NODES}/{n}/mem_banks/0/properties")["size_in_bytes"] for n in gpu_nodes(reads))
    told = answers()["range-sizes"]["value"]["bytes_by_card"]
    assert sorted(size for card in told.values() for size in card) == sizes and len(sizes) == 4


def test_ids_are_those_of_the_recorded_properties() -> None:
    by_location: dict[int, set[int]] = {}
    for properties in gpu_nodes(tree("dpx-nps2")).values():
        by_location.setdefault(properties["location_id"] >> 3, set()).add(properties["unique_id"])
    assert answers()["sibling-ids"]["word"] == "equal" and all(len(ids) == 1 for ids in by_location.values())


def test_offered_modes_are_the_recorded_files() -> None:
    told = answers()["offered-modes"]["value"]["by_state"]
    for state, name in (("SPX/NPS1", "spx-nps1"), ("DPX/NPS2", "dpx-nps2")):
        texts = {t for p, t in tree(name).items() if p.endswith("/available_compute_partition")}
        assert texts == {", ".join(told[state]["MI355X"]["available_compute"])}


def test_node_order_is_that_of_the_recorded_topology() -> None:
    """The devices of the card that was switched alone have the last node numbers."""
    nodes = gpu_nodes(tree("cpx-nps2-on-gpu0-alone"))
    of_card = {number: properties["location_id"] >> 8 for number, properties in nodes.items()}
    switched = {number for number, bus in of_card.items() if list(of_card.values()).count(bus) == 8}
    assert switched == set(sorted(nodes)[-8:]) and answers()["node-order"]["word"] == "appended"


def test_latencies_of_the_gpus_are_medians_of_the_runs_own_samples() -> None:
    told = {one["question"]: one for one in json.loads((H200 / "answers.json").read_text())["answers"]}
    (path,) = (H200 / "runs").glob("link*.json")
    found = {}
    for point in json.loads(path.read_text())["points"]:
        what = point["factors"]
        if (what["what"], what["working_set_bytes"], what["reader"]) == ("latency", 1 << 30, "gpu0/p0"):
            found[point["arm"]] = median(point["quantities"]["latency_ns"]["samples"])
    value = told["near-far-latency"]["value"]
    assert value["near_ns"] == pytest.approx(found["near"]) and value["far_ns"] == pytest.approx(found["far"])
    assert value["far_ns"] > 2 * value["near_ns"]
    assert told["node-order"]["said"] == "NVIDIA GPUs are left in the mode they are in"


def test_the_gpus_were_asked_what_applies_to_them() -> None:
    told = {one["question"]: one for one in json.loads((H200 / "answers.json").read_text())["answers"]}
    for name in ("peer-access", "poll-reliability", "remote-store", "vmm-remap", "launch-cost", "link-directions"):
        assert told[name]["status"] == "answered" and told[name]["origin"] == "measured", told[name]
    assert told["peer-access"]["value"]["wrong_bytes"] == 0
    assert told["poll-reliability"]["value"]["rounds_missed"] == 0
