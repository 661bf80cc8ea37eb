"""`env --record`: a recording replays to the same node, keeps equal ids equal, and carries no real id."""

import json
from dataclasses import replace

import pytest

from dieplace.backends.amd.backend import AmdBackend
from dieplace.backends.replayed import ReplayedBackend
from dieplace.cli import main as frame
from dieplace.emulator.node import create
from dieplace.errors import UsageError
from dieplace.recording import Pseudonyms, record

SHARED_IDS = ("unique_id", "uuid", "hive")


def without_ids(machine):
    """What must survive: everything but ids, and what names the backend and the moment."""
    cards = tuple(replace(c, unique_id=None, uuid=None, hive=None) for c in machine.cards)
    devices = tuple(replace(d, unique_id=None) for d in machine.devices)
    return cards, devices, machine.domains, machine.links, machine.host


@pytest.fixture(params=["equal", "distinct"])
def node(request, tmp_path):
    return create(tmp_path / "node", mode="DPX/NPS2", cards=3, unique_id=request.param)


def test_a_recording_replays_to_the_same_node(node, tmp_path):
    live = AmdBackend(sysfs=node.sysfs(), environ={}).snapshot()
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(node.sysfs(), {}, {})))
    replayed = ReplayedBackend(path).snapshot()
    assert without_ids(replayed) == without_ids(live)
    assert replayed.source == "replayed" and replayed.session is None


def test_equal_ids_stay_equal_and_different_ones_different(node, tmp_path):
    live = AmdBackend(sysfs=node.sysfs(), environ={}).snapshot()
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(node.sysfs(), {}, {})))
    replayed = ReplayedBackend(path).snapshot()

    def ids(machine):
        return [c.unique_id for c in machine.cards] + [d.unique_id for d in machine.devices] + [machine.cards[0].hive]

    before, after = ids(live), ids(replayed)
    assert all(
        (a == b) == (x == y) for a, x in zip(before, after, strict=True) for b, y in zip(before, after, strict=True)
    )
    assert not set(filter(None, before)) & set(filter(None, after))


def test_no_real_id_is_in_the_file(node):
    live = AmdBackend(sysfs=node.sysfs(), environ={}).snapshot()
    text = json.dumps(record(node.sysfs(), {"ROCR_VISIBLE_DEVICES": f"GPU-{live.devices[0].unique_id},1"}, {}))
    for thing in (*live.cards, *live.devices):
        number = int(thing.unique_id, 16)
        assert thing.unique_id not in text.lower() and str(number) not in text
    assert str(int(live.cards[0].hive, 16)) not in text
    assert node.boot_id not in text


def test_visibility_variables_are_replayed_with_their_pseudonyms(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=2, unique_id="distinct")
    wanted = AmdBackend(sysfs=node.sysfs(), environ={}).snapshot().device("gpu1/p1").unique_id
    environ = {"ROCR_VISIBLE_DEVICES": f"GPU-{wanted},0", "HOME": "/secret"}
    data = record(node.sysfs(), environ, {})
    assert "HOME" not in data["environ"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    seen = {d.id: d.runtime_index for d in ReplayedBackend(path).snapshot().devices}
    assert seen == {"gpu0/p0": 1, "gpu0/p1": None, "gpu1/p0": None, "gpu1/p1": 0}


def test_errors_are_replayed_too(tmp_path):
    node = create(tmp_path / "node", mode="DPX/NPS2", cards=2)
    node.begin_reset(node.bdfs()[0])
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(node.sysfs(), {}, {})))
    card = ReplayedBackend(path).snapshot().card("gpu0")
    assert card.mode is None and "EPERM" in card.whys["mode"]


def test_the_command_records_and_replays(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = str(tmp_path / "node.json")
    assert frame.main(["--backend", "emulated", "env", "--record", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recording"] == path
    assert frame.main(["--backend", "replayed", "--node", path, "list", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["source"] == "replayed" and len(value["devices"]) == 8
    assert frame.main(["--backend", "replayed", "--node", path, "partition", "set", "DPX/NPS2", "-y"]) == 3
    assert frame.main(["--backend", "emulated", "env", "--record", str(tmp_path / "no/such/folder/x")]) == 2
    assert frame.main(["--backend", "cpu", "env", "--record", path]) == 2


def test_pseudonyms_keep_zero_and_the_notation():
    names = Pseudonyms()
    text = names.text("/sys/x/properties", "unique_id 77\nhive_id 0\nsimd_count 77\n")
    assert text == "unique_id 1\nhive_id 0\nsimd_count 77\n"
    assert names.text("/sys/y/unique_id", "000000000000004d\n") == f"{1:016x}"


def test_something_else_is_told(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"schema": "dieplace/run/1"}')
    with pytest.raises(UsageError, match="neither a recording nor a saved machine"):
        ReplayedBackend(path).snapshot()
