"""The check of kernels must catch a kernel that is wrong: the faults here are put into kernels that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dieplace.kernels import registry
from dieplace.kernels.cases import Case, cases
from dieplace.kernels.check import check_op, same_bytes
from dieplace.kernels.reference import wide

LIMIT = 6  # cases an op
Fault = Callable[[registry.Call], None]
OPS = registry.op_names()


def kernel_with(fault: Fault, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The reference as a kernel, with a fault after it."""

    def kernel(operands: Any, attrs: Any, *, stream: Any = None) -> None:
        call = registry.check_call(op, operands, attrs)
        registry.run_reference(call)
        fault(call)

    monkeypatch.setattr(registry, "implementation", lambda name, backend: kernel)


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_without_a_fault_passes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_with(lambda call: None, monkeypatch, op)
    found = check_op(op, "flydsl", limit=LIMIT)
    assert found.ok and found.cases == LIMIT, [str(f) for f in found.failures]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_writes_nothing_is_caught(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every case that asks for anything: a wait whose flags are all up leaves its status alone, rightly."""
    monkeypatch.setattr(registry, "implementation", lambda name, backend: lambda operands, attrs, stream=None: None)
    asking = [case.label for case in cases(op, LIMIT) if _changes(op, case)]
    assert len(asking) >= LIMIT - 2
    assert [failure.case for failure in check_op(op, "flydsl", limit=LIMIT).failures] == asking


@pytest.mark.parametrize("op", OPS)
def test_a_store_into_an_input_is_caught(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stray(call: registry.Call) -> None:
        given = _tensors(call, registry.INPUT)
        if given:
            _invert_last(next(iter(given.values())))

    kernel_with(stray, monkeypatch, op)
    inputs = [spec.name for spec in registry.op(op).operands if spec.use == registry.INPUT]
    with_inputs = [case for case in cases(op, LIMIT) if any(case.operands.get(name) is not None for name in inputs)]
    found = check_op(op, "flydsl", limit=LIMIT)
    assert [failure.case for failure in found.failures] == [case.label for case in with_inputs]
    assert all("wrote to its input" in failure.reason for failure in found.failures)


@pytest.mark.parametrize(("op", "output"), [(op, spec.name) for op in OPS for spec in registry.op(op).outputs])
def test_each_output_is_compared_to_its_last_element(op: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one element inverted, everything else right."""

    def wrong(call: registry.Call) -> None:
        target = call.operands[output]
        if target is not None:
            _invert_last(target)

    kernel_with(wrong, monkeypatch, op)
    given = [case.label for case in cases(op, LIMIT) if case.operands.get(output) is not None]
    assert [failure.case for failure in check_op(op, "flydsl", limit=LIMIT).failures] == given


def _tensors(call: registry.Call, *uses: str) -> dict[str, Tensor]:
    """Operands with elements, by use."""
    named = {spec.name: call.operands[spec.name] for spec in call.op.operands if spec.use in uses}
    return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.numel()}


def _invert_last(tensor: Tensor) -> None:
    last = torch.empty(1, dtype=tensor.dtype).copy_(tensor[(-1,) * tensor.ndim])
    tensor[(-1,) * tensor.ndim] = (~last.view(torch.uint8)).view(tensor.dtype)[0]


def _changes(op: str, case: Case) -> bool:
    call = registry.check_call(op, case.operands, case.attrs)
    before = {name: t.clone() for name, t in _tensors(call, registry.OUTPUT, registry.IN_PLACE).items()}
    registry.run_reference(call)
    after = _tensors(call, registry.OUTPUT, registry.IN_PLACE)
    return any(not same_bytes(after[n], t) and not bool((wide(after[n]) == wide(t)).all()) for n, t in before.items())
