"""First light without a node: what follows from what was seen, and what a bundle takes and refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dieplace.backends.replayed import first_tree
from dieplace.errors import UsageError
from dieplace.experiments import first_light_bundle as bundles
from dieplace.experiments import first_light_marker as markers
from dieplace.experiments import first_light_runs as runs
from dieplace.experiments import first_light_seen as seen
from dieplace.experiments.first_light_catalogue import QUESTIONS, question
from dieplace.experiments.first_light_modes import Switched, visits
from dieplace.experiments.first_light_pace import Pace, words
from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, safely, without
from dieplace.experiments.first_light_report import answer_rows, page
from dieplace.modes import Mode, partitions_of
from dieplace.partition.facts import CardFacts, DeviceFacts, NodeFacts
from dieplace.partition.journal import Journal
from dieplace.run import Point, Quantity, Run

ROOT = Path(__file__).parents[2]

DIE = 154_610_434_048
RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "nvidia-h200-x2" / "link"


def card(number: int, mode: str = "SPX/NPS1", *, first_node: int | None = None, **more: Any) -> CardFacts:
    compute, memory = mode.split("/")
    count = partitions_of(compute, 8)
    start = 2 + number * count if first_node is None else first_node
    sizes = more.pop("sizes", [2 * DIE // count] * count)
    devices = tuple(
        DeviceFacts(p, 8 // count, 1024 // count, sizes[p], 1000 + p, start + p, 128 + 8 * number + p)
        for p in range(count)
    )
    base: dict[str, Any] = {
        "id": f"gpu{number}", "bdf": f"0000:{number + 5:02x}:00.0", "part": "MI355X", "device_id": 0x75A3,
        "hive": "00000000000000aa", "hbm_bytes": 2 * DIE, "compute": compute, "memory": memory, "devices": devices,
        "offered_compute": ("SPX", "DPX", "QPX", "CPX") if memory == "NPS1" else ("DPX", "QPX", "CPX"),
        "supported_compute": ("SPX", "DPX", "QPX", "CPX"), "offered_memory": ("NPS1", "NPS2"), "compute_writable": True,
        "memory_writable": True, "part_xccs": 8,
    }  # fmt: skip
    return CardFacts(**{**base, **more})


def node(*cards: CardFacts, boot: str = "boot-1") -> NodeFacts:
    return NodeFacts(boot, "7", True, cards or (card(0), card(1)), module_state="live")


def told(*observations: seen.Observation, **more: Any) -> seen.Seen:
    return seen.Seen("emulated", observations, **more)


def look(mode: str, *cards: CardFacts, alone: str | None = None) -> seen.Observation:
    combines = {"MI355X": {"SPX": ("NPS1",), "DPX": ("NPS1", "NPS2"), "TPX": None, "CPX": ()}}
    return seen.Observation(mode, node(*(cards or (card(0, mode), card(1, mode)))), combines, alone)


SPX, DPX = look("SPX/NPS1"), look("DPX/NPS2")


# -- which states are visited ------------------------------------------------------------------------------------------


def test_the_tour_reloads_twice_at_most_and_takes_what_amd_lists() -> None:
    found = visits(node(), unvalidated=False)
    assert [str(v) for v in found] == ["DPX/NPS2", "CPX/NPS2 on gpu0 alone", "QPX/NPS2", "CPX/NPS2"]
    assert found[1].wanted == {"gpu0": Mode("CPX", "NPS2"), "gpu1": Mode("DPX", "NPS2")}


def test_unlisted_modes_come_only_when_allowed_and_before_the_reload() -> None:
    found = [str(v) for v in visits(node(), unvalidated=True)]
    assert found[:3] == ["DPX/NPS1", "QPX/NPS1", "CPX/NPS1"] and found[3] == "DPX/NPS2"


def test_a_node_found_in_dpx_nps2_starts_with_one_card_alone() -> None:
    found = [str(v) for v in visits(node(card(0, "DPX/NPS2"), card(1, "DPX/NPS2")), unvalidated=False)]
    assert found == ["CPX/NPS2 on gpu0 alone", "QPX/NPS2", "CPX/NPS2", "SPX/NPS1"]


def test_one_card_cannot_be_switched_alone() -> None:
    assert all(v.alone is None for v in visits(node(card(0)), unvalidated=False))


@pytest.mark.parametrize("change", [{"guest": True}, {"driver": "vfio-pci"}, {"compute": None}])
def test_nothing_is_visited_where_a_card_cannot_be_switched(change: dict[str, Any]) -> None:
    assert visits(node(card(0), replace(card(1), **change)), unvalidated=False) == ()


# -- answers from comparing states -------------------------------------------------------------------------------------

ALONE = look("mixed", card(0, "CPX/NPS2", first_node=4), card(1, "DPX/NPS2", first_node=2), alone="gpu0")
IN_PLACE = look("mixed", card(0, "CPX/NPS2", first_node=2), card(1, "DPX/NPS2", first_node=10), alone="gpu0")
MIDDLE = look(
    "mixed", card(0, "CPX/NPS2", first_node=4), card(1, "DPX/NPS2", first_node=2), card(2, "DPX/NPS2", first_node=12),
    alone="gpu0",
)  # fmt: skip
LOST = look("mixed", replace(card(0, "CPX/NPS2"), devices=()), card(1, "DPX/NPS2", first_node=2), alone="gpu0")
RELOAD = Switched("DPX/NPS2", 40.0, 12.0, 18.0, 3.0)
INIT: dict[str, Any] = {"ok": False, "stage": "init", "name": "DRIVER_NOT_LOADED", "code": 34, "text": "not loaded"}


def sized(*sizes: int | None) -> seen.Observation:
    return look("DPX/NPS2", card(0, "DPX/NPS2", sizes=list(sizes)))


def ids(**devices: str | None) -> dict[str, dict[str, str | None]]:
    return {"DPX/NPS2": {name.replace("_", "/"): value for name, value in devices.items()}}


def ran(link: list[Run] | None = None, why: str = "", dies: bool = True) -> runs.Ran:
    return runs.Ran("measured", {"link": link or []}, {"link": why} if why else {}, dies)


def points(**changes: float | None) -> Run:
    """A link run of two dies with figures that are easy to check; a change of None leaves its points out."""
    value: dict[str, float | None] = {
        "near": 335, "far": 433, "near1": 335, "far1": 433, "warm": 9000, "cold": 3500, "one": 2000, "both": 3900,
        **changes,
    }  # fmt: skip
    rows = [
        ("near", "latency", "gpu0/p0", "one", "cold", "latency_ns", value["near"]),
        ("far", "latency", "gpu0/p0", "one", "cold", "latency_ns", value["far"]),
        ("near", "latency", "gpu0/p1", "one", "cold", "latency_ns", value["near1"]),
        ("far", "latency", "gpu0/p1", "one", "cold", "latency_ns", value["far1"]),
        ("near", "read", "gpu0/p0", "one", "warm", "gb_per_s", value["warm"]),
        ("near", "read", "gpu0/p0", "one", "cold", "gb_per_s", value["cold"]),
        ("far", "read", "gpu0/p0", "one", "cold", "gb_per_s", value["one"]),
        ("far", "read", "all", "both at once", "cold", "gb_per_s", value["both"]),
    ]
    made = tuple(
        Point(
            arm,
            {name: Quantity("ns", "measured", v)},
            {"what": what, "reader": reader, "directions": way, "cache": cache, "working_set_bytes": 1 << 30},
        )
        for arm, what, reader, way, cache, name, v in rows
        if v is not None
    )
    return Run("link", "gpu0", "measured", "live", made, {}, {"name": "link"}, {}, "2026-11-30T00:00:00Z")


def after(marker: markers.Marker | None, facts: NodeFacts, journal: Journal | None = None) -> Any:
    return lambda: markers.after_reboot(marker, facts, journal, origin="emulated")


IN_NPS2 = node(card(0, "DPX/NPS2"), card(1, "DPX/NPS2"))
MARKER = markers.marker_of(IN_NPS2, running=False)
LATER = Journal(node(), {}, (), "boot-2", 1, "9999-01-01T00:00:00Z", outcome="done")
NEW_BOOT = replace(IN_NPS2, boot_id="boot-2")

# question, how it is asked, the word (None: none), the status
CASES: list[tuple[str, Any, str | None, str]] = [
    ("offered-modes", lambda: seen.offered_modes(told(SPX, DPX)), "listed", "answered"),
    ("offered-modes", lambda: seen.offered_modes(told(SPX)), "listed in part", "answered"),
    ("offered-modes", lambda: seen.offered_modes(told(replace(SPX, facts=NodeFacts("b", "1", True)))), None,
     "not-asked"),
    ("reload-times", lambda: seen.reload_times(told(SPX, switches=(RELOAD,))), "emulated", "answered"),
    ("reload-times", lambda: seen.reload_times(seen.Seen("measured", (SPX,), (RELOAD,))), "measured", "answered"),
    ("reload-times", lambda: seen.reload_times(told(SPX, switches=(Switched("CPX/NPS2", 1.0),))), None, "not-asked"),
    ("node-order", lambda: seen.node_order(told(DPX, ALONE)), "appended", "answered"),
    ("node-order", lambda: seen.node_order(told(DPX, IN_PLACE)), "in place", "answered"),
    ("node-order", lambda: seen.node_order(told(DPX, MIDDLE)), "mixed", "answered"),
    ("node-order", lambda: seen.node_order(told(DPX, LOST)), None, "unknown"),
    ("node-order", lambda: seen.node_order(told(SPX, DPX)), None, "not-asked"),
    ("range-sizes", lambda: seen.range_sizes(told(SPX, DPX)), "equal", "answered"),
    ("range-sizes", lambda: seen.range_sizes(told(sized(DIE, DIE - (16 << 20)))), "nearly equal", "answered"),
    ("range-sizes", lambda: seen.range_sizes(told(sized(DIE, DIE // 2))), "unequal", "answered"),
    ("range-sizes", lambda: seen.range_sizes(told(sized(DIE, None))), None, "unknown"),
    ("range-sizes", lambda: seen.range_sizes(told(SPX)), None, "not-asked"),
    ("sibling-ids", lambda: seen.sibling_ids(told(DPX), ids(gpu0_p0="a", gpu0_p1="a")), "equal", "answered"),
    ("sibling-ids", lambda: seen.sibling_ids(told(DPX), ids(gpu0_p0="a", gpu0_p1="b")), "distinct", "answered"),
    ("sibling-ids",
     lambda: seen.sibling_ids(told(DPX), ids(gpu0_p0="a", gpu0_p1="a", gpu1_p0="b", gpu1_p1="c")),
     "differs by card or mode", "answered"),
    ("sibling-ids", lambda: seen.sibling_ids(told(DPX), ids(gpu0_p0="a", gpu0_p1=None)), None, "unknown"),
    ("sibling-ids", lambda: seen.sibling_ids(told(SPX), ids(gpu0_p0="a")), None, "not-asked"),
    ("amdsmi-init-unloaded", lambda: init(INIT), "fails", "answered"),
    ("amdsmi-init-unloaded", lambda: init({"ok": True}), "succeeds", "answered"),
    ("amdsmi-init-unloaded", lambda: init({"ok": False, "stage": "child", "name": "TIMEOUT", "text": "20 s"}), "hangs",
     "answered"),
    ("amdsmi-init-unloaded", lambda: init({"ok": False, "stage": "import", "text": "no library"}), None, "unknown"),
    ("amdsmi-init-unloaded", lambda: init({"not_asked": "library 24 may loop"}), None, "not-asked"),
    ("amdsmi-init-unloaded", lambda: seen.init_while_unloaded(told(SPX)), None, "not-asked"),
    ("nps2-after-reboot", after(MARKER, NEW_BOOT), "survives", "answered"),
    ("nps2-after-reboot", after(MARKER, node(boot="boot-2")), "lost", "answered"),
    ("nps2-after-reboot", after(MARKER, node(card(0, "DPX/NPS2"), card(1), boot="boot-2")), None, "unknown"),
    ("nps2-after-reboot", after(MARKER, NEW_BOOT, LATER), None, "unknown"),
    ("nps2-after-reboot", after(MARKER, IN_NPS2), None, "not-asked"),
    ("nps2-after-reboot", after(markers.marker_of(node(), running=False), NEW_BOOT), None, "not-asked"),
    ("nps2-after-reboot", after(None, NEW_BOOT), None, "not-asked"),
    ("die-affinity", lambda: runs.die_affinity(ran([points()])), "own range is near", "answered"),
    ("die-affinity", lambda: runs.die_affinity(ran([points(near=433, far=335, near1=433, far1=335)])),
     "other range is near", "answered"),
    ("die-affinity", lambda: runs.die_affinity(ran([points(far=340)])), "no difference", "answered"),
    ("die-affinity", lambda: runs.die_affinity(ran([points(near1=None)])), None, "unknown"),
    ("die-affinity", lambda: runs.die_affinity(ran([points()], dies=False)), None, "not-asked"),
    ("near-far-latency", lambda: runs.near_far_latency(ran([points()])), "measured", "answered"),
    ("near-far-latency", lambda: runs.near_far_latency(ran([replace(points(), source="emulated")])), "emulated",
     "answered"),
    ("near-far-latency", lambda: runs.near_far_latency(ran([points(near=None, near1=None)])), None, "unknown"),
    ("near-far-latency", lambda: runs.near_far_latency(ran(why="it cannot run")), None, "not-asked"),
    ("link-directions", lambda: runs.link_directions(ran([points()])), "each direction by itself", "answered"),
    ("link-directions", lambda: runs.link_directions(ran([points(both=2100)])), "directions share", "answered"),
    ("link-directions", lambda: runs.link_directions(ran([points(both=None)])), None, "unknown"),
    ("cache-bandwidth", lambda: runs.cache_bandwidth(ran([points()])), "measured", "answered"),
    ("cache-bandwidth", lambda: runs.cache_bandwidth(ran([replace(points(), source="emulated")])), "emulated",
     "answered"),
    ("cache-bandwidth", lambda: runs.cache_bandwidth(ran([points(warm=3000)])), None, "unknown"),
    ("cache-bandwidth", lambda: runs.cache_bandwidth(ran([points(cold=None)])), None, "unknown"),
    ("latency-by-stack", lambda: runs.latency_by_stack(ran([points()])), None, "not-asked"),
    ("published-terms", lambda: runs.published_terms(ran()), None, "not-asked"),
]  # fmt: skip
NEVER = {"latency-by-stack", "published-terms"}  # no machine answers them: their words are there for whoever can


def init(away: dict[str, Any]) -> Answer:
    return seen.init_while_unloaded(told(SPX, switches=(replace(RELOAD, away=away),)))


@pytest.mark.parametrize(("name", "ask", "word", "status"), CASES, ids=[f"{n}-{w or s}" for n, _, w, s in CASES])
def test_what_was_seen_decides_the_answer(name: str, ask: Any, word: str | None, status: str) -> None:
    found = safely(replace(question(name), ask=lambda scene: ask()), None, "emulated")
    assert (found.word, found.status) == (word, status)
    assert Answer.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_every_word_of_every_question_of_the_end_is_provoked() -> None:
    wanted = {(q.id, word) for q in QUESTIONS if q.place == "end" and q.id not in NEVER for word in q.words}
    assert {(name, word) for name, _, word, _ in CASES if word} == wanted


def test_numbers_of_the_answers() -> None:
    times = seen.reload_times(told(SPX, switches=(RELOAD,)))
    assert times.value["reloads"][0] == {
        "to": "DPX/NPS2", "unload_s": 12.0, "load_s": 18.0, "ready_s": 3.0, "switch_s": 40.0,
    }  # fmt: skip
    assert "33.0 s on 2 cards, in 1 reload, by the emulated node's own clock" in times.said
    order = seen.node_order(told(DPX, ALONE))
    assert order.value["other_devices_shifted"] == 2 and order.value["after"]["gpu1/p0"] == 2
    assert seen.range_sizes(told(sized(DIE, DIE // 2))).value["apart"] == pytest.approx(1.0)
    assert "34" in init(INIT).said and "DRIVER_NOT_LOADED" in init(INIT).said


def test_the_committed_link_run_answers_by_its_own_figures() -> None:
    """Against the figures that the run file holds, read here without the code under test."""
    path = RESULTS / "gpu0-gpu1.json"
    data = json.loads(path.read_text())
    cold = {
        p["arm"]: p["quantities"]["latency_ns"]["value"] for p in data["points"]
        if p["factors"]["what"] == "latency" and p["factors"]["working_set_bytes"] == 1 << 30
        and p["factors"]["reader"] == "gpu0/p0"
    }  # fmt: skip
    found = runs.near_far_latency(runs.Ran("measured", {"link": [Run.load(path)]}, {}, False))
    assert found.value["near_ns"] == cold["near"] and found.value["far_ns"] == cold["far"]
    assert found.origin == "measured"


# -- answers and bundles as files --------------------------------------------------------------------------------------


def test_an_answer_has_a_word_and_nothing_else_has() -> None:
    with pytest.raises(ValueError):
        Answer("x", "answered", "said", "measured")
    with pytest.raises(ValueError):
        Answer("x", "refused", "said", "measured", word="yes")
    with pytest.raises(ValueError):
        Answer("x", "answered", "said", "guessed", word="yes")


def test_a_word_that_the_question_does_not_have_is_a_mistake_of_ours() -> None:
    strange = replace(
        question("peer-access"), ask=lambda scene: answered("peer-access", "perhaps", "", origin="measured")
    )
    with pytest.raises(ValueError, match="perhaps"):
        safely(strange, None, "measured")


def test_unknown_numbers_have_a_why_and_nan_never_reaches_a_file() -> None:
    found = answered("x", "yes", "", origin="measured", value={"a": math.nan, "b": None, "c": 1})
    assert found.value["a"] is None and "finite" in found.value["a_why"] and found.value["b_why"] == "not seen"


def made(folder: Path, **more: Any) -> bundles.Bundle:
    return bundles.Bundle(folder=folder, backend="emulated", origin="emulated", started="2026-11-30T00:00:00Z", **more)


def test_a_bundle_reads_at_every_moment(tmp_path: Path) -> None:
    bundle = made(tmp_path / "b", start="SPX/NPS1", missing=("peer-access", "link"), cards=2, parts=("MI355X",))
    bundle.save()
    assert bundles.load(tmp_path / "b").missing == ("peer-access", "link")
    bundle.put(without("refused", "peer-access", "busy", origin="emulated"))
    bundle.save_tree("SPX/NPS1", {"schema": "dieplace/recording/1"})
    back = bundles.load(tmp_path / "b")
    assert back == bundle and back.missing == ("link",) and back.state == "running"
    assert first_tree(tmp_path / "b") == tmp_path / "b" / "tree" / "spx-nps1.json"
    assert not [p for p in (tmp_path / "b").rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("bundle.json", lambda d: d.update(schema="dieplace/run/1")),
        ("bundle.json", lambda d: d.update(state="fine")),
        ("bundle.json", lambda d: d.pop("trees")),
        ("bundle.json", lambda d: d.update(trees={"SPX": "../../../etc/passwd"})),
        ("bundle.json", lambda d: d.update(experiments={"link": {"status": "ran", "why": "", "runs": ["/x.json"]}})),
        ("bundle.json", lambda d: d.update(missing="link")),
        ("answers.json", lambda d: d.update(answers=[{"question": "x"}])),
        ("answers.json", lambda d: d.update(schema="x")),
    ],
)  # fmt: skip
def test_a_damaged_bundle_is_told(tmp_path: Path, file: str, change: Any) -> None:
    made(tmp_path).save()
    data = json.loads((tmp_path / file).read_text())
    change(data)
    (tmp_path / file).write_text(json.dumps(data))
    with pytest.raises(UsageError):
        bundles.load(tmp_path)


@pytest.mark.parametrize("trees", [{}, {"SPX/NPS1": "../x.json"}, {"SPX/NPS1": 7}, []])
def test_a_bundle_without_a_tree_is_told(tmp_path: Path, trees: Any) -> None:
    (tmp_path / "bundle.json").write_text(json.dumps({"schema": bundles.SCHEMA, "start": "SPX/NPS1", "trees": trees}))
    with pytest.raises(UsageError, match="no recorded tree"):
        first_tree(tmp_path)


def test_what_was_not_asked_yet_is_in_the_rows_and_on_the_page(tmp_path: Path) -> None:
    bundle = made(tmp_path, state="interrupted", cards=1, parts=("MI355X",))
    bundle.put(without("refused", "peer-access", "</script><b>busy", origin="emulated"))
    rows = {row["question"]: row for row in answer_rows(bundle)}
    assert list(rows) == [q.id for q in QUESTIONS]
    assert rows["vmm-remap"]["status"] == "missing" and "interrupted" in rows["vmm-remap"]["said"]
    text = page(bundle)
    assert "<b>busy" not in text and "&lt;b&gt;busy" in text and "interrupted before it came to this" in text


# -- the time left -----------------------------------------------------------------------------------------------------


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_the_speed_that_was_seen() -> None:
    clock = HandClock()
    pace = Pace(["experiment"] * 4, emulated=False, now=clock)
    assert pace.left_s() == 120.0 and pace.step("experiment") == "roughly 2 min left"
    clock.now = 500.0
    assert pace.step("experiment") == f"roughly {round(3 * (30 + 500) / 2 / 60)} min left"
    clock.now = 600.0
    pace.step("experiment")
    assert pace.left_s() == pytest.approx((30 + 500 + 100) / 3)
    assert words(89.0) == "89 s" and words(240) == "4 min" and words(0.2) == "1 s"


def test_the_time_left_knows_steps_by_kind_in_whatever_order_they_come() -> None:
    """A pace that counted down its list would take the experiments, which come first here, for questions."""
    clock = HandClock()
    pace = Pace(["preflight", *["question"] * 8, *["experiment"] * 2, "restore"], emulated=True, now=clock)
    for seconds in (1.0, 5.0, 5.0):
        pace.step("preflight" if clock.now == 0 else "experiment")
        clock.now += seconds
    pace.step("question")
    assert pace.left_s() == pytest.approx(7 * 0.5 + 3.0)


def test_every_question_is_written_down_where_its_answer_says() -> None:
    for asked in QUESTIONS:
        page_, _, anchor = asked.source.partition("#")
        text = (ROOT / page_).read_text(encoding="utf-8")
        row = next((line for line in text.splitlines() if f'<a id="{anchor}"></a>' in line), "")
        assert f"`{asked.id}`" in row and asked.text in row, asked.source


def test_not_asked_is_an_answer_too() -> None:
    def ask(scene: Any) -> Answer:
        raise NotAsked("there is one card")

    found = safely(replace(question("node-order"), ask=ask), None, "measured")
    assert found.status == "not-asked" and found.said == "there is one card"
