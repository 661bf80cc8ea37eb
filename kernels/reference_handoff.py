"""References of the hand-offs between shards: what the words and flags must hold afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from dieplace.errors import Unsupported
from dieplace.kernels.reference import Attrs, Expected, Operands, wide

MASK = 0x7FFFFFFF


def counted(value: int, operands: Operands) -> int:
    """The tag or value itself, or what it is in the step that the device has counted up to; 31 bits."""
    epoch = operands.get("epoch")
    return value if epoch is None else (int(epoch.cpu()[0]) + value) & MASK


def handoff_put(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """tag << 32 | bits of the fp32 value."""
    bits = operands["x"].cpu().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return {"mailbox": Expected((counted(attrs["tag"], operands) << 32) | bits)}


def handoff_sum(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """own + sent (+ residual); a word whose tag never came counts as one time-out, and the sum is not to be used."""
    words = operands["mailbox"].cpu()
    tags = words >> 32
    tag = counted(attrs["tag"], operands)
    wrong = tags != tag
    sent = wide(((words & 0xFFFFFFFF) << 32 >> 32).to(torch.int32).view(torch.float32))
    terms = [wide(operands["own"]), torch.where(wrong, 0.0, sent)]
    if operands["residual"] is not None:
        terms.append(wide(operands["residual"]))
    last = tags[wrong][-1] if bool(wrong.any()) else torch.zeros((), dtype=torch.int64)
    status = operands["status"].cpu() + torch.stack((wrong.sum(), last))
    return {
        "out": Expected(torch.stack(terms).sum(0), torch.stack([t.abs() for t in terms]).sum(0)),
        "status": Expected(status),
        **_record(operands, wrong, tags, tag),
    }


def flag_set(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Every flag line holds the value."""
    return {"flag": Expected(torch.full_like(operands["flag"].cpu(), counted(attrs["value"], operands)))}


def flag_wait(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """How many flag lines did not hold the value, and what the last of them held."""
    flags = operands["flag"].cpu()
    value = counted(attrs["value"], operands)
    wrong = flags != value
    last = flags[wrong][-1] if bool(wrong.any()) else torch.zeros((), dtype=torch.int32)
    status = operands["status"].cpu() + torch.stack((wrong.sum().to(torch.int32), last))
    return {"status": Expected(status), **_record(operands, wrong, flags, value)}


def _record(operands: Operands, wrong: Tensor, held: Tensor, expected: int) -> dict[str, Expected]:
    """The last of the flags that did not come, unless an earlier wait was noted; one block waits."""
    record = operands.get("record")
    if record is None:
        return {}
    kept = record.cpu().clone()
    if bool(wrong.any()) and int(kept[0]) == 0:
        index = int(wrong.nonzero()[-1])
        kept[:] = torch.tensor([index + 1, expected, int(held[index]), 0], dtype=torch.int32)
    return {"record": Expected(kept)}


def epoch_next(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The counter after one more step, 31 bits."""
    return {"epoch": Expected((operands["epoch"].cpu().long() + attrs["step"] & MASK).to(torch.int32))}


def flag_visibility(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The last value in the flag and in every acknowledgement; one party alone has no reference."""
    stamps = operands["stamps"].cpu()
    if attrs["party"] or attrs["parties"] not in (0, stamps.shape[0]):
        raise Unsupported("some parties of a flag have no reference", hint="run all parties in one launch")
    last = attrs["first"] + stamps.shape[1] - 1
    written = {name: operands[name].cpu().clone() for name in ("flag", "acks")}
    written["flag"][0], written["acks"].view(-1, 32)[:, 0] = last, last
    place = torch.zeros_like(operands["xcc"].cpu())
    return {
        **{name: Expected(value) for name, value in written.items()},
        "stamps": Expected(torch.zeros_like(stamps)),
        "xcc": Expected(place),
    }
