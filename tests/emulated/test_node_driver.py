"""The driver's state machine: every event, and every errno that the kernel's files give.

Expected results are the kernel's, read in `aqua_vanjaram.c`, `amdgpu_gfx.c` and `amdgpu_gmc.c`; each is reached by a
write to the sysfs file, as a tool would.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dieplace.emulator.node import Node, create, open_node
from dieplace.errors import NoSuchDevice, UsageError

CARD0 = "/sys/class/drm/card0/device"
COMPUTE, MEMORY = f"{CARD0}/current_compute_partition", f"{CARD0}/current_memory_partition"
NODES = "/sys/class/kfd/kfd/topology/nodes"


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


def _errno(act: Callable[[], object]) -> str | None:
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return None


def _write(node: Node, path: str, text: str) -> str | None:
    return _errno(lambda: node.sysfs().write(path, text))


def _read(node: Node, path: str) -> str:
    return node.sysfs().read(path)


def _modes(node: Node) -> list[str]:
    files = [f"/sys/bus/pci/devices/{bdf}/current_" for bdf in node.bdfs()]
    return [f"{_read(node, f + 'compute_partition')}/{_read(node, f + 'memory_partition')}" for f in files]


def _kfd(node: Node) -> list[tuple[int, int]]:
    """(bus, partition) of the GPU nodes in node order."""
    found = []
    for number in sorted(map(int, node.sysfs().names(NODES))):
        lines = dict(line.split() for line in _read(node, f"{NODES}/{number}/properties").splitlines())
        if lines["cpu_cores_count"] == "0":
            found.append((int(lines["location_id"]) >> 8, int(lines["location_id"]) & 7))
    return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return create(tmp_path / "node", cards=2, cores_per_node=2)


@pytest.mark.parametrize("text", ["DPX", "DPX\n", "dpx", "dPx\n", "DPXtra"])
def test_compute_words_match_by_prefix_in_any_case(node: Node, text: str) -> None:
    assert _write(node, COMPUTE, text) is None
    assert _modes(node) == ["DPX/NPS1", "SPX/NPS1"]


@pytest.mark.parametrize("text", ["", "XPX", "SP", "TPX", " SPX", "NPS1", "0", "\x00", "é"])
def test_compute_words_that_are_none(node: Node, text: str) -> None:
    assert _write(node, COMPUTE, text) == "EINVAL"
    assert _modes(node) == ["SPX/NPS1", "SPX/NPS1"]


def test_words_by_xcc_count(tmp_path: Path) -> None:
    four = create(tmp_path / "four", "MI308X", 1, cores_per_node=2)
    assert _write(four, COMPUTE, "QPX") == "EINVAL"
    assert _write(four, COMPUTE, "DPX") is None
    six = create(tmp_path / "six", "MI300A", 1, cores_per_node=2)
    assert _write(six, COMPUTE, "DPX") == "EINVAL"
    assert _write(six, COMPUTE, "TPX") is None
    assert len(_kfd(six)) == 3


def test_compute_mode_must_fit_the_memory_mode(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1, mode="DPX/NPS2", cores_per_node=2)
    assert _write(node, COMPUTE, "SPX") == "EINVAL"
    assert "requested: SPX, available memory partitions: 2" in node.log[-1]
    assert _write(node, COMPUTE, "CPX") is None
    assert _modes(node) == ["CPX/NPS2"]


def test_a_user_of_the_card_makes_it_busy(node: Node) -> None:
    pid = node.start_process(excluded_cards=(1,))
    assert _write(node, COMPUTE, "DPX") == "EBUSY"
    assert _write(node, COMPUTE, "SPX") is None  # same mode: no-op, even then
    node.write_compute(node.bdfs()[1], "DPX")
    node.close_descriptors(pid)
    assert _write(node, COMPUTE, "DPX") == "EBUSY"  # a ghost holds on until it exits
    node.end_process(pid)
    assert _write(node, COMPUTE, "DPX") is None


def test_an_old_kernel_is_busy_for_any_user(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, lock="node", cores_per_node=2)
    node.start_process(excluded_cards=(0,))
    assert _write(node, COMPUTE, "DPX") == "EBUSY"


def test_drm_only_users_do_not_block_compute_but_block_unload(node: Node) -> None:
    node.start_process("Xorg", kfd=False, render=("gpu0/p0",))
    assert _write(node, COMPUTE, "DPX") is None
    assert _errno(node.unload) == "EAGAIN"


def test_reset_gives_eperm_on_reads_and_writes(node: Node) -> None:
    node.begin_reset(node.bdfs()[0])
    for path in (COMPUTE, MEMORY):
        assert _errno(lambda path=path: _read(node, path)) == "EPERM"  # type: ignore[misc]
        assert node.sysfs().exists(path)
    assert _write(node, COMPUTE, "DPX") == "EPERM"
    assert _write(node, MEMORY, "NPS2") == "EPERM"
    node.write_compute(node.bdfs()[1], "DPX")
    node.end_reset(node.bdfs()[0])
    assert _modes(node) == ["SPX/NPS1", "DPX/NPS1"]


def test_kfd_that_does_not_come_back(node: Node) -> None:
    before = node.generation_id
    node.inject("kfd_init", card=0)
    assert _write(node, COMPUTE, "DPX") == "EIO"
    assert _modes(node)[0] == "DPX/NPS1"
    assert _kfd(node) == [(0x15, 0)]
    assert node.generation_id == before + 1
    assert _write(node, COMPUTE, "CPX") is None
    assert len(_kfd(node)) == 9


def test_a_switch_moves_the_card_to_the_end_and_renames_it(node: Node) -> None:
    before, ids = node.generation_id, {_read(node, f"{NODES}/{n}/gpu_id") for n in (2, 3)}
    assert _write(node, COMPUTE, "DPX") is None
    assert _kfd(node) == [(0x15, 0), (0x05, 0), (0x05, 1)]
    assert node.generation_id == before + 3
    after = {_read(node, f"{NODES}/{n}/gpu_id") for n in (2, 3, 4)}
    assert len(after) == 3 and len(after & ids) == 1


def test_memory_mode_is_a_wish_for_the_hive_until_the_driver_is_reloaded(node: Node) -> None:
    node.write_compute(node.bdfs()[1], "QPX")
    assert _write(node, MEMORY, "nps2\n") is None
    assert _modes(node) == ["SPX/NPS1", "QPX/NPS1"]
    assert "reload" in node.log[-1]
    assert _write(node, MEMORY, "NPS1") is None  # same as now: skipped, and the wish stays
    assert "same as current" in node.log[-1]
    before = node.generation_id
    node.unload()
    assert not node.sysfs().exists("/sys/class/kfd/kfd") and not node.sysfs().exists("/sys/module/amdgpu")
    assert not node.sysfs().exists(COMPUTE) and not node.sysfs().exists("/dev/kfd")
    assert node.sysfs().read(f"/sys/bus/pci/devices/{node.bdfs()[0]}/vendor") == "0x1002"
    assert _errno(lambda: node.write_compute(node.bdfs()[0], "DPX")) == "ENODEV"
    node.load()
    assert _modes(node) == ["DPX/NPS2", "DPX/NPS2"]
    assert _kfd(node) == [(0x05, 0), (0x05, 1), (0x15, 0), (0x15, 1)]
    assert node.generation_id == before + 4
    node.reload()
    assert _modes(node) == ["DPX/NPS2", "DPX/NPS2"]


@pytest.mark.parametrize("text", ["NPS4", "NPS8", "NPS3", "", "SPX", "2"])
def test_memory_words_that_are_not_offered(node: Node, text: str) -> None:
    assert _write(node, MEMORY, text) == "EINVAL"


def test_the_last_memory_wish_wins(tmp_path: Path) -> None:
    node = create(tmp_path / "node", "MI300X", 2, cores_per_node=2)
    node.write_memory(node.bdfs()[0], "NPS4")
    node.write_memory(node.bdfs()[1], "NPS2")
    node.reload()
    assert _modes(node) == ["DPX/NPS2"] * 2


def test_two_hives_and_no_hive_are_separate(tmp_path: Path) -> None:
    two = create(tmp_path / "two", cards=2, hives=2, cores_per_node=2)
    two.write_memory(two.bdfs()[1], "NPS2")
    two.reload()
    assert _modes(two) == ["SPX/NPS1", "DPX/NPS2"]
    alone = create(tmp_path / "alone", "MI350P", 2, nps_caps=("NPS1", "NPS2"), cores_per_node=2)
    alone.write_memory(alone.bdfs()[0], "NPS2")
    alone.reload()
    assert _modes(alone)[1] == "SPX/NPS1"
    assert _read(alone, f"/sys/bus/pci/devices/{alone.bdfs()[0]}/current_memory_partition") == "NPS2"


def test_read_only_files(tmp_path: Path) -> None:
    single = create(tmp_path / "single", "MI325X", 1, cores_per_node=2)
    assert _write(single, MEMORY, "NPS1") == "EACCES"
    assert not single.sysfs().exists(f"{CARD0}/available_memory_partition")
    guest = create(tmp_path / "guest", cards=1, virtual_function=True, cores_per_node=2)
    assert _write(guest, COMPUTE, "DPX") == "EACCES"
    assert _write(guest, MEMORY, "NPS2") == "EACCES"
    assert _errno(lambda: guest.write_memory(guest.bdfs()[0], "NPS2")) == "EACCES"
    assert not guest.sysfs().exists(f"{CARD0}/available_compute_partition")
    assert _read(guest, f"{CARD0}/device") == "0x75b3"
    assert _errno(lambda: guest.sysfs().write(f"{CARD0}/unique_id", "1")) == "EACCES"


def test_a_virtual_user_may_read_but_not_write(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1, uid=1000, cores_per_node=2)
    assert _modes(node) == ["SPX/NPS1"]
    assert _write(node, COMPUTE, "DPX") == "EACCES"
    assert _write(node, MEMORY, "NPS2") == "EACCES"
    assert _errno(lambda: _read(node, f"{CARD0}/compute_partition_config/xcc/num_inst")) == "EACCES"
    assert (_errno(node.unload), _errno(node.load)) == ("EPERM", "EPERM")
    node.become(0)
    assert _read(node, f"{CARD0}/compute_partition_config/xcc/num_inst") == "8"
    assert _write(node, COMPUTE, "DPX") is None


def test_other_peoples_descriptors_are_closed_to_a_virtual_user(node: Node) -> None:
    mine, theirs = node.start_process(uid=1000), node.start_process(uid=1001, render=("gpu1/p0",))
    user = node.sysfs(uid=1000)
    assert user.readlink(f"/proc/{mine}/fd/3") == "/dev/kfd"
    assert _errno(lambda: user.names(f"/proc/{theirs}/fd")) == "EACCES"
    assert _errno(lambda: user.readlink(f"/proc/{theirs}/fd/3")) == "EACCES"
    assert _errno(lambda: user.read(f"/proc/{theirs}/fdinfo/4")) == "EACCES"
    assert "Uid:\t1001" in user.read(f"/proc/{theirs}/status")
    assert node.sysfs().readlink(f"/proc/{theirs}/fd/4") == "/dev/dri/renderD136"
    assert f"drm-pdev:\t{node.bdfs()[1]}" in node.sysfs().read(f"/proc/{theirs}/fdinfo/4")


def test_config_folder_describes_without_switching(tmp_path: Path) -> None:
    node = create(tmp_path / "node", "MI300X", 1, cores_per_node=2)
    config = f"{CARD0}/compute_partition_config"
    engines = {"SPX": (8, 4, 16, 32), "DPX": (4, 2, 8, 16)}  # xcc, dec, dma, jpeg: amdsmi issue 132
    for word, counts in engines.items():
        assert _write(node, f"{config}/xcp_config", word) is None
        assert tuple(int(_read(node, f"{config}/{e}/num_inst")) for e in ("xcc", "dec", "dma", "jpeg")) == counts
    assert _write(node, f"{config}/xcp_config", "CPX") is None
    assert (_read(node, f"{config}/dec/num_inst"), _read(node, f"{config}/dec/num_shared")) == ("1", "2")
    assert _read(node, f"{config}/supported_nps_configs") == "NPS1, NPS4"
    assert _write(node, f"{config}/xcp_config", "TPX") == "EINVAL"
    assert _modes(node) == ["SPX/NPS1"]


def test_lifted_cap(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1, mode="QPX/NPS2", cores_per_node=2)
    bank = f"{NODES}/2/mem_banks/0/properties"
    capped = int(_read(node, bank).split("size_in_bytes ")[1].split()[0])
    assert _write(node, f"{CARD0}/compute_partition_mem_alloc_mode", "all\n") is None
    assert int(_read(node, bank).split("size_in_bytes ")[1].split()[0]) == 2 * capped
    assert _write(node, f"{CARD0}/compute_partition_mem_alloc_mode", "some") == "EINVAL"


def test_load_fails_where_no_mode_fits(tmp_path: Path) -> None:
    node = create(tmp_path / "node", "MI308X", 1, nps_caps=("NPS1", "NPS8"), cores_per_node=2)
    node.write_memory(node.bdfs()[0], "NPS8")
    node.unload()
    assert _errno(node.load) == "EINVAL"
    assert not node.loaded and "no compatible" in node.log[-1]


def test_older_automatic_rule(tmp_path: Path) -> None:
    for rule, expected in (("newer", "CPX/NPS4"), ("older", "QPX/NPS4")):
        node = create(tmp_path / rule, "MI300X", 1, auto_rule=rule, cores_per_node=2)
        node.write_memory(node.bdfs()[0], "NPS4")
        node.reload()
        assert _modes(node) == [expected]


def test_injected_failures(node: Node) -> None:
    node.inject("write_compute", "EBUSY", card=0, times=2)
    assert [_write(node, COMPUTE, "DPX") for _ in range(3)] == ["EBUSY", "EBUSY", None]
    node.inject("write_memory", errno.EIO)
    assert _write(node, MEMORY, "NPS2") == "EIO"
    node.inject("unload", "ETIMEDOUT")
    assert (_errno(node.unload), _errno(node.unload)) == ("ETIMEDOUT", None)
    node.inject("load", "ENODEV", times=None)
    assert [_errno(node.load) for _ in range(3)] == ["ENODEV"] * 3
    node.clear_faults()
    assert _errno(node.load) is None
    node.inject("read", "EIO", path="*/current_compute_partition")
    assert _errno(lambda: _read(node, COMPUTE)) == "EIO"
    assert _read(node, COMPUTE) == "SPX"
    node.inject("smi:set_memory", status="BUSY")
    fault = node.take_fault("smi:set_memory")
    assert fault is not None and fault.status == "BUSY" and node.take_fault("smi:set_memory") is None
    for step, words in (("dance", {"error": "EIO"}), ("load", {"error": "EWHAT"}), ("read", {"error": "EIO"})):
        with pytest.raises(UsageError):
            node.inject(step, **words)


def test_a_dropped_wish(node: Node) -> None:
    node.inject("nps_switch")
    node.write_memory(node.bdfs()[0], "NPS2")
    node.reload()
    assert _modes(node) == ["SPX/NPS1"] * 2 and any("request failed" in line for line in node.log)
    node.reload()
    assert _modes(node) == ["SPX/NPS1"] * 2


def test_delays_use_the_injected_sleep(tmp_path: Path) -> None:
    slept: list[float] = []
    node = create(tmp_path / "node", cards=1, cores_per_node=2, sleep=slept.append)
    node.inject("unload", seconds=75.0)
    node.unload()
    node.load()
    assert slept == [75.0] and node.loaded


def test_slow_start_with_an_injected_clock(tmp_path: Path) -> None:
    now = [100.0]
    node = create(tmp_path / "node", cards=2, cores_per_node=2, slow_start_s=10, slow_eperm_s=2, clock=lambda: now[0])
    node.reload()
    assert _read(node, "/sys/module/amdgpu/initstate") == "live" and _kfd(node) == []
    assert _errno(lambda: _read(node, COMPUTE)) == "ENOENT"
    before = node.generation_id
    now[0] = 105.0
    assert _kfd(node) == [(0x05, 0)] and node.generation_id == before + 1
    assert _errno(lambda: _read(node, COMPUTE)) == "EPERM"
    now[0] = 107.5
    assert _read(node, COMPUTE) == "SPX"
    assert _errno(lambda: node.write_compute(node.bdfs()[1], "DPX")) == "ENODEV"
    now[0] = 113.0
    assert _modes(node) == ["SPX/NPS1"] * 2 and len(_kfd(node)) == 2


def test_reboot(tmp_path: Path) -> None:
    for style, expected in (("keep", "DPX/NPS2"), ("NPS1", "SPX/NPS1")):
        node = create(tmp_path / style, cards=1, mode="CPX/NPS2", nps_after_reboot=style, cores_per_node=2)
        node.start_process()
        node.write_memory(node.bdfs()[0], "NPS1")
        old = node.boot_id
        node.reboot()
        assert node.sysfs().read("/proc/sys/kernel/random/boot_id") == node.boot_id != old
        assert _modes(node) == [expected] and node.sysfs().names("/sys/class/kfd/kfd/proc") == []
        node.reload()
        assert _modes(node) == [expected]  # the wish did not survive


def test_processes(node: Node) -> None:
    node.write_compute(node.bdfs()[0], "DPX")
    here = node.start_process("vllm", render=("gpu0/p1",), vram_bytes=5 << 30)
    away = node.start_process("exporter", in_this_pid_namespace=False, host_pid=777)
    drm = node.start_process("Xorg", kfd=False, render=(f"{node.bdfs()[1]}/p0",))
    sysfs, kfd = node.sysfs(), "/sys/class/kfd/kfd/proc"
    assert sysfs.names(kfd) == sorted([str(here), "777"])
    assert not sysfs.exists(f"/proc/{away}") and sysfs.exists(f"/proc/{drm}/fd")
    ids = {n: _read(node, f"{NODES}/{n}/gpu_id") for n in (2, 3, 4)}
    held = {n: int(_read(node, f"{kfd}/{here}/vram_{gpu}")) for n, gpu in ids.items()}
    assert held == {2: 0, 3: 0, 4: 5 << 30}  # nodes 3 and 4 are the switched card's two devices
    used = [int(_read(node, f"/sys/bus/pci/devices/{b}/mem_info_vram_used")) for b in node.bdfs()]
    assert used[0] - used[1] == 5 << 30
    assert _read(node, f"{NODES}/3/mem_banks/0/used_memory") == str(used[0])  # the whole package on both siblings
    assert f"drm-memory-vram:\t{5 << 20} KiB" in sysfs.read(f"/proc/{here}/fdinfo/4")
    node.close_descriptors(here)
    assert sysfs.names(f"/proc/{here}/fd") == ["0"] and str(here) in sysfs.names(kfd)
    for pid in (here, away, drm):
        node.end_process(pid)
    assert sysfs.names(kfd) == [] and _errno(node.unload) is None
    assert _errno(lambda: node.start_process()) == "ENOENT"
    with pytest.raises(NoSuchDevice):
        node.begin_reset("0000:00:00.0")


def test_ghosts_may_be_told_not_to_block_unload(tmp_path: Path) -> None:
    for style, expected in ((True, "EAGAIN"), (False, None)):
        node = create(tmp_path / str(style), cards=1, ghosts_block_unload=style, cores_per_node=2)
        node.close_descriptors(node.start_process())
        assert _errno(node.unload) == expected


def test_opening_device_nodes(node: Node) -> None:
    sysfs = node.sysfs()
    assert _errno(lambda: sysfs.openable("/dev/kfd")) is None
    assert _errno(lambda: sysfs.openable("/dev/dri/renderD128")) is None
    assert _errno(lambda: sysfs.openable("/dev/dri/renderD129")) == "ENOENT"  # a render node of an unused partition
    assert "partition 1 not valid" in node.log[-1]
    hidden = node.sysfs(hidden_cards=(1,))
    assert _errno(lambda: hidden.openable("/dev/dri/renderD136")) == "EPERM"
    assert _errno(lambda: hidden.read(f"{NODES}/3/properties")) == "EPERM"
    assert _errno(lambda: hidden.read(f"{NODES}/2/properties")) is None
    os.chmod(node.directory / "dev/dri/renderD128", 0o660)
    assert _errno(lambda: node.sysfs(uid=1000).openable("/dev/dri/renderD128")) == "EACCES"


def test_an_unknown_mode(node: Node) -> None:
    node.forget_mode(node.bdfs()[0])
    assert _read(node, COMPUTE) == "UNKNOWN"
    assert _kfd(node) == [(0x15, 0)]


def test_writes_by_every_path_reach_the_driver(node: Node) -> None:
    bdf = node.bdfs()[1]
    words = {
        f"/sys/bus/pci/devices/{bdf}": "DPX",
        "/sys/class/drm/card8/device": "QPX",
        f"/sys/devices/pci0000:15/{bdf}": "CPX",
        "/sys/class/drm/renderD136/device": "SPX",
    }
    for path, word in words.items():
        node.sysfs().write(f"{path}/current_compute_partition", word)
        assert open_node(node.directory).sysfs().read(f"{path}/current_compute_partition") == word
