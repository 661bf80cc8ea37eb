"""Where real stacks differ: each style of the emulated node shows what users reported of such a stack."""

import re
from pathlib import Path
from typing import Any

import pytest

from dieplace.emulator.node import Node, create
from dieplace.sysfs import Sysfs

NODES = "/sys/class/kfd/kfd/topology/nodes"
CARD = "/sys/bus/pci/devices/0000:05:00.0"


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


def _make(tmp_path: Path, **words: Any) -> Node:
    return create(tmp_path / "node", **{"cores_per_node": 2, "cards": 2, "mode": "DPX/NPS2", **words})


def _gpus(sysfs: Sysfs) -> list[dict[str, int]]:
    found = []
    for number in sorted(map(int, sysfs.names(NODES))):
        lines = dict(line.split() for line in sysfs.read(f"{NODES}/{number}/properties").splitlines())
        if lines["cpu_cores_count"] == "0":
            found.append({key: int(value) for key, value in lines.items()})
    return found


@pytest.mark.parametrize(
    ("style", "mode", "distinct", "package"),
    [
        ("equal", "DPX/NPS2", 1, True), ("distinct", "DPX/NPS2", 2, False), ("distinct", "SPX/NPS1", 1, True),
        ("transitional", "SPX/NPS1", 1, False), ("transitional", "DPX/NPS2", 2, False),
    ],
)  # fmt: skip
def test_unique_ids(tmp_path: Path, style: str, mode: str, distinct: int, package: bool) -> None:
    sysfs = _make(tmp_path, unique_id=style, mode=mode, cards=1).sysfs()
    ids = {gpu["unique_id"] for gpu in _gpus(sysfs)}
    whole = sysfs.read(f"{CARD}/unique_id")
    assert re.fullmatch("[0-9a-f]{16}", whole) and len(ids) == distinct
    assert (int(whole, 16) in ids) is package


@pytest.mark.parametrize(("style", "pattern"), [("underscore", r"amdgpu_xcp_\d+"), ("dot", r"amdgpu_xcp\.\d+")])
def test_xcp_names_and_their_number_in_every_mode(tmp_path: Path, style: str, pattern: str) -> None:
    for mode in ("SPX/NPS1", "CPX/NPS2"):
        sysfs = create(tmp_path / mode[:3], cards=8, mode=mode, xcp_name=style, cores_per_node=2).sysfs()
        names = sysfs.names("/sys/devices/platform")
        assert len(names) == 56 and all(re.fullmatch(pattern, name) for name in names)  # 7 a card: amdgpu_xcp.c
        render = [name for name in sysfs.names("/sys/class/drm") if name.startswith("renderD")]
        assert sorted(render) == sorted(f"renderD{number}" for number in range(128, 192))
        assert not sysfs.exists(f"/sys/devices/platform/{names[0]}/vendor")


def test_place_of_the_partition_id(tmp_path: Path) -> None:
    low = [gpu["location_id"] for gpu in _gpus(create(tmp_path / "l", cards=1, mode="CPX/NPS1").sysfs())]
    assert low == [0x0500 | p for p in range(8)]
    high = create(tmp_path / "h", cards=1, mode="CPX/NPS1", partition_id="high")
    assert [gpu["location_id"] for gpu in _gpus(high.sysfs())] == [0x0500 | p << 28 for p in range(8)]


def test_static_and_dynamic_lists(tmp_path: Path) -> None:
    words = {
        style: create(tmp_path / style, cards=1, mode="DPX/NPS2", available_list=style)
        for style in ("static", "dynamic")
    }
    read = {style: node.sysfs().read(f"{CARD}/available_compute_partition") for style, node in words.items()}
    assert read == {"static": "SPX, DPX, QPX, CPX", "dynamic": "DPX, QPX, CPX"}
    with pytest.raises(OSError, match="Invalid argument"):
        words["static"].write_compute("0000:05:00.0", "SPX")  # listed, and refused all the same


def test_a_video_device_costs_one_logical_device(tmp_path: Path) -> None:
    """amdsmi issue 99: 63 of 64; k8s-gpu-dra-driver issue 20: cards 1, 9, 17 with renderD 128, 136, 144."""
    sysfs = create(tmp_path / "node", cards=8, mode="CPX/NPS1", ast=True, cores_per_node=2).sysfs()
    gpus = _gpus(sysfs)
    assert len(gpus) == 63 and gpus[-1]["drm_render_minor"] == 190
    assert sysfs.read("/sys/class/drm/card0/device/vendor") == "0x1a03"
    cards = [
        n
        for n in sysfs.names("/sys/class/drm")
        if n.startswith("card") and "/pci" in sysfs.readlink(f"/sys/class/drm/{n}")
    ]
    assert sorted(int(name[4:]) for name in cards) == [0, 1, 9, 17, 25, 33, 41, 49, 57]
    assert sysfs.exists("/sys/class/drm/card9/device/drm/renderD136")


def test_other_render_nodes_shift_the_minors(tmp_path: Path) -> None:
    sysfs = create(tmp_path / "node", cards=8, mode="CPX/NPS1", other_render=3, cores_per_node=2).sysfs()
    gpus = _gpus(sysfs)
    assert gpus[0]["drm_render_minor"] == 131 and len(gpus) == 61
    assert sysfs.exists("/sys/class/drm/card3/device/drm/renderD131")


def test_absent_files(tmp_path: Path) -> None:
    old = _make(tmp_path, product_name=False, mem_alloc_mode=False, config_folder=False, xcp_card_nodes=False).sysfs()
    for name in ("product_name", "compute_partition_mem_alloc_mode", "compute_partition_config"):
        assert not old.exists(f"{CARD}/{name}")
    assert [n for n in old.names("/sys/class/drm") if n.startswith("card")] == ["card0", "card8"]
    lacks = create(tmp_path / "lacks", cards=1, nps_configs=False).sysfs()
    assert lacks.exists(f"{CARD}/compute_partition_config/xcp_config")
    assert not lacks.exists(f"{CARD}/compute_partition_config/supported_nps_configs")


def test_a_card_given_to_a_virtual_machine(tmp_path: Path) -> None:
    node = _make(tmp_path, cards=3, vfio_cards=(1,))
    sysfs = node.sysfs()
    assert [gpu["location_id"] >> 8 for gpu in _gpus(sysfs)] == [0x05, 0x05, 0x65, 0x65]
    assert sysfs.readlink("/sys/bus/pci/devices/0000:15:00.0/driver").endswith("/vfio-pci")
    assert not sysfs.exists("/sys/bus/pci/devices/0000:15:00.0/current_compute_partition")
    with pytest.raises(OSError, match="No such device"):
        node.write_compute("0000:15:00.0", "DPX")


def test_two_domains_reuse_bus_numbers(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=8, domains="two", cores_per_node=2)
    gpus = _gpus(node.sysfs())
    assert len({gpu["location_id"] for gpu in gpus}) == 4
    assert len({(gpu["domain"], gpu["location_id"]) for gpu in gpus}) == 8


def test_host_nodes(tmp_path: Path) -> None:
    sysfs = create(tmp_path / "node", cards=8, cpu_nodes=2, cores_per_node=64).sysfs()
    home = "/sys/devices/system/node"
    assert sysfs.read(f"{home}/node0/cpulist") == "0-63,128-191"
    assert sysfs.read(f"{home}/node1/distance") == "32 10"
    assert sysfs.read("/sys/devices/system/cpu/cpu200/topology/thread_siblings_list") == "72,200"
    assert [sysfs.read(f"/sys/bus/pci/devices/{bdf}/numa_node") for bdf in ("0000:05:00.0", "0000:f5:00.0")] == [
        "0",
        "1",
    ]
    quarter = create(tmp_path / "four", cards=8, cpu_nodes=4, cores_per_node=1, threads_per_core=1).sysfs()
    assert quarter.read(f"{home}/online") == "0-3" and quarter.read(f"{home}/node3/cpulist") == "3"
    assert quarter.read("/sys/bus/pci/devices/0000:75:00.0/numa_node") == "1"


def test_hive_and_links(tmp_path: Path) -> None:
    hive = _gpus(create(tmp_path / "hive", cards=2, cores_per_node=2).sysfs())
    assert hive[0]["hive_id"] == hive[1]["hive_id"] != 0
    pcie = create(tmp_path / "pcie", "MI350P", 2, cores_per_node=2).sysfs()
    assert {gpu["hive_id"] for gpu in _gpus(pcie)} == {0}
    assert "weight 61\n" in pcie.read(f"{NODES}/2/p2p_links/1/properties") + "\n"
