"""link on a simulated rig with known latencies and rates: what it finds, labels, refuses to say, and shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dieplace.cli import bench_files
from dieplace.cli import main as frame
from dieplace.experiments import link, live_tables, report
from dieplace.experiments.harness import Plan
from dieplace.experiments.link import GIB, MIB
from dieplace.experiments.run_shape import check_shape
from dieplace.run import Point, Run

# A simulated pair: ns of a load, and bytes a ns; the cache is ten times as fast as memory.
NEAR_NS, FAR_NS, NEAR_RATE, FAR_RATE = 350.0, 1050.0, 4000.0, 370.0
CACHE = 60 * MIB


class SimulatedRig:
    """Two devices or one, with noise, whose true figures the test knows."""

    cache_bytes = CACHE
    part = "NVIDIA H200"
    share_of_card = 1.0
    cycle_unit = "SM cycles"

    def __init__(self, devices: int = 2, near_rate: float = NEAR_RATE) -> None:
        self.readers = tuple(f"gpu{i}/p0" for i in range(devices))
        self.near_rate = near_rate
        self.random = random.Random(5)

    def noisy(self, ns: float) -> float:
        return ns * self.random.lognormvariate(0, 0.002)

    def latency(self, reader: str, home: str, nbytes: int, cycles: list[float]) -> Callable[[], float]:
        def sample() -> float:
            ns = self.noisy(NEAR_NS if reader == home else FAR_NS)
            cycles.append(ns * 1.98)
            return ns

        return sample

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]:
        near = reader == home
        rate = self.near_rate if near else FAR_RATE
        moved = nbytes * (2 if near and "copy" in kind else 1)
        served = rate * (10 if near and nbytes < CACHE else 1)
        return lambda: self.noisy(moved / served)

    def together(self, kind: str, far: bool, nbytes: int) -> Callable[[], float]:
        moved = nbytes * (2 if kind == "copy" and not far else 1)
        return lambda: self.noisy(moved / (FAR_RATE if far else self.near_rate))

    def far_homes(self, reader: str) -> dict[str, str]:
        others = [name for name in self.readers if name != reader]
        return {"other card": others[0]} if others else {}

    def no_far_because(self, reader: str) -> str | None:
        return None if self.far_homes(reader) else link.ONE_DEVICE

    def facts(self) -> dict[str, Any]:
        return {}


def points_of(rig: SimulatedRig, cases: int | None = None) -> list[Point]:
    told: list[str] = []
    found, _ = link.run_link(rig, Plan(seed=1, warmups=1, min_blocks=10, max_blocks=10), told.append)
    assert len(told) == (link.count_of_cases(len(rig.readers)) if cases is None else cases)
    return found


def one(
    points: list[Point], arm: str, what: str, nbytes: int, directions: str = "one", reader: str = "gpu0/p0"
) -> Point:
    wanted = {"what": what, "working_set_bytes": nbytes, "directions": directions, "reader": reader}
    (found,) = [p for p in points if p.arm == arm and wanted.items() <= p.factors.items()]
    return found


def run_of(points: list[Point]) -> Run:
    return Run(
        "link", "gpu0-gpu1", "measured", "live", tuple(points), {}, {"name": "link"}, {"devices": [], "domains": []},
        "2026-11-30T00:00:00+00:00", notes=(link.NOT_MI355X,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def two() -> list[Point]:
    return points_of(SimulatedRig())


def test_finds_the_true_ratios_with_intervals(two: list[Point]) -> None:
    far = one(two, "far", "latency", GIB).quantities
    assert far["time_over_near"].value == pytest.approx(FAR_NS / NEAR_NS, rel=0.01)
    assert far["time_over_near"].low <= far["time_over_near"].value <= far["time_over_near"].high
    assert far["latency_cycles"].value == pytest.approx(FAR_NS * 1.98, rel=0.01)
    assert one(two, "far", "read", GIB).quantities["gb_per_s"].value == pytest.approx(FAR_RATE, rel=0.01)
    control = one(two, "near", "read", GIB).quantities["time_over_near"]
    assert control.value == pytest.approx(1, abs=0.01) and control.method.startswith("A/A")


def test_cycles_of_warm_ups_are_no_samples(two: list[Point]) -> None:
    """Ten blocks: near is taken twice in each, with its control, and alone three times."""
    alone = points_of(SimulatedRig(devices=1))
    for points, arm, count in ((two, "near", 20), (two, "far", 10), (alone, "near", 30)):
        cycles = one(points, arm, "latency", link.GIB).quantities["latency_cycles"]
        assert len(cycles.samples) == count


def test_near_copies_count_both_directions_and_far_ones_what_crosses(two: list[Point]) -> None:
    assert one(two, "near", "copy", GIB).quantities["gb_per_s"].value == pytest.approx(NEAR_RATE, rel=0.01)
    assert one(two, "near Tensor.copy_", "copy", GIB).quantities["time_over_near"].value == pytest.approx(1, abs=0.01)
    assert one(two, "far to near", "copy", GIB).quantities["gb_per_s"].value == pytest.approx(FAR_RATE, rel=0.01)
    both = one(two, "far", "read", GIB, "both at once", "all")
    assert both.quantities["gb_per_s"].value == pytest.approx(2 * FAR_RATE, rel=0.01)


def test_a_share_is_of_a_ceiling_of_the_same_run_and_cold_only(two: list[Point]) -> None:
    """Cases h1 and h13: 16 MiB of a 60 MiB cache read 10 times as fast, and no share says 1,000 %."""
    warm = one(two, "near", "read", 16 * MIB)
    assert warm.factors["cache"] == "warm" and warm.quantities["gb_per_s"].value > 9 * NEAR_RATE
    assert warm.quantities["of_ceiling"].value is None and "warm" in str(warm.quantities["of_ceiling"].why)
    shares = [p.quantities["of_ceiling"].value for p in two if "of_ceiling" in p.quantities]
    assert all(share is None or share <= 1 for share in shares) and sum(s is not None for s in shares) > 10
    slower = points_of(SimulatedRig(near_rate=1000.0))  # another card: its ceiling is its own, not a typed-in figure
    assert one(slower, "near", "read", GIB).quantities["of_ceiling"].value == pytest.approx(1, abs=0.02)


def test_a_rate_above_the_datasheet_is_named_as_no_memory_rate() -> None:
    fast = points_of(SimulatedRig(near_rate=9000.0))
    assert "above the datasheet" in " ".join(one(fast, "near", "read", GIB).notes)
    unknown = SimulatedRig(near_rate=9000.0)
    unknown.part = "Some other card"
    assert "datasheet" not in " ".join(one(points_of(unknown), "near", "read", GIB).notes)


def test_one_visible_device_gives_near_figures_and_far_ones_as_null() -> None:
    points = points_of(SimulatedRig(devices=1))
    assert one(points, "near", "latency", GIB).quantities["latency_ns"].value == pytest.approx(NEAR_NS, rel=0.01)
    far = [p for p in points if p.arm not in ("near", "near Tensor.copy_") or p.factors["directions"] != "one"]
    assert len(far) == 5 + 3 + 3 * 3 + 2 * 2
    assert all(q.value is None and q.why == link.ONE_DEVICE for p in far for q in p.quantities.values())


class HiveRig(SimulatedRig):
    """Half a card whose other half is near the top, and another card behind a slower link."""

    part, share_of_card, cycle_unit = "MI355X", 0.5, "engine cycles"

    def __init__(self, near_rate: float = NEAR_RATE) -> None:
        super().__init__(near_rate=near_rate)
        self.readers = ("gpu0/p0", "gpu0/p1")

    def far_homes(self, reader: str) -> dict[str, str]:
        return {"same card": next(name for name in self.readers if name != reader), "other card": "gpu1/p0"}

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]:
        rate = 100.0 if home == "gpu1/p0" else FAR_RATE if home != reader else self.near_rate
        moved = nbytes * (2 if home == reader and "copy" in kind else 1)
        return lambda: self.noisy(moved / rate)


def test_two_kinds_of_far_memory_are_told_apart_and_each_has_its_ceiling() -> None:
    points = points_of(HiveRig(), cases=link.count_of_cases(2) + 3)
    wanted = {"what": "read", "reader": "gpu0/p0", "working_set_bytes": GIB}
    far = [p for p in points if p.arm == "far" and "hop" in p.factors and wanted.items() <= p.factors.items()]
    reads = {p.factors["hop"]: p for p in far}
    assert {hop: p.factors["home"] for hop, p in reads.items()} == {"same card": "gpu0/p1", "other card": "gpu1/p0"}
    for hop, rate in (("same card", FAR_RATE), ("other card", 100.0)):
        found = reads[hop].quantities
        assert found["gb_per_s"].value == pytest.approx(rate, rel=0.01)
        assert found["of_ceiling"].value == pytest.approx(1, abs=0.02)  # of its own kind, not of the faster one
    hops = {p.factors.get("hop") for p in points if p.factors["reader"] == "gpu0/p1"}
    assert hops == {"same card"}  # the second half measures the largest sets of the peer die alone


def test_the_datasheet_is_one_of_a_whole_card() -> None:
    rig = HiveRig(near_rate=5000.0)  # under 8,000 GB/s of a card, above the 4,000 of half of one
    told = " ".join(note for p in points_of(rig, cases=link.count_of_cases(2) + 3) for note in p.notes)
    assert "above the datasheet's 4000" in told


def test_run_file_report_and_tables_say_what_it_is(two: list[Point], tmp_path: Path, capsys: Any) -> None:
    run = run_of(two)
    path = run.save(tmp_path / "gpu0-gpu1.json")
    assert check_shape(Run.load(path), "x").to_json() == run.to_json()
    page = report.page([run])
    assert link.NOT_MI355X in page and "A/A control" in page
    said = live_tables.sentences([run])
    assert any("latency far, 1024 MiB, by gpu0/p0, is slower by" in line for line in said)
    assert frame.main(["bench", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Latency of dependent loads, measured" in shown and link.NOT_MI355X in " ".join(shown.split())
    assert frame.main(["bench", "compare", str(path), str(path)]) == 0


def test_refuses_other_backends_with_the_reason(tmp_path: Path, capsys: Any) -> None:
    assert frame.main(["--backend", "emulated", "bench", "run", "link", "--out", str(tmp_path)]) == 3
    assert "would print its own inputs" in capsys.readouterr().err
    assert frame.main(["bench", "list"]) == 0
    assert "link on emulated" in capsys.readouterr().out


def test_two_runs_that_start_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exec --per-device starts one run for each GPU at once: none may write over another's report."""
    monkeypatch.chdir(tmp_path)
    found = {bench_files.own_folder("link") for _ in range(5)}
    assert len(found) == 5 and all(folder.is_dir() for folder in found)


def test_ctrl_c_keeps_the_cases_that_are_there() -> None:
    """In the second case, whose blocks before it count, and before the first block, where nothing is kept."""

    def cut_after(calls: int) -> SimulatedRig:
        rig, left = SimulatedRig(), iter(range(calls))
        plain = rig.noisy
        rig.noisy = lambda value: plain(value) if next(left, None) is not None else interrupt()  # type: ignore
        return rig

    def interrupt() -> float:
        raise KeyboardInterrupt

    plan = Plan(seed=1, warmups=1, min_blocks=10, max_blocks=10)
    whole = 2 + 10 * 3  # samples of one case: two arms warm up, then blocks of them and the control
    points, stopped = link.run_link(cut_after(whole + 2 + 6 * 3 + 1), plan, lambda text: None)
    sizes = [len(point.quantities["latency_ns"].samples) for point in points]
    assert stopped == "interrupted" and sizes == [10, 10, 6, 6]
    with pytest.raises(KeyboardInterrupt):
        link.run_link(cut_after(4), plan, lambda text: None)
