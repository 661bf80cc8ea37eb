"""References of the hand-offs between shards: what the words and flags must hold afterwards."""

from __future__ import annotations

import torch

from dieplace.kernels.reference import Attrs, Expected, Operands, wide


def handoff_put(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """tag << 32 | bits of the fp32 value."""
    bits = operands["x"].cpu().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return {"mailbox": Expected((attrs["tag"] << 32) | bits)}


def handoff_sum(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """own + sent (+ residual); a word whose tag never came counts as one time-out, and the sum is not to be used."""
    words = operands["mailbox"].cpu()
    tags = words >> 32
    wrong = tags != attrs["tag"]
    sent = wide(((words & 0xFFFFFFFF) << 32 >> 32).to(torch.int32).view(torch.float32))
    terms = [wide(operands["own"]), torch.where(wrong, 0.0, sent)]
    if operands["residual"] is not None:
        terms.append(wide(operands["residual"]))
    last = tags[wrong][-1] if bool(wrong.any()) else torch.zeros((), dtype=torch.int64)
    status = operands["status"].cpu() + torch.stack((wrong.sum(), last))
    return {
        "out": Expected(torch.stack(terms).sum(0), torch.stack([t.abs() for t in terms]).sum(0)),
        "status": Expected(status),
    }


def flag_set(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Every flag line holds the value."""
    return {"flag": Expected(torch.full_like(operands["flag"].cpu(), attrs["value"]))}


def flag_wait(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """How many flag lines did not hold the value, and what the last of them held."""
    flags = operands["flag"].cpu()
    wrong = flags != attrs["value"]
    last = flags[wrong][-1] if bool(wrong.any()) else torch.zeros((), dtype=torch.int32)
    return {"status": Expected(operands["status"].cpu() + torch.stack((wrong.sum().to(torch.int32), last)))}
