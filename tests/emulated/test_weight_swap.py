"""weight-swap end to end on private emulated nodes, through the real command and in full size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dieplace.errors import Unsupported, UsageError
from dieplace.experiments import registry
from dieplace.experiments.model_storage import pieces, total_bytes
from dieplace.experiments.private_node import private_node
from dieplace.kernels.models import model_shape
from dieplace.kernels.step import stages
from dieplace.run import Run

SMALL = ("--model", "qwen3-0.6b", "--precision", "mxfp4")


def dieplace(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_STATE_HOME": str(cwd / "state"), **variables}
    return subprocess.run(
        [sys.executable, "-P", "-m", "dieplace.cli", *words],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("small")
    done = dieplace(
        "--backend", "emulated", "bench", "run", "weight-swap", *SMALL, "--out", "out", "--json", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_the_command_leaves_runs_report_and_no_node(small: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = small
    assert answer["schema"] == "dieplace/bench-run/1" and answer["ok"] and answer["source"] == "emulated"
    assert sorted(p.name for p in (folder / "out").iterdir()) == [
        *("dpx-nps1.json", "dpx-nps2.json", "report.html", "spx-nps1.json")
    ]
    assert [(row["run"], row["arm"]) for row in answer["arms"]] == [
        *(("dpx-nps2", "local"), ("dpx-nps2", "swapped"), ("spx-nps1", "local"), ("dpx-nps1", "local"))
    ]
    # Never the user's node, and nothing of a private one stays in the state folder.
    assert [p for p in (folder / "state").rglob("*") if p.is_file()] == []
    assert any("bytes are computed" in note for note in answer["notes"])
    assert any("cannot tell DPX/NPS1 from SPX/NPS1" in note for note in answer["notes"])


def test_audit_shows_both_dies_swapped_at_once(small: tuple[Path, dict[str, Any]]) -> None:
    _, answer = small
    where = {
        (r["run"], r["arm"], r["role"], r["device"]): (r["die0_bytes"], r["die1_bytes"]) for r in answer["residency"]
    }
    # qwen3-0.6b: 28 layers of q/k/v 4096 x 1024, o 1024 x 2048, mlp 3 x 3072 x 1024 in MXFP4 (17/32 B), tied head bf16
    layers = 28 * (4096 * 1024 + 1024 * 2048 + 3 * 3072 * 1024) * 17 // 32
    half = (layers + 151936 * 1024 * 2) // 2
    assert where["dpx-nps2", "local", "weights", "gpu0/p0"] == (half, 0)
    assert where["dpx-nps2", "local", "weights", "gpu0/p1"] == (0, half)
    assert where["dpx-nps2", "swapped", "weights", "gpu0/p0"] == (0, half)
    assert where["dpx-nps2", "swapped", "weights", "gpu0/p1"] == (half, 0)
    for role in ("kv_cache", "sync_flag"):
        assert where["dpx-nps2", "swapped", role, "gpu0/p0"][1] == 0
    near, far = where["spx-nps1", "local", "weights", "gpu0/p0"]
    assert near + far == 2 * half and abs(near - far) < 0.01 * half


@pytest.mark.slow
def test_show_report_and_compare_read_what_run_wrote(small: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = small
    shown = dieplace("bench", "show", "out", "--json", cwd=folder)
    assert shown.returncode == 0 and json.loads(shown.stdout)["arms"] == answer["arms"]
    page = dieplace("bench", "report", "out", "--out", "again.html", cwd=folder)
    assert page.returncode == 0
    assert (folder / "again.html").read_text() == (folder / "out" / "report.html").read_text()
    pair = ("out/dpx-nps2.json", "out/spx-nps1.json")
    refused = dieplace("bench", "compare", *pair, "--json", cwd=folder)
    error = json.loads(refused.stdout)["error"]
    assert refused.returncode == 2 and error["word"] == "incomparable" and error["differing"] == ["modes"]
    allowed = dieplace("bench", "compare", *pair, "--allow", "modes", cwd=folder)
    assert allowed.returncode == 0 and "DPX/NPS2" in allowed.stdout.split("RUN against BASE")[0]
    failing = dieplace("bench", "compare", *pair, "--allow", "modes", "--fail-on", "0.5", cwd=folder)
    assert failing.returncode == 1
    several = dieplace("bench", "compare", "out", pair[1], cwd=folder)
    assert several.returncode == 2 and "out holds 3 runs (dpx-nps2, spx-nps1, dpx-nps1)" in several.stderr
    same = dieplace("bench", "compare", pair[0], pair[0], "--fail-on", "0", cwd=folder)
    assert same.returncode == 0 and "the model gives the same" in same.stdout


def test_a_reader_that_leaves_is_no_failure(small: tuple[Path, dict[str, Any]]) -> None:
    """Case j1, with an answer over 64 KiB: stderr empty, never exit 1 or 70."""
    folder, _ = small
    copies = [folder / f"copy{n}.json" for n in range(4)]
    for copy in copies:
        copy.write_bytes((folder / "out" / "dpx-nps2.json").read_bytes())
    words = [sys.executable, "-P", "-m", "dieplace.cli", "bench", "show", *map(str, copies), "--json"]
    whole = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert len(whole.stdout) > 1 << 16
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) in (0, 141)
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_run_whose_reader_left_is_saved_all_the_same(tmp_path: Path) -> None:
    words = ["--backend", "emulated", "-q", "bench", "run", "weight-swap", *SMALL, "--out", str(tmp_path / "out")]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dieplace.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(90) in (0, 141)
    assert process.stderr.read() == b""
    process.stderr.close()
    assert len(list((tmp_path / "out").glob("*.json"))) == 3
    Run.load(tmp_path / "out" / "dpx-nps2.json")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_plain_characters_where_the_stream_has_no_more(small: tuple[Path, dict[str, Any]], encoding: str) -> None:
    """Case j11."""
    folder, _ = small
    done = dieplace("bench", "show", "out", cwd=folder, PYTHONIOENCODING=encoding, LC_ALL="C")
    assert done.returncode == 0 and done.stderr == ""
    assert "Time per token, modelled" in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["bench", "run", "weight-swop"], 2),
        (["bench", "run", "weight-swap", "--model", "gpt-5"], 2),
        (["bench", "run", "weight-swap", "--precision", "int3"], 2),
        (["bench", "run", "weight-swap", "--arms", "sideways"], 2),
        (["bench", "run", "weight-swap", "--arms", "local-nc"], 2),
        (["bench", "run", "weight-swap", "--context", "0"], 2),
        (["bench", "run", "weight-swap", "--shards", "1"], 2),
        (["bench", "run", "weight-swap", "--out", "/proc/nothing"], 2),
        (["bench", "show", "absent.json"], 2),
        (["bench", "show", "."], 2),
        (["bench", "compare", "absent.json", "absent.json"], 2),
    ],
)
def test_mistakes_are_told_without_a_traceback(tmp_path: Path, words: list[str], code: int) -> None:
    done = dieplace("--backend", "emulated", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_other_backends_are_told_why_not(tmp_path: Path) -> None:
    done = dieplace("--backend", "cpu", "bench", "run", "weight-swap", "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert "cannot run on the cpu backend" in json.loads(done.stdout)["error"]["message"]
    with pytest.raises(Unsupported):
        next(registry.get("weight-swap").run("amd", registry.Options(), lambda text: None))


def test_listing_names_backends_and_reasons(tmp_path: Path) -> None:
    done = dieplace("bench", "list", "--json", cwd=tmp_path)
    rows = {row["experiment"]: row for row in json.loads(done.stdout)["experiments"]}
    assert "emulated" in rows["weight-swap"]["backends"]
    assert all(rows["weight-swap"]["cannot"].values())
    with pytest.raises(UsageError, match="weight-swap"):
        registry.get("weight-swop")


def test_the_whole_model_is_placed() -> None:
    """gpt-oss-120b, dense parts MXFP4: 36 x 128 experts of 13,219,200 B, dense layers, head, bf16 embedding."""
    shape = model_shape("gpt-oss-120b")
    found = pieces(shape, stages(shape, precision="mxfp4"), "mxfp4")
    dense = 36 * (7_833_600 + 6_266_880 + 737_280) + 307_664_640
    assert total_bytes(found, "weights") == 36 * 128 * 13_219_200 + dense + 201_088 * 2880 * 2
    assert total_bytes(found, "kv_cache") == 18 * 2048 * 1024 + 18 * 2048 * 128
    for piece in found[:50]:
        assert piece.shard(0, 2) + piece.shard(1, 2) == piece.nbytes


def test_private_nodes_reach_every_mode_by_the_switching_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for mode in ("DPX/NPS2", "SPX/NPS1"):
        with private_node(mode, cards=1) as machine:
            assert {str(card.mode) for card in machine.cards} == {mode}
            folder = machine.session.node.directory  # type: ignore[union-attr]
            assert folder.is_dir()
        assert not folder.exists()


def test_all_arms_of_a_mode_share_addresses_and_only_homes_differ() -> None:
    options = registry.Options(model="qwen3-0.6b", arms=("local", "interleave-3/8", "swapped", "swapped-kv_cache"))
    run = next(registry.get("weight-swap").run("emulated", options, lambda text: None))
    shares = {}
    for point in run.points:
        assert point.residency_before == point.residency_after
        assert point.residency_before is not None and point.residency_before["misplaced_bytes"] == 0
        dies = point.residency_before["bytes_by_role_device_die"]["weights"]["gpu0/p0"]
        shares[point.arm] = dies.get("1", 0) / (dies.get("0", 0) + dies.get("1", 0))
    assert shares["local"] == shares["swapped-kv_cache"] == 0.0
    assert shares["swapped"] == 1.0
    assert shares["interleave-3/8"] == pytest.approx(3 / 8, abs=0.06)  # buffers of 1 to 150 objects
    token = {p.arm: p.quantities["token_us"].value or 0 for p in run.points}
    assert token["local"] < token["interleave-3/8"] < token["swapped"]


# A process of its own starts the command: a fork of the test runner would count the runner's memory.
_PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="\\0")
"""


@pytest.mark.slow
def test_full_model_under_a_minute_and_two_gibibytes(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "dieplace.cli", "--backend", "emulated", "bench", "run", "weight-swap"]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    started = time.monotonic()
    outer = [sys.executable, "-c", _PEAK, *command, "--out", "out"]
    asked = subprocess.run(outer, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    seconds = time.monotonic() - started
    stdout, stderr, status, peak_kib = asked.stdout.split("\0")
    assert int(status) == 0, stderr
    assert seconds < 60
    assert int(peak_kib) < 2 * 1024 * 1024
    for said in ("local", "swapped", "spx-nps1", "dpx-nps1", "869.5", "731.4", "report: out/report.html"):
        assert said in stdout
    assert max(map(len, stdout.split("note:")[0].splitlines())) <= 80 + 2


def test_ctrl_c_keeps_what_is_done_and_leaves_no_node(tmp_path: Path) -> None:
    words = ["--backend", "emulated", "bench", "run", "weight-swap", *SMALL, "--out", str(tmp_path / "out")]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dieplace.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:  # the second block has begun, so the first is written
        said.append(line)
        if "SPX/NPS1" in line:
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "dpx-nps2" in out and "spx-nps1" not in out and "Traceback" not in rest
    Run.load(tmp_path / "out" / "dpx-nps2.json")
    assert [p for p in (tmp_path / "state").rglob("*") if p.is_file()] == []
