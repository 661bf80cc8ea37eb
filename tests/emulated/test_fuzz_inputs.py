"""Bad input to every command: argument lists, files and trees. Never a traceback, never exit 70, JSON always one value.

Everything runs on an emulated node in a temporary folder: no command here can reach a real device.
"""

import json
import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dieplace.backends.amd.backend import AmdBackend
from dieplace.cli import main as frame
from dieplace.emulator.node import create

ALLOWED = {0, 1, 2, 3, 4, 5, 6, 7}
# Left out: `exec`, which replaces this process, and words that name a real experiment or kernel, which take long.
COMMANDS = [
    "list", "topo", "partition", "place", "bench", "emulate", "doctor", "env", "completion", "show", "plan", "set",
    "apply", "assert", "export", "restore", "compare", "report", "fault", "reset", "audit", "lint",
]  # fmt: skip
WORDS = [
    "--json", "-o", "json", "csv", "table", "svg", "--backend", "emulated", "cpu", "replayed", "banana", "--node",
    "nowhere", "-q", "-h", "--help", "--version", "--", "-m", "latency", "bandwidth", "distance", "--from", "-f", "-y",
    "--dry-run", "--card", "gpu0", "0", "all", "99", "-1", "0000:05:00.0", "DPX/NPS2", "dpx+nps2", "SPX", "NPS9/X", "",
    " ", "\n", "\x00", "é", "日本", "\udcff", "-", "--mode", "--part", "MI355X", "--cards", "1e9", "9" * 400, "%s",
    "{}", "../../..", "/dev/null", "broken.json", "node", "--output=json", "-ojson", "--wait", "nan", "bash",
    "--allow-unvalidated",
]  # fmt: skip


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    home = tmp_path_factory.mktemp("fuzz")
    create(home / "node", cards=1)
    (home / "broken.json").write_text('{"schema": "dieplace/machine/1"')
    return home


@pytest.fixture
def confined(playground, monkeypatch):
    monkeypatch.chdir(playground)
    monkeypatch.setenv("DIEPLACE_BACKEND", "emulated")
    monkeypatch.setenv("DIEPLACE_NODE", str(playground / "node"))
    monkeypatch.setenv("XDG_STATE_HOME", str(playground / "state"))
    monkeypatch.setenv("HOME", str(playground))
    return playground


def check(words, capsys):
    code = frame.main(words)
    out, err = capsys.readouterr()
    assert code in ALLOWED, (words, code, err)
    assert "Traceback" not in err and "Exception ignored" not in err, (words, err)
    helped = any(word in ("-h", "--help", "--version") for word in words)
    if frame.asks_for_json(words) and out and not helped:
        value = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in {words}"))
        assert value["schema"].startswith("dieplace/") and isinstance(value["ok"], bool) and "source" in value
        assert value["ok"] == (code == 0), (words, code)
    return code


@hypothesis_settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(COMMANDS + WORDS) | st.text(max_size=6), max_size=7))
def test_argument_lists(confined, capsys, words):
    check(words, capsys)


@hypothesis_settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(
        [["partition", w] for w in ("show", "plan", "set", "apply", "assert", "export", "restore")]
        + [["emulate", w] for w in ("show", "fault", "reset")]
        + [["bench", w] for w in ("list", "show", "compare", "report")]
        + [["topo"], ["list"], ["env"], ["doctor"], ["place", "plan"], ["place", "audit"]]
    ),
    st.lists(st.sampled_from(WORDS), max_size=5),
)
def test_known_commands_with_odd_words(confined, capsys, path, words):
    check([*path, *words], capsys)


READERS = [["list"], ["list", "--json"], ["topo"], ["topo", "-m", "bandwidth", "--json"], ["topo", "-o", "svg"]]


def check_tree(root, capsys):
    for words in READERS:
        check(["--backend", "replayed", "--node", str(root), *words], capsys)


def breakages(node):
    """Each of these spoils a fresh tree in one way."""
    kfd = node / "sys/class/kfd/kfd/topology"
    first = kfd / "nodes/2"
    card = next((node / "sys/bus/pci/devices").glob("*:*:*.0"))

    def replace_by(path, make):
        def spoil():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            make(path)

        return spoil

    def loop(path):
        path.symlink_to(path.name)

    yield "no KFD", lambda: shutil.rmtree(node / "sys/class/kfd")
    yield "no DRM", lambda: shutil.rmtree(node / "sys/class/drm")
    yield "no PCI", lambda: shutil.rmtree(node / "sys/bus")
    yield "no nodes", lambda: shutil.rmtree(kfd / "nodes")
    yield "nodes is a file", replace_by(kfd / "nodes", lambda p: p.write_text("x"))
    yield "nodes is a loop", replace_by(kfd / "nodes", loop)
    for name in ("properties", "gpu_id", "mem_banks/0/properties", "io_links/0/properties"):
        path = first / name
        yield f"{name} missing", path.unlink
        yield f"{name} empty", lambda p=path: p.write_text("")
        yield f"{name} binary", lambda p=path: p.write_bytes(bytes(range(256)) * 20)
        yield f"{name} huge", lambda p=path: p.write_text("simd_count 1\n" * 200_000)
        yield f"{name} a loop", replace_by(path, loop)
        yield f"{name} a folder", replace_by(path, lambda p: p.mkdir())
        yield f"{name} a pipe", replace_by(path, os.mkfifo)
    text = (first / "properties").read_text()
    for key in (
        "simd_count",
        "num_xcc",
        "location_id",
        "domain",
        "drm_render_minor",
        "simd_per_cu",
        "device_id",
        "unique_id",
    ):
        for value in ("0", "18446744073709551615", "4294967295", "-1", "99999999999999999999999", "0x10", "", "é"):
            lines = [f"{key} {value}" if line.startswith(f"{key} ") else line for line in text.splitlines()]
            changed = "\n".join(lines)
            yield f"{key}={value}", lambda t=changed: (first / "properties").write_text(t)
    for name in (
        "current_compute_partition",
        "current_memory_partition",
        "unique_id",
        "numa_node",
        "mem_info_vram_total",
    ):
        for value in ("", "UNKNOWN", "9" * 50, "\x00\x01", "DPX DPX", "-1"):
            yield f"{name}={value!r}", lambda n=name, v=value: (card / n).write_text(v)


@pytest.mark.slow
def test_broken_trees(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    create(tmp_path / "whole", mode="DPX/NPS2", cards=1)
    shutil.rmtree(tmp_path / "whole/sys/devices/system/cpu")  # most of the files, and none that discovery reads
    names = [name for name, _ in breakages(tmp_path / "whole")]
    assert len(names) > 100
    for name in names:
        root = tmp_path / "broken"
        shutil.copytree(tmp_path / "whole", root, symlinks=True)
        spoil = dict(breakages(root))[name]
        spoil()
        check_tree(root, capsys)
        shutil.rmtree(root)
    print(f"{len(names)} broken trees, {len(READERS)} commands")


def test_a_tree_of_nothing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    check_tree(tmp_path / "empty", capsys)
    (tmp_path / "loop").symlink_to("loop")
    check_tree(tmp_path / "loop", capsys)
    check_tree(tmp_path / "missing", capsys)
    check_tree("/dev/null", capsys)


@pytest.fixture(scope="module")
def good_files(tmp_path_factory):
    """A saved machine and a recording of the same node, as text."""
    from dieplace.cli.render import to_json
    from dieplace.recording import record

    node = create(tmp_path_factory.mktemp("good") / "node", mode="DPX/NPS2", cards=1)
    reader = AmdBackend(root=node.directory, environ={})
    machine = reader.snapshot()
    return {"machine": json.dumps(machine.to_json()), "recording": to_json(record(reader.sysfs, {}, {}))}


@pytest.mark.parametrize("kind", ["machine", "recording"])
def test_damaged_files(tmp_path, capsys, good_files, kind):
    text = good_files[kind]
    choose = random.Random(7)
    path = tmp_path / "file.json"
    variants = [
        b"", b"\x00" * 100, b"null", b"[]", b"{}", b"3", b'"x"', b"NaN", b"[" * 100_000, text.encode("utf-16"),
        text[: len(text) // 2].encode(), (text + text).encode(), text.replace("1", "1e999", 3).encode(),
    ]  # fmt: skip
    for _ in range(40):
        raw = bytearray(text.encode())
        for _ in range(3):
            raw[choose.randrange(len(raw))] = choose.randrange(256)
        variants.append(bytes(raw))
    for raw in variants:
        path.write_bytes(raw)
        for words in (["list", "--json"], ["topo"], ["topo", "-o", "svg"]):
            check(["--backend", "replayed", "--node", str(path), *words], capsys)


def test_a_machine_file_with_one_wrong_value_each(tmp_path, capsys, good_files):
    whole = json.loads(good_files["machine"])
    path = tmp_path / "machine.json"
    tried = 0
    for section in ("cards", "devices", "domains", "links"):
        for key in whole[section][0]:
            for value in (None, 10**30, -1, "x", [], {}, [1, "x"], True, 1.5, {"a": 1}):
                data = json.loads(good_files["machine"])
                data[section][0][key] = value
                path.write_text(json.dumps(data))
                for words in (["list", "--json"], ["topo"], ["topo", "-m", "bandwidth"], ["topo", "-o", "svg"]):
                    check(["--backend", "replayed", "--node", str(path), *words], capsys)
                tried += 1
    assert tried > 400
    for key in set(whole) - {"schema", "source"}:  # a loaded machine is replayed whatever it was
        data = {k: v for k, v in whole.items() if k != key}
        path.write_text(json.dumps(data))
        assert check(["--backend", "replayed", "--node", str(path), "list"], capsys) == 2
