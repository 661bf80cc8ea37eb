"""Run an op's cases on a backend and compare with the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dieplace.errors import DieplaceError
from dieplace.kernels import registry
from dieplace.kernels.cases import Case, cases
from dieplace.kernels.compare import compare


@dataclass(frozen=True)
class Failure:
    """A case that is wrong, and how."""

    case: str
    reason: str


@dataclass(frozen=True)
class CheckResult:
    """One op on one backend: cases run, the worst deviation in units of the tolerance, the wrong ones."""

    op: str
    backend: str
    cases: int
    worst_ratio: float
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Every case within tolerance."""
        return not self.failures


def check_op(
    op: str,
    backend: str,
    *,
    limit: int | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> CheckResult:
    """Run the cases of `op` strictly on `backend`; a kernel's typed error is a failure of that case.

    Operands are moved to torch device `device` for the run and compared on the host. Unsupported where the package that
    the backend's kernels are written in is not installed.
    """
    registry.implementation(op, backend)
    started = time.monotonic()
    worst, failures = 0.0, []
    # Cases are reproducible: one copy is run, the other keeps what in-place operands held before.
    pairs = list(zip(cases(op, limit), cases(op, limit), strict=True))
    for given, kept in pairs:
        if progress:
            progress(given.label)
        ratio, reason = _check_case(op, backend, given, kept, device)
        worst = max(worst, ratio)
        if reason:
            failures.append(Failure(given.label, reason))
    return CheckResult(op, backend, len(pairs), worst, tuple(failures), time.monotonic() - started)


def _check_case(op: str, backend: str, given: Case, kept: Case, device: str) -> tuple[float, str | None]:
    before = registry.check_call(op, kept.operands, kept.attrs)
    # `.to` keeps strides (flag lines) and is the tensor itself where it already is there.
    operands = {name: None if tensor is None else tensor.to(device) for name, tensor in given.operands.items()}
    try:
        registry.run(op, operands, given.attrs, backend=backend, strict=True)
    except DieplaceError as problem:
        return float("inf"), str(problem)
    found = {name: tensor.cpu() for name, tensor in operands.items() if tensor is not None}
    deviation = max(compare(before, found), key=lambda d: d.ratio)
    if not deviation.ok:
        return deviation.ratio, str(deviation)
    touched = _written_inputs(before, found)
    return deviation.ratio, f"wrote to its input {', '.join(touched)}" if touched else None


def _written_inputs(before: registry.Call, found: Mapping[str, Tensor]) -> list[str]:
    """Inputs whose bytes differ from what was given: a store that went astray into an operand of the call."""
    given = {spec.name: before.operands[spec.name] for spec in before.op.operands if spec.use == registry.INPUT}
    return [name for name, kept in given.items() if kept is not None and not same_bytes(kept, found[name])]


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    # Into fresh memory: one flag line keeps its stride even when asked to be contiguous.
    plain = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (first, second)]
    return torch.equal(*(t.view(torch.uint8) for t in plain))
