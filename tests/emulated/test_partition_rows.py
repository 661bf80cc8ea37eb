"""Public reports about partition switching, each as a test on an emulated node that is made to behave like its report.

The number is the report's row in our issue log; the name is the repository and thread. Rows about launching programs
(which device a process sees) are tested with `dieplace exec`; rows about other products' labels have no counterpart.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from partition_support import FAST, FakeClock, control_for, plan_for, small_node, switch, truth

from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import Node
from dieplace.errors import BackendError, Busy, NotVerified, Pending, StaleMachine, Unsupported
from dieplace.modes import Mode
from dieplace.partition.control import Limits
from dieplace.partition.entry import build, carry_out, plan_restore
from dieplace.partition.profile import parse_profile, resolve
from dieplace.partition.ready import not_ready
from dieplace.partition.support import offered_modes

Make = Callable[..., tuple[Node, FakeClock]]


@pytest.fixture
def make(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))

    def made(**styles: Any) -> tuple[Node, FakeClock]:
        clock = FakeClock()
        return small_node(memory_path / "node", clock, **styles), clock

    return made


def control(node: Node, clock: FakeClock) -> Any:
    return control_for(node, clock, node.directory.parent / "state")


def reads_of(ctl: Any) -> list[str]:
    """Every path that is read, listed, opened or written from now on."""
    seen: list[str] = []
    for name in ("read", "write", "names", "readlink"):
        real = getattr(ctl.sysfs, name)
        setattr(ctl.sysfs, name, lambda path, *a, _real=real, **k: seen.append(path) or _real(path, *a, **k))
    return seen


def test_row_11_amdsmi_132_dpx_is_set_where_a_command_refused_it(make: Make) -> None:
    node, clock = make(part="MI300X")
    assert switch(control(node, clock), "dpx+nps2").word == "done" and truth(node).is_in("DPX/NPS2")


@pytest.mark.parametrize("xcp_name", ["underscore", "dot"])
def test_row_12_amdsmi_100_every_partition_has_its_cards_mode(make: Make, xcp_name: str) -> None:
    node, _ = make(cards=8, mode="CPX/NPS2", xcp_name=xcp_name)
    machine = EmulatedBackend(node).snapshot(links=False)
    assert len(machine.devices) == 64
    assert {str(machine.card(device.card).mode) for device in machine.devices} == {"CPX/NPS2"}


@pytest.mark.parametrize("partition_id", ["low", "high"])
def test_row_13_legacy_rocm_build_4759_across_kernels(make: Make, partition_id: str) -> None:
    node, clock = make(mode="DPX/NPS2", partition_id=partition_id, unique_id="distinct")
    facts = control(node, clock).read()
    assert [(c.mode, len(c.devices)) for c in facts.cards] == [(Mode("DPX", "NPS2"), 2)] * 2


def test_row_14_legacy_rocm_build_4477_no_config_folder(make: Make) -> None:
    node, clock = make(config_folder=False, nps_configs=False)
    ctl = control(node, clock)
    assert Mode("DPX", "NPS2") in offered_modes(ctl.read().cards[0])
    assert switch(ctl, "DPX/NPS2").word == "done" and truth(node).is_in("DPX/NPS2")


def test_row_15_legacy_rocm_build_4750_capacity_is_the_partitions_own(make: Make) -> None:
    node, clock = make(mode="DPX/NPS2")
    card = control(node, clock).read().cards[0]
    assert card.hbm_bytes == sum(device.hbm_bytes for device in card.devices)
    assert {device.hbm_bytes for device in card.devices} == {card.hbm_bytes // 2}


def test_row_16_amdsmi_97_sizes_are_compared_with_the_driver_not_with_documents(make: Make) -> None:
    """MI300X in CPX: the share is what KFD says, 1/8 of what the driver has, not a documented round number."""
    node, clock = make(part="MI300X", mode="SPX/NPS1")
    assert switch(control(node, clock), "CPX/NPS4").word == "done"
    card = control(node, clock).read().cards[0]
    assert all(abs(device.hbm_bytes * 8 - card.hbm_bytes) < 0.03 * card.hbm_bytes for device in card.devices)


def test_row_17_legacy_rocm_build_4261_partition_to_render_node(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    from dieplace.cli.main import main

    node, _ = make(mode="DPX/NPS2", other_render=1)
    assert main(["--backend", "emulated", "--node", str(node.directory), "partition", "show"]) == 0
    assert re.search(r"gpu1/p1 .*/dev/dri/renderD138", capsys.readouterr().out)


def test_row_18_legacy_rocm_build_5720_no_unused_node_is_opened(make: Make) -> None:
    node, clock = make(mode="DPX/NPS2")
    ctl = control(node, clock)
    seen = reads_of(ctl)
    ctl.read(links=True), ctl.holders()
    switch(ctl, "SPX/NPS1")
    assert seen and not [path for path in seen if path.startswith("/dev/")]
    assert not [line for line in node.log if "not valid" in line]


def test_row_19_legacy_rocm_build_4688_an_unknown_mode_is_never_written(make: Make) -> None:
    node, clock = make()
    node.forget_mode(node.bdfs()[0])
    ctl, before = control(node, clock), truth(node)
    with pytest.raises(Unsupported, match="unknown mode is unsafe"):
        plan_for(ctl, "DPX/NPS2")
    assert truth(node) == before


def test_row_21_legacy_rocm_build_3002_one_cards_error_does_not_hide_the_others(make: Make) -> None:
    node, clock = make()
    pid = node.start_process("partial", excluded_cards=(0,))
    node.begin_reset(node.bdfs()[0])
    ctl = control(node, clock)
    facts = ctl.read()
    assert facts.cards[0].in_reset and facts.cards[1].mode == Mode("SPX", "NPS1")
    assert [holder.pid for holder in ctl.holders().holders] == [pid]


def test_row_22_legacy_rocm_build_4469_a_failed_reload_is_not_tried_again(make: Make) -> None:
    node, clock = make()
    node.inject("unload", "EIO", times=None)
    ctl = control(node, clock)
    tries = []
    real = ctl.reloader.unload
    ctl.reloader.unload = lambda *a: tries.append(1) or real(*a)
    with pytest.raises(Pending):
        switch(ctl, "DPX/NPS2")
    assert len(tries) == 1


def test_row_23_rocm_install_on_linux_385_a_hanging_modprobe_is_told_and_ends_nothing(make: Make) -> None:
    node, clock = make()
    node.inject("unload", "ETIMEDOUT")
    with pytest.raises(Pending, match="did not end within 60 s"):
        switch(control(node, clock), "DPX/NPS2")
    assert truth(node).wishes == ("NPS2",)


def test_row_24_k8s_device_plugin_167_old_drivers_are_named_and_modes_re_read(make: Make) -> None:
    """An older driver combines QPX with NPS1 only: told before any write, with its version."""
    node, clock = make(nps_table="2025", available_list="static")
    ctl, before = control(node, clock), truth(node)
    plan = plan_for(ctl, "QPX/NPS2")
    assert any("asked of it before the first" in note for note in plan.notes)
    with pytest.raises(Unsupported, match=r"version 6\.16\.13\) combines QPX on gpu0 only with NPS1") as caught:
        carry_out(plan, ctl, limits=FAST)
    assert caught.value.facts["offered"] == ["QPX/NPS1"] and truth(node) == before
    assert ctl.sysfs.read(f"/sys/bus/pci/devices/{node.bdfs()[0]}/compute_partition_config/xcp_config") == "SPX"
    outcome = switch(ctl, "DPX/NPS2")
    assert outcome.facts.device_count == 4  # read again after the change


def test_row_25_k8s_device_plugin_184_render_nodes_are_not_counted(make: Make) -> None:
    node, clock = make()
    facts = control(node, clock).read()
    renders = [name for name in node.sysfs().names("/dev/dri") if name.startswith("renderD")]
    assert len(renders) == 16 and facts.device_count == 2


def test_row_27_gpu_operator_382_clients_are_stopped_and_started_again(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    pid = node.start_process("kubelet-plugin", cgroup="0::/system.slice/amd-device-plugin.service")
    log: list[tuple[str, str]] = []

    def act(verb: str, unit: str) -> Any:
        from dieplace.partition.control import Answer

        log.append((verb, unit))
        if verb == "stop":
            node.end_process(pid)
        return Answer("ok", "systemctl")

    ctl.reloader.unit_active = lambda unit: unit == "amd-device-plugin.service"
    ctl.reloader.stop_unit = lambda unit: act("stop", unit)
    ctl.reloader.start_unit = lambda unit: act("start", unit)
    with pytest.raises(Busy, match=r"--stop-service amd-device-plugin\.service"):
        switch(ctl, "DPX/NPS2")
    plan = plan_for(ctl, "DPX/NPS2", units=("amd-device-plugin.service", "idle.service"))
    assert plan.blockers == () and carry_out(plan, ctl, limits=FAST).word == "done"
    assert log == [("stop", "amd-device-plugin.service"), ("start", "amd-device-plugin.service")]


def test_row_27_units_are_started_again_also_when_the_switch_fails(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    node.inject("write_memory", "EINVAL")
    log: list[str] = []
    from dieplace.partition.control import Answer

    ctl.reloader.unit_active = lambda unit: True
    ctl.reloader.stop_unit = lambda unit: log.append("stop") or Answer("ok", "systemctl")
    ctl.reloader.start_unit = lambda unit: log.append("start") or Answer("ok", "systemctl")
    plan = plan_for(ctl, "DPX/NPS2", units=("a.service",))
    with pytest.raises(Unsupported):
        carry_out(plan, ctl, limits=FAST)
    assert log == ["stop", "start"] and truth(node).is_in("SPX/NPS1")


def test_row_29_k8s_gpu_dra_driver_77_an_unresolved_identity_is_no_default(make: Make) -> None:
    """A KFD node without a render minor stays without one; it never inherits a neighbour's or 128."""
    node, clock = make(mode="DPX/NPS2")
    path = node.directory / "sys/class/kfd/kfd/topology/nodes/2/properties"
    text = path.read_text()
    path.write_text(re.sub(r"drm_render_minor \d+\n", "", text))
    device = control(node, clock).read().cards[0].devices
    assert [d.render_minor for d in device].count(None) == 1 and not any(
        d.render_present for d in device if d.render_minor is None
    )


def test_row_31_k8s_gpu_dra_driver_88_the_state_is_checked_again_before_the_write(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    plan = plan_for(ctl, "DPX/NPS1", allow_unvalidated=True)
    node.write_compute(node.bdfs()[1], "CPX")  # another tool, in between
    before = truth(node)
    with pytest.raises(StaleMachine, match="nothing was written"):
        carry_out(plan, ctl, limits=FAST)
    assert truth(node) == before


def test_row_31_switching_there_and_back_in_between_is_noticed_too(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    plan = plan_for(ctl, "DPX/NPS1", allow_unvalidated=True)
    node.write_compute(node.bdfs()[1], "CPX")
    node.write_compute(node.bdfs()[1], "SPX")
    with pytest.raises(StaleMachine):
        carry_out(plan, ctl, limits=FAST)


def test_row_32_k8s_gpu_dra_driver_90_a_card_given_to_a_virtual_machine(make: Make) -> None:
    node, clock = make(cards=3, vfio_cards=(1,))
    ctl = control(node, clock)
    facts = ctl.read()
    foreign = next(card for card in facts.cards if card.driver == "vfio-pci")
    assert foreign.bdf == node.bdfs()[1]
    with pytest.raises(Unsupported, match="vfio-pci"):
        build(ctl, facts, {foreign.id: Mode("DPX", "NPS1")}, allow_unvalidated=True)
    others = [card.id for card in facts.cards if card is not foreign]
    with pytest.raises(Unsupported, match="nobody knows whether it belongs to a hive"):
        build(ctl, facts, dict.fromkeys(others, Mode("DPX", "NPS2")))
    plan = build(ctl, facts, dict.fromkeys(others, Mode("CPX", "NPS1")), allow_unvalidated=True)
    assert carry_out(plan, ctl, limits=FAST).word == "done"  # compute modes of the others are their own affair


def test_row_33_gpu_operator_141_nothing_of_ours_is_open_during_the_unload(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    open_then: list[str] = []
    real = ctl.reloader.unload

    def unload(*arguments: Any) -> Any:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        open_then.extend(os.readlink(link) for link in links if link.is_symlink())
        return real(*arguments)

    ctl.reloader.unload = unload
    switch(ctl, "DPX/NPS2")
    assert open_then and not [
        p for p in open_then if str(node.directory) in p or p.startswith(("/dev/dri", "/dev/kfd"))
    ]


def test_row_35_rocm_systems_1147_no_command_output_is_parsed() -> None:
    import dieplace.backends.amd as package

    for path in Path(package.__file__).parent.glob("*.py"):
        assert not re.search(r"amd-smi[\"' ]|rocm-smi[\"' ]|rocminfo", path.read_text().replace("amd-smi-lib", "")), (
            path
        )


def test_rows_36_and_37_rocm_systems_10946_10927_a_whole_card_is_no_partition(make: Make) -> None:
    node, _clock = make()
    node.write_compute(node.bdfs()[1], "DPX")
    machine = EmulatedBackend(node).snapshot(links=False)
    assert [device.whole_card for device in machine.devices] == [True, False, False]
    assert machine.device("gpu0/p0").bdf == machine.card("gpu0").bdf


def test_row_38_rocm_systems_1609_gaps_in_node_numbers_lose_nothing(make: Make) -> None:
    node, clock = make(cards=3, mode="DPX/NPS2")
    nodes = node.directory / "sys/class/kfd/kfd/topology/nodes"
    numbers = sorted(int(name) for name in os.listdir(nodes))
    os.rename(nodes / str(numbers[-1]), nodes / str(numbers[-1] + 5))
    facts = control(node, clock).read()
    assert facts.device_count == 6 and any("gaps" in note for note in facts.notes)


@pytest.mark.parametrize("unique_id", ["equal", "distinct", "transitional"])
def test_row_39_flux_core_7646_partitions_are_not_the_same_device(make: Make, unique_id: str) -> None:
    node, _ = make(mode="CPX/NPS2", unique_id=unique_id)
    devices = EmulatedBackend(node).snapshot(links=False).devices
    assert len({device.id for device in devices}) == 16 and len({device.card for device in devices}) == 2


def test_row_42_aiter_2325_the_part_is_told_by_its_id_not_by_its_cu_count(make: Make) -> None:
    node, _ = make(mode="DPX/NPS2")
    machine = EmulatedBackend(node).snapshot(links=False)
    assert {device.cus for device in machine.devices} == {128}
    assert {(card.part, card.device_id, card.cus) for card in machine.cards} == {("MI355X", 0x75A3, 256)}


def test_row_44_pytorch_186516_this_process_never_loads_the_library(make: Make) -> None:
    node, _clock = make()
    code = (
        "import sys; from dieplace.cli.main import main;"
        f"main(['--backend','emulated','--node',{str(node.directory)!r},'partition','set','DPX/NPS2','-y','-q']);"
        "found = {'amdsmi','pyrsmi','torch'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_row_46_kaiwo_334_a_declared_state_is_reached_and_checked(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    entries = parse_profile('version = 1\n[modes.decode]\nall = "DPX/NPS2"').named("decode")
    for expected in ("done", "already"):
        facts = ctl.read()
        assert carry_out(build(ctl, facts, resolve(facts, entries)), ctl, limits=FAST).word == expected
    assert truth(node).is_in("DPX/NPS2")


def test_row_48_mig_parted_181_dependent_modules_are_named_before_the_unload(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    real = ctl.sysfs.names
    ctl.sysfs.names = lambda name: ["nvidia_like"] if name == "/sys/module/amdgpu/holders" else real(name)
    assert "nvidia_like, a kernel module" in str(plan_for(ctl, "DPX/NPS2"))
    with pytest.raises(Busy, match="nvidia_like"):
        switch(ctl, "DPX/NPS2")
    assert truth(node).is_in("SPX/NPS1")


def test_amdsmi_99_a_video_device_takes_a_render_minor_and_63_of_64_is_no_success(make: Make) -> None:
    node, clock = make(cards=8, ast=True)
    with pytest.raises(NotVerified, match="gpu7: has 7 devices"):
        switch(control(node, clock), "CPX/NPS2", limits=Limits(ready_s=30, poll_s=5, reset_s=5))
    carry_out(plan_restore(control(node, clock)), control(node, clock), limits=FAST)
    assert truth(node).is_in("SPX/NPS1")


def test_assert_says_no_where_the_word_is_right_and_a_device_is_lost(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    from dieplace.cli.main import main

    node, _ = make(cards=8, ast=True)
    for bdf in node.bdfs():
        node.write_compute(bdf, "CPX")
    words = ["--backend", "emulated", "--node", str(node.directory), "partition", "assert", "CPX/NPS1", "--card"]
    assert main([*words, "gpu0"]) == 0 and main([*words, "gpu7"]) == 1
    assert "gpu7: has 7 devices" in capsys.readouterr().out


def test_k8s_gpu_dra_driver_88_no_module_tree_no_reload(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    ctl.sysfs.faults["/lib/modules/*"] = 2
    with pytest.raises(Unsupported, match=r"module tree .* is not visible"):
        plan_for(ctl, "DPX/NPS2")
    assert plan_for(ctl, "DPX/NPS1", allow_unvalidated=True).blast.reload is False
    ctl.sysfs.faults = {"/sys/module/amdgpu/initstate": 2}
    with pytest.raises(Unsupported, match="built into this kernel"):
        plan_for(ctl, "DPX/NPS2")


def test_units_stay_stopped_while_an_unload_hangs_and_restore_starts_them(make: Make) -> None:
    from dieplace.partition.control import Answer

    node, clock = make()
    ctl = control(node, clock)
    log: list[str] = []
    ctl.reloader.unit_active = lambda unit: True
    ctl.reloader.stop_unit = lambda unit: log.append("stop") or Answer("ok", "systemctl")
    ctl.reloader.start_unit = lambda unit: log.append("start") or Answer("ok", "systemctl")
    node.inject("unload", "ETIMEDOUT")
    plan = plan_for(ctl, "DPX/NPS2", units=("a.service",))
    with pytest.raises(Pending, match=r"a\.service did not start again"):
        carry_out(plan, ctl, limits=FAST)
    assert log == ["stop"]
    carry_out(plan_restore(ctl), ctl, limits=FAST)
    assert log == ["stop", "start"] and truth(node).is_in("SPX/NPS1")


def test_an_old_kernel_refuses_for_a_user_of_any_card_and_that_is_busy_not_failure(make: Make) -> None:
    """Before mid-2025 the KFD lock was the whole node's: a user of gpu1 keeps gpu0 from switching."""
    node, clock = make(lock="node")
    node.start_process("elsewhere", excluded_cards=(0,))
    ctl = control(node, clock)
    facts = ctl.read()
    plan = build(ctl, facts, {"gpu0": Mode("DPX", "NPS1")}, allow_unvalidated=True)
    assert plan.blockers == ()
    with pytest.raises(Busy) as caught:
        carry_out(plan, ctl, limits=FAST)
    assert caught.value.facts["outcome"] == "unchanged" and caught.value.facts["holders"][0]["name"] == "elsewhere"
    assert truth(node).is_in("SPX/NPS1")


def test_slow_start_is_waited_for_with_progress(make: Make) -> None:
    node, clock = make(slow_start_s=40.0, slow_eperm_s=15.0)
    said: list[str] = []
    ctl = control(node, clock)
    outcome = carry_out(plan_for(ctl, "DPX/NPS2"), ctl, limits=FAST, progress=said.append)
    assert outcome.word == "done" and truth(node).is_in("DPX/NPS2")
    assert sum("waiting for the driver" in text for text in said) >= 5 and clock.time >= 1055


def test_a_card_that_never_comes_back_is_not_success(make: Make) -> None:
    node, clock = make(slow_start_s=3000.0)
    with pytest.raises(NotVerified, match="not ready 120 s after loading"):
        switch(control(node, clock), "DPX/NPS2")
    assert not_ready(control(node, clock).read(), control(node, clock).read()) == []


def test_a_reset_that_ends_is_waited_for_and_one_that_does_not_is_told(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    plan = plan_for(ctl, "DPX/NPS1", allow_unvalidated=True)
    with pytest.raises(Busy, match="is in reset"):
        node.begin_reset(node.bdfs()[1])
        plan_for(ctl, "DPX/NPS1", allow_unvalidated=True)
    node.end_reset(node.bdfs()[1])
    real = ctl.set_compute

    def set_compute(bdf: str, word: str) -> Any:
        if bdf == node.bdfs()[0]:
            node.begin_reset(node.bdfs()[1])
            clock.at(5, lambda: node.end_reset(node.bdfs()[1]))
        return real(bdf, word)

    ctl.set_compute = set_compute
    assert carry_out(plan, ctl, limits=FAST).word == "done" and truth(node).is_in("DPX/NPS1")


def test_kfd_that_does_not_come_back_is_told_and_never_called_a_rollback(make: Make) -> None:
    """EIO after a compute switch: the card has no devices any more."""
    node, clock = make()
    node.inject("kfd_init", "EIO", card=0, times=None)
    with pytest.raises(NotVerified) as caught:
        switch(control(node, clock), "DPX/NPS1", allow_unvalidated=True)
    assert "gpu0: has 0 devices" in str(caught.value) and caught.value.facts["outcome"] == "not-verified"


def test_a_driver_that_drops_the_wish_leaves_the_old_state_verified(make: Make) -> None:
    node, clock = make()
    node.inject("nps_switch")
    with pytest.raises(Exception) as caught:
        switch(control(node, clock), "DPX/NPS2")
    assert caught.value.facts["outcome"] == "rolled-back" and truth(node).is_in("SPX/NPS1")  # type: ignore[attr-defined]


def test_a_compute_failure_on_the_second_card_takes_the_first_one_back(make: Make) -> None:
    node, clock = make()
    node.inject("write_compute", "EINVAL", card=1)
    with pytest.raises(Exception) as caught:
        switch(control(node, clock), "DPX/NPS1", allow_unvalidated=True)
    assert caught.value.facts["outcome"] == "rolled-back" and truth(node).is_in("SPX/NPS1")  # type: ignore[attr-defined]
    assert not isinstance(caught.value, BackendError)


def test_two_hives_get_one_wish_each_and_one_reload(make: Make) -> None:
    node, clock = make(cards=4, hives=2)
    outcome = switch(control(node, clock), "DPX/NPS2")
    assert outcome.word == "done" and node.state.loads == 2 and truth(node).is_in("DPX/NPS2")
    assert sum("NPS mode change requested" in line for line in node.log) == 2


def test_cards_of_another_hive_keep_their_mode_through_a_reload(make: Make) -> None:
    node, clock = make(cards=4, hives=2)
    node.write_compute(node.bdfs()[3], "CPX")
    ctl = control(node, clock)
    facts = ctl.read()
    mine = [card.id for card in facts.cards if card.hive == facts.cards[0].hive]
    other = next(card for card in facts.cards if card.bdf == node.bdfs()[3])
    assert other.id not in mine
    plan = build(ctl, facts, dict.fromkeys(mine, Mode("DPX", "NPS2")))
    assert other.id in plan.blast.bystanders
    assert carry_out(plan, ctl, limits=FAST).word == "done"
    after = ctl.read()
    assert str(after.card(other.bdf).mode) == "CPX/NPS1" and str(after.card(node.bdfs()[0]).mode) == "DPX/NPS2"
