"""What the README says a user writes, run as it stands on an emulated card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dieplace as dp
from dieplace.emulator.node import create


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as name:
        monkeypatch.setenv("XDG_STATE_HOME", f"{name}/state")
        create(Path(name) / "node", cards=1, mode="DPX/NPS2")
        yield Path(name)


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))


def test_the_sketch(folder: Path) -> None:
    stored = {name: tensor + 1 for name, tensor in build_model().state_dict().items()}
    save_file(stored, folder / "model.safetensors")
    machine = dp.discover("emulated", node=folder / "node")
    die0 = machine.device("gpu0/p0")
    with die0.local(role="weights"):
        model = build_model()
    dp.load_safetensors(model, str(folder / "model.safetensors"))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    kv = die0.kv_cache(layers=36, kv_heads=8, head_dim=64, tokens=8192, dtype="bf16")
    flags = die0.sync_flags(64)
    found = dp.audit(model, kv, flags)
    weights = sum(tensor.nbytes for tensor in stored.values())
    assert found.bytes_by_domain() == {"gpu0/mem0": weights + 36 * 8192 * 2048 + 64 * 128}
    assert not found.misplaced and "gpu0/mem0" in str(found)
    with die0.peer(role="weights"):
        far = build_model()
    assert dp.audit(far).bytes_by_domain() == {"gpu0/mem1": weights}
    assert torch.equal(far(torch.ones(1, 64)).isfinite().all(), torch.tensor(True))
    with dp.partitioned(machine.plan("SPX/NPS1")) as switched:
        assert [str(card.mode) for card in switched.cards] == ["SPX/NPS1"]
    assert [str(card.mode) for card in dp.discover("emulated", node=folder / "node").cards] == ["DPX/NPS2"]
