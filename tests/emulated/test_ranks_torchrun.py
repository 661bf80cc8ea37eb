"""`bench run` under the real torchrun: case j5, and a rank whose process is killed from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
STUB = Path(__file__).resolve().parents[1] / "support" / "stub_experiment.py"


def _torchrun(folder: Path, faults: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(STUB)]
    words += [
        json.dumps(faults),
        "--json",
        "--backend",
        "emulated",
        "bench",
        "run",
        "stub",
        "--out",
        str(folder / "runs"),
    ]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "DIEPLACE"))}
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=environ)
    return done, time.monotonic() - began


def _first_failure(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """(rank, exit code) of what torchrun reports as the root cause."""
    cause = done.stderr.split("Root Cause")[1]
    rank, code = re.search(r"rank +: (\d+)", cause), re.search(r"exitcode +: (-?\d+)", cause)
    assert rank and code
    return int(rank[1]), int(code[1])


def _ranks(run: dict[str, Any]) -> list[int]:
    return [point["factors"]["rank"] for point in run["points"]]


def test_case_j5_a_rank_that_exits_with_86(tmp_path: Path) -> None:
    done, took_s = _torchrun(tmp_path, {"2": "exit 86"})
    answer = json.loads(done.stdout)  # one value, of one rank
    assert took_s < 60 and done.returncode != 0
    assert answer["ok"] is False and answer["lost"] == [2] and answer["ranks"][2]["exit_code"] == 86
    run = json.loads(Path(answer["runs"][0]).read_text())
    assert _ranks(run) == [0, 1, 3]
    assert [(r["rank"], r["exit_code"]) for r in run["facts"]["ranks"] if r["state"] == "lost"] == [(2, 86)]
    assert _first_failure(done) == (2, 86)  # the others' exit does not hide whose fault it was


def test_rank_0_killed_while_all_measure(tmp_path: Path) -> None:
    """torchrun then sends SIGTERM to the others at once: they still finish, and rank 1 merges."""
    done, took_s = _torchrun(tmp_path, {"0": "kill parent", "everybody": "sleep 1"})
    answer = json.loads(done.stdout)
    assert took_s < 60 and done.returncode != 0
    assert answer["lost"] == [0] and answer["ranks"][0]["exit_code"] is None
    assert _ranks(json.loads(Path(answer["runs"][0]).read_text())) == [1, 2, 3]
    assert _first_failure(done) == (0, -9)
