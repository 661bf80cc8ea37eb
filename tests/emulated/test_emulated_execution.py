"""The execution group of the emulated backend: launches run on the card, time is the clock's and is called modelled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import trial_kernels as trial
from dpx_machine import dpx_machine

from dieplace.backends.base import Execution, Timing, require
from dieplace.clock import arm, over_sets
from dieplace.codegen.flydsl import bind
from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.step import stages
from dieplace.machine import Device, Machine
from dieplace.workload import Handoff, Operand, Stage, Workload

ROWS, WIDTH = 16, 512


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with dpx_machine() as switched:
        yield switched


def projection(die: Device, side: str) -> tuple[Workload, torch.Tensor, torch.Tensor]:
    """One stage that multiplies by weights which lie on the device's own die or on its peer's; what it must give."""
    with getattr(die, side)(role="weights"):
        w = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
    w.copy_(torch.randn(ROWS, WIDTH) / 16)
    with die.local(role="activation"):
        x, y = torch.ones(WIDTH, dtype=torch.bfloat16), torch.zeros(ROWS)
    kernel = bind(trial.gemv_bf16(ROWS, WIDTH), w, x, y)
    # The clock is told of a layer's worth of bytes: a kilobyte would vanish beside the hand-off.
    stage = Stage(
        "qkv", (Operand("w", "weights", 10**7),), Handoff("qkv", "packed"), launches=(lambda: kernel(w, x, y),)
    )
    return Workload("projection", (stage,)), y, w.double() @ x.double()


def execution_of(machine: Machine) -> Execution:
    found: Execution = require(machine.require_session("launch"), "execution").execution
    return found


def timed(machine: Machine, side: str) -> Timing:
    die = machine.device("gpu0/p0")
    work, y, expected = projection(die, side)
    execution = execution_of(machine)
    prepared = execution.prepare(work, die)
    assert not y.any()
    execution.launch(prepared)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    (found,) = execution.time(prepared)
    return found


def test_time_is_the_clocks_for_where_the_bytes_were_read_from(machine: Machine) -> None:
    work = Workload("projection", (Stage("qkv", (Operand("w", "weights", 10**7),), Handoff("qkv", "packed")),))
    for side, name in (("local", "local"), ("peer", "swapped")):
        found = timed(machine, side)
        asked = over_sets(work, arm(name), lambda token: token.token_us)
        assert (found.origin, found.samples_ns) == ("modelled", ()) and found.range_ns is not None
        assert found.value_ns == pytest.approx(asked.value * 1000)
        assert found.range_ns == pytest.approx((asked.low * 1000, asked.high * 1000))
        assert found.detail["peer_share"]["weights"] == (side == "peer")


def test_both_halves_run_together(machine: Machine) -> None:
    execution = execution_of(machine)
    made = [projection(machine.device(name), "local") for name in ("gpu0/p0", "gpu0/p1")]
    prepared = [execution.prepare(m[0], machine.device(d)) for m, d in zip(made, ("gpu0/p0", "gpu0/p1"), strict=True)]
    times = execution.time(*prepared)
    assert len(times) == 2 and times[0].value_ns == times[1].value_ns
    for _, y, expected in made:
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_clock_needs_bytes(machine: Machine) -> None:
    execution, die = execution_of(machine), machine.device("gpu0/p0")
    prepared = execution.prepare(Workload.of_launches("qkv", [lambda: None]), die)
    with pytest.raises(Unsupported, match="its stages name no bytes"):
        execution.time(prepared)


def test_a_decode_step_stays_a_description(machine: Machine) -> None:
    """Shapes of a model make a workload that the clock times and nothing can launch."""
    with pytest.raises(UsageError, match="has no launches"):
        execution_of(machine).prepare(stages("gpt-oss-120b", precision="mxfp4"), machine.device("gpu0/p0"))
