"""Where a decode step says its operands are: dies where the backend can look inside a domain, else the domain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dieplace.experiments.private_node import private_node
from dieplace.kernels.placement import on_machine
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy


@pytest.fixture(scope="module")
def dpx() -> Iterator[Machine]:
    with private_node("DPX/NPS2") as machine:
        yield machine


def test_bytes_divide_as_the_buffer_lies(dpx: Machine) -> None:
    """Three of eight objects on the peer; what does not divide goes to the larger part, so that sums stay exact."""
    placement = on_machine(dpx, ["gpu0/p0"], {"weights": Policy.peer_share(3)})
    weight = placement.allocate(0, "weights", (8 * OBJECT_BYTES,), torch.uint8, "w")
    assert placement.bytes_by_place(weight, 8 * OBJECT_BYTES) == {
        "gpu0/die0": 5 * OBJECT_BYTES,
        "gpu0/die1": 3 * OBJECT_BYTES,
    }
    assert placement.bytes_by_place(weight, 7) == {"gpu0/die0": 5, "gpu0/die1": 2}
    assert placement.bytes_by_place(weight[100:200], 64) == {"gpu0/die0": 40, "gpu0/die1": 24}  # by its whole buffer
    assert placement.bytes_by_place(torch.zeros(4), 16) == {"host": 16}


def test_a_domain_that_nobody_can_look_into_is_not_called_host(dpx: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose driver tells domains and no dies."""
    placement = on_machine(dpx, ["gpu0/p1"], {"kv_cache": Policy.peer()})
    cache = placement.allocate(0, "kv_cache", (1000,), torch.uint8, "kv")
    monkeypatch.setattr(Buffer, "bytes_by_die", lambda buffer: None)
    assert placement.bytes_by_place(cache, 1000) == {"gpu0/mem0": 1000}
