"""Every op of the registry on the emulator, on all the cases that `kernel check` uses: 20 or more an op."""

from __future__ import annotations

import pytest

from dieplace.emulator.execution import Session
from dieplace.kernels.check import check_op
from dieplace.kernels.flydsl import OPS
from dieplace.kernels.registry import op_names


def test_every_contract_has_a_kernel() -> None:
    assert set(op_names()) - set(OPS) == {name for name in op_names() if name.startswith("probe_")}


@pytest.mark.slow
@pytest.mark.parametrize("op", list(OPS))
def test_an_op_is_within_tolerance_on_all_its_cases(op: str) -> None:
    with Session(two_die=False):
        result = check_op(op, "flydsl")
    assert result.cases >= 20
    assert not result.failures, "\n".join(f"{f.case}: {f.reason}" for f in result.failures[:5])
