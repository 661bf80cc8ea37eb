"""References of the probes: what a stream folds to, where a chase ends, how far two parties get."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dieplace.errors import Unsupported
from dieplace.kernels.reference import Attrs, Expected, Operands


def fold(words: Tensor) -> int:
    """XOR of all words."""
    return int(np.bitwise_xor.reduce(words.cpu().flatten().numpy(), initial=0))


def probe_stream(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The fold in the first word, zeros elsewhere; every pass folds all words again, so that two cancel."""
    out = torch.zeros_like(operands["out"].cpu())
    out[0] = fold(operands["src"]) if attrs["passes"] % 2 else 0
    return {"out": Expected(out)}


def probe_chase(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """The index after so many hops; clocks and place (the other three words) are the device's to say."""
    following = operands["following"].cpu().tolist()
    index = attrs["start"]
    for _ in range(attrs["hops"]):
        index = following[index]
    return {"out": Expected(torch.tensor([index, 0, 0, 0], dtype=torch.int64))}


def probe_ping_pong(operands: Operands, attrs: Attrs) -> dict[str, Expected]:
    """Both parties finish every round and have read its last value; one party alone has no reference."""
    out = torch.zeros_like(operands["out"].cpu())
    if out.shape[0] != 2:
        raise Unsupported("one party of a ping-pong has no reference", hint="run both parties in one launch")
    last = attrs["first"] + attrs["rounds"] - 1
    out[:, 0], out[:, 2] = attrs["rounds"], last
    flags = {name: Expected(_first(operands[name], last)) for name in ("ping", "pong")}
    return {"out": Expected(out), **flags}


def _first(flag: Tensor, value: int) -> Tensor:
    written = flag.cpu().clone()
    written[0] = value
    return written
