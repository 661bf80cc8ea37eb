"""The node on disk: several processes see one state, and a kill at any moment leaves a usable node."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from partition_support import hash_tree

from dieplace.emulator.node import check_tree, create, default_directory, open_node, open_or_create, store
from dieplace.errors import UsageError

TOGGLE = """
import sys
from dieplace.emulator.node import open_node
node = open_node(sys.argv[1])
print("ready", flush=True)
for step in range(int(sys.argv[2])):
    node.write_compute(node.bdfs()[int(sys.argv[3])], ("DPX", "SPX")[step % 2])
"""


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


def _toggle(directory: Path, steps: int, card: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", TOGGLE, str(directory), str(steps), str(card)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_state_persists_between_handles(tmp_path: Path) -> None:
    first = create(tmp_path / "node", cards=2, mode="DPX/NPS2", unique_id="distinct", cores_per_node=2)
    first.inject("load", "EIO", times=None)
    first.start_process("vllm")
    second = open_node(tmp_path / "node")
    assert second.state == first.state
    first.write_compute(first.bdfs()[0], "DPX")
    second.write_memory(second.bdfs()[0], "NPS1")
    assert first.boot_id == second.boot_id and first.state.hives[0].wish == "NPS1"


def test_two_processes_do_not_lose_each_others_steps(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, cores_per_node=2)
    before = node.generation_id
    steps = 20
    workers = [_toggle(node.directory, steps, card) for card in (0, 1)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    assert node.generation_id == before + 2 * 3 * steps  # each step removes and adds three logical devices in all
    assert check_tree(node.directory) == []


def test_kill_9_during_a_write_leaves_a_readable_node(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, cores_per_node=2)
    chance = random.Random(7)
    for _ in range(15):
        worker = _toggle(node.directory, 100_000, 0)
        time.sleep(chance.uniform(0, 0.03))
        worker.send_signal(signal.SIGKILL)
        worker.wait(timeout=10)
        json.loads((node.directory / ".dieplace/state.json").read_text())
        seen = open_node(node.directory)
        count = {"SPX": 1, "DPX": 2}[seen.sysfs().read("/sys/class/drm/card0/device/current_compute_partition")]
        assert len(seen.sysfs().names("/sys/class/kfd/kfd/topology/nodes")) == 2 + count + 1
        assert check_tree(node.directory) == []


def test_a_tree_left_half_done_is_finished_by_the_next_reader(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=1, cores_per_node=2)
    (node.directory / "sys/class/kfd/kfd/topology/nodes/2/gpu_id").unlink()
    (node.directory / ".dieplace/tree").write_text("0")  # as a kill between the two writes leaves it
    assert [v.row for v in check_tree(node.directory)] == ["gpu-id"]
    open_node(node.directory)
    assert check_tree(node.directory) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "dieplace/emulated-node/1"}', "\x00", "null"])
def test_a_broken_state_is_a_plain_error(tmp_path: Path, text: str) -> None:
    node = create(tmp_path / "node", cards=1, cores_per_node=2)
    (node.directory / ".dieplace/state.json").write_text(text)
    with pytest.raises(UsageError):
        open_node(node.directory)
    create(tmp_path / "node", cards=1, cores_per_node=2, replace_old=True)
    assert check_tree(node.directory) == []


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("keep")
    for act in (lambda: create(tmp_path / "mine"), lambda: open_or_create(tmp_path / "mine")):
        with pytest.raises(UsageError, match="not empty"):
            act()
    with pytest.raises(UsageError, match="no emulated node"):
        open_node(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["file"]
    create(tmp_path / "node", cards=1, cores_per_node=2)
    with pytest.raises(UsageError, match="already"):
        create(tmp_path / "node")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (lambda: create(tmp_path / "file"), lambda: create(tmp_path / "file/below")):
        with pytest.raises(UsageError):
            act()


def test_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "dieplace/node"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the XDG rules: ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".local/state/dieplace/node"


def test_first_use_by_several_commands_at_once(tmp_path: Path) -> None:
    code = "import sys; from dieplace.emulator.node import *; print(open_or_create(sys.argv[1]).boot_id)"
    arguments = [sys.executable, "-c", code, str(tmp_path / "node")]
    runs = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({run.communicate(timeout=60)[0] for run in runs}) == 1
    assert check_tree(tmp_path / "node") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else to show that no root is needed")
def test_no_root_is_needed() -> None:
    code = """
import os, sys
from dieplace.emulator.node import *
create(sys.argv[1] + "-first", cards=1, cores_per_node=2).reload()  # all imports: others may not read Python's files
os.setgid(12345); os.setuid(12345)
node = create(sys.argv[1], cards=1, cores_per_node=2)
pid = node.start_process(uid=7)
node.end_process(pid); node.write_memory(node.bdfs()[0], "NPS2"); node.reload()
print(node.sysfs().read("/sys/class/drm/card0/device/current_compute_partition"), len(check_tree(node.directory)))
"""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        os.chmod(place, 0o777)
        done = subprocess.run([sys.executable, "-c", code, f"{place}/node"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("DPX 0\n", "")


def test_a_tree_changed_step_by_step_is_the_one_written_at_once(memory_path: Path) -> None:
    """Each event touches only what differs; what that adds up to must be the tree of the last state, name by name."""
    node = create(memory_path / "node", cards=2, ast=True)
    first, second = node.bdfs()
    events: list[Callable[[], object]] = [
        lambda: node.write_compute(first, "CPX"),
        lambda: node.start_process("holder", pid=77, render=("gpu0/p1",), vram_bytes=1 << 30),
        lambda: node.close_descriptors(77),
        lambda: node.forget_mode(second),
        lambda: node.end_process(77),
        lambda: node.write_memory(first, "NPS2"),
        node.unload,
        node.load,
        lambda: node.write_compute(second, "QPX"),
        lambda: node.reboot(keep_memory_mode=False),
    ]
    for number, event in enumerate(events):
        event()
        fresh = memory_path / f"fresh{number}"
        (fresh / store.OWN).mkdir(parents=True)
        shutil.copy(node.directory / store.OWN / "state.json", fresh / store.OWN / "state.json")
        open_node(fresh)
        assert hash_tree(node.directory, skip=(store.OWN,)) == hash_tree(fresh, skip=(store.OWN,)), number
        shutil.rmtree(fresh)
