"""Every shell block of docs/recipes.md is run against an emulated node, with stand-ins for the servers and trainers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dieplace.emulator.node import create

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", RECIPES.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
STAND_IN = """#!/bin/sh
echo "{name} $* | $DIEPLACE_DEVICE rocr=$ROCR_VISIBLE_DEVICES hip=$HIP_VISIBLE_DEVICES" \\
    "rank=$LOCAL_RANK of $LOCAL_WORLD_SIZE"
"""


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    node = create(tmp_path / "node", cards=2, mode="DPX/NPS2", cores_per_node=4)
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python"):
        (tmp_path / "bin" / name).write_text(STAND_IN.format(name=name))
    programs = {"dieplace": "-m dieplace.cli", "torchrun": "-m torch.distributed.run"}
    for name, words in programs.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    hidden = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    kept = {name: text for name, text in os.environ.items() if name not in hidden}
    return kept | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state"),
        "DIEPLACE_BACKEND": "emulated", "DIEPLACE_NODE": str(node.directory),
    }  # fmt: skip


def _run(command: str, environ: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_there_are_recipes_to_run() -> None:
    assert len(COMMANDS) > 15 and all(re.match(r"(MASTER_ADDR=\S+ \S+ )?(dieplace|torchrun) ", c) for c in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_does_what_the_page_says(environ: dict[str, str], command: str) -> None:
    if command.startswith("torchrun"):
        pytest.importorskip("torch")
    code, out = _run(command, environ)
    assert code == 0 and out.strip()
    if "exec" not in command or "--print" in command:
        return
    lines = sorted(re.sub(r"^\[.*?\] ", "", line) for line in out.splitlines())
    told = [line.split(" | ")[1] for line in lines]
    keep, one_each = "--keep-visible" in command, "--per-device" in command or "--by-rank" in command
    if one_each:
        rocr = ["0,1", "0,1"] if keep else ["0", "1"]
        hip = ["0,1", "0,1"] if keep else ["0", "0"]
        assert sorted(told) == [f"gpu0/p{i} rocr={rocr[i]} hip={hip[i]} rank={i} of 2" for i in (0, 1)]
    elif "--visible-by hip" in command:
        assert told == ["gpu0/p0,gpu0/p1 rocr= hip=0,1 rank= of "]
    elif "--device gpu0 " in command:
        assert told == ["gpu0/p0,gpu0/p1 rocr=0,1 hip=0,1 rank= of "]
    else:
        number = int(re.search(r"--device gpu0/p(\d)", command)[1])  # type: ignore[index]
        assert told == [f"gpu0/p{number} rocr={number} hip=0 rank= of "]


def test_servers_of_one_card_get_their_own_ports(environ: dict[str, str]) -> None:
    command = next(command for command in COMMANDS if "8000 + LOCAL_RANK" in command)
    _, out = _run(command, environ)
    assert sorted(re.findall(r"--port (\d+)", out)) == ["8000", "8001"]
