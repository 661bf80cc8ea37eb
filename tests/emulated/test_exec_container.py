"""`exec` in network-free containers made with unshare, over fake `/sys` trees, read back from the program itself.

The container's `/sys` is an emulated node's tree whose CPU numbers are this machine's own, so that the *live* AMD
backend discovers it and the CPU binding is real. Memory nodes beyond the kernel's own cannot be made up.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.emulator.node import create

CPUS = sorted(os.sched_getaffinity(0))
NODES = "sys/devices/system/node"


def _can_unshare() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "-rmn", "sh", "-c", "mount --rbind /proc /sys"], capture_output=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


pytestmark = [
    pytest.mark.skipif(not _can_unshare(), reason="this host does not let a test make mount namespaces"),
    pytest.mark.skipif(len(CPUS) < 2, reason="two NUMA nodes with CPUs need two CPUs"),
]

# Refuses set_mempolicy(2) as container runtimes do, then becomes the command: a seccomp filter of five instructions.
REFUSE = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 238), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
program = Program(len(steps), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0, ctypes.get_errno()
os.execvp(sys.argv[1], sys.argv[1:])
"""
SEEN = (
    "grep -E 'Cpus_allowed_list|Mems_allowed_list' /proc/self/status;"
    " grep -m1 -o -E 'bind:[0-9]+|prefer[a-z ()]*:[0-9]+|default' /proc/self/numa_maps"
)


def _tree(place: Path, cpus: list[str], distances: list[str], kib: list[int]) -> Path:
    """An emulated MI355X of two cards whose host has these NUMA nodes; the cards are on the first and the last."""
    node = create(place, cards=2, mode="DPX/NPS2", cpu_nodes=len(cpus), cores_per_node=1, threads_per_core=1)
    for number, (text, row, size) in enumerate(zip(cpus, distances, kib, strict=True)):
        for name, content in (("cpulist", text), ("distance", row), ("meminfo", f"Node {number} MemTotal: {size} kB")):
            file = node.directory / NODES / f"node{number}" / name
            file.unlink()
            file.write_text(f"{content}\n")
    (node.directory / "sys/fs/cgroup").mkdir(parents=True)
    return node.directory


def _run(
    tree: Path, arguments: list[str], *, refuse: bool = False, program: str = SEEN, **environ: str
) -> tuple[int, str, str]:
    """Inside: /sys is the tree's, /dev the tree's with the usual files added; no network; no numactl in PATH."""
    keep = tree.parent / "dev"
    keep.mkdir(exist_ok=True)
    inside = f"""
        set -e
        for name in null zero urandom; do touch {tree}/dev/$name; mount --bind /dev/$name {tree}/dev/$name; done
        mount --rbind {tree}/dev /dev
        mount --rbind {tree}/sys /sys
        exec "$@"
    """
    command = [sys.executable, "-m", "dieplace.cli", "exec", *arguments, "--", "sh", "-c", program]
    if refuse:
        command = [sys.executable, "-c", REFUSE, *command]
    words = {"PATH": os.environ["PATH"], "HOME": str(tree.parent), **environ}
    full = ["unshare", "-rmn", "sh", "-c", inside, "sh", *command]
    done = subprocess.run(full, capture_output=True, text=True, timeout=120, env=words)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def tree(disk_path: Path) -> Path:
    return _tree(disk_path / "node", [str(CPUS[0]), str(CPUS[1])], ["10 32", "32 10"], [1000, 1000])


def test_the_child_sits_near_its_die(tree: Path) -> None:
    """vllm 55416: no helper program is needed, and the binding is read back from the child."""
    code, out, err = _run(tree, ["--device", "gpu0/p1"])
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [f"Cpus_allowed_list:\t{CPUS[0]}", "Mems_allowed_list:\t0"]
    assert out.splitlines()[2].startswith("prefer")


def test_a_node_that_the_kernel_does_not_have_is_told(tree: Path) -> None:
    code, out, err = _run(tree, ["--device", "gpu1/p0"], program=SEEN + "; echo $ROCR_VISIBLE_DEVICES")
    assert code == 0 and f"Cpus_allowed_list:\t{CPUS[1]}" in out and out.endswith("\n2\n")
    assert "node 1 may not be allocated from (cpuset): host memory prefers node 0" in err and err.count("\n") == 1


def test_explicit_lists(tree: Path) -> None:
    code, out, err = _run(tree, ["--cpunodebind", "1", "--membind", "0"])
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"Cpus_allowed_list:\t{CPUS[1]}", "Mems_allowed_list:\t0", "bind:0"]
    code, out, err = _run(tree, ["--membind", "1"])
    assert code == 3 and out == "" and "may use 0 only" in err


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names the x86-64 number of set_mempolicy")
def test_a_container_that_forbids_set_mempolicy(tree: Path) -> None:
    """sglang 27368, vllm PR 45438: the program starts, bound to its CPUs; one warning names call and errno."""
    code, out, err = _run(tree, ["--device", "gpu0/p1"], refuse=True)
    assert code == 0 and f"Cpus_allowed_list:\t{CPUS[0]}" in out and "default" in out
    assert err.count("\n") == 1 and "set_mempolicy: EPERM" in err
    code, out, err = _run(tree, ["--device", "gpu0/p1", "--strict"], refuse=True)
    assert (code, out) == (4, "") and "set_mempolicy: EPERM" in err
    code, out, _ = _run(tree, ["--device", "gpu0/p1", "--per-device", "--strict"], refuse=True)
    assert code == 4 and "allowed_list" not in out


def test_four_nodes_with_memory_only_cpu_less_and_far(disk_path: Path) -> None:
    """The cards are on nodes 0 and 2; node 2 has no CPUs, 1 is nearest to it, 3 is far."""
    tree = _tree(
        disk_path / "node", [str(CPUS[0]), str(CPUS[1]), "", ""],
        ["10 32 80 99", "32 10 20 99", "80 20 10 99", "99 99 99 10"], [1000, 0, 1000, 1000],
    )  # fmt: skip
    code, out, err = _run(tree, ["--device", "gpu1/p1"])
    assert code == 0 and f"Cpus_allowed_list:\t{CPUS[1]}" in out
    assert "gpu1/p1 is on node 2, which has no CPUs: node 1 is nearest (distance 20)" in err
    assert "node 1 has no memory: host memory prefers node 0" in err


def test_a_caller_that_is_itself_limited(tree: Path) -> None:
    """taskset before exec: a node whose CPUs the caller took away is not used, strict or not."""
    for strict in ([], ["--strict"]):
        held = ["taskset", "-c", str(CPUS[1])]
        if shutil.which("taskset") is None:
            pytest.skip("no taskset here to limit the caller with")
        command = [*held, sys.executable, "-m", "dieplace.cli", "exec", "--cpunodebind", "0", *strict, "--", "true"]
        inside = f'mount --rbind {tree}/sys /sys; exec "$@"'
        full = ["unshare", "-rmn", "sh", "-c", inside, "sh", *command]
        done = subprocess.run(full, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and f"it may use {CPUS[1]}" in done.stderr


def test_one_process_per_device_on_real_cpus(tree: Path) -> None:
    program = "echo $DIEPLACE_DEVICE $(grep Cpus_allowed_list /proc/self/status)"
    code, out, _ = _run(tree, ["--device", "gpu0/p0,gpu1/p0", "--per-device"], program=program)
    assert code == 0
    assert sorted(out.splitlines()) == [
        f"[gpu0/p0] gpu0/p0 Cpus_allowed_list: {CPUS[0]}",
        f"[gpu1/p0] gpu1/p0 Cpus_allowed_list: {CPUS[1]}",
    ]


def test_two_ranks_on_one_node_get_disjoint_halves(disk_path: Path) -> None:
    both = f"{CPUS[0]}-{CPUS[1]}" if CPUS[1] == CPUS[0] + 1 else f"{CPUS[0]},{CPUS[1]}"
    tree = _tree(disk_path / "node", [both], ["10"], [1000])
    seen = []
    for rank in ("0", "1"):
        program = "grep Cpus_allowed_list /proc/self/status"
        code, out, _ = _run(tree, ["--device", "gpu0", "--by-rank"], program=program, LOCAL_RANK=rank)
        assert code == 0
        seen.append(out.strip())
    assert seen == [f"Cpus_allowed_list:\t{CPUS[0]}", f"Cpus_allowed_list:\t{CPUS[1]}"]


def test_verify_without_the_runtime_fails_and_says_why(tree: Path) -> None:
    code, out, err = _run(tree, ["--device", "gpu0/p1", "--verify"])
    assert code == 125 and out == "" and "libamdhip64" in err and "not started" in err
