"""Host binding decided over fake `/sys` trees: nodes without CPUs, without memory, far ones, cpusets, quotas."""

import random
from pathlib import Path

import pytest

from dieplace import numberlist
from dieplace.binding import plan
from dieplace.binding.host import Host, HostNode, cpu_quota, read_host, read_nodes, status_lists
from dieplace.binding.plan import Binding
from dieplace.binding.ranks import RANK_VARIABLES, local_rank, require_rank
from dieplace.errors import Unsupported, UsageError
from dieplace.sysfs import Sysfs

GIB = 1 << 30


def _tree(root: Path, nodes: dict[int, tuple[str, int]], distances: dict[int, str] | None = None) -> Sysfs:
    """A fake host: node -> (cpulist, MemTotal in KiB)."""
    for number, (cpus, kib) in nodes.items():
        home = root / f"sys/devices/system/node/node{number}"
        home.mkdir(parents=True)
        (home / "cpulist").write_text(f"{cpus}\n")
        (home / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\n")
        words = distances[number] if distances else " ".join("10" if n == number else "20" for n in nodes)
        (home / "distance").write_text(f"{words}\n")
    return Sysfs(root)


def _host(sysfs: Sysfs, cpus: str, mems: str | None = None) -> Host:
    nodes, notes = read_nodes(sysfs)
    return Host(nodes, numberlist.parse(cpus), None if mems is None else numberlist.parse(mems), {}, notes)


def test_accelerator_memory_as_a_node_without_cpus(tmp_path: Path) -> None:
    """vllm PR 39361: node 2 is memory only; 2-0 is 80 and 2-1 is 20."""
    sysfs = _tree(
        tmp_path, {0: ("0-7", 100), 1: ("8-15", 100), 2: ("", 100)}, {0: "10 40 80", 1: "40 10 20", 2: "80 20 10"}
    )
    binding = plan.near(_host(sysfs, "0-15"), 2)
    assert (binding.cpus, binding.policy, binding.nodes) == (tuple(range(8, 16)), "preferred", (1,))
    assert len(binding.reasons) == 1 and "no CPUs" in binding.reasons[0] and "20" in binding.reasons[0]


def test_four_nodes_memory_only_cpu_only_and_far(tmp_path: Path) -> None:
    sysfs = _tree(
        tmp_path,
        {0: ("0-3", 100), 1: ("", 100), 2: ("4-7", 0), 3: ("8-11", 100)},  # 1 memory only, 2 CPUs only, 3 far
        {0: "10 20 12 99", 1: "20 10 15 99", 2: "12 15 10 99", 3: "99 99 99 10"},
    )
    host = _host(sysfs, "0-11")
    memory_only = plan.near(host, 1)
    assert memory_only.cpus == (4, 5, 6, 7) and memory_only.nodes == (0,)  # DRAM goes before memory without CPUs
    assert plan.near(host, 2).nodes == (0,)
    assert plan.near(host, 3) == Binding((8, 9, 10, 11), "preferred", (3,))
    assert plan.near(_host(sysfs, "0-3"), 3).cpus == (0, 1, 2, 3)
    assert plan.near(_host(sysfs, "0-11", "3"), 0).nodes == (3,)


def test_a_host_with_one_node_gets_no_calls(tmp_path: Path) -> None:
    """iggy 4242: a one-node host that rejects memory binding."""
    host = _host(_tree(tmp_path, {0: ("0-3", 100)}), "0-3")
    assert plan.near(host, 0).cpus is None and plan.near(host, 0).policy is None
    asked = plan.asked(host, policy="membind", nodes="0")
    assert asked.policy is None and "one NUMA node" in asked.reasons[0]


@pytest.mark.parametrize("number", [None, -1, 9])
def test_a_device_that_names_no_node(tmp_path: Path, number: int | None) -> None:
    host = _host(_tree(tmp_path, {0: ("0", 100), 1: ("1", 100)}), "0-1")
    binding = plan.near(host, number)
    assert binding.cpus is None and binding.policy is None and len(binding.incomplete) == 1


def test_limits_of_the_caller_go_first(tmp_path: Path) -> None:
    host = _host(_tree(tmp_path, {0: ("0-7", 100), 1: ("8-15", 100)}), "2-3,12")
    assert plan.near(host, 0).cpus == (2, 3)
    assert "2 of node 0's 8 CPUs" in plan.near(host, 0).reasons[0]
    with pytest.raises(Unsupported, match=r"0-1.*2-3,12"):
        plan.asked(host, cpus="0-2")
    assert plan.asked(host, cpunodes="1").cpus == (12,)
    with pytest.raises(Unsupported, match="has 0-1"):
        plan.asked(host, cpunodes="2")
    with pytest.raises(Unsupported):
        plan.asked(_host(_tree(tmp_path / "b", {0: ("0", 1), 1: ("1", 1)}), "0"), cpunodes="1")


def test_memory_nodes_that_are_asked_for(tmp_path: Path) -> None:
    sysfs = _tree(tmp_path, {0: ("0", 100), 1: ("1", 100), 2: ("2", 0)})
    host = _host(sysfs, "0-2", "0-1")
    assert plan.asked(host, policy="interleave", nodes="all").nodes == (0, 1)
    assert plan.asked(host, policy="membind", nodes="!0,2").nodes == (1,)
    for nodes in ("2", "0-2"):
        with pytest.raises(Unsupported, match="no memory"):
            plan.asked(host, policy="membind", nodes=nodes)
    with pytest.raises(Unsupported, match="may use 0 only"):
        plan.asked(_host(sysfs, "0-2", "0"), policy="membind", nodes="1")
    with pytest.raises(UsageError, match="one node"):
        plan.asked(host, policy="preferred", nodes="0-1")


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-1", "1,,x", "99999999999", "0-70000", "!0-15", "+9", "1;2", "٣"]
)
def test_lists_that_are_none(tmp_path: Path, text: str) -> None:
    host = _host(_tree(tmp_path, {0: ("0-7", 100), 1: ("8-15", 100)}), "0-3")
    with pytest.raises(UsageError):
        plan.asked(host, cpus=text)


def test_numactl_words(tmp_path: Path) -> None:
    host = _host(_tree(tmp_path, {0: ("0-7", 100), 1: ("8-15", 100)}), "4-7")
    assert plan.asked(host, cpus="all").cpus == (4, 5, 6, 7)
    assert plan.asked(host, cpus="+0,2").cpus == (4, 6)
    assert plan.asked(host, cpus="!0-4,8-15").cpus == (5, 6, 7)


def test_list_format_both_ways() -> None:
    assert numberlist.parse("0-3,8, 10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert numberlist.parse("0-10:2/4") == (0, 1, 4, 5, 8, 9)  # bitmap_parselist in the kernel's documentation
    chance = random.Random(3)
    for _ in range(200):
        numbers = {chance.randrange(300) for _ in range(chance.randrange(40))}
        assert numberlist.parse(numberlist.show(numbers)) == tuple(sorted(numbers))


def test_shares_are_disjoint_whole_cores() -> None:
    """Two ranks on one node: disjoint halves, hyper-threads together."""
    chance = random.Random(5)
    for _ in range(200):
        cores, threads, count = chance.randint(1, 24), chance.choice((1, 2, 4)), chance.randint(1, 8)
        siblings = {
            c + t * cores: tuple(c + u * cores for u in range(threads)) for c in range(cores) for t in range(threads)
        }
        every = tuple(sorted(siblings))
        host = Host((HostNode(0, every, GIB),), every, None, siblings)
        parts = [plan.share(host, Binding(every), index, count) for index in range(count)]
        for part in parts:
            assert part.cpus and all(set(siblings[cpu]) <= set(part.cpus) for cpu in part.cpus)
        if count <= cores:
            assert sorted(cpu for part in parts for cpu in part.cpus or ()) == list(every)
            assert not any(part.incomplete for part in parts)
            sizes = [len(part.cpus or ()) for part in parts]
            assert max(sizes) - min(sizes) <= threads
        else:
            assert all("overlap" in part.incomplete[0] for part in parts)


def test_broken_trees_are_told(tmp_path: Path) -> None:
    assert read_nodes(Sysfs(tmp_path)) == ((), ("/sys/devices/system/node: ENOENT; the host is taken as one node",))
    sysfs = _tree(tmp_path, {0: ("0-3", 100), 1: ("banana", 100)}, {0: "10", 1: "x y"})
    (tmp_path / "sys/devices/system/node/node1/meminfo").unlink()
    nodes, notes = read_nodes(sysfs)
    assert [node.cpus for node in nodes] == [(0, 1, 2, 3), ()] and nodes[1].total_bytes is None
    assert len(notes) == 4
    assert plan.near(_host(sysfs, "0-3"), 1).cpus is None


def test_process_limits_come_from_status(tmp_path: Path) -> None:
    assert status_lists("Cpus_allowed_list:\t0-3,7\nMems_allowed_list:\t1\n") == ((0, 1, 2, 3, 7), (1,))
    assert status_lists("Name: x\nCpus_allowed_list:\tx\n") == (None, None)
    sysfs = _tree(tmp_path, {0: ("0-7", 100), 1: ("8-15", 100)})
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list:\t9-10\nMems_allowed_list:\t1\n")
    host = read_host(sysfs, process=sysfs)
    assert host.cpus_allowed == (9, 10) and host.mems_allowed == (1,)
    assert [host.usable_cpus(node) for node in host.nodes] == [(), (9, 10)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),  # cpython issue 149452
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "400000 100000", "sys/fs/cgroup/a/cpu.max": "100000 50000"}, 2.0),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_is_not_affinity(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in {"proc/self/cgroup": "0::/a/b\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    value, where = cpu_quota(Sysfs(tmp_path))
    assert value == expected and where


def test_cpu_quota_of_cgroup_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpuset:/\n1:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(Sysfs(tmp_path))[0] == 0.5


def test_ranks_of_every_launcher() -> None:
    for name in RANK_VARIABLES:
        assert local_rank({name: "3"}) == (3, name)
    assert local_rank({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}) == (1, "LOCAL_RANK")
    assert local_rank({"LOCAL_RANK": ""}) is None
    with pytest.raises(UsageError, match="no launcher"):
        require_rank({}, 2)
    with pytest.raises(Unsupported, match="there are 2"):
        require_rank({"SLURM_LOCALID": "2"}, 2)
    for text in ("-1", "one", "1.0", "9999999", "²"):
        with pytest.raises(UsageError):
            local_rank({"LOCAL_RANK": text})
