"""What a rig takes for near and far, when it can run, and what it reads of AMD cards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dieplace.backends.amd.telemetry import read_all
from dieplace.backends.availability import Availability
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.experiments import link, rig_parts
from dieplace.experiments.link_run import block_of
from dieplace.experiments.torch_rig import CLOCK_TOLERANCE, scale_of
from dieplace.machine import Machine
from dieplace.sysfs import Sysfs

BDF = "0000:05:00.0"


def machine_in(folder: Path, mode: str, cards: int = 2) -> Machine:
    return EmulatedBackend(create(folder / "n", cards=cards, mode=mode), environ={}).snapshot()


def homes(machine: Machine, reader: str) -> dict[str, str]:
    seen = {d.id: d for d in rig_parts.seen_devices(machine)}
    return rig_parts.far_homes(machine, seen, machine.device(reader))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Two cards in DPX/NPS2."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield machine_in(Path(folder), "DPX/NPS2")


def test_the_peer_die_comes_first_and_another_card_is_further(machine: Machine) -> None:
    assert homes(machine, "gpu0/p0") == {"same card": "gpu0/p1", "other card": "gpu1/p0"}
    assert homes(machine, "gpu0/p1") == {"same card": "gpu0/p0", "other card": "gpu1/p0"}
    amd = rig_parts.parts_of("amd")
    seen = rig_parts.seen_devices(machine)
    assert amd.readers(seen) == ("gpu0/p0", "gpu0/p1")  # both halves of one card read; others are homes
    assert amd.share_of_card(machine, seen) == 0.5 and amd.part(machine, seen) == "MI355X"
    assert amd.cache_bytes(seen) == 256 << 20 and amd.note("MI355X") is None
    assert "MI300X" in str(amd.note("MI300X")) and "says nothing about an MI355X" in str(amd.note("MI300X"))
    assert block_of(machine, ("gpu0/p0", "gpu0/p1")) == "gpu0-dpx-nps2"


def test_a_hidden_half_and_another_hive_are_no_homes(machine: Machine) -> None:
    hidden = replace(machine, devices=tuple(
        replace(d, runtime_index=None if d.id == "gpu0/p1" else d.runtime_index) for d in machine.devices
    ))  # fmt: skip
    assert homes(hidden, "gpu0/p0") == {"other card": "gpu1/p0"}
    apart = replace(machine, cards=tuple(replace(c, hive=f"hive of {c.id}") for c in machine.cards))
    assert homes(apart, "gpu0/p0") == {"same card": "gpu0/p1"}


def test_interleaved_memory_has_no_far_half(memory_path: Path) -> None:
    machine = machine_in(memory_path, "SPX/NPS1", cards=1)
    assert homes(machine, "gpu0/p0") == {}
    assert "interleaved over dies 0, 1" in rig_parts.no_far_because(machine, machine.device("gpu0/p0"))


def test_two_nvidia_gpus_are_each_others_far_memory(machine: Machine) -> None:
    gpus = tuple(
        replace(d, whole_card=True, runtime_index=i)
        for i, d in enumerate(d for d in machine.devices if d.partition == 0)
    )
    two = replace(machine, devices=gpus, cards=tuple(replace(c, hive=None, mode=None) for c in machine.cards))
    assert homes(two, "gpu0/p0") == {"other card": "gpu1/p0"} and homes(two, "gpu1/p0") == {"other card": "gpu0/p0"}
    assert block_of(two, ("gpu0/p0", "gpu1/p0")) == "gpu0-gpu1"


@pytest.mark.parametrize(
    ("answer", "torch", "words"),
    [
        (Availability(False, "the amdgpu driver is not loaded"), None, "the amdgpu driver is not loaded"),
        (Availability(True, ""), "torch 2.13 is built for the CPU alone, not for ROCm", "not for ROCm"),
        (Availability(True, ""), None, None),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    answer: Availability, torch: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dieplace.backends.torch_build.why_not", lambda backend: torch)
    found = rig_parts.cannot("amd", probe=lambda: answer)
    assert (found is None) == (words is None) and str(words) in str(found)
    assert rig_parts.cannot("nvidia") is None and "no torch drives" in str(rig_parts.cannot("emulated"))


def test_link_on_this_host_says_why_not() -> None:
    assert link.cannot("emulated") is not None and link.cannot("cpu") is not None and link.cannot("nvidia") is None


def test_the_constant_clock_is_trusted_within_the_launch() -> None:
    """100 MHz is no public figure for an MI355X: a clock of 25 MHz would make every latency four times too small."""
    assert scale_of(25e6 * (1 + CLOCK_TOLERANCE / 2), 25e6) == 1.0
    assert scale_of(100e6, 25e6) == pytest.approx(4.0)
    assert scale_of(1.0, 0.0) == 1.0


# ---- telemetry


def tree(folder: Path, **files: str) -> Sysfs:
    card = folder / "sys/bus/pci/devices" / BDF
    for name, text in files.items():
        path = card / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Sysfs(folder)


def test_clocks_power_and_temperature_are_read_in_their_units(tmp_path: Path) -> None:
    sysfs = tree(
        tmp_path,
        hwmon__hwmon7__freq1_input="1920000000",
        hwmon__hwmon7__freq2_input="1900000000",
        hwmon__hwmon7__power1_average="612000000",
        hwmon__hwmon7__temp1_input="54000",
        pp_dpm_sclk="S: 132Mhz *\n0: 500Mhz\n1: 2400Mhz",
    )
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.14.14\n")
    version, (reading,), why = read_all(sysfs, [BDF])
    assert (version, why) == ("6.14.14", None)
    assert (reading.sm_clock_mhz, reading.sm_clock_max_mhz, reading.memory_clock_mhz) == (1920, 2400, 1900)
    assert (reading.power_w, reading.temperature_c, reading.clock_share) == (612.0, 54, 0.8)


def test_what_the_driver_does_not_say_is_none_with_a_why(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, hwmon__hwmon0__power1_input="1", hwmon__hwmon0__freq1_input="busy")
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.11.0\n")
    version, (reading,), _ = read_all(sysfs, [BDF])
    assert version == "kernel 6.11.0" and reading.power_w == 1e-6
    body = reading.to_json()
    assert body["sm_clock_mhz"] is None and body["sm_clock_mhz_why"] == "the driver does not say"
    assert reading.clock_share is None and body["temperature_c"] is None
    assert read_all(Sysfs(tmp_path / "nothing"), [BDF])[2] == "neither amdgpu nor the kernel says"
