"""Matrix instructions against float64 torch products of matrices laid out by AMD's published lane tables."""

from __future__ import annotations

import random

import pytest
import torch
from isa_bench import run_wave
from isa_numbers import BF6, BF8, BF16, F16, F32, F64, FP4, FP6, FP8, FloatFormat, round_to, to_float
from isa_tables import MATRIX, SCALED_MATRIX

WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "i8": 8, "fp8": 8, "bf8": 8}
FORMATS: dict[str, FloatFormat] = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "fp8": FP8, "bf8": BF8}
WIDE = {0: FP8, 1: BF8, 2: FP6, 3: BF6, 4: FP4}
A, B, C, D = 16, 32, 48, 80


def code_of(kind: str, rng: random.Random) -> int:
    if kind == "i8":
        return rng.getrandbits(8)
    fmt = FORMATS[kind]
    return round_to(rng.choice([-1, 1]) * rng.uniform(0.25, 4), fmt)


def value_of(kind: str, code: int) -> float:
    return float(code - 256 if code > 127 else code) if kind == "i8" else to_float(code, FORMATS[kind])


def lane_registers(codes: list[list[int]], bits: int, first: int) -> dict[int, list[int]]:
    """codes[lane] as little-endian fields of `bits` in consecutive registers."""
    words = len(codes[0]) * bits // 32
    packed = [sum(code << bits * k for k, code in enumerate(lane)) for lane in codes]
    return {first + w: [value >> 32 * w & 0xFFFFFFFF for value in packed] for w in range(words)}


def source(kind: str, m: int, k: int, blocks: int, seed: str) -> tuple[list[list[int]], torch.Tensor]:
    """Codes a lane holds and the matrix [blocks, m, k]: lane = row + m * (block or k-group), runs of k in a lane."""
    rng = random.Random(seed)
    run = k * m * blocks // 64
    codes = [[code_of(kind, rng) for _ in range(run)] for _ in range(64)]
    matrix = torch.zeros(blocks, m, k, dtype=torch.float64)
    for lane in range(64):
        group = lane // m
        block, start = (group, 0) if blocks > 1 else (0, group * run)
        for place, code in enumerate(codes[lane]):
            matrix[block, lane % m, start + place] = value_of(kind, code)
    return codes, matrix


def result_place(m: int, blocks: int, register: int, lane: int, f64: bool) -> tuple[int, int, int]:
    """Block, row, column of a result register (AMD matrix instruction calculator)."""
    if m == 4:
        return lane // 4, register, lane % 4
    if f64:
        return 0, 4 * register + lane // 16, lane % 16
    per_block = m * m // 64
    within = register % per_block
    rows = 8 if m == 32 else 16
    return register // per_block, rows * (within // 4) + 4 * (lane // m) + within % 4, lane % m


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_matrix_product(name: str) -> None:
    kind, m, k, blocks = MATRIX[name]
    left, right = kind.split("_") if "8_" in kind else (kind, kind)
    codes_a, a = source(left, m, k, blocks, name + "a")
    codes_b, b = source(right, m, k, blocks, name + "b")
    f64 = kind == "f64"
    count = m * m * blocks // 64
    rng = random.Random(name)
    wanted = a @ b.transpose(1, 2)
    addend = [[rng.randint(-9, 9) for _ in range(64)] for _ in range(count)]
    vgprs = lane_registers(codes_a, WIDTHS[left], A) | lane_registers(codes_b, WIDTHS[right], B)
    wide = 2 if f64 else 1
    for r in range(count):
        codes = [x & 0xFFFFFFFF if kind == "i8" else round_to(float(x), F64 if f64 else F32) for x in addend[r]]
        for h in range(wide):
            vgprs[C + wide * r + h] = [c >> 32 * h & 0xFFFFFFFF for c in codes]
    words = max(1, len(codes_a[0]) * WIDTHS[left] // 32)
    reg = lambda first, n: f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"  # noqa: E731
    text = f"{name} {reg(D, count * wide)}, {reg(A, words)}, {reg(B, words)}, {reg(C, count * wide)}"
    after = run_wave(text, vgprs, exec_mask=1)
    for r in range(count):
        for lane in range(64):
            block, row, column = result_place(m, blocks, r, lane, f64)
            want = float(wanted[block, row, column]) + addend[r][lane]
            if kind == "i8":
                assert after.v(D + r)[lane] == int(want) & 0xFFFFFFFF
                continue
            code = after.v64(D + 2 * r)[lane] if f64 else after.v(D + r)[lane]
            got = to_float(code, F64 if f64 else F32)
            assert got == pytest.approx(want, rel=2e-7, abs=1e-5), f"register {r}, lane {lane}"


def wide_source(fmt: FloatFormat, m: int, k: int, seed: str) -> tuple[list[list[int]], list[int], torch.Tensor]:
    """Codes, scale bytes and scaled matrix of the f8f6f4 forms."""
    rng = random.Random(seed)
    groups = 64 // m
    codes = [[rng.getrandbits(fmt.bits) for _ in range(32)] for _ in range(64)]
    if fmt in (FP8, BF8):  # no NaN, no infinity
        codes = [[c & 0xBF if fmt is FP8 else c & 0xBB for c in lane] for lane in codes]
    scales = [rng.randint(120, 134) for _ in range(64)]
    matrix = torch.zeros(m, k, dtype=torch.float64)
    for lane in range(64):
        group, row = lane // m, lane % m
        for place, code in enumerate(codes[lane]):
            column = 32 * group + place
            if fmt.bits == 8:
                column = 16 * group + place if place < 16 else k // 2 + 16 * group + place - 16
            matrix[row, column] = to_float(code, fmt)
    for lane in range(64):
        group, row = lane // m, lane % m
        matrix[row, 32 * group : 32 * group + 32] *= 2.0 ** (scales[lane] - 127)
    assert groups * 32 == k
    return codes, scales, matrix


@pytest.mark.parametrize("name", sorted(SCALED_MATRIX))
@pytest.mark.parametrize(("cbsz", "blgp"), [(0, 0), (1, 0), (4, 4), (4, 0), (2, 3), (3, 1), (0, 4)])
def test_block_scaled_product(name: str, cbsz: int, blgp: int) -> None:
    m, k, scaled = SCALED_MATRIX[name]
    codes_a, scale_a, a = wide_source(WIDE[cbsz], m, k, f"{name}{cbsz}a")
    codes_b, scale_b, b = wide_source(WIDE[blgp], m, k, f"{name}{blgp}b")
    if not scaled:
        for matrix, scales in ((a, scale_a), (b, scale_b)):
            for lane in range(64):
                matrix[lane % m, 32 * (lane // m) : 32 * (lane // m) + 32] /= 2.0 ** (scales[lane] - 127)
    vgprs = lane_registers(codes_a, WIDE[cbsz].bits, A) | lane_registers(codes_b, WIDE[blgp].bits, B)
    vgprs |= {2: [s << 16 | 0x7F for s in scale_a], 3: [s << 8 | 0x7F for s in scale_b]}
    count = m * m // 64
    words = {8: 8, 6: 6, 4: 4}
    operands = (f"v[{D}:{D + count - 1}], v[{A}:{A + words[WIDE[cbsz].bits] - 1}], "
                f"v[{B}:{B + words[WIDE[blgp].bits] - 1}], 0")  # fmt: skip
    tail = ", v2, v3 op_sel:[0,1,0] op_sel_hi:[1,0,0]" if scaled else ""
    after = run_wave(f"{name} {operands}{tail} cbsz:{cbsz} blgp:{blgp}", vgprs)
    wanted = a @ b.T
    for r in range(count):
        for lane in range(64):
            _, row, column = result_place(m, 1, r, lane, False)
            got = to_float(after.v(D + r)[lane], F32)
            assert got == pytest.approx(float(wanted[row, column]), rel=3e-7, abs=1e-30)


def test_scale_byte_255_is_nan() -> None:
    vgprs = {r: [0] * 64 for r in range(A, A + 4)} | {r: [0] * 64 for r in range(B, B + 4)}
    vgprs |= {2: [127] * 3 + [255] + [127] * 60, 3: [127] * 64}
    text = (
        f"v_mfma_scale_f32_16x16x128_f8f6f4 v[{D}:{D + 3}], v[{A}:{A + 3}], v[{B}:{B + 3}], 0, v2, v3 op_sel_hi:[0,0,0]"
    )
    after = run_wave(f"{text} cbsz:4 blgp:4", vgprs)
    rows = {
        4 * (lane // 16) + r for r in range(4) for lane in range(64) if after.v(D + r)[lane] & 0x7F800000 == 0x7F800000
    }
    assert rows == {3}


def test_broadcast_modifiers_that_are_not_modelled_are_refused() -> None:
    with pytest.raises(Exception, match="cbsz"):
        run_wave("v_mfma_f32_4x4x4_16b_f16 v[80:83], v[16:17], v[32:33], v[48:51] cbsz:2")
