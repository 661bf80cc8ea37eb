"""Discovery of every part in every mode on emulated nodes.

Expected counts come from AMD's tables (XCDs and CUs of each part, partitions of each mode) and from byte counts that
users reported for real nodes; they are typed here and not computed by dieplace.
"""

import errno
import shutil

import pytest

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import StaleMachine
from dieplace.machine import Machine
from dieplace.modes import Mode
from dieplace.sysfs import Sysfs

# part: XCDs, CUs of the card, dies
PARTS = {
    "MI355X": (8, 256, 2),
    "MI350X": (8, 256, 2),
    "MI300X": (8, 304, 4),
    "MI325X": (8, 304, 4),
    "MI300A": (6, 228, 4),
    "MI350P": (4, None, None),
    "MI308X": (4, 80, None),
}
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
# Bytes of one logical device as users reported them for real nodes: k8s-gpu-dra-driver issue 20, ROCm issue 4750.
REPORTED_BYTES = {
    ("MI300X", "DPX/NPS1"): 103_070_826_496,
    ("MI300X", "CPX/NPS4"): 25_767_706_624,
    ("MI300X", "CPX/NPS1"): 25_767_706_624,
    ("MI355X", "SPX/NPS1"): 309_220_868_096,
    ("MI355X", "DPX/NPS2"): 154_610_434_048,
}
MODES = {
    "MI355X": ["SPX/NPS1", "DPX/NPS1", "DPX/NPS2", "QPX/NPS1", "QPX/NPS2", "CPX/NPS1", "CPX/NPS2"],
    "MI350X": ["SPX/NPS1", "DPX/NPS1", "DPX/NPS2", "QPX/NPS1", "QPX/NPS2", "CPX/NPS1", "CPX/NPS2"],
    "MI300X": ["SPX/NPS1", "DPX/NPS1", "DPX/NPS2", "QPX/NPS1", "QPX/NPS4", "CPX/NPS1", "CPX/NPS4"],
    "MI325X": ["SPX/NPS1", "DPX/NPS1", "QPX/NPS1", "CPX/NPS1"],
    "MI300A": ["SPX/NPS1", "TPX/NPS1", "CPX/NPS1"],
    "MI350P": ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1"],
    "MI308X": ["SPX/NPS1", "CPX/NPS1"],
}
CASES = [(part, mode) for part, modes in MODES.items() for mode in modes]


def discovered(tmp_path, part="MI355X", mode="SPX/NPS1", cards=2, environ=None, **styles) -> Machine:
    node = create(tmp_path / "node", part=part, mode=mode, cards=cards, **styles)
    return EmulatedBackend(node, environ=environ or {}).snapshot()


NAMES = ("part", "xccs", "cus", "hbm_bytes", "dies", "stacks_per_die", "mode", "memory_limit_bytes", "domain")


def assert_unknown_has_a_reason(machine: Machine) -> None:
    for thing in (*machine.cards, *machine.devices, *machine.domains):
        for name in (*NAMES, "total_bytes"):
            if getattr(thing, name, "") is None and not (name == "card" or thing.id.startswith("host/")):
                assert thing.whys.get(name), f"{thing.id}.{name} is None without a reason"


@pytest.mark.parametrize(("part", "mode"), CASES)
def test_every_part_in_every_mode(tmp_path, part, mode):
    machine = discovered(tmp_path, part, mode)
    xccs, cus, dies = PARTS[part]
    compute, memory = mode.split("/")
    count = PARTITIONS.get(compute, xccs)
    ranges = int(memory[3:])
    assert [(c.part, str(c.mode), c.xccs, c.cus, c.dies) for c in machine.cards] == [(part, mode, xccs, cus, dies)] * 2
    assert len(machine.devices) == 2 * count
    assert {d.xccs for d in machine.devices} == {xccs // count}
    assert {d.cus for d in machine.devices} == {None if cus is None else cus // count}
    assert [d.id for d in machine.devices] == [f"gpu{c}/p{p}" for c in (0, 1) for p in range(count)]
    assert len(machine.domains_of("gpu0")) == ranges
    for device in machine.devices:
        assert device.domain == f"{device.card}/mem{device.partition // (count // ranges)}"
        assert device.whole_card == (compute == "SPX")
        assert (device.card in device.aliases) == (compute == "SPX")
    if (part, mode) in REPORTED_BYTES:
        assert {d.memory_limit_bytes for d in machine.devices} == {REPORTED_BYTES[part, mode]}
    assert_unknown_has_a_reason(machine)


def test_the_node_of_the_published_experiment(tmp_path):
    machine = discovered(tmp_path, "MI355X", "DPX/NPS2", cards=8)
    assert len(machine.cards) == 8 and len(machine.devices) == 16
    assert {(d.xccs, d.cus) for d in machine.devices} == {(4, 128)}
    assert machine.domain("gpu3/die0").id == "gpu3/mem0" and machine.domain("gpu3/die1").id == "gpu3/mem1"
    card = machine.card("gpu3")
    assert card.hbm_bytes == 309_220_868_096
    assert [d.total_bytes for d in machine.domains_of("gpu3")] == [card.hbm_bytes // 2] * 2
    assert all(d.local_guaranteed for d in machine.devices)
    assert [d.dies for d in machine.devices_of("gpu3")] == [(0,), (1,)]


def test_spx_promises_no_locality(tmp_path):
    machine = discovered(tmp_path, "MI355X", "SPX/NPS1", cards=8)
    assert len(machine.devices) == 8 and {(d.xccs, d.cus) for d in machine.devices} == {(8, 256)}
    assert not any(d.local_guaranteed for d in machine.devices)
    assert machine.domain("gpu0/mem0").dies == (0, 1)
    assert machine.device("gpu7").id == "gpu7/p0"


@pytest.mark.parametrize(
    ("part", "mode", "dies", "guaranteed"),
    [
        ("MI355X", "CPX/NPS2", [(0,)] * 4 + [(1,)] * 4, True),
        ("MI355X", "QPX/NPS1", [(0,), (0,), (1,), (1,)], False),
        ("MI355X", "DPX/NPS1", [(0,), (1,)], False),
        ("MI300X", "DPX/NPS2", [(0, 1), (2, 3)], True),
        ("MI300X", "QPX/NPS4", [(0,), (1,), (2,), (3,)], True),
        ("MI300X", "CPX/NPS4", [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)], True),
    ],
)
def test_dies_follow_the_order_of_the_xcds(tmp_path, part, mode, dies, guaranteed):
    machine = discovered(tmp_path, part, mode, cards=1)
    assert [d.dies for d in machine.devices] == dies
    assert {d.local_guaranteed for d in machine.devices} == {guaranteed}


def test_cpx_nps2_of_a_full_node(tmp_path):
    machine = discovered(tmp_path, "MI355X", "CPX/NPS2", cards=8)
    assert len(machine.devices) == 64 and len([d for d in machine.domains if d.card]) == 16
    assert [d.runtime_index for d in machine.devices] == list(range(64))


@pytest.mark.parametrize(
    ("unique_id", "partition_id", "xcp_name", "domains"),
    [
        ("equal", "low", "underscore", "one"),
        ("equal", "high", "dot", "two"),
        ("distinct", "low", "dot", "two"),
        ("distinct", "high", "underscore", "one"),
        ("transitional", "low", "underscore", "two"),
        ("transitional", "high", "dot", "one"),
    ],
)
def test_siblings_are_found_whatever_the_stack_writes(tmp_path, unique_id, partition_id, xcp_name, domains):
    machine = discovered(
        tmp_path, mode="DPX/NPS2", cards=4,
        unique_id=unique_id, partition_id=partition_id, xcp_name=xcp_name, domains=domains,
    )  # fmt: skip
    assert [d.id for d in machine.devices] == [f"gpu{c}/p{p}" for c in range(4) for p in range(2)]
    assert len({c.bdf for c in machine.cards}) == 4 and not machine.notes
    pairs = [[x for x in machine.links if x.initiator == f"gpu{c}/p0" and x.target == f"gpu{c}/p1"] for c in range(4)]
    assert all(len(pair) == 1 and pair[0].kind == "same-card" and pair[0].weight == 13 for pair in pairs)
    assert all(pair[0].bandwidth.value is None and pair[0].bandwidth.why for pair in pairs)


def test_siblings_that_only_the_pci_domain_tells_apart(tmp_path):
    node = create(tmp_path / "node", cards=8, domains="two")
    machine = EmulatedBackend(node, environ={}).snapshot()
    assert sorted({c.bdf[:4] for c in machine.cards}) == ["0000", "0001"]
    assert [c.bdf for c in machine.cards] == sorted(c.bdf for c in machine.cards)


def test_a_gap_in_the_node_numbers_is_told(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=2)
    shutil.rmtree(node.directory / "sys/class/kfd/kfd/topology/nodes/3")
    machine = AmdBackend(root=node.directory, environ={}).snapshot()
    assert [d.id for d in machine.devices] == ["gpu0/p0", "gpu1/p0", "gpu1/p1"]
    assert any("missing 3" in note for note in machine.notes)
    assert any("gpu0" in note and "2 logical devices, KFD shows 1" in note for note in machine.notes)


def test_a_damaged_node_is_left_out_and_told(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=2)
    path = node.directory / "sys/class/kfd/kfd/topology/nodes/4/properties"
    path.write_bytes(b"simd_count 512\nlocation_id \xff\xfe\n")
    machine = AmdBackend(root=node.directory, environ={}).snapshot()
    assert len(machine.devices) == 3
    assert any("node 4" in note and "location_id" in note for note in machine.notes)


def test_two_nodes_of_one_identity_are_an_oddity_not_a_device(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=1)
    nodes = node.directory / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "3/properties").write_text((nodes / "2/properties").read_text())
    machine = AmdBackend(root=node.directory, environ={}).snapshot()
    assert [d.id for d in machine.devices] == ["gpu0/p0"]
    assert any("same partition" in note for note in machine.notes)


def test_a_card_in_reset_has_no_mode_and_says_so(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=2)
    node.begin_reset(node.bdfs()[0])
    machine = EmulatedBackend(node, environ={}).snapshot()
    assert machine.card("gpu0").mode is None and "EPERM" in machine.card("gpu0").whys["mode"]
    assert machine.card("gpu1").mode == Mode("DPX", "NPS2")
    assert machine.device("gpu0/p0").domain is None


def test_a_card_whose_kfd_nodes_failed_is_still_shown(tmp_path):
    node = create(tmp_path / "node", mode="SPX/NPS1", cards=2)
    node.inject("kfd_init", errno.EIO, card=0)
    with pytest.raises(OSError):
        node.write_compute(node.bdfs()[0], "DPX")
    machine = EmulatedBackend(node, environ={}).snapshot()
    assert [c.id for c in machine.cards] == ["gpu0", "gpu1"]
    assert machine.devices_of("gpu0") == () and len(machine.devices_of("gpu1")) == 1
    assert any("gpu0" in note for note in machine.notes)


def test_the_index_follows_kfd_order_after_one_card_was_switched(tmp_path):
    node = create(tmp_path / "node", mode="SPX/NPS1", cards=3)
    node.write_compute(node.bdfs()[0], "DPX")
    machine = EmulatedBackend(node, environ={}).snapshot()
    # The switched card's nodes are appended, the other cards close up (as kfd_topology.c adds to its list's end).
    assert {d.id: d.runtime_index for d in machine.devices} == {"gpu1/p0": 0, "gpu2/p0": 1, "gpu0/p0": 2, "gpu0/p1": 3}


def test_visibility_variables_are_applied_and_told(tmp_path):
    machine = discovered(tmp_path, mode="DPX/NPS2", cards=2, environ={"ROCR_VISIBLE_DEVICES": "3,1"})
    assert {d.id: d.runtime_index for d in machine.devices} == {
        "gpu0/p0": None, "gpu0/p1": 1, "gpu1/p0": None, "gpu1/p1": 0,
    }  # fmt: skip
    assert any("ROCR_VISIBLE_DEVICES='3,1' leaves 2 of 4" in note for note in machine.notes)


def test_a_render_node_without_access_stops_the_runtime_and_is_told(tmp_path):
    node = create(tmp_path / "node", cards=2)
    sysfs = Sysfs(node.directory, faults={"/dev/dri/renderD128": errno.EACCES})
    machine = AmdBackend(sysfs=sysfs, environ={}).snapshot()
    assert machine.device("gpu0/p0").runtime_index is None and machine.device("gpu1/p0").runtime_index == 0
    assert any("whole HIP runtime fails" in note for note in machine.notes)


def test_a_hidden_card_is_skipped_and_the_rest_is_numbered_on(tmp_path):
    node = create(tmp_path / "node", cards=3)
    sysfs = node.sysfs(hidden_cards=(1,))
    machine = AmdBackend(sysfs=sysfs, environ={}).snapshot()
    assert {d.id: d.runtime_index for d in machine.devices} == {"gpu0/p0": 0, "gpu2/p0": 1}
    assert any("cgroup" in note for note in machine.notes)


def test_a_virtual_function_warns_about_its_mode(tmp_path):
    machine = discovered(tmp_path, cards=1, virtual_function=True)
    assert machine.card("gpu0").part == "MI355X"
    assert any("virtual function" in note for note in machine.notes)


def test_numbers_of_cpu_nodes_and_hosts(tmp_path):
    machine = discovered(tmp_path, cards=8)
    assert [d.id for d in machine.domains if d.card is None] == ["host/node0", "host/node1"]
    assert [c.numa_node for c in machine.cards] == [0] * 4 + [1] * 4


def test_a_machine_goes_through_a_file_unchanged(tmp_path):
    machine = discovered(tmp_path, mode="CPX/NPS2", cards=2)
    machine.save(tmp_path / "machine.json")
    loaded = Machine.load(tmp_path / "machine.json")
    assert loaded.cards == machine.cards and loaded.devices == machine.devices
    assert loaded.domains == machine.domains and loaded.links == machine.links
    assert loaded.source == "replayed"


def test_a_changed_node_makes_the_snapshot_stale(tmp_path):
    node = create(tmp_path / "node", cards=2)
    machine = EmulatedBackend(node, environ={}).snapshot()
    machine.check_fresh()
    node.write_compute(node.bdfs()[1], "DPX")
    with pytest.raises(StaleMachine):
        machine.check_fresh()
