"""`exec` on emulated nodes: the right index for every device, under every mix of inherited visibility variables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.backends.amd.visibility import Entry, visible
from dieplace.binding import visibility
from dieplace.binding.prepare import Prepared, Request, prepare
from dieplace.binding.worker import bind_this_process
from dieplace.cli.main import main
from dieplace.emulator.node import Node, create
from dieplace.errors import DieplaceError, NoSuchDevice, Unsupported, UsageError

COUNT = {"SPX/NPS1": 8, "DPX/NPS2": 16, "CPX/NPS2": 64}


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*visibility.AMD_VARIABLES, "LOCAL_RANK", "SLURM_LOCALID", "DIEPLACE_BACKEND", "DIEPLACE_NODE"):
        monkeypatch.delenv(name, raising=False)


def _walk(node: Node) -> list[Entry]:
    """Devices in KFD order, read here from the tree: what ROCr's own walk finds."""
    sysfs, entries = node.sysfs(), []
    base = "/sys/class/kfd/kfd/topology/nodes"
    buses = sorted({bdf[5:7] for bdf in node.bdfs()})
    for number in sorted(map(int, sysfs.names(base))):
        lines = dict(line.split() for line in sysfs.read(f"{base}/{number}/properties").splitlines())
        if lines["cpu_cores_count"] == "0":
            place = int(lines["location_id"])
            entries.append(Entry(f"gpu{buses.index(f'{place >> 8:02x}')}/p{place & 7}", int(lines["unique_id"])))
    return entries


def _reordered(count: int) -> list[dict[str, str]]:
    """No variable, each one alone, and all three; every device stays visible, in another order."""
    numbers = list(range(count))
    back = ",".join(map(str, reversed(numbers)))
    turned = ",".join(map(str, numbers[3:] + numbers[:3]))
    one, two, three = visibility.AMD_VARIABLES
    return [
        {},
        {one: back},
        {two: turned},
        {three: back},
        {one: back, two: turned, three: "0"},
        {one: turned, three: back},
    ]


@pytest.mark.parametrize("mode", ["SPX/NPS1", "DPX/NPS2", pytest.param("CPX/NPS2", marks=pytest.mark.slow)])
def test_every_device_under_every_mix_of_variables(tmp_path: Path, mode: str) -> None:
    node = create(tmp_path / "node", mode=mode, cores_per_node=1)
    entries = _walk(node)
    assert len(entries) == COUNT[mode]
    if mode == "CPX/NPS2":
        node.write_compute(node.bdfs()[2], "DPX")  # its devices move to the end of the walk
        node.write_compute(node.bdfs()[2], "CPX")
        entries = _walk(node)
        assert entries[-1].id == "gpu2/p7"
    for inherited in _reordered(len(entries)):
        view = visibility.look("emulated", str(node.directory), inherited)
        before = visible(entries, inherited).order
        assert sorted(before) == sorted(e.id for e in entries)
        for entry in entries:
            devices = visibility.chosen_devices(view, [entry.id])
            added = visibility.environment(view, devices)
            after = visible(entries, {**inherited, **added})
            assert after.order == (entry.id,), (mode, inherited, added)
            assert added["DIEPLACE_DEVICE"] == entry.id
            assert ("CUDA_VISIBLE_DEVICES" in added) == ("CUDA_VISIBLE_DEVICES" in inherited)
            by_hip = visibility.environment(view, devices, by="hip")
            assert "ROCR_VISIBLE_DEVICES" not in by_hip
            assert visible(entries, {**inherited, **by_hip}).order == (entry.id,)


@pytest.mark.parametrize("inherited", _reordered(16))
def test_print_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, inherited: dict[str, str]
) -> None:
    node = create(tmp_path / "node", mode="DPX/NPS2", cores_per_node=2)
    for name, text in inherited.items():
        monkeypatch.setenv(name, text)
    arguments = [
        "exec",
        "--backend",
        "emulated",
        "--node",
        str(node.directory),
        "--device",
        "gpu7/p1,gpu0/p1",
        "--print",
    ]
    assert main([*arguments, "--json", "--", "vllm", "serve"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "dieplace/exec-print/1" and value["command"] == ["vllm", "serve"]
    process = value["processes"][0]
    assert [device["id"] for device in process["devices"]] == ["gpu7/p1", "gpu0/p1"]
    environment = {**inherited, **process["environment"]}
    assert visible(_walk(node), environment).order == ("gpu7/p1", "gpu0/p1")
    assert environment["ROCR_VISIBLE_DEVICES"] == "15,1" and environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert process["cpus"] == "0-7" and process["memory_policy"] == "interleave" and process["memory_nodes"] == [0, 1]


@pytest.mark.parametrize(
    ("inherited", "named"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,2"}, ["ROCR_VISIBLE_DEVICES='0,2'"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, ["ROCR_VISIBLE_DEVICES=''"]),
        ({"HIP_VISIBLE_DEVICES": "0"}, ["HIP_VISIBLE_DEVICES='0'"]),
        ({"CUDA_VISIBLE_DEVICES": "0,0,3"}, ["CUDA_VISIBLE_DEVICES='0,0,3'"]),
        (
            {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"},
            ["ROCR_VISIBLE_DEVICES='1,0'", "HIP_VISIBLE_DEVICES='1'"],
        ),
        ({"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "1"}, ["HIP_VISIBLE_DEVICES='-1'"]),
    ],
)  # fmt: skip
def test_contradictions_name_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    inherited: dict[str, str], named: list[str],
) -> None:  # fmt: skip
    node = create(tmp_path / "node", cards=2, mode="DPX/NPS2", cores_per_node=2)
    for name, text in inherited.items():
        monkeypatch.setenv(name, text)
    arguments = ["exec", "--backend", "emulated", "--node", str(node.directory), "--device", "gpu0/p1"]
    assert main([*arguments, "--", "true"]) == 3
    said = capsys.readouterr().err
    assert "gpu0/p1" in said and "index 1 of the whole node" in said and all(text in said for text in named)
    assert main([*arguments, "--json", "--", "true"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["inherited"] == inherited and error["asked"] == ["gpu0/p1"] and "gpu0/p1" not in error["visible"]


def _prepare(node: Node, **words: object) -> tuple[Prepared, ...]:
    environ = words.pop("environ", {})
    request = Request(backend="emulated", node=str(node.directory), **words)  # type: ignore[arg-type]
    return prepare(request, environ)  # type: ignore[arg-type]


def test_names_of_devices(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, mode="QPX/NPS2", cores_per_node=2)
    assert [d.id for d in _prepare(node, devices=("gpu1",))[0].devices] == [f"gpu1/p{p}" for p in range(4)]
    assert len(_prepare(node, devices=("all",))[0].devices) == 8
    refused: dict[tuple[str, ...], type[DieplaceError]] = {
        ("gpu9/p0",): NoSuchDevice,
        ("gpu0/p9",): NoSuchDevice,
        ("gpu0/p1", "gpu0/p1"): Unsupported,
        ("gpu0", "gpu0/p1"): Unsupported,
        ("",): NoSuchDevice,
    }
    for names, kind in refused.items():
        with pytest.raises(kind):
            _prepare(node, devices=names)


def test_one_process_per_device_shares_out_the_cpus(tmp_path: Path) -> None:
    node = create(tmp_path / "node", mode="DPX/NPS2", cores_per_node=64)
    items = _prepare(node, devices=("all",), per_device=True)
    assert len(items) == 16
    every = [cpu for item in items for cpu in item.planned.cpus or ()]
    assert len(every) == len(set(every)) == 256  # disjoint, and nothing is wasted
    for index, item in enumerate(items):
        assert item.added["LOCAL_RANK"] == item.added["RANK"] == str(index)
        assert item.added["LOCAL_WORLD_SIZE"] == item.added["WORLD_SIZE"] == "16"
        assert item.added["ROCR_VISIBLE_DEVICES"] == str(index) and item.added["HIP_VISIBLE_DEVICES"] == "0"
        cpus = set(item.planned.cpus or ())
        assert {cpu ^ 128 for cpu in cpus} == cpus  # hyper-threads of this node are 128 apart
        assert item.planned.nodes == (index // 8,)


def test_rank_picks_the_same_die_as_per_device(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, mode="DPX/NPS2", cores_per_node=8)
    started = _prepare(node, devices=("all",), per_device=True)
    for rank, item in enumerate(started):
        for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
            mine = _prepare(node, devices=("all",), by_rank=True, environ={name: str(rank)})[0]
            assert (mine.devices, mine.planned) == (item.devices, item.planned)
    kept = _prepare(node, devices=("all",), by_rank=True, keep_visible=True, environ={"LOCAL_RANK": "3"})[0]
    assert kept.added["DIEPLACE_DEVICE"] == "gpu1/p1" and kept.added["HIP_VISIBLE_DEVICES"] == "0,1,2,3"
    with pytest.raises(Unsupported, match="there are 4"):
        _prepare(node, devices=("all",), by_rank=True, environ={"LOCAL_RANK": "4"})
    with pytest.raises(UsageError, match="no launcher"):
        _prepare(node, devices=("all",), by_rank=True)


def test_a_card_that_cannot_be_opened(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, cores_per_node=2)
    (node.directory / "dev/dri/renderD128").unlink()
    with pytest.raises(Unsupported, match="gpu0/p0 was asked for, and no program can use it"):
        _prepare(node, devices=("gpu0/p0",))
    # the runtime's walk skips it, so the second card is the first that a program can name
    assert _prepare(node, devices=("gpu1/p0",))[0].added["ROCR_VISIBLE_DEVICES"] == "0"


def test_a_memory_only_node_goes_to_the_nearest_cpus(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1, cpu_nodes=3, cores_per_node=8, threads_per_core=1)
    home = node.directory / "sys/devices/system/node"
    for name, text in {"node2/cpulist": "", "node2/distance": "80 20 10"}.items():
        (home / name).unlink()
        (home / name).write_text(f"{text}\n")
    path = node.directory / "sys/bus/pci/devices" / node.bdfs()[0] / "numa_node"
    real = path.resolve()
    real.unlink()
    real.write_text("2\n")
    planned = _prepare(node, devices=("gpu0",))[0].planned
    assert planned.cpus == tuple(range(8, 16)) and planned.nodes == (1,)


def test_the_children_see_the_same_emulated_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = create(tmp_path / "node", cards=1, mode="DPX/NPS2", cores_per_node=2)
    arguments = ["exec", "--backend", "emulated", "--node", str(node.directory), "-q", "--per-device", "--"]
    code = main([*arguments, "sh", "-c", 'echo $DIEPLACE_DEVICE $DIEPLACE_BACKEND $(basename "$DIEPLACE_NODE")'])
    seen = capfd.readouterr()
    assert code == 0 and seen.err == ""
    assert sorted(seen.out.splitlines()) == ["[gpu0/p0] gpu0/p0 emulated node", "[gpu0/p1] gpu0/p1 emulated node"]


def test_verify_does_not_claim_what_it_cannot_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = create(tmp_path / "node", cards=1, cores_per_node=2)
    arguments = [
        "exec",
        "--backend",
        "emulated",
        "--node",
        str(node.directory),
        "--device",
        "gpu0",
        "--verify",
        "--json",
    ]
    assert main(arguments) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["ok"] for check in checks] == [None] and "no GPU runtime" in checks[0]["seen"]


WORKERS = """
import multiprocessing, os, sys
from dieplace.binding.worker import bind_this_process
from dieplace.errors import DieplaceError

def work(queue, node, rank):
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        bound = bind_this_process(backend="emulated", node=node)
        queue.put((rank, bound.environment["DIEPLACE_DEVICE"], os.environ["ROCR_VISIBLE_DEVICES"], len(bound.failures)))
    except DieplaceError as error:
        queue.put((rank, error.message))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    workers = [context.Process(target=work, args=(queue, sys.argv[2], rank)) for rank in range(3)]
    for worker in workers: worker.start()
    for item in sorted(queue.get(timeout=60) for _ in workers): print(*item)
    for worker in workers: worker.join(timeout=60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_bind_themselves(tmp_path: Path, method: str) -> None:
    node = create(tmp_path / "node", cards=1, mode="DPX/NPS2", cores_per_node=2)
    (tmp_path / "workers.py").write_text(WORKERS)
    command = [sys.executable, str(tmp_path / "workers.py"), method, str(node.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["0 gpu0/p0 0 1", "1 gpu0/p1 1 1"], done.stderr  # 1: the emulated CPUs are not bound, and said
    assert "LOCAL_RANK=2" in lines[2] and "there are 2" in lines[2]


def test_a_named_device_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = create(tmp_path / "node", cards=1, mode="DPX/NPS2", cores_per_node=2)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "DIEPLACE_DEVICE"):
        monkeypatch.setenv(name, "x")  # so that what the call sets is undone afterwards
        monkeypatch.delenv(name)
    bind_this_process("gpu0/p1", backend="emulated", node=str(node.directory))
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "1" and os.environ["HIP_VISIBLE_DEVICES"] == "0"
    with pytest.raises(Unsupported, match="ROCR_VISIBLE_DEVICES='1'"):
        bind_this_process("gpu0/p0", backend="emulated", node=str(node.directory))
    with pytest.raises(UsageError, match="names 2 devices"):
        monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
        monkeypatch.delenv("HIP_VISIBLE_DEVICES")
        bind_this_process("gpu0", backend="emulated", node=str(node.directory))
