"""Weights go straight from a file into storages that were placed on a die, and stay there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dieplace as dp
from dieplace.experiments.private_node import private_node
from dieplace.machine import Machine


@pytest.fixture(scope="module")
def dpx() -> Iterator[Machine]:
    with private_node("DPX/NPS2") as machine:
        yield machine


class Model(torch.nn.Module):
    """Two matrices and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.up = torch.nn.Linear(64, 256)
        self.head = torch.nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("where", ["local", "peer"])
def test_loading_keeps_every_storage_on_its_die(where: str, dpx: Machine, tmp_path: Path) -> None:
    wanted = {"embed.weight": torch.randn(512, 64), "up.weight": torch.randn(256, 64), "up.bias": torch.randn(256)}
    save_file(wanted, tmp_path / "model.safetensors")
    device = dpx.device("gpu0/p0")
    with getattr(device, where)(role="weights"):
        model = Model()
    before = dp.audit(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    report = dp.load_safetensors(model, tmp_path / "model.safetensors")
    assert report.tensors == 3 and [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())
    assert torch.equal(model.head.weight, wanted["embed.weight"])
    after = dp.audit(model)
    home = {"local": "gpu0/mem0", "peer": "gpu0/mem1"}[where]
    assert set(after.bytes_by_domain()) == {home} and after.bytes_by_domain() == before.bytes_by_domain()
