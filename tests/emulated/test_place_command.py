"""dieplace place: fits against sums done by hand, foreign processes against what the emulated node was told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import DomainFull, PlacementError, UsageError
from dieplace.fit import Wanted, plan_fit, read_spec
from dieplace.machine import Machine
from dieplace.policy import OBJECT_BYTES, Policy

GIB = 1 << 30


@pytest.fixture(scope="module")
def node() -> Iterator[Path]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        made = create(Path(folder) / "n", cards=2, mode="DPX/NPS2")
        made.start_process("server", render=(f"{made.bdfs()[0]}/p1",), vram_bytes=40 * GIB)
        yield Path(folder) / "n"


@pytest.fixture(scope="module")
def machine(node: Path) -> Machine:
    return EmulatedBackend(node).snapshot()


def dieplace(node: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "dieplace.cli",
        "--backend",
        "emulated",
        "--node",
        str(node),
        "place",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_sums_per_die_and_device(machine: Machine) -> None:
    wanted = [
        Wanted("w", "weights", 10 * GIB, "gpu0/p0", Policy.local(), 3),
        Wanted("k", "kv_cache", 5, "gpu0/p0", Policy.peer()),
        Wanted("f", "weights", 8 * OBJECT_BYTES, "gpu0/p1", Policy.peer_share(3)),
    ]
    found = plan_fit(machine, wanted)
    asked = {one.domain: one.asked_bytes for one in found.domains}
    assert asked == {"gpu0/mem0": 30 * GIB + 3 * OBJECT_BYTES, "gpu0/mem1": OBJECT_BYTES + 5 * OBJECT_BYTES}
    assert {one.domain: one.asked_bytes for one in found.devices} == {
        "gpu0/p0": 30 * GIB + OBJECT_BYTES,
        "gpu0/p1": 8 * OBJECT_BYTES,
    }
    assert found.fits is True


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["local", "peer", "interleave-5/8", "preferred:gpu1/mem0"]), st.integers(1, 70 * GIB)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_plan_says_what_allocation_does(machine: Machine, requests: list[tuple[str, int]]) -> None:
    """The emulated HBM itself is the judge: all of it can be allocated exactly where the plan says that it fits."""
    policies = [(Policy.parse(word), nbytes) for word, nbytes in requests]
    fits = plan_fit(machine, [Wanted("x", "weights", n, "gpu1/p0", policy) for policy, n in policies]).fits
    held = []
    try:
        for policy, nbytes in policies:
            held.append(machine.allocate(nbytes, device="gpu1/p0", policy=policy, role="weights"))
        allocated = True
    except DomainFull:
        allocated = False
    finally:
        for buffer in held:
            buffer.free()
    assert fits is allocated


def test_what_spills_takes_the_rest_from_the_peer(machine: Machine) -> None:
    """100 GiB of a die are taken: of 60 that spill, whole objects stay as room is left, and the peer holds the rest."""
    total = machine.domain("gpu0/mem0").total_bytes
    assert total is not None
    wanted = [
        Wanted("w", "weights", 100 * GIB, "gpu0/p0", Policy.local()),
        Wanted("k", "kv_cache", 10 * GIB, "gpu0/p1", Policy.preferred("gpu0/mem0"), count=6),
    ]
    found = plan_fit(machine, wanted)
    room = total // OBJECT_BYTES * OBJECT_BYTES - 100 * GIB
    by_domain = {one.domain: one.by_role.get("kv_cache", 0) for one in found.domains}
    assert found.fits is True and by_domain == {"gpu0/mem0": room, "gpu0/mem1": 60 * GIB - room}
    assert plan_fit(machine, [*wanted, replace(wanted[1], count=20)]).fits is False


def test_nps1_says_that_nothing_is_local(tmp_path: Path) -> None:
    spx = EmulatedBackend(create(tmp_path / "n", cards=1, mode="SPX/NPS1")).snapshot()
    found = plan_fit(spx, [Wanted("w", "weights", 200 * GIB, "gpu0", Policy.local())])
    assert found.fits is True and any("spans dies 0 and 1" in note for note in found.notes)
    with pytest.raises(PlacementError, match="no single peer"):
        plan_fit(spx, [Wanted("w", "weights", 1, "gpu0", Policy.peer())])


def test_spec_files(tmp_path: Path, node: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text(
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = "31.5 GB"\ndevice = ["gpu0/p0", "gpu0/p1"]\n'
        '[[buffers]]\nrole = "kv_cache"\nbytes = 2097152\ncount = 36\ndevice = "gpu0/p0"\npolicy = "peer"\n'
    )
    wanted = read_spec(good)
    assert [(w.role, w.nbytes, w.device, w.count) for w in wanted] == [
        ("weights", 31_500_000_000, "gpu0/p0", 1),
        ("weights", 31_500_000_000, "gpu0/p1", 1),
        ("kv_cache", 2097152, "gpu0/p0", 36),
    ]
    done = dieplace(node, "plan", str(good), "--json")
    answer = json.loads(done.stdout)
    places = {row["place"]: row for row in answer["places"]}
    assert done.returncode == 0 and answer["fits"] is True and answer["ok"] is True
    assert places["gpu0/mem1"]["kv_cache_bytes"] == 36 * 2097152


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 2",
        "version = 1\nbuffers = []",
        "version = 1\nbuffers = [1]",
        'version = 1\n[[buffers]]\nrole = "weight"\nbytes = 1\ndevice = "gpu0/p0"',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 0\ndevice = "gpu0/p0"',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = "3 parsec"\ndevice = "gpu0/p0"',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = true\ndevice = "gpu0/p0"',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 1',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 1\ndevice = []',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 1\ndevice = "gpu0/p0"\ncount = 0',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 1\ndevice = "gpu0/p0"\ncolour = "red"',
        'version = 1\n[[buffers]]\nrole = "weights"\nbytes = 1\ndevice = "gpu0/p0"\npolicy = "near"',
        "version = [" * 2000,
    ],
)
def test_wrong_spec_files_are_usage_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_spec(path)


def test_exit_codes_of_plan(tmp_path: Path, node: Path) -> None:
    fits = dieplace(node, "plan", "--model", "gpt-oss-120b")
    assert fits.returncode == 0 and "it fits" in fits.stdout
    full = dieplace(node, "plan", "--model", "gpt-oss-120b", "--context", "9000000")
    assert full.returncode == 1 and "it does not fit" in full.stdout and full.stderr == ""
    for words in (["plan"], ["plan", "absent.toml"], ["plan", "--model", "gpt-9"], ["plan", "x", "--model", "y"]):
        done = dieplace(node, *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert dieplace(node, "plan", "--model", "gpt-oss-120b", "--card", "gpu7").returncode == 3


def test_audit_of_other_processes(node: Path, machine: Machine) -> None:
    done = dieplace(node, "audit", "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    held = {row["device"]: row for row in answer["items"] if row["bytes"]}
    assert done.returncode == 0 and answer["evidence"] == "accounted"
    assert list(held) == ["gpu0/p1"]
    assert (held["gpu0/p1"]["bytes"], held["gpu0/p1"]["die"], held["gpu0/p1"]["name"]) == (40 * GIB, 1, "server")
    pid = str(held["gpu0/p1"]["pid"])
    assert json.loads(dieplace(node, "audit", pid, "--json").stdout)["items"] == answer["items"]
    absent = dieplace(node, "audit", "4242424")
    assert absent.returncode == 3 and "no process 4242424" in absent.stderr


def test_a_process_that_ends_meanwhile_leaves_the_others_answer(tmp_path: Path) -> None:
    """The driver still lists it, but nothing of it can be read any more: as when it ends between two reads."""
    from dieplace.process_audit import audit_processes
    from dieplace.sysfs import Sysfs

    root = create(tmp_path / "n", cards=1, mode="DPX/NPS2")
    machine = EmulatedBackend(root).snapshot()
    gpu_id = machine.device("gpu0/p1").gpu_id
    listed = tmp_path / "root" / "sys/class/kfd/kfd/proc"
    for pid, files in (("10", {f"vram_{gpu_id}": "4096", "vram_7": "many"}), ("12", {f"vram_{gpu_id}": "8192"})):
        (listed / pid).mkdir(parents=True)
        for name, text in files.items():
            (listed / pid / name).write_text(text)
    (listed / "11").write_text("no folder any more")
    found, missed = audit_processes(machine, Sysfs(tmp_path / "root"))
    assert missed == (11,)
    assert [(one.pid, [part.nbytes for part in one.devices]) for one in found] == [(10, [4096]), (12, [8192])]
    assert found[0].whys["vram_7"].endswith("vram_7 is 'many'")  # not silently left out of the sum


def test_host_pages_are_summed_by_node_and_page_size(tmp_path: Path) -> None:
    from dieplace.process_audit import audit_process
    from dieplace.sysfs import Sysfs

    backend = EmulatedBackend(create(tmp_path / "n", cards=1, mode="SPX/NPS1"))
    folder = tmp_path / "root" / "proc" / "77"
    folder.mkdir(parents=True)
    (folder / "comm").write_text("worker\n")
    (folder / "numa_maps").write_text(
        "7f0000000000 default anon=5 dirty=5 N0=3 N1=2 kernelpagesize_kB=4\n"
        "7f1000000000 bind:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n"
        "7f2000000000 default file=/lib/libc.so mapped=9 N0=9 kernelpagesize_kB=4\n"
    )
    found = audit_process(backend.snapshot(), Sysfs(tmp_path / "root"), 77)
    assert found.host_bytes == {"host/node0": 12 * 4096, "host/node1": 2 * 4096 + 2 * 2 * (1 << 20)}
    assert found.devices == () and "ENOENT" in found.whys["devices"] and found.name == "worker"
