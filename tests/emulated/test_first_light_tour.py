"""First light through the modes of an emulated node and back: whatever happens on the way, the node is as it was found
(by the emulated driver's own state), and the bundle says what was asked, what was not, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from first_light_hosts import ALLOWED, NO_EXPERIMENTS, Here, ToldSmi, amd_host_on, host_on, node_in
from partition_support import FAST, FakeClock, truth

from dieplace.backends.replayed import ReplayedBackend
from dieplace.emulator.node import Node
from dieplace.errors import BackendError, NotVerified, Unsupported, UsageError
from dieplace.experiments import first_light_bundle as bundles
from dieplace.experiments import first_light_marker as markers
from dieplace.experiments.first_light import first_light, preflight
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_modes import Permission
from dieplace.modes import Mode
from dieplace.partition.entry import build, carry_out, plan_restore
from dieplace.partition.journal import Record

STATES = ["SPX/NPS1", "DPX/NPS2", "CPX/NPS2 on gpu0 alone", "QPX/NPS2", "CPX/NPS2"]
DEVICES = {"SPX/NPS1": 2, "DPX/NPS2": 4, "CPX/NPS2 on gpu0 alone": 10, "QPX/NPS2": 8, "CPX/NPS2": 16}


@pytest.fixture
def place(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    return memory_path


def unable() -> Any:
    """A machine whose devices cannot be opened: the child's answer where there is no accelerator."""
    raise Unsupported("no device here")


def go(host: Any, place: Path, **more: Any) -> bundles.Bundle:
    options: dict[str, Any] = {"talk": Here(unable), "skip": NO_EXPERIMENTS, **more}
    folder = place / options.pop("folder", "bundle")
    return first_light(host, folder, options.pop("permission", ALLOWED), **options)


def words_of(bundle: bundles.Bundle) -> dict[str, str | None]:
    return {name: answer.word for name, answer in bundle.answers.items()}


@pytest.mark.slow
def test_the_whole_tour(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    said: list[str] = []
    bundle = go(host, place, talk=Here(host.machine), skip=(), step=said.append)
    assert truth(node).is_in("SPX/NPS1") and node.state.processes == ()
    assert bundle.state == "complete" and bundle.restored is True and bundle.missing == ()
    assert list(bundle.trees) == STATES and bundle.refused == {}
    assert set(bundle.answers) == {q.id for q in QUESTIONS}
    assert all(answer.origin == "emulated" for answer in bundle.answers.values())
    found = words_of(bundle)
    assert {k: found[k] for k in ("peer-access", "drm-client", "node-order", "range-sizes", "mem-alloc-mode")} == {
        "peer-access": "yes", "drm-client": "does not block", "node-order": "appended", "range-sizes": "equal",
        "mem-alloc-mode": "cannot spill",
    }  # fmt: skip
    assert bundle.answers["peer-access"].mode == "DPX/NPS2" and bundle.answers["kfd-counters"].mode == "SPX/NPS1"
    # Card 0 was switched alone: its eight devices came last, and both devices of card 1 moved up by two.
    order = bundle.answers["node-order"].value
    assert order["other_devices_shifted"] == 2 and order["before"]["gpu1/p0"] - order["after"]["gpu1/p0"] == 2
    assert all("left" in line for line in said) and len(said) >= len(STATES)
    assert bundles.load(place / "bundle") == bundle


def test_every_recorded_state_replays_with_its_devices(place: Path) -> None:
    node, clock = node_in(place)
    bundle = go(host_on(node, clock), place)
    for state, name in bundle.trees.items():
        machine = ReplayedBackend(place / "bundle" / name).snapshot()
        assert machine.source == "replayed" and len(machine.devices) == DEVICES[state], state
    folder = ReplayedBackend(place / "bundle").snapshot()
    assert {str(card.mode) for card in folder.cards} == {"SPX/NPS1"}


def test_no_id_of_the_hardware_is_in_the_bundle(place: Path) -> None:
    node, clock = node_in(place, unique_id="distinct")
    host = host_on(node, clock)
    go(host, place)
    text = "".join(path.read_text() for path in (place / "bundle").rglob("*.json"))
    for card in host.machine().cards:
        unique = int(str(card.unique_id), 16)
        assert f"{unique:016x}" not in text and str(unique) not in text
    assert node.boot_id not in text and str(place) not in text


@pytest.mark.parametrize(
    ("style", "word"), [("equal", "equal"), ("distinct", "distinct"), ("transitional", "distinct")]
)
def test_ids_by_the_style_of_the_driver(place: Path, style: str, word: str) -> None:
    node, clock = node_in(place, unique_id=style)
    assert words_of(go(host_on(node, clock), place))["sibling-ids"] == word


def test_without_leave_nothing_changes(place: Path) -> None:
    node, clock = node_in(place)
    loads = node.state.loads
    bundle = go(host_on(node, clock), place, permission=Permission())
    assert truth(node).is_in("SPX/NPS1") and node.state.loads == loads
    assert bundle.state == "complete" and list(bundle.trees) == ["SPX/NPS1"]
    assert "--allow-mode-changes" in bundle.answers["node-order"].said
    assert bundle.answers["kfd-counters"].word == "readable"


def test_a_holder_refuses_the_modes_and_nothing_else(place: Path) -> None:
    node, clock = node_in(place)
    node.start_process("train")
    bundle = go(host_on(node, clock), place)
    assert truth(node).is_in("SPX/NPS1") and bundle.restored is True and bundle.state == "complete"
    assert set(bundle.refused) == set(STATES[1:]) and "train" in bundle.refused["DPX/NPS2"]
    assert bundle.answers["range-sizes"].status == "not-asked" and "train" in bundle.answers["range-sizes"].said
    assert bundle.answers["offered-modes"].word == "listed in part"


@pytest.mark.parametrize(
    ("step", "error", "times"),
    [
        ("unload", "EBUSY", 1), ("unload", "EIO", 1), ("write_memory", "EINVAL", 1), ("nps_switch", None, 1),
        ("write_compute", "EBUSY", 3), ("write_compute", "EINVAL", 2), ("kfd_init", None, 1), ("load", "EIO", 1),
    ],
)  # fmt: skip
def test_a_switch_that_fails_is_told_and_everything_is_put_back(
    place: Path, step: str, error: str | None, times: int
) -> None:
    """Whatever one step of the driver does wrong, the node is led back, or the command says that it is not."""
    node, clock = node_in(place)
    node.inject(step, error, times=times)
    try:
        bundle = go(host_on(node, clock), place)
    except NotVerified:
        bundle = bundles.load(place / "bundle")
        assert bundle.state == "not-restored" and bundle.restored is False and "restore" in bundle.restored_said
        carry_out(plan_restore(control_for_record(node, clock)), control_for_record(node, clock), limits=FAST)
    else:
        assert bundle.state == "complete" and bundle.restored is True
    assert truth(node).is_in("SPX/NPS1")
    asked_by_fault = bundle.refused or any(a.status in ("unknown", "refused") for a in bundle.answers.values())
    assert asked_by_fault, "the fault was seen nowhere"


def control_for_record(node: Node, clock: FakeClock) -> Any:
    """A fresh control over the node's own record, as the next command has it."""
    from dieplace.backends.amd.control_emulated import emulated_control

    return emulated_control(node, clock=clock)


def test_a_node_that_cannot_be_led_back_is_never_called_restored(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)

    def spoil(text: str) -> None:
        if "leading" in text:
            node.inject("load", "EIO", times=None)

    with pytest.raises(NotVerified, match="restore"):
        go(host, place, step=spoil)
    bundle = bundles.load(place / "bundle")
    assert bundle.state == "not-restored" and bundle.restored is False and bundle.answers
    node.clear_faults()
    control = control_for_record(node, clock)
    carry_out(plan_restore(control), control, limits=FAST)
    assert truth(node).is_in("SPX/NPS1")


@pytest.mark.parametrize("at", range(1, 14, 2))
def test_ctrl_c_at_any_step_leads_back(place: Path, at: int) -> None:
    node, clock = node_in(place)
    host, seen = host_on(node, clock), 0

    def stop(text: str) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise KeyboardInterrupt

    try:
        go(host, place, step=stop)
    except KeyboardInterrupt:
        pass
    else:
        assert seen < at  # there are not so many steps
    assert truth(node).is_in("SPX/NPS1") and node.state.processes == ()
    bundle = bundles.load(place / "bundle")
    if seen >= at:
        assert bundle.state == "interrupted"
    assert set(bundle.missing) | set(bundle.answers) | set(bundle.experiments) >= {q.id for q in QUESTIONS}
    assert (place / "bundle" / "report.html").exists() or bundle.restored is False


@pytest.mark.parametrize("call", ["set_memory", "unload", "load", "set_compute"])
def test_ctrl_c_in_the_middle_of_a_switch_leads_back(place: Path, call: str) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    real, done = getattr(host.control, call), []

    def interrupted(*words: Any, **more: Any) -> Any:
        answer = real(*words, **more)
        if not done:
            done.append(call)
            raise KeyboardInterrupt
        return answer

    setattr(host.control, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(host, place)
    assert truth(node).is_in("SPX/NPS1")
    assert bundles.load(place / "bundle").state == "interrupted"


def test_a_child_that_dies_costs_its_question_only(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    talk = Here(host.machine, lose=("peer-access", "vmm-remap"))
    bundle = go(host, place, talk=talk)
    for name in talk.lose:
        assert bundle.answers[name].status == "unknown" and "signal 11" in bundle.answers[name].said
    assert bundle.answers["poll-reliability"].word == "reliable" and truth(node).is_in("SPX/NPS1")


def test_an_experiment_that_fails_is_told_and_the_others_run(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    bundle = go(host, place, talk=Here(host.machine, failing=("weight-swap",)), skip=())
    assert (
        bundle.experiments["weight-swap"].status == "refused" and "no kernel" in bundle.experiments["weight-swap"].why
    )
    assert bundle.experiments["mode"].status == "ran" and bundle.experiments["link"].status == "not-asked"
    assert [run.experiment for run in bundle.runs()["mode"]] == ["mode"]


# -- what was before, and what comes after -----------------------------------------------------------------------------


def test_the_record_of_a_persons_own_switch_is_kept(place: Path) -> None:
    """Somebody went to DPX/NPS2 before: their restore must still lead to SPX/NPS1, not to what first light found."""
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    facts = host.control.read()
    carry_out(build(host.control, facts, {c.id: Mode("DPX", "NPS2") for c in facts.cards}), host.control, limits=FAST)
    go(host, place)
    assert truth(node).is_in("DPX/NPS2")
    carry_out(plan_restore(host.control), host.control, limits=FAST)
    assert truth(node).is_in("SPX/NPS1")


def test_an_unfinished_switch_comes_first(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    facts = host.control.read()
    plan = build(host.control, facts, {c.id: Mode("DPX", "NPS2") for c in facts.cards})
    Record(host.control.store).begin(plan)
    with pytest.raises(Unsupported, match="did not finish") as caught:
        preflight(host, ALLOWED)
    assert "partition restore" in str(caught.value)
    assert preflight(host, Permission()).lines  # told, and no mode is changed


def test_a_first_light_that_was_killed_is_seen_by_the_next_one(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    marker = markers.marker_of(host.control.read(), running=True)
    gone = markers.Marker(**{**vars(marker), "pid": 2**22 + 1})
    assert markers.write(host.control, gone) is None
    assert preflight(host, ALLOWED).switches  # it had changed nothing yet
    facts = host.control.read()
    carry_out(build(host.control, facts, {c.id: Mode("DPX", "NPS2") for c in facts.cards}), host.control, limits=FAST)
    with pytest.raises(Unsupported, match="was killed before it had led the node back"):
        preflight(host, ALLOWED)
    carry_out(plan_restore(host.control), host.control, limits=FAST)
    assert preflight(host, ALLOWED).switches


@pytest.mark.parametrize(("style", "word"), [("keep", "survives"), ("NPS1", "lost")])
def test_nps2_over_a_reboot(place: Path, style: str, word: str) -> None:
    node, clock = node_in(place, "DPX/NPS2", nps_after_reboot=style)
    first = go(host_on(node, clock), place)
    assert first.answers["nps2-after-reboot"].status == "not-asked"
    node.reboot()
    second = go(host_on(node, clock), place, permission=Permission(), folder="second")
    assert second.answers["nps2-after-reboot"].word == word


def test_a_file_that_a_killed_first_light_left_is_put_back(place: Path) -> None:
    node, clock = node_in(place, "DPX/NPS2")
    host = host_on(node, clock)
    assert host.control is not None
    path = f"/sys/bus/pci/devices/{node.bdfs()[0]}/compute_partition_mem_alloc_mode"
    node.fire("write_alloc_mode", node.bdfs()[0], "ALL")
    marker = markers.marker_of(host.control.read(), running=True, put_back={path: "CAPPING", "/etc/passwd": "x"})
    markers.write(host.control, markers.Marker(**{**vars(marker), "pid": 2**22 + 1}))
    bundle = go(host, place)
    node.refresh()
    assert node.state.cards[0].alloc_mode == "CAPPING" and truth(node).is_in("DPX/NPS2")
    assert any("was left at ALL" in note for note in bundle.notes)
    assert not any("passwd" in note for note in bundle.notes)
    left = markers.read(host.control)
    assert left is not None and left.put_back == {} and not left.running


def test_a_driver_that_cannot_be_reloaded_costs_the_modes_only(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    real = host.control.read
    why = "amdgpu is built into this kernel"
    host.control.read = lambda **more: replace(real(**more), reload_why_not=why)  # type: ignore[method-assign]
    found = preflight(host, ALLOWED)
    assert any(why in line for line in found.lines)
    bundle = go(host, place, found=found)
    assert set(bundle.refused) == set(STATES[1:]) and all(why in said for said in bundle.refused.values())
    assert bundle.answers["kfd-counters"].word == "readable" and truth(node).is_in("SPX/NPS1")


def test_a_virtual_user_sees_and_changes_nothing(place: Path) -> None:
    node, clock = node_in(place)
    node.become(1000)
    bundle = go(host_on(node, clock), place)
    assert bundle.state == "complete" and any("only root" in note for note in bundle.notes)
    assert list(bundle.trees) == ["SPX/NPS1"] and truth(node).is_in("SPX/NPS1")


def test_names_to_leave_out_are_checked(place: Path) -> None:
    node, clock = node_in(place)
    with pytest.raises(UsageError, match="no part 'lnik'"):
        go(host_on(node, clock), place, skip=("lnik",))
    bundle = go(host_on(node, clock), place, skip=("drm-client", *NO_EXPERIMENTS), permission=Permission())
    assert bundle.answers["drm-client"].said == "it was left out (--skip)"


# -- the code for live AMD nodes over the emulated driver --------------------------------------------------------------


@pytest.fixture
def smi() -> ToldSmi:
    opened = ["/dev/dri/renderD128"]
    return ToldSmi(
        init={"ok": False, "stage": "init", "name": "DRIVER_NOT_LOADED", "code": 34, "text": "not loaded"},
        descriptors={
            "ok": True, "versions": {"library": "26.0.2"},
            "open": {"before": [], "initialised": opened, "asked": opened, "shut_down": []},
        },
    )  # fmt: skip


def test_a_live_node_is_asked_for_its_library_too(place: Path, smi: ToldSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    node, clock = node_in(place)
    host = amd_host_on(node, clock, smi)
    loaded: list[bool] = []
    real = smi.ask
    monkeypatch.setattr(smi, "ask", lambda op, **more: (op == "init" and loaded.append(node.loaded), real(op))[1])
    bundle = go(host, place)
    assert truth(node).is_in("SPX/NPS1") and bundle.state == "complete"
    found = words_of(bundle)
    assert found["amdsmi-descriptors"] == "holds until shutdown" and found["amdsmi-init-unloaded"] == "fails"
    assert bundle.answers["amdsmi-init-unloaded"].value["code"] == 34
    assert loaded and not any(loaded)  # it was asked while the driver was away
    assert bundle.answers["peer-access"].status == "refused" and "no device here" in bundle.answers["peer-access"].said
    assert bundle.origin == "measured"


def test_experiments_of_a_live_node_run_where_they_belong(
    place: Path, smi: ToldSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """link before any switch and again with two ranges, flags and weight-swap there, mode after the way back."""
    from dieplace.experiments import first_light_drive as drive

    order: list[tuple[str, str, bool]] = []
    real = drive.Drive.run_experiment

    def noted(self: drive.Drive, name: str, mode: str, *, in_child: bool = True) -> None:
        modes = {str(card.mode) for card in self.host.machine().cards}
        order.append((name, "".join(modes), in_child))
        real(self, name, mode, in_child=True)

    monkeypatch.setattr(drive.Drive, "run_experiment", noted)
    node, clock = node_in(place)
    bundle = go(amd_host_on(node, clock, smi), place, skip=())
    assert order == [
        ("link", "SPX/NPS1", True), ("link", "DPX/NPS2", True), ("flags", "DPX/NPS2", True),
        ("weight-swap", "DPX/NPS2", True), ("mode", "SPX/NPS1", False),
    ]  # fmt: skip
    assert [Path(name).name for name in bundle.experiments["link"].runs] == [
        "link-spx-nps1-block.json", "link-dpx-nps2-block.json",
    ]  # fmt: skip
    assert truth(node).is_in("SPX/NPS1")


def test_what_nobody_expected_leads_back_too(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)

    def broken() -> Any:
        raise RuntimeError("a bug of ours")

    host.tree = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug of ours"):
        go(host, place)
    assert truth(node).is_in("SPX/NPS1")


def test_a_backend_error_in_a_switch_is_no_end(place: Path) -> None:
    node, clock = node_in(place)
    host = host_on(node, clock)
    assert host.control is not None
    real, calls = host.control.set_compute, []

    def failing(bdf: str, word: str) -> Any:
        calls.append(word)
        if len(calls) == 1:
            raise BackendError("the library died")
        return real(bdf, word)

    host.control.set_compute = failing  # type: ignore[method-assign]
    bundle = go(host, place)
    assert truth(node).is_in("SPX/NPS1") and bundle.restored is True
    assert json.loads((place / "bundle" / "bundle.json").read_text())["state"] == "complete"
