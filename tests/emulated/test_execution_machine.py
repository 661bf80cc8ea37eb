"""FlyDSL kernels on an emulated machine through the calls that a live one takes: local, peer, audit, launch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import handoff_kernels as handoff
import pytest
import torch
import trial_kernels as trial

import dieplace
from dieplace.codegen.flydsl import bind
from dieplace.codegen.flydsl_names import flyc
from dieplace.emulator.devices import logical_device
from dieplace.emulator.execution import Session, run
from dieplace.errors import KernelFault, Unsupported, UsageError
from dieplace.machine import Machine


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    found = dieplace.discover(backend="emulated", node=tmp_path_factory.mktemp("emulated") / "node")
    with dieplace.partitioned(found.plan("DPX/NPS2")) as switched:
        yield switched


def gemv(machine: Machine, device: str, side: str) -> tuple[int, int | None, int | None]:
    die = machine.device(device)
    n, k = 16, 512
    with getattr(die, side)(role="weights"):
        w = torch.empty(n, k, dtype=torch.bfloat16)
    w.copy_(torch.randn(n, k) / 16)
    with die.local(role="activation"):
        x, y = torch.ones(k, dtype=torch.bfloat16), torch.zeros(n)
    with Session(device=die, memory=machine.session.memory.hbm) as session:  # type: ignore[union-attr]
        bind(trial.gemv_bf16(n, k), w, x, y)(w, x, y)
    torch.testing.assert_close(y.double(), w.double() @ x.double(), rtol=1e-5, atol=1e-5)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None
    weights = traffic.by_role()["weights"][0]
    return weights.distinct, weights.distinct_local, weights.distinct_peer


@pytest.mark.parametrize("device", ["gpu0/p0", "gpu0/p1", "gpu1/p1"])
def test_local_and_peer_weights_are_where_the_kernel_finds_them(machine: Machine, device: str) -> None:
    size = 16 * 512 * 2
    assert gemv(machine, device, "local") == (size, size, 0)
    assert gemv(machine, device, "peer") == (size, 0, size)


def test_a_launch_outside_a_session_runs_on_the_device_of_its_tensors(machine: Machine) -> None:
    with machine.device("gpu0/p1").local(role="activation"):
        order, result = torch.zeros(64, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    trial.chase()(order, result, 1)
    assert result[1] == 0 and result[2] in (0, 1, 2, 3)
    with machine.device("gpu0/p0").local(role="activation"):
        other = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(UsageError, match=r"gpu0/p0.*gpu0/p1"):
        trial.chase()(other, result, 1)


def test_two_devices_at_once_through_the_machine(machine: Machine) -> None:
    p0, p1 = machine.device("gpu0/p0"), machine.device("gpu0/p1")
    with p1.local(role="sync_flag"):
        box = torch.zeros(4 * 16, dtype=torch.int64)
        out = torch.zeros(2, 4, dtype=torch.int32)
    settings = {"memory": machine.session.memory.hbm}  # type: ignore[union-attr]
    with machine.concurrent(seed=5) as records:
        run(handoff.consumer(), box, out, 4, 0, handoff.FOREVER, 2, device=p1, **settings)
        run(handoff.producer(), box, 4, 0, device=p0, **settings)
        assert not out.any()  # queued
    assert out.tolist() == [[7, 10, 13, 16]] * 2
    assert [r.device for r in records] == ["gpu0/p1", "gpu0/p0"]


def test_nothing_runs_when_the_block_fails(machine: Machine) -> None:
    box = torch.zeros(4 * 16, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="stop"), machine.concurrent():
        run(handoff.producer(), box, 4, 0)
        raise RuntimeError("stop")
    assert not box.any()


def test_a_live_backend_has_no_concurrent(machine: Machine, tmp_path: Path) -> None:
    machine.save(tmp_path / "machine.json")
    with pytest.raises(Unsupported):
        Machine.load(tmp_path / "machine.json").concurrent()


@pytest.mark.parametrize(
    ("name", "xcds"),
    [("gpu0", tuple(range(8))), ("gpu0/p1", (4, 5, 6, 7)), ("gpu1/p0", (8, 9, 10, 11)), ("gpu2", tuple(range(16, 24)))],
)
def test_names_of_devices_are_their_xcds(name: str, xcds: tuple[int, ...]) -> None:
    assert logical_device(name).xcds == xcds


def test_wrong_device_names_and_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match="no logical device"):
        logical_device("die0")
    with pytest.raises(UsageError, match="the card has 8"):
        logical_device("gpu0/p2")
    with pytest.raises(UsageError, match="roles name nothing"):
        run(trial.vector_add(), torch.zeros(4), torch.zeros(4), torch.zeros(4), 4, roles={"nothing": "weights"})
    short = torch.zeros(100)
    with pytest.raises(KernelFault, match="of 'C' \\(400 bytes\\)"):
        run(trial.vector_add(), torch.zeros(256), torch.zeros(256), short, 256)


def test_flydsls_own_compiled_handle_runs_too() -> None:
    a, b, c = torch.randn(300), torch.randn(300), torch.zeros(300)
    with Session() as session:
        handle = flyc.compile(trial.vector_add(), a, b, c, 300)
        handle(a, b, c, 300, None)
    assert torch.equal(c, a + b)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None and {t.name for t in traffic.buffers} == {"A", "B", "C"}


def test_launches_together_must_agree_on_their_memory(machine: Machine) -> None:
    box = torch.zeros(4 * 16, dtype=torch.int64)
    with pytest.raises(UsageError, match="differ in two_die"), machine.concurrent():
        run(handoff.producer(), box, 4, 0, two_die=True)
        run(handoff.producer(), box, 4, 0, two_die=False)
