"""Values that move between lanes, DPP controls, and the operations with operand rules of their own."""

from __future__ import annotations

import random

import pytest
from isa_bench import ALL, run_wave
from isa_numbers import F32, round_to, to_float, ulps
from isa_references import CASES
from isa_tables import MIXED, PACKED_F32

M32 = 0xFFFFFFFF
LANES = list(range(64))
X = [0x1000 + lane for lane in LANES]
Y = [0x2000 + lane for lane in LANES]
PARTIAL = 0xFFFF_00FF_F0F0_3333


def define() -> None:
    from isa_integers import define_all

    define_all()


define()


def test_readlane_by_constant_and_by_register() -> None:
    after = run_wave("v_readlane_b32 s20, v8, 63\nv_readlane_b32 s21, v8, s30", {8: X}, {30: 64 + 5}, exec_mask=1)
    assert (after.s(20), after.s(21)) == (X[63], X[5])


def test_writelane_changes_one_lane_whatever_exec_says() -> None:
    after = run_wave("v_writelane_b32 v8, s20, 17", {8: X}, {20: 99}, exec_mask=1)
    assert after.v(8) == [99 if lane == 17 else X[lane] for lane in LANES]


@pytest.mark.parametrize(("mask", "lane"), [(ALL, 0), (1 << 40 | 1 << 50, 40), (0, 0)])
def test_readfirstlane_takes_the_lowest_active_lane_and_lane_0_when_none_is(mask: int, lane: int) -> None:
    assert run_wave("v_readfirstlane_b32 s20, v8", {8: X}, exec_mask=mask).s(20) == X[lane]


def swizzle(source: list[int], lanes: list[int], mask: int, old: list[int]) -> list[int]:
    return [
        (source[lanes[lane]] if mask >> lanes[lane] & 1 else 0) if mask >> lane & 1 else old[lane] for lane in LANES
    ]


@pytest.mark.parametrize(
    ("pattern", "lane_of"),
    [
        ("swizzle(SWAP,8)", lambda i: i ^ 8),
        ("swizzle(REVERSE,16)", lambda i: (i & ~15) + 15 - (i & 15)),
        ("swizzle(BROADCAST,8,3)", lambda i: (i & ~7) + 3),
        ("swizzle(QUAD_PERM,3,1,0,2)", lambda i: (i & ~3) + (3, 1, 0, 2)[i & 3]),
        ('swizzle(BITMASK_PERM,"01pip")', lambda i: (i & 32) | 0b01000 | (i & 0b101) | (~i & 0b10)),
        ("0x80b1", lambda i: (i & ~3) + (1, 0, 3, 2)[i & 3]),
        ("0x041f", lambda i: i ^ 1),
    ],
)
@pytest.mark.parametrize("mask", [ALL, PARTIAL])
def test_ds_swizzle(pattern: str, lane_of: object, mask: int) -> None:
    after = run_wave(f"ds_swizzle_b32 v8, v9 offset:{pattern}", {8: Y, 9: X}, exec_mask=mask)
    assert after.v(8) == swizzle(X, [lane_of(i) for i in LANES], mask, Y)  # type: ignore[operator]


@pytest.mark.parametrize("mask", [ALL, PARTIAL])
def test_bpermute_pulls_and_permute_pushes(mask: int) -> None:
    lanes = random.Random(4).sample(LANES, 64)
    after = run_wave("ds_bpermute_b32 v8, v10, v9 offset:4", {8: Y, 9: X, 10: [4 * lane + 256 for lane in lanes]},
                     exec_mask=mask)  # fmt: skip
    assert after.v(8) == swizzle(X, [(lane + 1) % 64 for lane in lanes], mask, Y)
    targets = [lane // 2 for lane in lanes]  # two writers each: the higher lane wins
    after = run_wave("ds_permute_b32 v8, v10, v9", {8: Y, 9: X, 10: [4 * t for t in targets]}, exec_mask=mask)
    pushed = [0] * 64
    for lane in LANES:
        if mask >> lane & 1:
            pushed[targets[lane]] = X[lane]
    assert after.v(8) == [pushed[lane] if mask >> lane & 1 else Y[lane] for lane in LANES]


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("suffix", ["", "_e32"])
def test_permlane_swap(width: int, suffix: str) -> None:
    """CDNA 4 ISA: the upper rows of vdst trade places with the lower rows of src."""
    after = run_wave(f"v_permlane{width}_swap_b32{suffix} v8, v9", {8: X, 9: Y})
    want_x, want_y = list(X), list(Y)
    for lane in LANES:
        if not lane & width:
            want_y[lane], want_x[lane + width] = X[lane + width], Y[lane]
    assert (after.v(8), after.v(9)) == (want_x, want_y)


def test_swap_exchanges_active_lanes() -> None:
    after = run_wave("v_swap_b32 v8, v9", {8: X, 9: Y}, exec_mask=PARTIAL)
    pick = [PARTIAL >> lane & 1 for lane in LANES]
    assert after.v(8) == [Y[i] if pick[i] else X[i] for i in LANES]
    assert after.v(9) == [X[i] if pick[i] else Y[i] for i in LANES]


def test_mbcnt_numbers_lanes_and_counts_set_bits_below() -> None:
    after = run_wave("v_mbcnt_lo_u32_b32 v8, -1, 0\nv_mbcnt_hi_u32_b32 v8, -1, v8", {8: X})
    assert after.v(8) == LANES
    mask = 0xF0F0_1234_8000_0001
    text = "v_mbcnt_lo_u32_b32 v8, vcc_lo, 5\nv_mbcnt_hi_u32_b32 v8, vcc_hi, v8"
    assert run_wave(text, {8: X}, vcc=mask).v(8) == [5 + (mask & ((1 << i) - 1)).bit_count() for i in LANES]


def test_accumulation_registers_keep_what_is_written_to_them() -> None:
    after = run_wave("v_accvgpr_write_b32 a3, v8\nv_accvgpr_read_b32 v9, a3\nv_accvgpr_mov_b32 a4, a3",
                     {8: X, 9: Y}, exec_mask=PARTIAL, agprs=8)  # fmt: skip
    assert after.v(9) == [X[i] if PARTIAL >> i & 1 else Y[i] for i in LANES]
    assert after.a(4)[0] == X[0] == after.a(3)[0]


DPP = {
    "row_shl:3": lambda i: (i + 3, (i & 15) + 3 < 16), "row_shr:1": lambda i: (i - 1, (i & 15) >= 1),
    "row_ror:5": lambda i: ((i & ~15) + (i - 5 & 15), True), "row_mirror": lambda i: ((i & ~15) + 15 - (i & 15), True),
    "row_half_mirror": lambda i: ((i & ~7) + 7 - (i & 7), True), "wave_shl:1": lambda i: (i + 1, i < 63),
    "wave_shr:1": lambda i: (i - 1, i > 0), "wave_rol:1": lambda i: ((i + 1) % 64, True),
    "wave_ror:1": lambda i: ((i - 1) % 64, True), "row_bcast:15": lambda i: ((i & ~15) - 1, i >= 16),
    "row_bcast:31": lambda i: (31, i >= 32), "row_newbcast:6": lambda i: ((i & ~15) + 6, True),
    "quad_perm:[2,2,0,1]": lambda i: ((i & ~3) + (2, 2, 0, 1)[i & 3], True),
}  # fmt: skip


@pytest.mark.parametrize("control", sorted(DPP))
@pytest.mark.parametrize("masks", [(0xF, 0xF), (0xA, 0xF), (0xC, 0x5)])
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
@pytest.mark.parametrize("exec_mask", [ALL, PARTIAL])
def test_dpp(control: str, masks: tuple[int, int], bound: str, exec_mask: int) -> None:
    rows, banks = masks
    text = f"v_mov_b32_dpp v8, v9 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}"
    after = run_wave(text, {8: Y, 9: X}, exec_mask=exec_mask)
    for lane in LANES:
        origin, exists = DPP[control](lane)
        enabled = exec_mask >> lane & 1 and rows >> (lane >> 4) & 1 and banks >> (lane >> 2 & 3) & 1
        valid = exists and exec_mask >> (origin % 64) & 1
        want = Y[lane] if not enabled or (not valid and not bound) else X[origin] if valid else 0
        assert after.v(8)[lane] == want, f"{text}: lane {lane}"


# ---- packed and mixed operations


def floats(seed: str) -> list[int]:
    rng = random.Random(seed)
    return [round_to(rng.uniform(-9, 9), F32) for _ in LANES]


@pytest.mark.parametrize("name", sorted(PACKED_F32))
@pytest.mark.parametrize("exec_mask", [ALL, PARTIAL])
def test_packed_f32_selects_registers_by_op_sel(name: str, exec_mask: int) -> None:
    count = PACKED_F32[name]
    scalar = CASES["v_fma_f32" if count == 3 else name.replace("_pk", "")].ref
    rng = random.Random(name)
    for attempt in range(6):
        low, high = ([rng.getrandbits(1) for _ in range(count)] for _ in range(2))
        negate_low, negate_high = ([rng.getrandbits(1) for _ in range(count)] for _ in range(2))
        vgprs = {8 + k: floats(f"{name}{attempt}{k}") for k in range(2 * (count + 1))}
        sources = ", ".join(f"v[{10 + 2 * k}:{11 + 2 * k}]" for k in range(count))
        text = f"{name} v[8:9], {sources} op_sel:{low} op_sel_hi:{high} neg_lo:{negate_low} neg_hi:{negate_high}"
        after = run_wave(text.replace(", ", ",").replace(",v[", ", v["), vgprs, exec_mask=exec_mask)
        for lane in LANES:
            for side, (pick, negate) in enumerate(((low, negate_low), (high, negate_high))):
                args = [vgprs[10 + 2 * k + pick[k]][lane] ^ negate[k] << 31 for k in range(count)]
                want = scalar(*args) if exec_mask >> lane & 1 else vgprs[8 + side][lane]
                assert ulps(after.v(8 + side)[lane], want, F32) == 0, f"{text}: lane {lane}"


def test_packed_f32_defaults_constants_and_overlap() -> None:
    vgprs = {8 + k: floats(f"overlap{k}") for k in range(4)}
    after = run_wave(
        "v_pk_mul_f32 v[8:9], v[8:9], v[10:11] op_sel_hi:[0,1]\nv_pk_add_f32 v[10:11], v[10:11], 1.0", vgprs
    )
    mul, add = CASES["v_mul_f32"].ref, CASES["v_add_f32"].ref
    for lane in LANES:
        assert after.v(8)[lane] == mul(vgprs[8][lane], vgprs[10][lane])
        assert after.v(9)[lane] == mul(vgprs[8][lane], vgprs[11][lane]), "the old low register feeds both results"
        assert after.v(11)[lane] == add(vgprs[11][lane], 0x3F800000)


def test_packed_move_and_packed_fmac() -> None:
    vgprs = {8: X, 9: Y, 10: floats("m0"), 11: floats("m1")}
    after = run_wave("v_pk_mov_b32 v[8:9], v[10:11], v[8:9] op_sel:[1,0]", vgprs)
    assert (after.v(8), after.v(9)) == (vgprs[11], X)
    rng = random.Random("fmac")
    halves = {
        k: [rng.getrandbits(16) & 0xBFFF | (rng.getrandbits(16) & 0xBFFF) << 16 for _ in LANES] for k in (8, 9, 10)
    }
    after = run_wave("v_pk_fmac_f16 v8, v9, v10", halves)
    fma = CASES["v_fma_f16"].ref
    for lane in LANES:
        parts = [fma(halves[9][lane] >> s & 0xFFFF, halves[10][lane] >> s & 0xFFFF, halves[8][lane] >> s & 0xFFFF)
                 for s in (0, 16)]  # fmt: skip
        assert after.v(8)[lane] == parts[0] | parts[1] << 16


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_fma_rounds_once(name: str) -> None:
    from fractions import Fraction

    from isa_numbers import F16

    a, c = floats("mixa"), floats("mixc")
    b = [0x3C01 << 16 | 0x4200 for _ in LANES]
    old = [0xABCD1234] * 64
    after = run_wave(f"{name} v8, -v9, v10, |v11| op_sel:[0,1,0] op_sel_hi:[0,1,0]", {8: old, 9: a, 10: b, 11: c})
    for lane in LANES:
        exact = -Fraction(to_float(a[lane], F32)) * Fraction(to_float(0x3C01, F16)) + abs(
            Fraction(to_float(c[lane], F32))
        )
        single = round_to(exact, F32)
        got = after.v(8)[lane]
        if name == "v_fma_mix_f32":
            assert got == single
            continue
        half = round_to(to_float(single, F32), F16)
        assert got == (half | 0xABCD0000 if "lo" in name else half << 16 | 0x1234)


def test_sign_modifiers_act_on_bits_and_constants_work_everywhere() -> None:
    vgprs = {9: [0x7FC00001, 0x3F800000, 0x80000000, 0xC0000000] * 16}
    after = run_wave("v_mul_f32_e64 v8, -|v9|, 1.0\nv_sub_f32_e64 v10, 2.0, s20", vgprs, {20: 0x3F800000})
    assert after.v(8)[1:4] == [0xBF800000, 0x80000000, 0xC0000000]
    assert after.v(10)[0] == 0x3F800000
    after = run_wave("v_add_u32_e32 v8, 0xfffffffe, v9\nv_add_u32_e32 v10, s20, v9\nv_add_u32_e32 v11, -16, v9",
                     {9: LANES}, {20: 7})  # fmt: skip
    assert after.v(8)[5] == 3 and after.v(10)[5] == 12 and after.v(11)[5] == (5 - 16) & M32


def test_output_modifiers() -> None:
    vgprs = {9: [round_to(x, F32) for x in (-3.0, 0.25, 0.75, 7.0)] * 16, 10: [0x3F800000] * 64}
    text = "v_mul_f32_e64 v8, v9, v10 clamp\nv_mul_f32_e64 v11, v9, v10 mul:4\nv_mul_f32_e64 v12, v9, v10 div:2"
    after = run_wave(text,
                     vgprs)  # fmt: skip
    assert [to_float(x, F32) for x in after.v(8)[:4]] == [0.0, 0.25, 0.75, 1.0]
    assert [to_float(x, F32) for x in after.v(11)[:4]] == [-12.0, 1.0, 3.0, 28.0]
    assert [to_float(x, F32) for x in after.v(12)[:4]] == [-1.5, 0.125, 0.375, 3.5]
    after = run_wave("v_sub_u32_e64 v8, v9, v10 clamp\nv_add_u32_e64 v11, v9, v10 clamp\nv_add_i32 v12, v9, v10 clamp",
                     {9: [1, M32, 0x7FFFFFFF, 5] * 16, 10: [2, 2, 2, 2] * 16})  # fmt: skip
    assert after.v(8)[:4] == [0, M32 - 2, 0x7FFFFFFD, 3]
    assert after.v(11)[:4] == [3, M32, 0x80000001, 7]
    assert after.v(12)[:4] == [3, 1, 0x7FFFFFFF, 7]
