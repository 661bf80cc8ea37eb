"""`dieplace emulate`: what each command does to the node on disk, its exit codes and its one JSON value."""

import json
from pathlib import Path

import pytest

from dieplace.cli.main import main
from dieplace.emulator.node import check_tree, open_node

KEYS = {"schema", "source", "ok", "directory", "part", "loaded", "uid", "boot_id", "generation_id", "cards",
        "processes", "faults", "styles", "log"}  # fmt: skip


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Nodes are many small files: in memory where there is some."""
    return memory_path


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("DIEPLACE_NODE", raising=False)
    return tmp_path / "state/dieplace/node"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    code = main(["emulate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_new_makes_a_node_that_meets_every_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "node"
    code, value = _run(capsys, "new", str(place), "--part", "MI300X", "--cards", "2", "--mode", "dpx+nps2",
                       "--style", "cores_per_node=2", "--style", "domains=two", "--style", "ast=yes")  # fmt: skip
    assert code == 0 and set(value) == KEYS and value["schema"] == "dieplace/emulate-new/1"
    assert [card["bdf"] for card in value["cards"]] == ["0000:05:00.0", "0001:05:00.0"]
    assert value["styles"] == {"ast": True, "domains": "two", "cores_per_node": 2} and value["source"] == "emulated"
    assert check_tree(place) == []
    assert open_node(place).sysfs().exists("/sys/class/drm/card0") and open_node(place).state.style.ast


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["new", "{}", "--part", "MI999"], 2),
        (["new", "{}", "--cards", "9"], 2),
        (["new", "{}", "--mode", "SPX/NPS2"], 3),
        (["new", "{}", "--mode", "hello"], 2),
        (["new", "{}", "--style", "nothing"], 2),
        (["new", "{}", "--style", "ast=perhaps"], 2),
        (["new", "{}", "--style", "colour=red"], 2),
        (["new", "{}", "--style", "vfio_cards=a"], 2),
        (["new", "/proc/nope"], 2),
        (["show", "{}"], 2),
        (["fault", "load", "{}", "--error", "EIO"], 2),
        (["fault"], 2),
        (["reset", "/dev/null"], 2),
        (["release", "1", "{}"], 2),
    ],
)
def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    found, value = _run(capsys, *(text.format(tmp_path / "node") for text in arguments))
    assert found == code and value["ok"] is False and value["error"]["message"]
    assert not (tmp_path / "node").exists()


def test_the_default_node_is_made_on_first_use(state_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = _run(capsys, "show")
    assert code == 0 and value["part"] == "MI355X" and len(value["cards"]) == 8
    assert value["directory"] == str(state_folder)
    assert _run(capsys, "new")[0] == 2  # there is one already
    assert _run(capsys, "new", "--replace", "--cards", "1")[0] == 0
    assert len(_run(capsys, "show")[1]["cards"]) == 1


def test_node_option_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], state_folder: Path) -> None:
    assert _run(capsys, "new", "--node", str(tmp_path / "other"), "--cards", "1")[0] == 0
    assert _run(capsys, "show", "--node", str(tmp_path / "other"))[1]["directory"] == str(tmp_path / "other")
    assert not state_folder.exists()


def test_faults_holders_and_reset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "node")
    _run(capsys, "new", place, "--cards", "2", "--style", "cores_per_node=2")
    code, value = _run(capsys, "fault", "write_memory", place, "--error", "ebusy", "--card", "gpu1", "--always")
    assert code == 0
    assert value["faults"] == [{"step": "write_memory", "error": "EBUSY", "status": None, "card": "gpu1",
                                "times": None, "seconds": 0.0, "path": None}]  # fmt: skip
    assert _run(capsys, "fault", "write_memory", place)[0] == 2
    assert _run(capsys, "fault", "in-reset", place, "--card", "gpu7")[0] == 3
    _, value = _run(capsys, "fault", "in-reset", place, "--card", "0000:05:00.0")
    assert [card["state"] for card in value["cards"]] == ["in reset", "ok"]
    node = open_node(Path(place))
    with pytest.raises(PermissionError):
        node.write_compute(node.bdfs()[0], "DPX")
    _, value = _run(capsys, "fault", "--clear", place)
    assert value["faults"] == [] and {card["state"] for card in value["cards"]} == {"ok"}
    _, value = _run(capsys, "hold", place, "--name", "vllm", "--device", "gpu1/p0", "--vram-bytes", "4096")
    pid = value["processes"][0]["pid"]
    assert value["processes"][0]["cards"] == ["gpu0", "gpu1"]
    assert _run(capsys, "hold", place, "--device", "gpu9/p0")[0] == 3
    assert _run(capsys, "release", str(pid), place, "--ghost")[1]["processes"][0]["open"] is False
    boot = value["boot_id"]
    code, value = _run(capsys, "reboot", place)
    assert code == 0 and value["processes"] == [] and value["boot_id"] != boot
    node.write_compute(node.bdfs()[0], "CPX")
    node.write_memory(node.bdfs()[0], "NPS2")
    _, value = _run(capsys, "show", place)
    assert value["cards"][0]["pending_memory"] == "NPS2" and value["log"]
    code, value = _run(capsys, "reset", place)
    assert code == 0 and [c["compute"] for c in value["cards"]] == ["SPX", "SPX"] and not value["log"]
    assert value["cards"][0]["pending_memory"] is None and value["styles"] == {"cores_per_node": 2}
    assert check_tree(place) == []


def test_table_fits_and_shows_what_is_pending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "node")
    _run(capsys, "new", place, "--cards", "1", "--uid", "1000", "--style", "cores_per_node=2")
    assert main(["emulate", "show", place]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[1:])) <= 80 and "virtual user 1000" in text
    assert main(["emulate", "show", place, "-o", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("gpu0,0000:05:00.0,amdgpu,SPX,NPS1")
