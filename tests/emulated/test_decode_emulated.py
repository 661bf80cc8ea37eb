"""Decode steps on the emulated card: FlyDSL kernels from their gfx950 code, operands in the HBM of a chosen die."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import MAKERS, build, follow

from dieplace.experiments.private_node import private_node
from dieplace.kernels.placement import MachinePlacement, on_machine
from dieplace.machine import Machine
from dieplace.policy import Policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dpx() -> Iterator[Machine]:
    with private_node("DPX/NPS2") as machine:
        yield machine


def placed(machine: Machine, shards: int, **policies: Policy) -> MachinePlacement:
    return on_machine(machine, ["gpu0/p0", "gpu0/p1"][:shards], policies)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_sixteen_tokens_from_the_kernels_isa(family: str, shards: int, tmp_path: Path, dpx: Machine) -> None:
    """Logits and greedy tokens as `transformers`; every op ran as a kernel; bytes counted equal the contract."""
    theirs, config = MAKERS[family](tmp_path)
    ours = build(tmp_path, config, shards, placed(dpx, shards), splits=3, page=4, backend="flydsl", strict=True)
    steps = follow(theirs, ours)
    for step in steps:
        ran = {op: backends for op, backends in step.ledger.backends().items() if op != "embed"}
        assert set.union(*ran.values()) == {"flydsl"}
    last = steps[-1].ledger
    contract, counted = last.bytes_by_role_and_die(), last.counted_by_role_and_die()
    row = config.hidden * 2  # the embedding row is copied, not read by a kernel
    dies = [f"die{die}" for die in range(shards)]
    assert set(counted["weights"]) == set(dies)
    assert sum(counted["weights"].values()) == sum(contract["weights"].values()) - shards * row
    assert {f"gpu0/{die}": n for die, n in counted["kv_cache"].items()} == contract["kv_cache"]
    assert {f"gpu0/{die}": n for die, n in counted["sync_flag"].items()} == contract["sync_flag"]


def test_swapped_weights_change_where_bytes_are_read_and_nothing_else(tmp_path: Path, dpx: Machine) -> None:
    """Two shards, every shard's weights on the other die: the same logits, all weight bytes from the peer."""
    theirs, config = MAKERS["gpt_oss"](tmp_path)
    local = build(tmp_path, config, 2, placed(dpx, 2), backend="flydsl", strict=True)
    far = build(tmp_path, config, 2, placed(dpx, 2, weights=Policy.peer()), backend="flydsl", strict=True)
    here, there = (follow(theirs, model, steps=2) for model in (local, far))
    for one, other in zip(here, there, strict=True):
        assert (one.logits == other.logits).all()
    assert _sides(here[-1], "weights") == {"local"} and _sides(there[-1], "weights") == {"peer"}
    assert _sides(here[-1], "kv_cache") == _sides(there[-1], "kv_cache") == {"local"}


def _sides(step: Any, role: str) -> set[str]:
    """Sides that any launch of the step read the role's bytes from."""
    found: set[str] = set()
    for kernel in (k for call in step.ledger.calls for k in call.kernels):
        read = kernel.traffic.by_role().get(role, (None,))[0]
        found |= {side for side, n in (read.requested_by_side if read else {}).items() if n}
    return found


def test_verify_rounds_read_each_distinct_expert_once(tmp_path: Path, dpx: Machine) -> None:
    """Three tokens fill nine slots from eight experts: the union is read once, to the byte."""
    _, config = MAKERS["gpt_oss"](tmp_path)
    ours = build(tmp_path, config, 1, placed(dpx, 1), backend="flydsl", strict=True)
    ledger = ours.step([5, 17, 80]).ledger
    for call in (c for c in ledger.calls if c.stage == "experts"):
        contract = sum(o.nbytes for o in call.operands if o.role == "weights")
        counted = sum(k.traffic.by_role()["weights"][0].distinct for k in call.kernels)
        whole = ours.weights.get(0, f"layers.{call.layer}.{'gate_up' if call.op.endswith('up') else 'down'}.blocks")
        assert whole is not None
        assert counted == contract
        assert 3 * whole[0].numel() < contract < 8 * whole[0].numel() * 17 // 16 + 8 * 4 * 64
