"""Reading KFD nodes: identity from `location_id`, damaged values, and what a node number list may look like."""

import errno

import pytest

from dieplace.backends.amd.kfd import KfdNode, parse_properties, read_topology
from dieplace.sysfs import Sysfs


def node(**properties):
    return KfdNode(0, 1, properties, None)


@pytest.mark.parametrize(
    ("location_id", "domain", "key"),
    [
        # The MI308X capture: card 0 is 0000:0a:00, its partitions 2560 to 2563; card 1 begins at 32768.
        (2560, 0, (0, 0x0A, 0, 0)),
        (2563, 0, (0, 0x0A, 0, 3)),
        (32768, 0, (0, 0x80, 0, 0)),
        (32769, 1, (1, 0x80, 0, 1)),
        # Newer stacks: the partition is in bits 31:28 and wins over the function bits.
        ((1 << 28) | 0x0500, 0, (0, 5, 0, 1)),
        ((7 << 28) | 0xFFF8, 0, (0, 0xFF, 0x1F, 7)),
        ((2 << 28) | 0x0503, 0, (0, 5, 0, 2)),
    ],
)
def test_identity(location_id, domain, key):
    assert node(location_id=location_id, domain=domain, simd_count=4).key == key


def test_properties_take_plain_decimals_of_64_bits_only():
    text = "a 1\nb 18446744073709551615\nc 18446744073709551616\nd 0x10\ne -1\nf\n\ng 1 2\nh ٣\n"
    values, bad = parse_properties(text)
    assert values == {"a": 1, "b": (1 << 64) - 1}
    assert bad == ["c", "d", "e", "f", "g", "h"]


def write(root, number, text, gpu_id="7"):
    base = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    base.mkdir(parents=True)
    (base / "properties").write_text(text)
    (base / "gpu_id").write_text(gpu_id)
    return base


def test_names_that_are_no_numbers_are_left_out_and_told(tmp_path):
    write(tmp_path, 0, "cpu_cores_count 4\n", "0")
    write(tmp_path, 1, "simd_count 4\nlocation_id 256\n")
    write(tmp_path, "lost+found", "simd_count 4\n")
    topology = read_topology(Sysfs(tmp_path))
    assert [n.number for n in topology.gpus] == [1] and [n.number for n in topology.cpus] == [0]
    assert any("'lost+found'" in note for note in topology.notes)


def test_nodes_are_in_numeric_order(tmp_path):
    for number in (0, 2, 10, 1, 9):
        write(tmp_path, number, f"simd_count 4\nlocation_id {256 * (number + 1)}\n")
    topology = read_topology(Sysfs(tmp_path))
    assert [n.number for n in topology.nodes] == [0, 1, 2, 9, 10]
    assert any("missing 3, 4, 5, 6, 7, 8" in note for note in topology.notes)


def test_a_node_hidden_by_the_cgroup_is_told_as_such(tmp_path):
    write(tmp_path, 0, "simd_count 4\nlocation_id 256\n")
    write(tmp_path, 1, "simd_count 4\nlocation_id 512\n")
    hidden = "/sys/class/kfd/kfd/topology/nodes/1/properties"
    topology = read_topology(Sysfs(tmp_path, faults={hidden: errno.EPERM}))
    assert [n.number for n in topology.gpus] == [0]
    assert topology.notes == ("KFD node 1 cannot be read: EPERM (hidden by the device cgroup)",)


def test_a_pipe_in_the_tree_does_not_block(tmp_path):
    import os

    base = write(tmp_path, 0, "simd_count 4\nlocation_id 256\n")
    (base / "gpu_id").unlink()
    os.mkfifo(base / "gpu_id")
    assert read_topology(Sysfs(tmp_path)).nodes[0].gpu_id is None
