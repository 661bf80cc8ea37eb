"""First light on two NVIDIA GPUs without any: the committed machine of two H200s, asked by hands that were told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from first_light_hosts import NO_EXPERIMENTS, Here

from dieplace.backends.replayed import ReplayedBackend
from dieplace.errors import UsageError
from dieplace.experiments.first_light import EXPERIMENT, first_light
from dieplace.experiments.first_light_catalogue import QUESTIONS
from dieplace.experiments.first_light_devices import scene_of
from dieplace.experiments.first_light_host import NvidiaHost
from dieplace.experiments.first_light_modes import Permission
from dieplace.experiments.first_light_sights import Remapped, Rounds
from dieplace.experiments.registry import Options

RUN = Path(__file__).resolve().parents[2] / "experiments/results/nvidia-h200-x2/link/gpu0-gpu1.json"


class Session:
    """What NvidiaHost asks of its backend."""

    def __init__(self) -> None:
        self.machine = replace(ReplayedBackend(RUN).snapshot(), source="live", backend="nvidia")

    def snapshot(self, *, ask_cuda: bool = True) -> Any:
        assert not ask_cuda  # CUDA is not started in the process that asks others
        return self.machine


class Hands:
    def offers_access(self, *_: Any) -> bool:
        return True

    def wrong_bytes(self, *_: Any) -> int:
        return 0

    def rounds(self, writer: Any, reader: Any, *, readers: int, rounds: int, **_: Any) -> Rounds:
        return Rounds(rounds, (rounds,) * readers, (1600.0 if writer.id == reader.id else 4000.0,) * 9, (0, 1))

    def remap(self, device: Any) -> Remapped:
        return Remapped(10, 10, 0, 100, 100, True)

    def launch_ns(self, device: Any) -> tuple[float, float]:
        return 1500.0, 6000.0


def test_a_rank_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UsageError, match="without torchrun"):
        list(EXPERIMENT.run("nvidia", Options(), lambda text: None))


def test_two_gpus_are_asked_what_applies_and_left_alone(tmp_path: Path) -> None:
    session = Session()
    host = NvidiaHost(session)
    allowed = Permission(modes=True)  # allowed, and there is nothing to change
    talk = Here(lambda: scene_of(session.machine, Hands()))  # type: ignore[arg-type]
    bundle = first_light(host, tmp_path / "b", allowed, talk=talk, skip=NO_EXPERIMENTS)
    assert bundle.state == "complete" and bundle.restored is True and bundle.restored_said == "nothing was changed"
    assert set(bundle.answers) == {q.id for q in QUESTIONS} and bundle.missing == ()
    words = {name: answer.word for name, answer in bundle.answers.items() if answer.word}
    assert words == {
        "peer-access": "yes", "poll-reliability": "reliable", "remote-store": "arrives, later than 0.1 us extra",
        "vmm-remap": "fresh, device busy", "launch-cost": "measured",
    }  # fmt: skip
    assert bundle.answers["remote-store"].value["extra_ns"] == pytest.approx(1200.0)
    for one in QUESTIONS:
        if "nvidia" not in one.backends and one.id != "uncached-memory":
            assert bundle.answers[one.id].said == "NVIDIA GPUs are left in the mode they are in"
    assert "no memory class" in bundle.answers["uncached-memory"].said
    assert any("MI355X" in note for note in bundle.notes)
    machine = ReplayedBackend(tmp_path / "b").snapshot()
    assert len(machine.cards) == 2 and all(card.uuid is None for card in machine.cards)
    assert all(json.loads(p.read_text()) for p in (tmp_path / "b").rglob("*.json"))
