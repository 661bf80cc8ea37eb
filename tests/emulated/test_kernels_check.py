"""Every op of the registry has a kernel; all their cases run in test_kernel_command (`kernel check --all`)."""

from __future__ import annotations

from dieplace.kernels.flydsl import OPS
from dieplace.kernels.registry import op_names


def test_every_contract_has_a_kernel() -> None:
    assert set(op_names()) - set(OPS) == {name for name in op_names() if name.startswith("probe_")}
