"""Operands over 2 GiB: right to the last row, or refused before launch (reports of 32-bit offsets that wrap)."""

import pytest
import torch

from dieplace.emulator.execution import Session
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.errors import Unsupported
from dieplace.kernels import registry
from dieplace.machine import Domain

HBM_BYTES = 144_000_000_000


@pytest.mark.slow
def test_a_matrix_of_2_3_gigabytes_is_right_in_its_last_row() -> None:
    """402,176 x 2,880 bf16 is 2,316,533,760 bytes; only rows beyond the wrap of 31 and of 32 bits hold anything."""
    rows, k = 402_176, 2_880
    hbm = EmulatedHBM([Domain("gpu0/mem0", "gpu0", (0,), HBM_BYTES), Domain("gpu0/mem1", "gpu0", (1,), HBM_BYTES)])
    weight = hbm.empty((rows, k), torch.bfloat16, "gpu0/mem0", role="weights")
    assert weight.numel() * 2 == 2_316_533_760 > 2**31
    first_over = 2**31 // (2 * k) + 1
    for row, value in ((0, 1.0), (first_over, 2.0), (rows - 1, 3.0)):
        weight[row] = value
    out = torch.full((1, rows), torch.nan)
    operands = {"x": torch.ones(1, k, dtype=torch.bfloat16), "weight": weight, "bias": None, "out": out}
    with Session(device="gpu0/p0", memory=hbm, two_die=False):
        registry.run("gemv_bf16", operands, backend="flydsl", strict=True)
    found = {int(row): float(out[0, row]) for row in out[0].nonzero().flatten()}
    assert found == {0: 1.0 * k, first_over: 2.0 * k, rows - 1: 3.0 * k}


def test_beyond_the_contract_is_refused_before_launch() -> None:
    """5,760-wide rows make 4,633,067,520 bytes: more than a buffer descriptor counts."""
    weight = torch.empty(402_176, 5_760, dtype=torch.bfloat16, device="meta")
    out = torch.zeros(1, 402_176)
    operands = {"x": torch.ones(1, 5_760, dtype=torch.bfloat16), "weight": weight, "bias": None, "out": out}
    with pytest.raises(Unsupported, match="weight spans 4633067520 bytes"):
        registry.run("gemv_bf16", operands, backend="flydsl", strict=True)
    assert not out.any()
