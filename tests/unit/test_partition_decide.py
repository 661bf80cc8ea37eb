"""Planning decisions over plain facts: what is refused, and which steps come in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dieplace.errors import Busy, NoSuchMode, Unsupported, UsageError
from dieplace.modes import Mode
from dieplace.partition.decide import refuse_impossible, steps_between
from dieplace.partition.facts import CardFacts, DeviceFacts, NodeFacts
from dieplace.partition.support import offered_modes
from dieplace.partition.verify import mismatches

GB = 10**9


def card(
    number: int, mode: str = "SPX/NPS1", *, hive: str | None = "a", part: str = "MI355X", **changes: object
) -> CardFacts:
    now = Mode.parse(mode)
    count = {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}[now.compute]
    devices = tuple(
        DeviceFacts(
            p,
            8 // count,
            1024 // count,
            288 * GB // count,
            1000 * number + p,
            2 + number * count + p,
            128 + 8 * number + p,
        )
        for p in range(count)
    )
    made = CardFacts(
        f"gpu{number}", f"0000:{number + 5:02x}:00.0", part, 0x75A3, hive, 288 * GB, now.compute, now.memory,
        offered_compute=("SPX", "DPX", "QPX", "CPX") if now.memory == "NPS1" else ("DPX", "QPX", "CPX"),
        supported_compute=("SPX", "DPX", "QPX", "CPX"), offered_memory=("NPS1", "NPS2"),
        compute_writable=True, memory_writable=True, devices=devices,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def node(*cards: CardFacts) -> NodeFacts:
    return NodeFacts("boot", "7", True, cards, "live")


def steps(facts: NodeFacts, wanted: dict[str, str], **options: object) -> list[tuple[str, str, str | None]]:
    defaults: dict[str, object] = {"pending": {}, "clear_pending": False, "stop_units": (), "roads": ("r", "r")}
    modes = {name: Mode.parse(word) for name, word in wanted.items()}
    made, _, _ = steps_between(facts, modes, **(defaults | options))  # type: ignore[arg-type]
    return [(step.kind, step.target, step.value) for step in made]


def test_up_records_memory_once_a_hive_then_reloads_then_sets_compute() -> None:
    facts = node(card(0), card(1), card(2, hive="b"), card(3, hive="b"))
    kinds = steps(facts, dict.fromkeys(("gpu0", "gpu1", "gpu2", "gpu3"), "DPX/NPS2"))
    assert [k for k in kinds if k[0] == "set-memory"] == [
        ("set-memory", "hive a", "NPS2"),
        ("set-memory", "hive b", "NPS2"),
    ]
    order = [kind for kind, _, _ in kinds]
    assert order == ["set-memory"] * 2 + ["unload", "load"] + ["set-compute"] * 4 + ["verify"]


def test_cards_without_a_hive_are_asked_one_by_one() -> None:
    kinds = steps(node(card(0, hive=None), card(1, hive=None)), dict.fromkeys(("gpu0", "gpu1"), "DPX/NPS2"))
    assert sum(kind == "set-memory" for kind, _, _ in kinds) == 2


def test_a_compute_change_needs_no_reload_and_touches_its_cards_only() -> None:
    assert steps(node(card(0), card(1)), {"gpu1": "DPX/NPS1"}) == [
        ("set-compute", "gpu1", "DPX"),
        ("verify", "node", None),
    ]


def test_bystanders_of_a_reload_get_their_compute_mode_back() -> None:
    facts = node(card(0), card(1), card(2, "CPX/NPS1", hive="b"))
    made, targets, blast = steps_between(
        facts,
        {n: Mode("DPX", "NPS2") for n in ("gpu0", "gpu1")},
        pending={},
        clear_pending=False,
        stop_units=(),
        roads=("", ""),
    )
    assert targets["gpu2"] == Mode("CPX", "NPS1") and blast.bystanders == ("gpu2",)
    assert ("set-compute", "gpu2", "CPX") in [(s.kind, s.target, s.value) for s in made]
    assert (blast.devices_before, blast.devices_after) == (10, 12)


def test_nothing_to_do_is_no_step_at_all() -> None:
    assert steps(node(card(0)), {"gpu0": "SPX/NPS1"}, stop_units=("x.service",)) == []


def test_a_pending_wish_is_reloaded_away_only_when_asked() -> None:
    facts = node(card(0), card(1))
    wanted = dict.fromkeys(("gpu0", "gpu1"), "SPX/NPS1")
    assert steps(facts, wanted, pending={"hive a": "NPS2"}) == []
    kinds = [kind for kind, _, _ in steps(facts, wanted, pending={"hive a": "NPS2"}, clear_pending=True)]
    assert kinds[:5] == ["unload", "load", "set-memory", "unload", "load"]


def test_from_an_absent_driver_it_is_loaded_first_and_the_rest_is_conditional() -> None:
    facts = replace(node(card(0), card(1)), driver_loaded=False)
    kinds = [kind for kind, _, _ in steps(facts, dict.fromkeys(("gpu0", "gpu1"), "SPX/NPS1"), clear_pending=True)]
    assert kinds == ["load", "set-memory", "unload", "load", "set-compute", "set-compute", "verify"]


def test_units_are_stopped_first_and_started_last() -> None:
    kinds = steps(node(card(0)), {"gpu0": "DPX/NPS2"}, stop_units=("x.service",))
    assert kinds[0] == ("stop-unit", "x.service", None) and kinds[-1] == ("start-unit", "x.service", None)


REFUSALS = [
    ({}, "SPX/NPS2", NoSuchMode),  # SPX is not available under NPS2
    ({}, "DPX/NPS4", NoSuchMode),  # not in the firmware's list
    ({}, "TPX/NPS1", NoSuchMode),  # needs six XCCs
    ({}, "DPX/NPS1", NoSuchMode),  # offered, but not in AMD's list
    ({"guest": True}, "DPX/NPS2", Unsupported),
    ({"driver": "vfio-pci"}, "DPX/NPS2", Unsupported),
    ({"memory_writable": False}, "DPX/NPS2", Unsupported),
    ({"compute_writable": False}, "QPX/NPS2", Unsupported),
    ({"compute": None}, "DPX/NPS2", Unsupported),
    ({"in_reset": True, "compute": None}, "DPX/NPS2", Busy),
]


@pytest.mark.parametrize(("changes", "mode", "error"), REFUSALS, ids=[f"{c}-{m}" for c, m, _ in REFUSALS])
def test_refused_before_any_step(changes: dict[str, object], mode: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        refuse_impossible(node(card(0, **changes)), {"gpu0": Mode.parse(mode)}, allow_unvalidated=False)
    if error is NoSuchMode:
        assert (
            "DPX/NPS2" in str(caught.value) and "DPX/NPS2" in caught.value.facts["offered"] + caught.value.hint.split()
        )  # type: ignore[attr-defined]


def test_unvalidated_modes_are_taken_when_told_to_but_impossible_ones_never() -> None:
    facts = node(card(0))
    notes = refuse_impossible(facts, {"gpu0": Mode("DPX", "NPS1")}, allow_unvalidated=True)
    assert any("does not list" in note for note in notes)
    with pytest.raises(NoSuchMode):
        refuse_impossible(facts, {"gpu0": Mode("DPX", "NPS4")}, allow_unvalidated=True)


def test_part_of_a_hive_cannot_change_its_memory_mode() -> None:
    with pytest.raises(Unsupported, match="whole hive"):
        refuse_impossible(node(card(0), card(1)), {"gpu0": Mode("DPX", "NPS2")}, allow_unvalidated=False)


def test_the_drivers_word_wins_over_the_tables() -> None:
    """A driver whose table, as read, combines QPX with NPS1 only is believed over the kernel source we know."""
    old = card(0, selected=("QPX", ("NPS1",)))
    with pytest.raises(NoSuchMode):
        refuse_impossible(node(old), {"gpu0": Mode("QPX", "NPS2")}, allow_unvalidated=True)
    assert Mode("QPX", "NPS2") not in offered_modes(old) and Mode("QPX", "NPS2") in offered_modes(card(0))


def test_cards_are_found_by_every_name_and_by_no_other() -> None:
    facts = node(card(0, unique_id="00ff"), card(1))
    for name in ("gpu0", "0", "0000:05:00.0", "0000:05:00", "GPU-00ff", "00FF"):
        assert facts.card(name).id == "gpu0"
    twins = node(card(0, unique_id="00ff"), card(1, unique_id="00ff"))
    with pytest.raises(UsageError, match="gpu0, gpu1"):
        twins.card("GPU-00ff")


def test_facts_survive_the_journals_json() -> None:
    facts = node(card(0, "DPX/NPS2", selected=("DPX", ("NPS1", "NPS2"))), card(1, whys={"memory": "x"}))
    import json

    assert NodeFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


DPX = {"gpu0": Mode("DPX", "NPS2")}


def broken(**changes: object) -> NodeFacts:
    good = card(0, "DPX/NPS2")
    first = replace(good.devices[0], **changes)  # type: ignore[arg-type]
    return node(replace(good, devices=(first, good.devices[1])))


FAULTS = {
    "three XCCs": broken(xccs=3),
    "fewer SIMDs": broken(simds=256),
    "half the bytes": broken(hbm_bytes=72 * GB),
    "bytes unread": broken(hbm_bytes=None),
    "no render node": broken(render_present=False),
    "not a sibling": broken(sibling_weights=(41,)),
    "shared render node": broken(render_minor=129),
    "one device lost": node(replace(card(0, "DPX/NPS2"), devices=card(0, "DPX/NPS2").devices[:1])),
    "wrong word": node(replace(card(0, "DPX/NPS2"), memory="NPS1")),
    "no card": node(),
    "module coming": replace(node(card(0, "DPX/NPS2")), module_state="coming"),
    "driver gone": replace(node(card(0, "DPX/NPS2")), driver_loaded=False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_verification_sees_what_a_mode_word_hides(name: str) -> None:
    before = node(card(0))
    assert mismatches(node(card(0, "DPX/NPS2")), DPX, before) == ()
    assert mismatches(FAULTS[name], DPX, before)
