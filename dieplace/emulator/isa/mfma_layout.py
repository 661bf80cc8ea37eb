"""Where matrix instructions keep their elements: lane and register of every row, column and k, and how values decode.

Layouts follow AMD's matrix instruction calculator for CDNA 3 and agree with FlyDSL's MMA atoms: lane l of A holds row
l % M and a run of k values, B likewise with columns, D holds column l % N and rows in groups of four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dieplace.emulator.isa.formats import BF6, BF8, FP4, FP6, FP8, Format, bf16_values, values
from dieplace.emulator.isa.state import F32, F64, LANES

LANE = np.arange(LANES)
Decode = Callable[[np.ndarray], np.ndarray]  # uint32 [n, 64, words] to float64 [n, 64, values]


@dataclass(frozen=True)
class Shape:
    """M x N x K with `blocks` independent products; `words` is the registers of A and B in one lane."""

    m: int
    n: int
    k: int
    blocks: int
    words: int

    @property
    def accumulators(self) -> int:
        """Result registers in one lane."""
        return self.m * self.n * self.blocks // LANES


def bf16_lanes(words: np.ndarray) -> np.ndarray:
    return bf16_values(words.view(np.uint16)).astype(F64)


def f16_lanes(words: np.ndarray) -> np.ndarray:
    return words.view(np.float16).astype(F64)


def f32_lanes(words: np.ndarray) -> np.ndarray:
    return words.view(F32).astype(F64)


def f64_lanes(words: np.ndarray) -> np.ndarray:
    return words.view(F64)


def i8_lanes(words: np.ndarray) -> np.ndarray:
    return words.view(np.int8).astype(F64)


def bytes_of(fmt: Format) -> Decode:
    table = values(fmt)
    return lambda words: table[words.view(np.uint8)]


def packed_of(fmt: Format) -> Decode:
    """4- and 6-bit values, packed low bits first across the lane's registers."""
    table, weights = values(fmt), 1 << np.arange(fmt.bits)

    def decode(words: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return table[bits.reshape(*bits.shape[:-1], -1, fmt.bits) @ weights]

    return decode


def nibbles_of(fmt: Format) -> Decode:
    table = values(fmt)

    def decode(words: np.ndarray) -> np.ndarray:
        octets = words.view(np.uint8)
        both = np.empty((*octets.shape, 2), F64)
        both[..., 0], both[..., 1] = table[octets & 15], table[octets >> 4]
        return both.reshape(*octets.shape[:-1], -1)

    return decode


# cbsz and blgp of the f8f6f4 forms: format, registers in one lane (MI350 ISA guide, "Block scaled matrix").
F8F6F4: dict[int, tuple[Decode, int]] = {0: (bytes_of(FP8), 8), 1: (bytes_of(BF8), 8), 2: (packed_of(FP6), 6),
                                         3: (packed_of(BF6), 6), 4: (nibbles_of(FP4), 4)}  # fmt: skip


def to_wide_matrix(shape: Shape, lanes: np.ndarray, rows: int, octets: bool) -> np.ndarray:
    """[n, 64, 32] values of the f8f6f4 forms to [n, 1, rows, k].

    4- and 6-bit values of a lane are 32 neighbours in k. 8-bit values are two runs of 16, half of K apart (AMD,
    "Matrix Core Programming on CDNA 3 and CDNA 4", figure of the 32x32x64 form).
    """
    n, groups = lanes.shape[0], LANES // rows
    if octets:
        runs = lanes.reshape(n, groups, rows, 2, 16).transpose(0, 2, 3, 1, 4)
        return runs.reshape(n, 1, rows, groups * 32)
    return to_matrix(shape, lanes, rows)


def to_matrix(shape: Shape, lanes: np.ndarray, rows: int) -> np.ndarray:
    """[n, 64, run] values of lanes to [n, blocks, rows, k]."""
    n, run = lanes.shape[0], lanes.shape[2]
    groups = LANES // (rows * shape.blocks)
    split = lanes.reshape(n, shape.blocks, groups, rows, run)
    return split.transpose(0, 1, 3, 2, 4).reshape(n, shape.blocks, rows, groups * run)


def places(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, row and column of result register r in lane l, each [accumulators, 64]."""
    r = np.arange(shape.accumulators)[:, None]
    if shape.m == 4:
        return (
            np.broadcast_to(LANE // 4, (4, LANES)),
            np.broadcast_to(r, (4, LANES)),
            np.broadcast_to(LANE % 4, (4, LANES)),
        )
    per_block = shape.m * shape.n // LANES
    within = r % per_block
    group = LANES // shape.n
    row = 4 * group * (within // 4) + 4 * (LANE // shape.n)[None, :] + within % 4
    return np.broadcast_to(r // per_block, row.shape), row, np.broadcast_to(LANE % shape.n, row.shape)


def places_f64() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The float64 form holds row 4 * r + lane // 16 of column lane % 16 in result r."""
    row = 4 * np.arange(4)[:, None] + (LANE // 16)[None, :]
    return np.zeros_like(row), row, np.broadcast_to(LANE % 16, row.shape)
