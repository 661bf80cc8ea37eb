"""Whole stdout of `bench show` on the committed version 1 runs; 80 columns, every title says modelled or audited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "experiments" / "results" / "emulated-mi355x" / "weight-swap"


def show(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dieplace.cli", "bench", "show", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=60)


def test_whole_text(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(RESULTS)
    done = show("runs", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == (HERE / "bench_show.txt").read_text(encoding="utf-8")


def test_tables_fit_eighty_columns_and_say_what_they_are() -> None:
    text = (HERE / "bench_show.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith("runs:")) <= 80
    titles = [lines[i - 2] for i, line in enumerate(lines) if line.startswith("─")]
    assert len(titles) == 5
    assert all("modelled" in title or "audited" in title for title in titles)
