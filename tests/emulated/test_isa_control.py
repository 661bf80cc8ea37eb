"""Branches, barriers, hardware registers, clocks, and the text that the parser accepts or refuses."""

from __future__ import annotations

import numpy as np
import pytest
from isa_bench import ALL, HostArray, isa_text, launch, memory_of, run, run_wave
from isa_tables import BRANCHES, HINTS

from dieplace.emulator.isa import Launch, LogicalDevice, NeverWritten, Program, UnknownInstruction
from dieplace.errors import CompileError, UsageError

STORE_S20 = "v_mov_b32_e32 v1, s20\nv_lshlrev_b32_e32 v2, 2, v0\nglobal_store_dword v2, v1, s[4:5]"
LOAD_OUT = "s_load_dwordx2 s[4:5], s[0:1], 0x0"

CONDITIONS = {
    "s_branch": [("s_nop 0", True)],
    "s_cbranch_scc0": [("s_cmp_eq_u32 1, 2", True), ("s_cmp_eq_u32 2, 2", False)],
    "s_cbranch_scc1": [("s_cmp_eq_u32 1, 2", False), ("s_cmp_eq_u32 2, 2", True)],
    "s_cbranch_vccz": [("s_mov_b64 vcc, 0", True), ("s_mov_b64 vcc, 8", False)],
    "s_cbranch_vccnz": [("s_mov_b64 vcc, 0", False), ("s_mov_b64 vcc, 8", True)],
    "s_cbranch_execz": [("s_mov_b64 exec, 0", True), ("s_mov_b64 exec, 2", False)],
    "s_cbranch_execnz": [("s_mov_b64 exec, 0", False), ("s_mov_b64 exec, 2", True)],
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_is_taken_exactly_on_its_condition(name: str) -> None:
    for setup, taken in CONDITIONS[name]:
        out = HostArray("out", np.zeros(64, np.uint32))
        body = f"""{LOAD_OUT}
        s_mov_b32 s20, 1
        {setup}
        {name} .LBB0_1
        s_mov_b32 s20, 2
        .LBB0_1:
        s_mov_b64 exec, -1
        {STORE_S20}"""
        run([launch(body, out)], memory_of(out))
        assert out.array.tolist() == [1 if taken else 2] * 64, setup


def test_waves_diverge_and_each_leaves_its_own_result() -> None:
    """Eight waves loop as often as their number says; the sum of 1..n is Gauss's."""
    out = HostArray("out", np.zeros(8 * 64, np.uint32))
    body = f"""{LOAD_OUT}
    v_readfirstlane_b32 s6, v0
    s_lshr_b32 s6, s6, 6
    s_mov_b32 s20, 0
    .LBB0_1:
    s_add_u32 s20, s20, s6
    s_sub_u32 s6, s6, 1
    s_cmp_lg_u32 s6, -1
    s_cbranch_scc1 .LBB0_1
    {STORE_S20}"""
    run([launch(body, out, block=512)], memory_of(out))
    assert out.array.reshape(8, 64)[:, 0].tolist() == [n * (n + 1) // 2 for n in range(8)]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_barrier_orders_lds_between_waves(seed: int | None) -> None:
    """Each wave writes its number, then reads its neighbour's: without the barrier some would read nothing."""
    out = HostArray("out", np.zeros(4 * 64, np.uint32))
    body = f"""{LOAD_OUT}
    v_lshrrev_b32_e32 v3, 6, v0
    v_lshlrev_b32_e32 v4, 2, v3
    ds_write_b32 v4, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_add_u32_e32 v5, 1, v3
    v_and_b32_e32 v5, 3, v5
    v_lshlrev_b32_e32 v5, 2, v5
    ds_read_b32 v1, v5
    v_lshlrev_b32_e32 v2, 2, v0
    global_store_dword v2, v1, s[4:5]"""
    run([launch(body, out, block=256, lds=64)], memory_of(out), seed=seed)
    assert out.array.reshape(4, 64)[:, 0].tolist() == [1, 2, 3, 0]


def test_a_wave_that_ended_is_not_waited_for_at_a_barrier() -> None:
    out = HostArray("out", np.zeros(128, np.uint32))
    body = f"""{LOAD_OUT}
    v_readfirstlane_b32 s6, v0
    s_mov_b32 s20, 5
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .LBB0_2
    s_barrier
    {STORE_S20}
    .LBB0_2:"""
    run([launch(body, out, block=128)], memory_of(out))
    assert out.array.tolist() == [5] * 64 + [0] * 64


@pytest.mark.parametrize("base", [0, 4])
def test_workgroups_go_round_robin_to_the_xcds_of_the_device_and_read_their_number(base: int) -> None:
    out = HostArray("out", np.zeros(64, np.uint32))
    body = f"""{LOAD_OUT}
    s_getreg_b32 s20, hwreg(HW_REG_XCC_ID, 0, 4)
    v_mov_b32_e32 v1, s20
    v_mov_b32_e32 v2, s2
    v_lshlrev_b32_e32 v2, 2, v2
    global_store_dword v2, v1, s[4:5]"""
    device = LogicalDevice("gpu0/p1", xcds=(4, 5, 6, 7), xcc_id_base=base)
    run([launch(body, out, grid=64, device=device)], memory_of(out))
    assert out.array.tolist() == [base + w % 4 for w in range(64)]


def test_hardware_id_fields() -> None:
    after = run_wave(
        "s_getreg_b32 s20, hwreg(HW_REG_HW_ID)\ns_getreg_b32 s21, hwreg(4, 8, 4)\ns_getreg_b32 s22, 0x1804"
    )
    assert after.s(21) == after.s(20) >> 8 & 15 and after.s(22) == after.s(20) & 15


def test_clocks_move_forward_and_real_time_is_the_slower_one() -> None:
    after = run_wave("s_memtime s[20:21]\n" + "s_memrealtime s[22:23]\ns_nop 0\n" * 40 + "s_memtime s[24:25]")
    assert after.s64(20) < after.s64(24)
    assert 0 < after.s64(22) < (after.s64(24) - after.s64(20)) // 8


@pytest.mark.parametrize("name", HINTS)
def test_hints_change_no_register(name: str) -> None:
    text = {"s_setreg_imm32_b32": "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3", "s_waitcnt": "s_waitcnt vmcnt(0)"}
    operand = "" if name in ("s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_wakeup") else " 1"
    after = run_wave(text.get(name, name + operand), {8: list(range(64))}, {20: 7}, vcc=5, scc=True)
    assert (after.v(8), after.s(20), after.vcc, after.exec, after.scc) == (list(range(64)), 7, 5, ALL, True)


# ---- what is not known is refused by name


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("v_frobnicate_b32 v0, v1", "mnemonic v_frobnicate_b32"),
        ("v_add_f32_e32 v0, v1, v2 wobble:1", "wobble:1"),
        ("global_load_dword v0, v[2:3], off glc", "glc"),
        ("global_load_dword v0, v[2:3], off row_shl:1", "row_shl"),
        ("v_add_f32_e32 v0, v1", "operands"),
        ("v_add_f32_e32 v0, v1, v99", "beyond"),
        ("v_mov_b32_e32 v0, ttmp3", "ttmp3"),
        ("s_branch .LBB9_9", ".LBB9_9"),
        ("s_getreg_b32 s0, hwreg(HW_REG_TRAPSTS)", "HW_REG_TRAPSTS"),
        ("v_mov_b32_dpp v0, v1 row_shl:1 row_shr:1 row_mask:0xf bank_mask:0xf", "DPP control"),
        ("v_cvt_scalef32_sr_fp8_f32 v0, v1, v2, v3", "mnemonic v_cvt_scalef32_sr_fp8_f32"),
        ("ds_read_b64_tr_b8 v[0:1], v2", "mnemonic ds_read_b64_tr_b8"),
        ("scratch_load_dword v0, off, s0", "mnemonic scratch_load_dword"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0 cbsz:5 blgp:4", "cbsz:5"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "floating-point mode"),
        ("global_atomic_add v0, v1, v2, s[2:3]", "sc0"),
    ],
)
def test_unknown_text_is_an_error_that_names_it_and_its_line(line: str, what: str) -> None:
    text = isa_text(f"s_nop 0\n{line}", vgprs=32)
    with pytest.raises(UnknownInstruction) as caught:
        Program.parse(text, "t")
    assert what in str(caught.value) and caught.value.facts["line"] == 3
    assert text.split("\n")[2].strip() == line == caught.value.facts["instruction"]


def test_kernels_that_cannot_run_here_are_refused() -> None:
    with pytest.raises(CompileError, match="no kernel"):
        Program.parse(isa_text("s_nop 0"), "other")
    with pytest.raises(CompileError, match="scratch"):
        Program.parse(isa_text("s_nop 0", extra="\t\t.amdhsa_private_segment_fixed_size 64\n"), "t")
    with pytest.raises(CompileError, match="private_segment_buffer"):
        Program.parse(isa_text("s_nop 0", extra="\t\t.amdhsa_user_sgpr_private_segment_buffer 1\n"), "t")
    with pytest.raises(CompileError, match="floating-point mode"):
        Program.parse(isa_text("s_nop 0", extra="\t\t.amdhsa_float_denorm_mode_32 0\n"), "t")
    with pytest.raises(CompileError, match="s_endpgm"):
        Program.parse("t:\n\ts_nop 0\n.Lfunc_end0:\n", "t")


def test_what_is_reserved_and_not_provided_must_not_be_read() -> None:
    """Compilers reserve the dispatch and queue pointers in kernels that never look at them: the order is LLVM's."""
    extra = "".join(
        f"\t\t.amdhsa_{what}\n" for what in ("user_sgpr_dispatch_ptr 1", "user_sgpr_queue_ptr 1", "user_sgpr_count 6")
    )
    unread = Program.parse(isa_text("s_load_dword s20, s[4:5], 0x0\ns_waitcnt lgkmcnt(0)", extra=extra), "t")
    assert unread.initial_sgprs[:6] == (None, None, None, None, "kernarg_lo", "kernarg_hi")
    device = LogicalDevice()
    run([Launch(unread, (1, 1, 1), (64, 1, 1), bytes(8), device)], memory_of())
    read = Program.parse(isa_text("s_load_dword s20, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)", extra=extra), "t")
    with pytest.raises(NeverWritten, match="s0"):
        run([Launch(read, (1, 1, 1), (64, 1, 1), bytes(8), device)], memory_of())


METADATA = """	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .args:
      - .address_space:  global
        .name:           X
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_y
      - .offset:         20
        .size:           2
        .value_kind:     hidden_group_size_x
    .group_segment_fixed_size: 512
    .kernarg_segment_size: 24
    .max_flat_workgroup_size: 256
    .name:           t
    .sgpr_count:     12
    .vgpr_count:     36
...
	.end_amdgpu_metadata
"""


def test_metadata_and_argument_packing() -> None:
    program = Program.parse(isa_text("s_nop 0", vgprs=32, agprs=4, lds=512) + METADATA, "t")
    assert (program.vgprs, program.agprs, program.lds_bytes, program.kernarg_bytes) == (32, 4, 512, 24)
    assert [(a.offset, a.size, a.kind, a.name) for a in program.kernarg] == [
        (0, 8, "global_buffer", "X"), (8, 4, "by_value", None), (16, 4, "hidden_block_count_y", None),
        (20, 2, "hidden_group_size_x", None),
    ]  # fmt: skip
    packed = program.pack([b"\1" * 8, b"\2" * 4], (3, 7, 1), (128, 1, 1))
    assert packed == b"\1" * 8 + b"\2" * 4 + bytes(4) + (7).to_bytes(4, "little") + (128).to_bytes(2, "little") + bytes(
        2
    )
    with pytest.raises(UsageError, match="takes 2 arguments"):
        program.pack([b""], (1, 1, 1), (64, 1, 1))
    with pytest.raises(UsageError, match="takes 8 bytes"):
        program.pack([b"\1" * 4, b"\2" * 4], (1, 1, 1), (64, 1, 1))


def test_preloaded_kernel_arguments_arrive_in_sgprs() -> None:
    extra = ("\t\t.amdhsa_user_sgpr_kernarg_preload_length 2\n\t\t.amdhsa_user_sgpr_kernarg_preload_offset 0\n"
             "\t\t.amdhsa_user_sgpr_count 4\n")  # fmt: skip
    out = HostArray("out", np.zeros(64, np.uint32))
    body = "v_mov_b32_e32 v1, s4\nv_lshlrev_b32_e32 v2, 2, v0\nglobal_store_dword v2, v1, s[2:3]"
    program = Program.parse(isa_text(body, extra=extra), "t")
    from dieplace.emulator.isa import Launch

    run([Launch(program, (1, 1, 1), (64, 1, 1), out.pointer)], memory_of(out))
    assert out.array.tolist() == [0] * 64 and program.initial_sgprs[2:4] == (0, 4)


def test_work_item_ids_are_packed_ten_bits_each() -> None:
    out = HostArray("out", np.zeros(128, np.uint32))
    body = f"""{LOAD_OUT}
    v_bfe_u32 v1, v0, 10, 10
    v_bfe_u32 v3, v0, 20, 10
    v_and_b32_e32 v4, 0x3ff, v0
    v_mad_u32_u24 v5, v1, 4, v4
    v_mad_u32_u24 v5, v3, 32, v5
    v_lshlrev_b32_e32 v2, 2, v5
    global_store_dword v2, v0, s[4:5]"""
    from dieplace.emulator.isa import Launch

    run([Launch(Program.parse(isa_text(body), "t"), (1, 1, 1), (4, 8, 4), out.pointer)], memory_of(out))
    want = [x | y << 10 | z << 20 for z in range(4) for y in range(8) for x in range(4)]
    assert out.array.tolist() == want


def test_a_partial_wave_keeps_its_missing_lanes_inactive() -> None:
    out = HostArray("out", np.zeros(128, np.uint32))
    body = f"{LOAD_OUT}\nv_mov_b32_e32 v1, 1\nv_lshlrev_b32_e32 v2, 2, v0\nglobal_store_dword v2, v1, s[4:5]"
    run([launch(body, out, block=100)], memory_of(out))
    assert out.array.tolist() == [1] * 100 + [0] * 28
