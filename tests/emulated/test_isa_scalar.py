"""Every scalar ALU mnemonic against Python integers, with register and constant operands and both values of SCC."""

from __future__ import annotations

import random

import pytest
from isa_bench import run_wave
from isa_scalar import CASES, M64, SAVEEXEC

from dieplace.emulator.isa.operands import SGPR

EDGE = {32: [0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00100005, 0x00200000, 0x0008001F],
        64: [0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 32, 0xFFFFFFFF]}  # fmt: skip


def values(bits: int, rng: random.Random) -> int:
    return rng.choice(EDGE[bits]) if rng.random() < 0.4 else rng.getrandbits(rng.choice([bits, bits // 2, 6]))


@pytest.mark.parametrize("name", sorted(CASES))
def test_scalar_instruction_matches_its_published_description(name: str) -> None:
    case, rng = CASES[name], random.Random(name)
    for attempt in range(24):
        args = [values(bits, rng) for bits in case.src]
        scc = bool(attempt & 1)
        sgprs, names = {20: 0xDEAD, 21: 0xBEEF}, []
        if case.dst:
            names.append("s20" if case.dst == 32 else "s[20:21]")
        for number, (value, bits) in enumerate(zip(args, case.src, strict=True)):
            if case.reads_dst and number == 0:
                sgprs |= {20: value & 0xFFFFFFFF, 21: value >> 32}
            elif case.constant and number == len(args) - 1:
                args[number] = value & 0xFFFF
                names.append(hex(value & 0xFFFF))
            else:
                first = 24 + 4 * number
                sgprs |= {first: value & 0xFFFFFFFF, first + 1: value >> 32}
                names.append(f"s{first}" if bits == 32 else f"s[{first}:{first + 1}]")
        text = f"{name} {', '.join(names)}"
        after = run_wave(text, {}, sgprs, scc=scc)
        result, new_scc = case.ref(*args, int(scc))
        if result is not None:
            got = after.s(20) if case.dst == 32 else after.s64(20)
            assert got == result, f"{text} with {list(map(hex, args))}, scc {scc}: {got:#x} is not {result:#x}"
        assert after.scc == (scc if new_scc is None else new_scc), f"{text} with {list(map(hex, args))}: SCC"


@pytest.mark.parametrize("name", sorted(SAVEEXEC))
def test_saveexec_saves_the_old_mask_and_sets_the_new(name: str) -> None:
    rng = random.Random(name)
    for _ in range(8):
        before, source = rng.getrandbits(64), rng.getrandbits(64)
        sgprs = {24: source & 0xFFFFFFFF, 25: source >> 32}
        after = run_wave(f"s_{name}_saveexec_b64 s[20:21], s[24:25]", {}, sgprs, exec_mask=before)
        want = SAVEEXEC[name](before, source) & M64
        assert (after.s64(20), after.exec, after.scc) == (before, want, want != 0)


def test_saveexec_may_save_over_its_own_source() -> None:
    after = run_wave("s_and_saveexec_b64 s[24:25], s[24:25]", {}, {24: 0xF0F0, 25: 0}, exec_mask=0xFF00)
    assert (after.s64(24), after.exec) == (0xFF00, 0xF000)


def test_constants_are_sign_extended_and_floats_take_their_bits() -> None:
    after = run_wave("s_mov_b64 s[20:21], -1\ns_mov_b32 s22, 1.0\ns_mov_b32 s23, 0xcafe", {}, {})
    assert (after.s64(20), after.s(22), after.s(23)) == (M64, 0x3F800000, 0xCAFE)


def test_sixty_four_bit_operand_must_start_at_an_even_register() -> None:
    with pytest.raises(Exception, match="even register"):
        run_wave("s_mov_b64 s[21:22], 0")


def test_a_comparison_writes_scc_for_another_block() -> None:
    """Only the comparison touches SCC in its block; the next block reads what it wrote, not what was never written."""
    text = "s_cmp_eq_u32 s20, s21\ns_branch .LBB0_1\n.LBB0_1:\ns_cselect_b32 s22, 7, 9"
    for first, second, want in ((3, 3, 7), (3, 4, 9)):
        after = run_wave(text, {}, {20: first, 21: second})
        assert after.s(22) == want and after.is_written(SGPR + 22)
