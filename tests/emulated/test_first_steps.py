"""What somebody meets in the first hour: a node named wrongly, a machine that is printed, words that contradict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dieplace as dp
from dieplace.cli.main import main
from dieplace.emulator.node import Node, create


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    for name in ("DIEPLACE_BACKEND", "DIEPLACE_NODE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return create(memory_path / "node", cards=1, mode="DPX/NPS2", cores_per_node=2)


def test_a_node_without_a_backend_is_never_the_live_machine(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """`--node` alone would otherwise show, or switch, the machine it runs on."""
    for words in (["list"], ["partition", "set", "SPX/NPS1", "-y"], ["exec", "--device", "gpu0/p0", "--", "true"]):
        assert main(["--node", str(node.directory), *words]) == 2
        seen = capsys.readouterr()
        assert str(node.directory) in seen.err and "--backend emulated" in seen.err and seen.out == ""
    with pytest.raises(dp.UsageError, match="no backend"):
        dp.discover(node=node.directory)


def test_a_misspelt_folder_is_told(memory_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "emulated", "--node", str(memory_path / "mynod"), "list", "--json"]
    assert main(words) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["ok"] and "mynod was not there" in seen.err
    assert main(words) == 0 and capsys.readouterr().err == ""


def test_a_machine_prints_as_a_few_lines(node: Node) -> None:
    machine = dp.discover("emulated", node=node.directory)
    lines = str(machine).splitlines()
    assert lines[0] == "emulated node: 1 x MI355X in DPX/NPS2" and len(lines) == 3
    # 288 GiB of HBM in two halves (MI355X data sheet), less what the driver keeps.
    assert lines[2] == "  gpu0/p1: 4 XCDs, 128 CUs, memory gpu0/mem1 (154.6 GB)"
    assert repr(machine.devices[0]).startswith("Device(id='gpu0/p0'")


def test_keep_visible_needs_several_processes(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["exec", "--backend", "emulated", "--node", str(node.directory), "--device", "gpu0/p0"]
    assert main([*words, "--keep-visible", "--", "true"]) == 2
    assert "--per-device" in capsys.readouterr().err


def test_the_ended_process_is_the_subject(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["exec", "--backend", "emulated", "--node", str(node.directory), "--device", "gpu0", "--per-device", "--"]
    assert main([*words, "sh", "-c", "exit $LOCAL_RANK"]) == 1
    assert "gpu0/p1 ended with status 1" in capfd.readouterr().err


def test_emulated_host_memory_is_never_shown_as_real(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """CPUs of this machine by number, and host memory near the emulated device: the second is not carried out."""
    words = ["exec", "--backend", "emulated", "--node", str(node.directory), "--device", "gpu0/p0", "--print"]
    assert main([*words, "--cpus", "+0"]) == 0
    seen = capsys.readouterr().out
    assert "host memory: preferred node 0" in seen and "not carried out" in seen


def test_what_a_backend_lacks_is_told_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "cpu", "partition", "show"]) == 3
    assert "--backend amd, nvidia or emulated" in capsys.readouterr().err


@pytest.mark.slow
def test_the_decode_page_runs_as_it_stands(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sketch, on the node that it names: each matrix is read once, half of them from either die."""
    page = Path(__file__).resolve().parents[2] / "docs/decode.md"
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    monkeypatch.chdir(memory_path)
    create(Path("mynode"), cards=1, mode="DPX/NPS2")
    names: dict[str, Any] = {}
    exec(found[1], names)
    step = names["step"]
    # bf16, in two layers: qkv (256 x 64), o_proj (64 x 128), gate and up (2 x 128 x 64), down (64 x 128); head 96 x 64.
    matrices = 2 * (2 * (256 * 64 + 64 * 128 + 2 * 128 * 64 + 64 * 128) + 96 * 64)
    counted = step.ledger.counted_by_role_and_die()["weights"]
    assert matrices < sum(counted.values()) < 1.05 * matrices  # and the norms, on both
    assert counted["die0"] == counted["die1"]
