"""Whole-stdout texts of commands on generated nodes, reviewed as a reader would see them.

`python tests/golden/test_texts.py` writes them anew; the difference is then reviewed like any other change.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TEXTS = Path(__file__).parent / "texts"
# name: (part, mode, cards, words)
CASES = {
    "list-mi355x-spx-nps1": ("MI355X", "SPX/NPS1", 8, ["list"]),
    "list-mi355x-dpx-nps2": ("MI355X", "DPX/NPS2", 8, ["list"]),
    "list-mi350p-dpx-nps1": ("MI350P", "DPX/NPS1", 2, ["list"]),
    "list-mi300a-tpx-nps1-csv": ("MI300A", "TPX/NPS1", 1, ["list", "-o", "csv"]),
    "topo-mi355x-dpx-nps2": ("MI355X", "DPX/NPS2", 8, ["topo"]),
    "topo-mi300x-cpx-nps4": ("MI300X", "CPX/NPS4", 1, ["topo"]),
    "distance-mi355x-dpx-nps2": ("MI355X", "DPX/NPS2", 8, ["topo", "-m", "distance"]),
    "bandwidth-mi355x-spx-nps1": ("MI355X", "SPX/NPS1", 8, ["topo", "-m", "bandwidth"]),
    "latency-mi355x-dpx-nps2": ("MI355X", "DPX/NPS2", 1, ["topo", "-m", "latency"]),
    "drawing-mi355x-dpx-nps2": ("MI355X", "DPX/NPS2", 2, ["topo", "-o", "svg"]),
}


def output(case, folder) -> subprocess.CompletedProcess:
    part, mode, cards, words = CASES[case]
    keep = {k: v for k, v in os.environ.items() if "COLOR" not in k and "VISIBLE" not in k and "DIEPLACE" not in k}
    keep |= {"XDG_STATE_HOME": str(folder), "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "dieplace.cli"]
    node = str(Path(folder) / "node")
    made = [*command, "emulate", "new", node, "--part", part, "--mode", mode, "--cards", str(cards)]
    subprocess.run(made, env=keep, check=True, capture_output=True)
    words = [*command, "--backend", "emulated", "--node", node, *words]
    return subprocess.run(words, env=keep, capture_output=True, text=True, encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_text(case, tmp_path):
    done = output(case, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (TEXTS / f"{case}.txt").read_text(encoding="utf-8")
    if CASES[case][3][-1] not in ("csv", "svg"):
        assert max(map(len, done.stdout.splitlines())) <= 80


if __name__ == "__main__":
    for name in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            (TEXTS / f"{name}.txt").write_text(output(name, scratch).stdout, encoding="utf-8")
            print("wrote", name)
