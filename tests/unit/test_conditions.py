"""Conditions: a typed registry; unknown is null with a why; which keys must agree for a comparison."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from dieplace import conditions
from dieplace.conditions import CONDITIONS, Unknown, collect, differing
from dieplace.sysfs import Sysfs


def test_every_key_is_there_and_null_has_a_why() -> None:
    found = collect(None)
    json.dumps(found, allow_nan=False)
    for condition in CONDITIONS:
        assert condition.key in found
        if found[condition.key] is None:
            assert len(found[f"{condition.key}_why"]) > 5
        else:
            assert isinstance(found[condition.key], condition.kind)
            assert f"{condition.key}_why" not in found
    assert len({c.key for c in CONDITIONS}) == len(CONDITIONS)


def test_facts_come_from_the_host_not_from_us() -> None:
    found = collect(None)
    assert found["python_version"] == platform.python_version()
    assert found["cpus_allowed"] == len(os.sched_getaffinity(0))


def test_quota_is_stored_beside_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`cpu.max` 200000 100000 with 64 allowed CPUs is 64 and 2.0 (case c11)."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(conditions, "Sysfs", lambda root: Sysfs(tmp_path))
    monkeypatch.setattr(conditions.os, "sched_getaffinity", lambda _: set(range(64)))
    found = collect(None)
    assert (found["cpus_allowed"], found["cpu_quota_cpus"]) == (64, 2.0)
    (group / "cpu.max").write_text("max 100000\n")
    assert collect(None)["cpu_quota_cpus"] is None


def test_given_values_are_checked() -> None:
    assert collect(None, power_w=700.0)["power_w"] == 700.0
    assert collect(None, power_w=Unknown("off"))["power_w_why"] == "off"
    with pytest.raises(TypeError, match="power_w is a float"):
        collect(None, power_w="700")
    with pytest.raises(TypeError, match="not registered"):
        collect(None, colour="red")


def test_differing_names_checked_keys_only() -> None:
    base = collect(None, code_hash="a", core_clock_mhz=2400.0)
    other = {**base, "code_hash": "b", "core_clock_mhz": 1400.0, "host_id": "elsewhere", "taken_at": "later"}
    assert differing(base, other) == ("code_hash", "core_clock_mhz")
    assert differing(base, dict(base)) == ()


def test_no_host_name_is_recorded() -> None:
    text = json.dumps(collect(None))
    assert platform.node() not in text or len(platform.node()) < 4


def test_no_run_file_names_a_device_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dieplace exec` and ranks under torchrun choose NVIDIA devices by UUID; ROCr takes UUIDs too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-f26431e7-1b3b-703f-b60b-14ed1fe51ecc,1")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-4d3a2b1c0f9e8d7c,0")
    found = collect(None)["environment"]
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-(left out),1" and found["ROCR_VISIBLE_DEVICES"] == "GPU-(left out),0"
