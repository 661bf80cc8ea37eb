"""What atomic operations leave in memory, in Python integers, struct and torch."""

from __future__ import annotations

import random
import struct

import torch
from isa_numbers import signed

M32 = 0xFFFFFFFF


def atomic_reference(name: str, old: int, operands: list[int], size: int) -> int:
    bits = 8 * size
    new = operands[0]
    integer = {
        "swap": lambda: new, "cmpswap": lambda: new if old == operands[1] else old, "add": lambda: old + new,
        "sub": lambda: old - new, "and": lambda: old & new, "or": lambda: old | new, "xor": lambda: old ^ new,
        "umin": lambda: min(old, new), "umax": lambda: max(old, new),
        "smin": lambda: min(old, new, key=lambda x: signed(x, bits)),
        "smax": lambda: max(old, new, key=lambda x: signed(x, bits)),
        "inc": lambda: 0 if old >= new else old + 1, "dec": lambda: new if old == 0 or old > new else old - 1,
        "rsub": lambda: new - old,
    }  # fmt: skip
    if name in integer:
        return integer[name]() & ((1 << bits) - 1)
    if name in ("pk_add_f16", "pk_add_bf16"):
        kind = torch.float16 if name.endswith("_f16") else torch.bfloat16
        a, b = (torch.tensor([signed(x, 32)], dtype=torch.int32).view(kind) for x in (old, new))
        return int((a + b).view(torch.int32)[0]) & M32
    code, raw = ("<f", "<I") if size == 4 else ("<d", "<Q")
    a, b = (struct.unpack(code, struct.pack(raw, x))[0] for x in (old, new))
    verb = name.split("_")[0]
    result = {"add": a + b, "min": min(a, b), "max": max(a, b)}[verb]
    if size == 4:
        result = struct.unpack("<f", struct.pack("<f", result))[0]
    return int(struct.unpack(raw, struct.pack(code, result))[0])


def atomic_operands(name: str, size: int, rng: random.Random) -> int:
    """A memory word or operand: of the float kinds, ordinary numbers."""
    if name.startswith("pk_add"):
        code = "<2e" if name.endswith("_f16") else None
        if code:
            return struct.unpack("<I", struct.pack(code, rng.uniform(-4, 4), rng.uniform(-4, 4)))[0]
        return sum((struct.unpack("<I", struct.pack("<f", rng.uniform(-4, 4)))[0] >> 16) << k for k in (0, 16))
    if name.endswith(("f32", "f64")):
        code, raw = ("<f", "<I") if size == 4 else ("<d", "<Q")
        return struct.unpack(raw, struct.pack(code, rng.uniform(-100, 100)))[0]
    return rng.getrandbits(8 * size) if rng.random() < 0.7 else rng.randrange(4)
