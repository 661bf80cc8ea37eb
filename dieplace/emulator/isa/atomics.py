"""Atomic operations on memory words: one function for a pair of values, and its application to many elements in order.

Semantics from the AMD Instinct MI300 ISA guide (FLAT, MUBUF and DS atomics): INC wraps to 0 at or above the operand,
DEC wraps to the operand at 0 or above it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dieplace.emulator.isa.formats import bf16_bits, bf16_values
from dieplace.emulator.isa.state import U32


class Words(Protocol):
    """Memory that can be read and written by address."""

    def read(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint32 [N, words]."""

    def write(self, address: np.ndarray, size: int, data: np.ndarray) -> None:
        """Store uint32 [N, words]."""


def _signed(value: int, size: int) -> int:
    top = 1 << (8 * size - 1)
    return (value ^ top) - top


def _floats(code: str, fn: Callable[[Any, Any], Any]) -> Callable[[int, int, int], int]:
    raw = {"f": "I", "d": "Q"}[code]

    def apply(old: int, new: int, size: int) -> int:
        a, b = (struct.unpack("<" + code, struct.pack("<" + raw, v))[0] for v in (old, new))
        dtype: Any = np.float32 if code == "f" else np.float64
        with np.errstate(all="ignore"):
            result = dtype(fn(dtype(a), dtype(b)))
        return int(result.view(np.uint32 if code == "f" else np.uint64))

    return apply


def _pair(old: int, new: int, size: int) -> int:
    a, b = (np.array([v], np.uint32).view(np.float16) for v in (old, new))
    return int((a + b).view(np.uint32)[0])


def _pair_bf16(old: int, new: int, size: int) -> int:
    a, b = (bf16_values(np.array([v], np.uint32).view(np.uint16)) for v in (old, new))
    return int(bf16_bits(a + b).view(np.uint32)[0])


OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "swap": lambda old, new, size: new,
    "add": lambda old, new, size: old + new,
    "sub": lambda old, new, size: old - new,
    "rsub": lambda old, new, size: new - old,
    "smin": lambda old, new, size: old if _signed(old, size) < _signed(new, size) else new,
    "smax": lambda old, new, size: old if _signed(old, size) > _signed(new, size) else new,
    "umin": lambda old, new, size: min(old, new),
    "umax": lambda old, new, size: max(old, new),
    "and": lambda old, new, size: old & new,
    "or": lambda old, new, size: old | new,
    "xor": lambda old, new, size: old ^ new,
    "inc": lambda old, new, size: 0 if old >= new else old + 1,
    "dec": lambda old, new, size: new if old == 0 or old > new else old - 1,
    "fadd_f32": _floats("f", lambda a, b: a + b),
    "fadd_f64": _floats("d", lambda a, b: a + b),
    "fmin_f32": _floats("f", np.fmin),
    "fmax_f32": _floats("f", np.fmax),
    "fmin_f64": _floats("d", np.fmin),
    "fmax_f64": _floats("d", np.fmax),
    "pk_add_f16": _pair,
    "pk_add_bf16": _pair_bf16,
}


def atomic_value(operation: str, old: int, operands: tuple[int, ...], size: int) -> int:
    """The new word; `cmpswap` takes (new, compare) and stores new where the old value equals compare."""
    if operation == "cmpswap":
        return operands[0] if old == operands[1] else old
    return OPERATIONS[operation](old, operands[0], size) & ((1 << 8 * size) - 1)


def apply_atomic(memory: Words, operation: str, address: np.ndarray, size: int, data: np.ndarray) -> np.ndarray:
    """Apply one atomic per element in order; returns the old values, uint32 [N, size // 4]."""
    count, words = len(address), size // 4
    old = np.zeros((count, words), U32)
    operands = _integers(data, words)
    for element in range(count):
        place = address[element : element + 1]
        before = memory.read(place, size)
        old[element] = before[0]
        value = int.from_bytes(before.tobytes(), "little")
        after = atomic_value(operation, value, operands[element], size)
        memory.write(place, size, np.frombuffer(after.to_bytes(size, "little"), U32)[None, :])
    return old


def _integers(data: np.ndarray, words: int) -> list[tuple[int, ...]]:
    """Operand words of each element as integers of the memory word's size."""
    parts = data.shape[1] // words
    flat = np.ascontiguousarray(data, U32).reshape(len(data), parts, words)
    return [tuple(int.from_bytes(part.tobytes(), "little") for part in element) for element in flat]
