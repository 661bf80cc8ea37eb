"""What `partition export --for` writes, read by rules that come from each format's own documentation."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dieplace import exporters
from dieplace.cli.main import main
from dieplace.discover import discover
from dieplace.emulator.node import create
from dieplace.errors import Unsupported, UsageError
from dieplace.machine import Machine

# gres.conf(5): parameter names that a NodeName line may carry
GRES_NAMES = {"NodeName", "AutoDetect", "Name", "Type", "File", "Cores", "Count", "Flags", "Links", "MultipleFiles"}


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


def _machine(place: Path, **words: object) -> Machine:
    return discover("emulated", node=create(place, **words).directory)  # type: ignore[arg-type]


def _gres(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith("NodeName=") for line in lines)  # the first parameter, says the page
    return [dict(word.split("=", 1) for word in line.split()) for line in lines]


def test_slurm_lists_each_partition_by_its_render_node(tmp_path: Path) -> None:
    machine = _machine(tmp_path / "node", mode="DPX/NPS2", cores_per_node=4)
    lines = _gres(exporters.slurm(machine, node_name="tux0", cores={0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}))
    assert len(lines) == 16 and all(set(line) <= GRES_NAMES for line in lines)
    assert [line["File"] for line in lines] == [
        f"/dev/dri/renderD{128 + 8 * g + p}" for g in range(8) for p in range(2)
    ]
    assert {line["Type"] for line in lines} == {"mi355x_dpx_nps2"}
    assert [line["Cores"] for line in lines] == ["0-3"] * 8 + ["4-7"] * 8
    assert {(line["Name"], line["AutoDetect"], line["Flags"]) for line in lines} == {("gpu", "off", "amd_gpu_env")}


def test_slurm_order_is_the_runtimes_and_types_differ_by_mode(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, cores_per_node=2)
    node.write_compute(node.bdfs()[0], "DPX")  # its devices come last now
    text = exporters.slurm(discover("emulated", node=node.directory), node_name="tux0")
    assert [line["File"][-3:] for line in _gres(text)] == ["136", "128", "129"]
    assert "Gres=gpu:mi355x_spx_nps1:1,gpu:mi355x_dpx_nps1:2" in text


def test_slurm_core_numbers_count_cores_not_threads() -> None:
    siblings = {cpu: (cpu % 4, cpu % 4 + 4) for cpu in range(8)}  # 4 cores, two threads each, threads last
    assert exporters.slurm_cores(siblings, {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}) == {0: (0, 1), 1: (2, 3)}
    siblings = {cpu: (cpu - cpu % 2, cpu - cpu % 2 + 1) for cpu in range(8)}  # neighbours are one core
    assert exporters.slurm_cores(siblings, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}) == {0: (0, 1), 1: (2, 3)}


def _config_map(text: str) -> dict:  # type: ignore[type-arg]
    """The ConfigMap's JSON: a block scalar, indented below `config.json: |`."""
    head, body = text.split("  config.json: |\n")
    assert re.search(r"^kind: ConfigMap$", head, re.MULTILINE) and "  name: config-manager-config\n" in head
    assert all(line.startswith("    ") for line in body.splitlines())
    return json.loads(body)


def test_kubernetes_profile_obeys_the_managers_rules(tmp_path: Path) -> None:
    """configmap.md: counts and skipped cards add up to all cards; one memory mode; words from a list."""
    node = create(tmp_path / "node", cores_per_node=2)
    for index in (2, 3, 4):
        node.write_compute(node.bdfs()[index], "DPX")
    config = _config_map(exporters.kubernetes(discover("emulated", node=node.directory), profile="mixed"))
    profile = config["gpu-config-profiles"]["mixed"]
    entries = profile["profiles"]
    assert sum(entry["numGPUsAssigned"] for entry in entries) + len(profile["skippedGPUs"]["ids"]) == 8
    assert [(e["computePartition"], e["numGPUsAssigned"]) for e in entries] == [("SPX", 2), ("DPX", 3), ("SPX", 3)]
    assert {entry["memoryPartition"] for entry in entries} == {"NPS1"}
    assert all(isinstance(name, str) for name in config["gpuClientSystemdServices"]["names"])


def test_kubernetes_refuses_what_the_manager_refuses(tmp_path: Path) -> None:
    node = create(tmp_path / "node", cards=2, hives=2, cores_per_node=2)
    node.write_memory(node.bdfs()[1], "NPS2")
    node.reload()
    with pytest.raises(Unsupported, match="several memory modes"):
        exporters.kubernetes(discover("emulated", node=node.directory))
    text = exporters.kubernetes(_machine(tmp_path / "cpx", cards=1, mode="CPX/NPS2", cores_per_node=2))
    assert "documents NPS2 with DPX only; CPX/NPS2" in text and _config_map(text)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "dieplace-partition.service"
    unit.write_text(exporters.systemd("/bin/true", profile="decode"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "dieplace-partition" not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("Type=oneshot", "Type=oneshoot").replace("ExecStart=", "ExecStrat="))
    broken = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "dieplace-partition" in broken.stderr  # the check itself notices a broken unit


def test_the_units_command_is_one_that_dieplace_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = create(tmp_path / "node", cards=1, cores_per_node=2)
    profile = tmp_path / "partition.toml"
    assert (
        main(["partition", "export", "--profile", "decode", "--backend", "emulated", "--node", str(node.directory)])
        == 0
    )
    profile.write_text(capsys.readouterr().out)
    text = exporters.systemd("/usr/bin/dieplace", profile="decode", profile_file=str(profile))
    words = re.search(r'^ExecStart="/usr/bin/dieplace" (.*)$', text, re.MULTILINE)
    assert words is not None
    arguments = [word.strip('"') for word in words[1].split()]
    assert main([*arguments, "--backend", "emulated", "--node", str(node.directory)]) == 0


@pytest.mark.parametrize("target", exporters.TARGETS)
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    node = create(tmp_path / "node", cards=2, mode="DPX/NPS2", cores_per_node=2)
    arguments = ["partition", "export", "--for", target, "--backend", "emulated", "--node", str(node.directory)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "dieplace/partition-export/1" and value["for"] == target and value["text"] == text


@pytest.mark.parametrize("name", ["", "a b", "x;reboot", "$(id)", "a\nb", "-x"])
def test_names_cannot_smuggle_anything(tmp_path: Path, name: str) -> None:
    machine = _machine(tmp_path / "node", cards=1, cores_per_node=2)
    for act in (
        lambda: exporters.slurm(machine, node_name=name or " "),
        lambda: exporters.kubernetes(machine, profile=name),
        lambda: exporters.systemd("/usr/bin/dieplace", profile=name),
        lambda: exporters.systemd(f"/opt/{name}%n"),
    ):
        with pytest.raises(UsageError):
            act()
