"""Every op of the registry has a kernel, a fused one those of its parts; all cases run in test_kernel_command."""

from __future__ import annotations

from dieplace.kernels.flydsl import OPS
from dieplace.kernels.fused import PARTS
from dieplace.kernels.registry import op_names


def test_every_contract_has_a_kernel() -> None:
    probes = {name for name in op_names() if name.startswith("probe_")}
    assert set(op_names()) - set(OPS) == probes | set(PARTS)
    assert {part.op for parts in PARTS.values() for part in parts} <= set(OPS)
