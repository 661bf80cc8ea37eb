"""A real node: KFD topology of 8 MI308X in CPX/NPS1, recorded by the k8s-device-plugin project (Apache-2.0).

The expected numbers are read from the recording's own files by the few lines here, or stand in its README.
"""

import re
import tarfile
from pathlib import Path

import pytest

from dieplace.backends.amd.backend import AmdBackend
from dieplace.cli import main as frame

ARCHIVE = Path(__file__).resolve().parents[3] / "shared/data/kfd-mi308x-8gpu-cpx.tar.gz"
pytestmark = [
    pytest.mark.recorded,
    pytest.mark.skipif(not ARCHIVE.exists(), reason="the recorded MI308X topology is not carried in a plain clone"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    home = tmp_path_factory.mktemp("mi308x")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(home / "archive", filter="data")
    topology = next((home / "archive").rglob("topology"))
    target = home / "root/sys/class/kfd/kfd"
    target.mkdir(parents=True)
    topology.rename(target / "topology")
    return home / "root"


@pytest.fixture(scope="module")
def machine(tree):
    return AmdBackend(root=tree, environ={}).snapshot()


@pytest.fixture(scope="module")
def raw(tree):
    """Per GPU node in number order: its properties and bank size, by regular expressions over the recording."""
    found = []
    nodes = tree / "sys/class/kfd/kfd/topology/nodes"
    for number in range(2, 34):
        text = (nodes / f"{number}/properties").read_text()
        values = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        bank = (nodes / f"{number}/mem_banks/0/properties").read_text()
        values["size_in_bytes"] = int(re.search(r"size_in_bytes (\d+)", bank)[1])
        values["gpu_id"] = int((nodes / f"{number}/gpu_id").read_text())
        found.append(values)
    return found


def test_32_devices_on_8_cards(machine):
    assert len(machine.cards) == 8 and len(machine.devices) == 32
    assert [d.id for d in machine.devices] == [f"gpu{c}/p{p}" for c in range(8) for p in range(4)]
    assert {c.part for c in machine.cards} == {"MI308X"}
    assert {(c.xccs, c.cus) for c in machine.cards} == {(4, 80)}


def test_each_device_is_what_its_node_says(machine, raw):
    by_id = {d.gpu_id: d for d in machine.devices}
    assert len(by_id) == 32
    for values in raw:
        device = by_id[values["gpu_id"]]
        assert device.memory_limit_bytes == values["size_in_bytes"]
        assert device.cus == values["simd_count"] // values["simd_per_cu"] == 20
        assert device.render_node == f"/dev/dri/renderD{values['drm_render_minor']}"
        assert device.unique_id == f"{values['unique_id']:016x}"
        bus, function = values["location_id"] >> 8, values["location_id"] & 7
        assert device.bdf == f"{values['domain']:04x}:{bus:02x}:00.{function}" and device.partition == function


def test_the_index_is_the_order_of_the_nodes(machine, raw):
    order = [v["gpu_id"] for v in raw]
    assert [d.gpu_id for d in sorted(machine.devices, key=lambda d: d.runtime_index)] == order


def test_render_nodes_step_by_8_though_there_are_4_partitions(machine):
    assert [machine.device(f"gpu{c}/p0").render_node for c in (0, 1, 2)] == [
        f"/dev/dri/renderD{n}" for n in (128, 136, 144)
    ]


def test_links_within_a_card_are_made_up_and_say_so(machine):
    inside = [link for link in machine.links if link.kind == "same-card"]
    assert len(inside) == 8 * 4 * 3 and {link.weight for link in inside} == {13}
    assert all(link.bandwidth.value is None and link.bandwidth.why for link in inside)
    across = [link for link in machine.links if link.kind == "xgmi"]
    assert len(across) == 32 * 28 and {link.weight for link in across} == {41}


def test_the_mode_is_unknown_and_says_what_kfd_shows(machine):
    for card in machine.cards:
        assert card.mode is None and "4 devices of 1 XCDs, as in CPX" in card.whys["mode"]


def test_visibility_variables_on_equal_ids(tree, raw):
    uuid = f"GPU-{raw[0]['unique_id']:016x}"
    hidden = AmdBackend(root=tree, environ={"ROCR_VISIBLE_DEVICES": uuid}).snapshot()
    assert not [d for d in hidden.devices if d.runtime_index is not None]
    first = AmdBackend(root=tree, environ={"HIP_VISIBLE_DEVICES": uuid}).snapshot()
    assert [d.id for d in first.devices if d.runtime_index is not None] == ["gpu0/p0"]


def test_the_command_lists_them(tree, capsys):
    assert frame.main(["--backend", "replayed", "--node", str(tree), "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "replayed node: 8 x MI308X in an unknown mode, 32 logical devices"
    assert len([line for line in lines if line.startswith("gpu")]) == 32
