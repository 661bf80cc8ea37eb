"""`exec --verify` against a stub of HIP that applies the visibility variables itself, in C, to a table of devices.

The live AMD backend discovers an emulated tree mounted over /sys; the stub stands in for libamdhip64 only, and reads
which devices exist from a file, so that it can be made to disagree with discovery.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dieplace.emulator.node import Node, create

STUB = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char bdf[32]; int cus; unsigned long long bytes; } Row;
static Row rows[64]; static int count = -1;
static void keep(const char *name) {
    const char *text = getenv(name); Row old[64]; int n = 0; char copy[1024];
    if (!text) return;
    memcpy(old, rows, sizeof rows); strncpy(copy, text, 1023); copy[1023] = 0;
    for (char *word = strtok(copy, ","); word; word = strtok(0, ",")) {
        int index = atoi(word);
        if (index < 0 || index >= count) break;
        rows[n++] = old[index];
    }
    count = n;
}
static void load(void) {
    if (count >= 0) return;
    FILE *file = fopen(getenv("STUB_HIP_TABLE"), "r"); count = 0;
    while (file && count < 64) {
        Row *row = rows + count;
        if (fscanf(file, "%31s %d %llu", row->bdf, &row->cus, &row->bytes) != 3) break;
        count++;
    }
    keep("ROCR_VISIBLE_DEVICES"); keep("HIP_VISIBLE_DEVICES");
}
int hipGetDeviceCount(int *n) { load(); *n = count; return count ? 0 : 100; }
int hipDeviceGetPCIBusId(char *text, int size, int i) { snprintf(text, size, "%s", rows[i].bdf); return 0; }
int hipDeviceGetAttribute(int *value, int what, int i) { *value = what == 63 ? rows[i].cus : -1; return 0; }
int hipDeviceTotalMem(unsigned long *bytes, int i) { *bytes = rows[i].bytes; return 0; }
"""
HALF = 154_610_434_048  # half an MI355X


def _can_unshare() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "-rmn", "sh", "-c", "mount --rbind /proc /sys"], capture_output=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="a stub of HIP needs a C compiler"),
    pytest.mark.skipif(not _can_unshare(), reason="this host does not let a test make mount namespaces"),
]


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="dieplace-test-"))  # not below /dev, which is mounted over
    (folder / "hip.c").write_text(STUB)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / "libamdhip64.so"), str(folder / "hip.c")]
    subprocess.run(command, check=True, timeout=60)
    yield folder
    shutil.rmtree(folder)


def _node(place: Path, **styles: object) -> Node:
    node = create(place, **{"cards": 2, "cpu_nodes": 1, "cores_per_node": 1, "threads_per_core": 1} | styles)  # type: ignore[arg-type]
    home = node.directory / "sys/devices/system/node/node0/cpulist"
    home.unlink()
    home.write_text("0-4095\n")
    (node.directory / "sys/fs/cgroup").mkdir(parents=True)
    return node


@pytest.fixture
def node(disk_path: Path) -> Node:
    return _node(disk_path / "node", mode="DPX/NPS2")


def _table(node: Node, rows: list[str] | None = None) -> None:
    good = [f"{bdf[:-1]}{p} 128 {HALF}" for bdf in node.bdfs() for p in range(2)]
    (node.directory.parent / "table").write_text("\n".join(rows or good) + "\n")


def _run(node: Node, library: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    place = node.directory
    inside = f"""
        set -e
        for name in null zero urandom; do touch {place}/dev/$name; mount --bind /dev/$name {place}/dev/$name; done
        mount --rbind {place}/dev /dev; mount --rbind {place}/sys /sys; exec "$@"
    """
    command = [sys.executable, "-m", "dieplace.cli", "exec", *arguments]
    words = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(library), "STUB_HIP_TABLE": str(place.parent / "table")}
    full = ["unshare", "-rmn", "sh", "-c", inside, "sh", *command]
    done = subprocess.run(full, capture_output=True, text=True, timeout=120, env={**words, **environ})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "inherited",
    [{}, {"ROCR_VISIBLE_DEVICES": "3,2,1,0"}, {"HIP_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "2,1,3"},
     {"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "0"}],
)  # fmt: skip
def test_what_hip_sees_is_what_was_asked_for(node: Node, library: Path, inherited: dict[str, str]) -> None:
    _table(node)
    code, out, err = _run(node, library, "--device", "gpu1/p1,gpu0/p1", "--verify", "--json", **inherited)
    assert code == 0, err
    value = json.loads(out)
    seen = {check["what"]: check["seen"] for check in value["checks"]}
    assert value["ok"] and seen["gpu1/p1 BDF"] == "0000:15:00.1" and seen["gpu0/p1 BDF"] == "0000:05:00.1"
    assert seen["devices"] == "2" and seen["gpu0/p1 CUs"] == "128" and seen["gpu0/p1 bytes"] == str(HALF)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0000:05:00.0 128 154610434048", "BDF"),  # the sibling die: same bus, other function
        ("0000:15:00.1 128 154610434048", "BDF"),
        ("0000:05:00.1 256 154610434048", "CUs"),
        ("0000:05:00.1 128 309220868096", "bytes"),
        ("0001:05:00.1 128 154610434048", "BDF"),
    ],
)
def test_a_mismatch_stops_the_program(node: Node, library: Path, row: str, what: str) -> None:
    good = [f"{bdf[:-1]}{p} 128 {HALF}" for bdf in node.bdfs() for p in range(2)]
    _table(node, [good[0], row, *good[2:]])
    code, out, err = _run(node, library, "--device", "gpu0/p1", "--verify", "--", "echo", "started")
    assert (code, out) == (125, "") and f"gpu0/p1 {what} should be" in err and "not started" in err
    assert _run(node, library, "--device", "gpu0/p1", "--verify")[0] == 1
    assert _run(node, library, "--device", "gpu0/p0", "--verify", "--", "echo", "started")[:2] == (0, "started\n")


def test_a_device_that_hip_does_not_list(node: Node, library: Path) -> None:
    _table(node, ["0000:05:00.0 128 154610434048"])
    code, _, err = _run(node, library, "--device", "gpu1/p0", "--verify", "--", "true")
    assert code == 125 and "devices should be 1 and is 0" in err


def test_one_process_per_device_is_verified_too(node: Node, library: Path) -> None:
    _table(node)
    code, out, _ = _run(
        node, library, "--device", "gpu0", "--per-device", "--verify", "--", "sh", "-c", "echo $DIEPLACE_DEVICE"
    )
    assert code == 0 and sorted(out.splitlines()) == ["[gpu0/p0] gpu0/p0", "[gpu0/p1] gpu0/p1"]


def _walk(node: Node) -> list[str]:
    """What HIP would list with no variable set, one table row a KFD node, read here from the tree."""
    base, rows = node.directory / "sys/class/kfd/kfd/topology/nodes", []
    for number in sorted(int(path.name) for path in base.iterdir()):
        words = dict(line.split() for line in (base / str(number) / "properties").read_text().splitlines())
        if words["cpu_cores_count"] == "0":
            place, domain = int(words["location_id"]), int(words["domain"])
            bank = dict(line.split() for line in (base / f"{number}/mem_banks/0/properties").read_text().splitlines())
            cus = int(words["simd_count"]) // int(words["simd_per_cu"])
            bdf = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
            rows.append(f"{bdf} {cus} {bank['size_in_bytes']}")
    return rows


@pytest.mark.parametrize(
    ("part", "mode", "again"),
    [("MI300A", "TPX/NPS1", None), ("MI355X", "CPX/NPS2", None), ("MI355X", "SPX/NPS1", "DPX")],
)
def test_rows_30_and_40_mpibind_45_one_slot_one_device_verified_in_a_child(
    disk_path: Path, library: Path, part: str, mode: str, again: str | None
) -> None:
    """Every slot gets its own device, the same one each time, and HIP (here its stand-in) agrees about each."""
    node = _node(disk_path / "node", part=part, mode=mode)
    if again:
        node.write_compute(node.bdfs()[0], again)  # its devices go to the end of the walk
    rows = _walk(node)
    _table(node, rows)
    words = ("--device", "all", "--per-device", "--json")
    maps = [json.loads(_run(node, library, *words, "--print")[1])["processes"] for _ in range(2)]
    assert maps[0] == maps[1]
    shown = [process["environment"]["ROCR_VISIBLE_DEVICES"] for process in maps[0]]
    assert sorted(map(int, shown)) == list(range(len(rows)))
    assert [process["devices"][0]["bdf"] for process in maps[0]] == [rows[int(index)].split()[0] for index in shown]
    code, out, err = _run(node, library, *words, "--verify")
    checks = json.loads(out)["checks"]
    assert code == 0 and all(check["ok"] for check in checks), err
    seen = [check["seen"] for check in checks if check["what"].endswith("BDF")]
    assert sorted(seen) == sorted(row.split()[0] for row in rows) and len(set(seen)) == len(rows)
    # A slot that is claimed twice is the same device; a slot beyond the last is none.
    ranks = [_run(node, library, "--by-rank", "--print", "--json", LOCAL_RANK=str(rank)) for rank in (1, 1, len(rows))]
    first, second = (json.loads(out)["processes"][0]["devices"][0]["id"] for _, out, _ in ranks[:2])
    assert first == second == maps[0][1]["devices"][0]["id"] and ranks[2][0] != 0


def test_row_40_a_wrong_map_is_caught_in_the_child(disk_path: Path, library: Path) -> None:
    """One id per PCI device, as the report had it: every partition of a card looks like its first."""
    node = _node(disk_path / "node", part="MI300A", mode="TPX/NPS1")
    rows = _walk(node)
    _table(node, [rows[index - index % 3] for index in range(len(rows))])
    code, out, err = _run(node, library, "--device", "all", "--per-device", "--verify", "--", "echo", "started")
    assert code == 125 and out == "" and "gpu0/p1 BDF should be" in err
