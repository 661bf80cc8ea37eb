"""Conversions from and to 8-, 6- and 4-bit floats, and division, against exact arithmetic."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from isa_bench import run_wave
from isa_numbers import F16, F32, F64, FORMATS, bits_of, is_nan, nan, round_to, samples, to_float, ulps
from isa_tables import NARROW_32, NARROW_PAIR, UNSCALED, UNSCALED_WIDEN, WIDEN_32, WIDEN_ONE, WIDEN_PAIR

LANES = range(64)


def scales(seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(100, 150) << 23 | rng.getrandbits(23) | rng.getrandbits(1) << 31 for _ in LANES]


def power(scale: int) -> Fraction:
    return Fraction(2) ** ((scale >> 23 & 255) - 127)


def widened(code: int, narrow: str, wide: str, scale: int | None) -> int:
    value = to_float(code, FORMATS[narrow])
    if not math.isfinite(value) or value == 0:
        return round_to(value, FORMATS[wide])
    return round_to(Fraction(value) * (power(scale) if scale is not None else 1), FORMATS[wide])


def narrowed(code: int, narrow: str, wide: str, scale: int | None) -> int:
    value = to_float(code, FORMATS[wide])
    if not math.isfinite(value) or value == 0:
        return round_to(value, FORMATS[narrow])
    return round_to(Fraction(value) / (power(scale) if scale is not None else 1), FORMATS[narrow])


def same(got: int, want: int, kind: str) -> bool:
    return got == want or ulps(got, want, FORMATS[kind]) == 0


def words(seed: str, count: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.getrandbits(32) for _ in LANES] for _ in range(count)]


@pytest.mark.parametrize("name", sorted(WIDEN_PAIR))
def test_widening_two(name: str) -> None:
    wide, narrow = WIDEN_PAIR[name]
    bits, source, scale = FORMATS[narrow].bits, words(name)[0], scales(name)
    for select in range(4 if bits == 4 else 2):
        dst = "v[8:9]" if wide == "f32" else "v8"
        text = f"{name} {dst}, v10, v11 op_sel:[{select & 1},{select >> 1},0]"
        after = run_wave(text, {10: source, 11: scale})
        for lane in LANES:
            field = source[lane] >> 2 * bits * select
            pair = [widened(field >> bits * k & ((1 << bits) - 1), narrow, wide, scale[lane]) for k in (0, 1)]
            low = after.v(8)[lane]
            got = [low, after.v(9)[lane]] if wide == "f32" else [low & 0xFFFF, low >> 16]
            assert all(same(g, w, wide) for g, w in zip(got, pair, strict=True)), f"{text}: lane {lane}"


@pytest.mark.parametrize("name", sorted(WIDEN_ONE))
def test_widening_one(name: str) -> None:
    wide, narrow = WIDEN_ONE[name]
    source, scale = words(name)[0], scales(name)
    for byte in range(4):
        half = byte & 1 if wide == "f16" else 0
        text = f"{name} v8, v10, v11 op_sel:[{byte & 1},{byte >> 1},{half}]"
        after = run_wave(text, {8: [0xABCD1234] * 64, 10: source, 11: scale})
        for lane in LANES:
            want = widened(source[lane] >> 8 * byte & 255, narrow, wide, scale[lane])
            got = after.v(8)[lane]
            if wide == "f16":
                assert (got & 0xFFFF if half else got >> 16) == (0x1234 if half else 0xABCD)
                got = got >> 16 if half else got & 0xFFFF
            assert same(got, want, wide), f"{text}: lane {lane}"


@pytest.mark.parametrize("name", sorted(UNSCALED_WIDEN))
def test_widening_without_scale(name: str) -> None:
    narrow, source = UNSCALED_WIDEN[name], words(name)[0]
    pair = "_pk_" in name
    for text, place in ((f"{name}_e32", 0), (f"{name}_sdwa", 1)):
        sel = f" src0_sel:{'WORD_1' if pair else 'BYTE_1'}" if place else ""
        after = run_wave(f"{text} {'v[8:9]' if pair else 'v8'}, v10{sel}", {10: source})
        for lane in LANES:
            shift = (16 if pair else 8) * place
            for k in range(2 if pair else 1):
                want = widened(source[lane] >> shift + 8 * k & 255, narrow, "f32", None)
                assert same(after.v(8 + k)[lane], want, "f32")


def sources_of(wide: str, narrow: str, seed: str, count: int) -> list[list[int]]:
    """Operands; without NaNs for formats that have none, where the MX specification leaves the result open."""
    one = round_to(Fraction(1), FORMATS[wide])
    keep = FORMATS[narrow].specials != "none"
    return [
        [x if keep or not is_nan(x, FORMATS[wide]) else one for x in samples(wide, f"{seed}{k}")] for k in range(count)
    ]


@pytest.mark.parametrize("name", sorted(NARROW_PAIR))
def test_narrowing_two(name: str) -> None:
    wide, narrow = NARROW_PAIR[name]
    bits, scale = FORMATS[narrow].bits, scales(name)
    first, second = sources_of(wide, narrow, name, 2)
    for place in range(4 if bits == 4 else 2):
        if bits == 4:
            select = f" op_sel:[0,0,{place & 1},{place >> 1}]"
        else:
            select = f" op_sel:[0,0,0,{place}]" if wide == "f32" else f" op_sel:[0,0,{place}]"
        if wide == "f32":
            text, vgprs = f"{name} v8, v10, v12, v11{select}", {10: first, 12: second}
        else:
            text, vgprs = (
                f"{name} v8, v10, v11{select}",
                {10: [a | b << 16 for a, b in zip(first, second, strict=True)]},
            )
        after = run_wave(text, {8: [0x5A5A5A5A] * 64, 11: scale} | vgprs)
        for lane in LANES:
            codes = [narrowed(x[lane], narrow, wide, scale[lane]) for x in (first, second)]
            shift, width = 2 * bits * place, 2 * bits
            got = after.v(8)[lane]
            kept = ~(((1 << width) - 1) << shift) & 0xFFFFFFFF
            assert got & kept == 0x5A5A5A5A & kept, f"{text}: other bits changed"
            pair = [got >> shift + bits * k & ((1 << bits) - 1) for k in (0, 1)]
            assert all(close(g, w, narrow) for g, w in zip(pair, codes, strict=True)), (
                f"{text}: lane {lane} {pair} {codes}"
            )


def close(got: int, want: int, kind: str) -> bool:
    fmt = FORMATS[kind]
    return got == want or (fmt.specials != "none" and is_nan(got, fmt) and is_nan(want, fmt))


@pytest.mark.parametrize("name", sorted(UNSCALED))
def test_narrowing_without_scale(name: str) -> None:
    first, second = sources_of("f32", UNSCALED[name], name, 2)
    for half in (0, 1):
        text = f"{name} v8, v10, v12 op_sel:[0,0,{half}]"
        after = run_wave(text, {8: [0x5A5A5A5A] * 64, 10: first, 12: second})
        for lane in LANES:
            got = after.v(8)[lane]
            assert (got & 0xFFFF if half else got >> 16) == 0x5A5A
            pair = [got >> 16 * half + 8 * k & 255 for k in (0, 1)]
            want = [narrowed(x[lane], UNSCALED[name], "f32", None) for x in (first, second)]
            assert all(close(g, w, UNSCALED[name]) for g, w in zip(pair, want, strict=True))


def fields6(lane_words: list[int]) -> list[int]:
    packed = sum(w << 32 * k for k, w in enumerate(lane_words))
    return [packed >> 6 * k & 63 for k in range(32)]


@pytest.mark.parametrize("name", sorted(WIDEN_32))
def test_widening_thirty_two(name: str) -> None:
    wide, narrow = WIDEN_32[name]
    source, scale = words(name, 6), scales(name)
    count = 32 if wide == "f32" else 16
    text = f"{name} v[64:{63 + count}], v[10:15], v20"
    after = run_wave(text, {10 + k: source[k] for k in range(6)} | {20: scale})
    for lane in LANES:
        for place, code in enumerate(fields6([source[k][lane] for k in range(6)])):
            want = widened(code, narrow, wide, scale[lane])
            got = (
                after.v(64 + place)[lane]
                if wide == "f32"
                else after.v(64 + place // 2)[lane] >> 16 * (place & 1) & 0xFFFF
            )
            assert same(got, want, wide)


@pytest.mark.parametrize("name", sorted(NARROW_32))
def test_narrowing_thirty_two(name: str) -> None:
    wide, narrow = NARROW_32[name]
    numbers, scale = sources_of(wide, narrow, name, 32), scales(name)
    if wide == "f32":
        text = f"{name} v[8:13], v[16:31], v[32:47], v50"
        vgprs = {16 + k: numbers[2 * k] for k in range(16)} | {32 + k: numbers[2 * k + 1] for k in range(16)}
    else:
        text = f"{name} v[8:13], v[16:31], v50"
        pairs = [[a | b << 16 for a, b in zip(numbers[2 * k], numbers[2 * k + 1], strict=True)] for k in range(16)]
        vgprs = {16 + k: pairs[k] for k in range(16)}
    after = run_wave(text, vgprs | {50: scale})
    for lane in LANES:
        got = fields6([after.v(8 + k)[lane] for k in range(6)])
        assert got == [narrowed(numbers[k][lane], narrow, wide, scale[lane]) for k in range(32)]


def test_a_scale_may_be_an_inline_constant() -> None:
    after = run_wave("v_cvt_scalef32_pk_f32_fp4 v[8:9], v10, 1.0", {10: [0x000000F1] * 64})
    assert (after.v(8)[0], after.v(9)[0]) == (0x3F000000, 0xC0C00000)


# ---- division as LLVM expands it: the quotient must be the correctly rounded one


DIVIDE_F32 = """v_div_scale_f32 v10, s[20:21], v9, v9, v8
v_div_scale_f32 v11, vcc, v8, v9, v8
v_rcp_f32_e32 v12, v10
v_fma_f32 v13, -v10, v12, 1.0
v_fmac_f32_e32 v12, v13, v12
v_mul_f32_e32 v13, v11, v12
v_fma_f32 v14, -v10, v13, v11
v_fmac_f32_e32 v13, v14, v12
v_fma_f32 v10, -v10, v13, v11
v_div_fmas_f32 v10, v10, v12, v13
v_div_fixup_f32 v16, v10, v9, v8"""

DIVIDE_F64 = """v_div_scale_f64 v[20:21], s[20:21], v[10:11], v[10:11], v[8:9]
v_rcp_f64_e32 v[22:23], v[20:21]
v_fma_f64 v[24:25], -v[20:21], v[22:23], 1.0
v_fmac_f64_e32 v[22:23], v[22:23], v[24:25]
v_fma_f64 v[24:25], -v[20:21], v[22:23], 1.0
v_fmac_f64_e32 v[22:23], v[22:23], v[24:25]
v_div_scale_f64 v[24:25], vcc, v[8:9], v[10:11], v[8:9]
v_mul_f64 v[26:27], v[24:25], v[22:23]
v_fma_f64 v[20:21], -v[20:21], v[26:27], v[24:25]
v_div_fmas_f64 v[20:21], v[20:21], v[22:23], v[26:27]
v_div_fixup_f64 v[16:17], v[20:21], v[10:11], v[8:9]"""


def quotients(kind: str) -> tuple[list[int], list[int]]:
    rng, fmt = random.Random(kind), FORMATS[kind]
    edge = [round_to(x, fmt) for x in (0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, math.nan)]
    top = (1 << fmt.exponent) - 2
    edge += [1, 5, (1 << fmt.mantissa) - 1, 1 << fmt.mantissa, top << fmt.mantissa, (top - 3) << fmt.mantissa | 77]
    pairs = [(a, b) for a in edge for b in edge]
    pairs += [(rng.getrandbits(fmt.bits), rng.getrandbits(fmt.bits)) for _ in range(400)]
    pairs = pairs[: len(pairs) // 64 * 64]
    return [a for a, _ in pairs], [b for _, b in pairs]


def true_quotient(a: int, b: int, kind: str) -> int:
    fmt = FORMATS[kind]
    x, y = to_float(a, fmt), to_float(b, fmt)
    if math.isfinite(x) and math.isfinite(y) and y != 0 and x != 0:
        return round_to(Fraction(x) / Fraction(y), fmt)
    with np.errstate(all="ignore"):
        return round_to(float(np.float64(x) / np.float64(y)), fmt)


@pytest.mark.parametrize(("kind", "text"), [("f32", DIVIDE_F32), ("f64", DIVIDE_F64)])
def test_division_sequence_gives_the_correctly_rounded_quotient(kind: str, text: str) -> None:
    numerators, denominators = quotients(kind)
    for start in range(0, len(numerators), 64):
        a, b = numerators[start : start + 64], denominators[start : start + 64]
        vgprs: dict[int, Any] = {8: a, 9: b}
        if kind == "f64":
            vgprs = {8: [x & 0xFFFFFFFF for x in a], 9: [x >> 32 for x in a], 10: [x & 0xFFFFFFFF for x in b],
                     11: [x >> 32 for x in b]}  # fmt: skip
        after = run_wave(text, vgprs)
        got = after.v(16) if kind == "f32" else after.v64(16)
        for lane in LANES:
            want, fmt = true_quotient(a[lane], b[lane], kind), FORMATS[kind]
            assert ulps(got[lane], want, fmt) <= (1 if abs(to_float(want, fmt)) < 2.0 ** (2 - fmt.bias) else 0), (
                f"{to_float(a[lane], fmt)!r} / {to_float(b[lane], fmt)!r}: {got[lane]:#x} not {want:#x}")  # fmt: skip


def test_div_fixup_f16_special_cases() -> None:
    rows = [(0x3C00, 0x0000, 0x3C00, 0x7C00), (0x3C00, 0x8000, 0x3C00, 0xFC00), (0x3C00, 0x0000, 0x0000, 0xFE00),
            (0x3C00, 0x7C00, 0xC000, 0x8000), (0xC200, 0x4000, 0xC600, 0xC200),
            (0x3C00, 0x7E01, 0x3C00, 0x7E01)]  # fmt: skip
    vgprs = {9 + k: [rows[lane % len(rows)][k] for lane in LANES] for k in range(3)}
    after = run_wave("v_div_fixup_f16 v8, v9, v10, v11", vgprs | {8: [0xABCD0000] * 64})
    for lane, row in enumerate(rows):
        got = after.v(8)[lane] & 0xFFFF
        assert got == row[3] or (is_nan(got, F16) and is_nan(row[3], F16))
        assert after.v(8)[lane] >> 16 == 0xABCD


def test_references_agree_with_struct() -> None:
    """The exact rounding that these tests rest on, against struct's own."""
    rng = random.Random(7)
    for _ in range(500):
        value = rng.choice([-1, 1]) * rng.random() * 2.0 ** rng.randint(-20, 14)
        assert round_to(value, F32) == bits_of(value, "f32") and round_to(value, F16) == bits_of(value, "f16")
        assert round_to(value, F64) == bits_of(value, "f64") and to_float(bits_of(value, "f64"), F64) == value
    assert nan(F32) == 0x7FC00000
