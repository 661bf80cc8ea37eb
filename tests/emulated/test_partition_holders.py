"""Who holds a card: each kind of holder on the emulated node, and when the view cannot be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from partition_support import FakeClock, control_for, plan_for, small_node, switch, truth

from dieplace.backends.amd.holders import find_holders
from dieplace.backends.amd.observe import observe
from dieplace.emulator.node import Node
from dieplace.errors import Busy
from dieplace.partition.blocking import blockers


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(memory_path: Path, clock: FakeClock) -> Node:
    return small_node(memory_path / "node", clock)


def kinds(node: Node, clock: FakeClock, home: Path) -> list[tuple[str, int | None, tuple[str, ...]]]:
    return [(h.kind, h.pid, h.devices) for h in control_for(node, clock, home).holders().holders]


def test_a_compute_process_holds_every_card_it_could_open(node: Node, clock: FakeClock, memory_path: Path) -> None:
    """Facts 9: a HIP process opens every visible GPU, whatever its variables say; a device cgroup does limit it."""
    everywhere = node.start_process("train", vram_bytes=1 << 30)
    one = node.start_process("one", excluded_cards=(0,))
    assert kinds(node, clock, memory_path) == [
        ("compute", everywhere, ("gpu0/p0", "gpu1/p0")),
        ("compute", one, ("gpu1/p0",)),
    ]
    found = control_for(node, clock, memory_path).holders().holders
    assert found[0].name == "train" and found[0].vram_bytes and found[0].vram_bytes >= 1 << 30
    assert [h.pid for h in blockers(control_for(node, clock, memory_path).holders(), ("gpu0",), reload=False)] == [
        everywhere
    ]


def test_a_ghost_is_told_to_be_restarted(node: Node, clock: FakeClock, memory_path: Path) -> None:
    pid = node.start_process("exporter", cgroup="0::/system.slice/amd-metrics-exporter.service")
    node.close_descriptors(pid)
    assert kinds(node, clock, memory_path) == [("ghost", pid, ("gpu0/p0", "gpu1/p0"))]
    with pytest.raises(Busy) as caught:
        switch(control_for(node, clock, memory_path), "DPX/NPS2")
    text = str(caught.value)
    assert f"pid {pid} (exporter)" in text and "only its exit frees the card" in text
    assert "--stop-service amd-metrics-exporter.service" in text and truth(node).is_in("SPX/NPS1")


def test_a_drm_only_user_is_seen_with_its_device(node: Node, clock: FakeClock, memory_path: Path) -> None:
    pid = node.start_process("vaapi", kfd=False, render=("gpu1/p0",))
    assert kinds(node, clock, memory_path) == [("drm", pid, ("gpu1/p0",))]
    found = control_for(node, clock, memory_path).holders()
    assert [h.pid for h in blockers(found, ("gpu1",), reload=False)] == [pid]
    assert blockers(found, ("gpu0",), reload=False) == ()
    assert [h.pid for h in blockers(found, ("gpu0",), reload=True)] == [pid]


def test_another_pid_namespace_makes_the_view_incomplete(node: Node, clock: FakeClock, memory_path: Path) -> None:
    node.start_process("hidden", in_this_pid_namespace=False)
    found = control_for(node, clock, memory_path).holders()
    assert found.holders[0].kind == "unreadable" and any("another pid namespace" in why for why in found.incomplete)
    with pytest.raises(Busy):
        switch(control_for(node, clock, memory_path), "DPX/NPS2")
    assert truth(node).is_in("SPX/NPS1")


def test_unreadable_processes_refuse_a_switch_but_not_a_plan(node: Node, clock: FakeClock, memory_path: Path) -> None:
    pid = node.start_process("secret", kfd=False, render=("gpu0/p0",))
    control = control_for(node, clock, memory_path)
    control.sysfs.faults[f"/proc/{pid}/fd"] = 13
    plan = plan_for(control, "DPX/NPS2")
    assert any("cannot be inspected" in why for why in plan.incomplete) and "incomplete" in str(plan)
    with pytest.raises(Busy, match="incomplete"):
        switch(control, "DPX/NPS2")
    assert truth(node).is_in("SPX/NPS1")


def test_an_unreadable_process_list_refuses_too(node: Node, clock: FakeClock, memory_path: Path) -> None:
    control = control_for(node, clock, memory_path)
    control.sysfs.faults["/sys/class/kfd/kfd/proc"] = 13
    with pytest.raises(Busy, match="KFD's process list cannot be read"):
        switch(control, "DPX/NPS2")


def test_a_user_who_is_not_root_never_has_a_complete_view(node: Node, clock: FakeClock, memory_path: Path) -> None:
    node.start_process("theirs", uid=0)
    node.become(1000)
    found = control_for(node, clock, memory_path).holders()
    assert any("only root" in why for why in found.incomplete)


def test_a_process_in_a_container_namespace_of_ours_is_told(node: Node) -> None:
    """What this process itself sees: a pid namespace other than the first means that KFD's pids are not ours."""
    folder = node.directory / "proc" / "self" / "ns"
    folder.mkdir(parents=True)
    for text, complete in (("pid:[4026531836]", True), ("pid:[4026532999]", False)):
        (folder / "pid").unlink(missing_ok=True)
        (folder / "pid").symlink_to(text)
        sysfs = node.sysfs()
        assert (find_holders(sysfs, observe(sysfs)).incomplete == ()) is complete


def test_waiting_ends_when_the_holder_does_and_nothing_is_killed(
    node: Node, clock: FakeClock, memory_path: Path
) -> None:
    pid = node.start_process("job")
    clock.at(20, lambda: node.end_process(pid))
    with pytest.raises(Busy):
        switch(control_for(node, clock, memory_path), "DPX/NPS2", wait_s=10)
    assert any(p.pid == pid for p in node.state.processes)
    assert switch(control_for(node, clock, memory_path), "DPX/NPS2", wait_s=60).word == "done"
    assert truth(node).is_in("DPX/NPS2")


def test_module_holders_block_a_reload_and_are_named(node: Node, clock: FakeClock, memory_path: Path) -> None:
    control = control_for(node, clock, memory_path)
    real = control.sysfs.names
    control.sysfs.names = lambda name: ["some_module"] if name == "/sys/module/amdgpu/holders" else real(name)  # type: ignore[method-assign]
    with pytest.raises(Busy, match="some_module"):
        switch(control, "DPX/NPS2")
    assert blockers(control.holders(), ("gpu0",), reload=False) == ()
