"""The JSON answer of every command: its keys and their types, and the rules that hold for all of them.

`ANSWERS` is the published shape; keys may be added to an answer under the same schema number, never removed or changed.
"""

import json
import re
from pathlib import Path

import pytest

from dieplace.cli import main as frame
from dieplace.emulator.node import create

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "experiments/results/emulated-mi355x/weight-swap"
TEXT, NUMBER, FLAG, LIST, TABLE = str, (int, float), bool, list, dict

DEVICE = {
    "id": TEXT, "card": TEXT, "part": TEXT, "mode": TEXT, "share": TEXT, "xcds": NUMBER, "cus": NUMBER,
    "hbm_bytes": NUMBER, "domain": TEXT, "dies": LIST, "local_guaranteed": FLAG, "bdf": TEXT, "numa_node": NUMBER,
    "render_node": TEXT, "runtime_index": NUMBER, "aliases": LIST,
}  # fmt: skip
CARD = {
    "id": TEXT,
    "bdf": TEXT,
    "part": TEXT,
    "mode": TEXT,
    "xcds": NUMBER,
    "cus": NUMBER,
    "hbm_bytes": NUMBER,
    "dies": NUMBER,
}
DOMAIN = {"id": TEXT, "total_bytes": NUMBER, "aliases": LIST}
NODE = {
    "directory": TEXT,
    "part": TEXT,
    "loaded": FLAG,
    "uid": NUMBER,
    "cards": LIST,
    "processes": LIST,
    "faults": LIST,
}
SWITCH = {"outcome": TEXT, "targets": TABLE, "devices": LIST, "standing": LIST}

# schema: (words, shape); in a shape a list of one shape stands for "every item has this shape".
ANSWERS = {
    "list/1": (["list"], {"backend": TEXT, "devices": [DEVICE], "cards": [CARD], "domains": [DOMAIN], "notes": LIST}),
    "topo/1": (
        ["topo"],
        {"cards": LIST, "devices": LIST, "domains": LIST, "links": LIST, "stamp": LIST, "host": TABLE},
    ),
    "topo-matrix/1": (
        ["topo", "-m", "distance"],
        {
            "metric": TEXT,
            "unit": TEXT,
            "direction": TEXT,
            "cells": [{"initiator": TEXT, "target": TEXT, "origin": TEXT}],
        },
    ),
    "partition-show/1": (
        ["partition", "show"],
        {"driver": TABLE, "cards": [{"card": TEXT, "bdf": TEXT, "mode": TEXT, "offered": LIST}], "holders": LIST},
    ),
    "partition-plan/1": (["partition", "plan", "DPX/NPS2"], {"plan": TABLE}),
    "partition-assert/1": (["partition", "assert", "SPX/NPS1"], {"cards": LIST, "wrong": LIST}),
    "partition-export/1": (["partition", "export"], {"cards": TABLE, "name": TEXT}),
    "partition-set/1": (["partition", "set", "DPX/NPS2", "-y"], SWITCH),
    "bench-list/1": (["bench", "list"], {"experiments": [{"experiment": TEXT, "summary": TEXT, "factors": TABLE}]}),
    "bench-compare/1": (["bench", "compare", str(RUNS / "spx-nps1.json"), str(RUNS / "spx-nps1.json")], {}),
    "bench-report/1": (["bench", "report", str(RUNS), "--out", "report.html"], {"report": TEXT}),
    "kernel-list/1": (["kernel", "list"], {"ops": [{"op": TEXT, "summary": TEXT, "operands": LIST}]}),
    "kernel-lint/1": (["kernel", "lint"], {}),
    "place-plan/1": (["place", "plan", "--model", "gpt-oss-120b"], {}),
    "place-audit/1": (["place", "audit"], {"items": LIST}),
    "exec-print/1": (["exec", "--print", "--device", "gpu0/p0", "--", "true"], {"command": LIST, "processes": LIST}),
    "emulate-show/1": (["emulate", "show", "node"], NODE),
    "emulate-new/1": (["emulate", "new", "other"], NODE),
    "emulate-fault/1": (["emulate", "fault", "unload", "node", "--error", "EBUSY"], NODE),
    "emulate-hold/1": (["emulate", "hold", "node"], NODE),
    "emulate-release/1": (["emulate", "release", "PID", "node"], NODE),
    "emulate-reboot/1": (["emulate", "reboot", "node"], NODE),
    "emulate-reset/1": (["emulate", "reset", "node"], NODE),
    "doctor/1": (
        ["doctor"],
        {"python": TEXT, "packages": LIST, "checks": [{"what": TEXT, "works": FLAG, "why": TEXT}]},
    ),
    "env/1": (["env"], {"dieplace": TEXT, "host": TABLE, "packages": TABLE, "environment": TABLE, "node": TABLE}),
    "completion/1": (["completion", "bash"], {"shell": TEXT, "script": TEXT}),
}
ELSEWHERE = {  # these compile, emulate or start programs: their own tests look at the answer
    "exec-verify/1", "kernel-build/1", "kernel-check/1", "kernel-trace/1", "bench-run/1", "bench-show/1",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    create(tmp_path / "node", cards=2)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "DIEPLACE_BACKEND": "emulated",
        "DIEPLACE_NODE": "node",
        "XDG_STATE_HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def answer(words, capsys):
    code = frame.main(["--json", *words])
    out = capsys.readouterr().out
    return code, json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def fits(value, shape, where):
    if isinstance(shape, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            fits(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), where
        for key, inner in shape.items():
            assert key in value, f"{where}.{key} is missing"
            if value[key] is None:
                assert value.get(f"{key}_why"), f"{where}.{key} is null without a why"
            else:
                fits(value[key], inner, f"{where}.{key}")
    else:
        assert isinstance(value, shape), f"{where} is {type(value).__name__}"


@pytest.mark.parametrize("schema", ANSWERS)
def test_the_answer_of(schema, here, capsys):
    words, shape = ANSWERS[schema]
    if "PID" in words:
        frame.main(["emulate", "hold", "node", "--json"])
        pid = json.loads(capsys.readouterr().out)["processes"][0]["pid"]
        words = [str(pid) if word == "PID" else word for word in words]
    code, value = answer(words, capsys)
    assert value["schema"] == f"dieplace/{schema}", value
    assert value["ok"] is (code == 0) and code in (0, 1)
    assert value["source"] in (None, "live", "emulated", "replayed")
    fits(value, shape, schema)


def test_no_answer_is_left_out():
    found = set()
    for path in (ROOT / "cli").glob("*.py"):
        found |= set(re.findall(r'"([a-z-]+/1)"', path.read_text()))
    assert found - {"error/1"} - ELSEWHERE <= set(ANSWERS), found - set(ANSWERS)


def test_an_emulated_answer_says_so(here, capsys):
    for words in (
        ["list"],
        ["topo"],
        ["topo", "-m", "bandwidth"],
        ["partition", "show"],
        ["partition", "plan", "DPX/NPS2"],
    ):
        assert answer(words, capsys)[1]["source"] == "emulated", words


def test_numbers_are_numbers_and_ids_are_text(here, capsys):
    _, value = answer(["list"], capsys)
    assert [d["hbm_bytes"] for d in value["devices"]] == [309_220_868_096] * 2
    assert {d["xcds"] for d in value["devices"]} == {8} and {d["cus"] for d in value["devices"]} == {256}


def test_unknown_is_null_with_a_why(tmp_path, capsys, monkeypatch):
    create(tmp_path / "node", part="MI350P", cards=1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code = frame.main(["--backend", "emulated", "--node", str(tmp_path / "node"), "list", "--json"])
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert code == 0 and device["cus"] is None and device["cus_why"]
