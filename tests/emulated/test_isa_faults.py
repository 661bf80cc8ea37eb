"""Faulty programs, each caught with its own error that names instruction, line and buffer."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from isa_bench import HostArray, launch, memory_of, run, run_wave

from dieplace.emulator.isa import (
    BarrierDeadlock,
    Buffer,
    Livelock,
    Misaligned,
    NeverWritten,
    OutOfBounds,
    ReservedValue,
)
from dieplace.errors import KernelFault, UsageError

HEAD = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v2, 2, v0"


def line_of(body: str, needle: str) -> int:
    """Line in the ISA text: the label is line 1."""
    return next(n for n, line in enumerate(body.split("\n"), 2) if needle in line)


def faulting(kind: type[KernelFault], body: str, needle: str, **how: object) -> KernelFault:
    a, b = HostArray("weights", np.zeros(64, np.uint32)), HostArray("result", np.zeros(64, np.uint32))
    memory = memory_of(a, b)
    if how.pop("poison", False):
        memory.poison("weights")
    with pytest.raises(kind) as caught:
        run([launch(body, a, b, **how)], memory, step_limit=100_000)  # type: ignore[arg-type]
    fault = caught.value
    assert type(fault) is kind
    assert fault.facts["line"] == line_of(body, needle) and needle in fault.facts["instruction"]
    assert fault.facts["instruction"] in str(fault) and f"line {fault.facts['line']}" in str(fault)
    return fault


def test_load_past_the_end_names_buffer_lane_and_workgroup() -> None:
    body = f"{HEAD}\nglobal_load_dword v1, v2, s[4:5] offset:8"
    fault = faulting(OutOfBounds, body, "global_load_dword")
    assert fault.facts["buffer"] == "weights" and (fault.facts["workgroup"], fault.facts["lane"]) == (0, 62)
    assert "past the end of 'weights' (256 bytes)" in str(fault)


def test_store_before_the_start() -> None:
    body = f"{HEAD}\nv_mov_b32_e32 v1, 0\nglobal_store_dword v2, v1, s[6:7] offset:-4"
    fault = faulting(OutOfBounds, body, "global_store_dword")
    assert fault.facts["buffer"] == "result" and fault.facts["lane"] == 0 and "before the start" in str(fault)


def test_last_element_that_sticks_out_by_one_dword() -> None:
    body = f"{HEAD}\nglobal_load_dwordx2 v[4:5], v2, s[4:5]"
    assert faulting(OutOfBounds, body, "dwordx2").facts["lane"] == 63


def test_buffer_descriptor_larger_than_the_buffer_does_not_hide_the_overrun() -> None:
    body = f"{HEAD}\ns_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, -1\ns_mov_b32 s11, 0x27000\n" \
           "v_add_u32_e32 v2, 0x100, v2\nbuffer_load_dword v1, v2, s[8:11], 0 offen"  # fmt: skip
    assert faulting(OutOfBounds, body, "buffer_load_dword").facts["buffer"] == "weights"


def test_atomic_and_scalar_load_out_of_bounds() -> None:
    faulting(
        OutOfBounds, f"{HEAD}\nv_mov_b32_e32 v1, 1\nglobal_atomic_add v2, v1, s[4:5] offset:256", "global_atomic_add"
    )
    faulting(OutOfBounds, f"{HEAD}\ns_load_dwordx2 s[8:9], s[4:5], 0xfc", "s_load_dwordx2 s[8:9]")


def test_kernel_argument_past_the_segment() -> None:
    fault = faulting(OutOfBounds, "s_load_dwordx8 s[8:15], s[0:1], 0x80\ns_nop 0", "s_load_dwordx8")
    assert fault.facts["buffer"] == "kernarg"
    body = f"{HEAD}\ns_load_dword s8, s[0:1], 0x10\nv_mov_b32_e32 v1, s8\nglobal_store_dword v2, v1, s[4:5]"
    assert "kernel argument bytes beyond the 16" in str(faulting(NeverWritten, body, "global_store_dword"))


def test_misaligned_dword_and_double_word_atomic() -> None:
    fault = faulting(Misaligned, f"{HEAD}\nglobal_load_dword v1, v2, s[4:5] offset:2", "global_load_dword")
    assert fault.facts["alignment_bytes"] == 4 and "buffer 'weights'" in str(fault)
    setup = f"{HEAD}\nv_mov_b32_e32 v4, 1\nv_mov_b32_e32 v5, 0\nv_mov_b32_e32 v3, 4"
    body = f"{setup}\nglobal_atomic_add_x2 v3, v[4:5], s[4:5]"
    assert faulting(Misaligned, body, "global_atomic_add_x2").facts["alignment_bytes"] == 8


def test_lds_out_of_range_and_misaligned() -> None:
    fault = faulting(OutOfBounds, f"{HEAD}\nds_write_b32 v2, v0 offset:4", "ds_write_b32", lds=256)
    assert fault.facts["buffer"] == "LDS" and fault.facts["lane"] == 63
    faulting(Misaligned, f"{HEAD}\nv_add_u32_e32 v2, 1, v2\nds_write_b32 v2, v0", "ds_write_b32", lds=1024)


def test_wave_at_a_barrier_while_another_polls_for_ever() -> None:
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v2, 0
    v_readfirstlane_b32 s6, v0
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .LBB0_2
    s_barrier
    .LBB0_2:
    global_load_dword v1, v2, s[4:5] sc1
    s_sleep 1
    s_branch .LBB0_2"""
    flag = HostArray("flag", np.zeros(64, np.uint32))
    with pytest.raises(Livelock) as caught:
        run([launch(body, flag, block=128)], memory_of(flag), step_limit=20_000)
    words = str(caught.value)
    assert "line 7: `s_barrier`" in words and "last read 0x0 at byte 0 of buffer 'flag'" in words


def test_barrier_deadlock_names_the_barrier_and_who_never_arrives() -> None:
    """Wave 1 waits in LDS for a flag that wave 0 sets only behind the barrier that wave 1 has not reached."""
    body = """v_mov_b32_e32 v2, 0
    v_mov_b32_e32 v3, 1
    ds_write_b32 v2, v2
    v_readfirstlane_b32 s6, v0
    s_barrier
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .LBB0_1
    s_barrier
    ds_write_b32 v2, v3
    s_branch .LBB0_2
    .LBB0_1:
    ds_read_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    v_cmp_eq_u32_e32 vcc, 1, v1
    s_cbranch_vccz .LBB0_1
    s_barrier
    .LBB0_2:"""
    with pytest.raises(BarrierDeadlock) as caught:
        run([launch(body, block=128, lds=64)], memory_of(), step_limit=20_000)
    fault = caught.value
    assert fault.facts["line"] == 9 and "line 9: `s_barrier`" in str(fault)
    assert "the rest never arrives: 1 wave(s) of workgroup 0 at line 13" in str(fault)


def test_waves_may_meet_at_different_barriers_and_leave_early() -> None:
    """The hardware counts waves that have not ended, whichever barrier instruction they are at."""
    body = """v_readfirstlane_b32 s6, v0
    s_cmp_lt_u32 s6, 64
    s_cbranch_scc1 .LBB0_1
    s_barrier
    .LBB0_1:
    s_barrier
    s_barrier"""
    assert run([launch(body, block=128)], memory_of()).by_kind["barrier"] == 5


def test_consumer_without_a_producer_is_a_livelock_that_says_what_was_read() -> None:
    body = f"""{HEAD}
    v_mov_b32_e32 v3, 0
    .LBB0_1:
    global_load_dword v1, v3, s[4:5] sc0 sc1
    s_sleep 1
    s_waitcnt vmcnt(0)
    v_cmp_eq_u32_e32 vcc, 1, v1
    s_cbranch_vccz .LBB0_1"""
    fault = faulting(Livelock, body, "global_load_dword", grid=3)
    assert "last read 0x0 at byte 0 of buffer 'weights'" in str(fault) and "workgroups 0, 1, 2" in str(fault)


def test_swizzled_descriptor_is_refused() -> None:
    with pytest.raises(ReservedValue, match="swizzled"):
        run_wave("buffer_load_dword v1, v2, s[20:23], 0 offen", {2: [0] * 64}, {20: 0, 21: 1 << 31, 22: 64, 23: 0})


def test_overlapping_buffers_are_refused() -> None:
    with pytest.raises(UsageError, match="overlap"):
        from dieplace.emulator.isa import PlainMemory

        PlainMemory([Buffer("a", 4096, 100), Buffer("b", 4150, 100)])


# ---- never-written values


STORE = "global_store_dword v2, v1, s[4:5]"


@pytest.mark.parametrize(
    ("setup", "needle", "origin"),
    [
        (STORE, "global_store_dword", "v1, which was never written"),
        ("v_add_u32_e32 v1, v3, v0\n" + STORE, "global_store_dword", "v3, which was never written"),
        ("v_mov_b32_e32 v1, s20\n" + STORE, "global_store_dword", "s20, which was never written"),
        ("global_load_dword v1, v3, s[4:5]", "global_load_dword", "v3"),
        ("s_cmp_eq_u32 s20, 1\ns_cbranch_scc1 .LBB0_9\n.LBB0_9:", "s_cbranch_scc1", "s20"),
        ("v_cmp_eq_u32_e32 vcc, 1, v3\ns_cbranch_vccz .LBB0_9\n.LBB0_9:", "s_cbranch_vccz", "v3"),
        ("v_cmp_gt_u32_e32 vcc, v3, v0\ns_and_saveexec_b64 s[8:9], vcc", "s_and_saveexec_b64", "v3"),
        ("v_cmpx_gt_u32_e32 vcc, v3, v0", "v_cmpx", "v3"),
        ("s_mov_b64 exec, s[20:21]", "s_mov_b64 exec", "s20"),
        ("s_load_dword s8, s[20:21], 0x0", "s_load_dword s8", "s20"),
        ("v_readlane_b32 s8, v3, 5\nv_mov_b32_e32 v1, s8\n" + STORE, "global_store_dword", "v3"),
        ("v_mov_b32_dpp v1, v3 row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:1\n" + STORE, "store", "v3"),
        ("ds_write_b32 v3, v0", "ds_write_b32", "v3"),
        ("ds_read_b32 v1, v2\n" + STORE, "global_store_dword", "LDS that was never written, read in line"),
        ("v_mov_b32_e32 v4, 0\nds_write_b32 v2, v3\nds_read_b32 v1, v2\n" + STORE, "global_store_dword",
         "LDS that was never written"),
        ("v_mov_b32_e32 v1, 1\nglobal_atomic_add v2, v3, s[4:5]", "global_atomic_add", "v3"),
        ("v_fma_f32 v1, v0, v0, v3\n" + STORE, "global_store_dword", "v3"),
        ("v_pk_add_f32 v[4:5], v[6:7], v[6:7]\nv_mov_b32_e32 v1, v5\n" + STORE, "global_store_dword", "v7"),
        ("v_lshlrev_b64 v[4:5], 3, v[6:7]\nv_mov_b32_e32 v1, v4\n" + STORE, "global_store_dword", "v6"),
        ("v_mov_b32_e32 v4, 9\nv_mad_u64_u32 v[6:7], s[8:9], v4, v4, v[4:5]\nv_mov_b32_e32 v1, v7\n" + STORE,
         "global_store_dword", "v5"),
        ("v_cvt_pk_bf16_f32 v1, v0, v3\n" + STORE, "global_store_dword", "v3"),
        ("v_xor_b32_e32 v1, v3, v0\n" + STORE, "global_store_dword", "v3"),
        ("v_perm_b32 v1, v3, v0, v3\n" + STORE, "global_store_dword", "v3"),
        ("s_lshl_b32 s10, s20, 2\nv_mov_b32_e32 v1, s10\n" + STORE, "global_store_dword", "s20"),
        ("v_cndmask_b32_e64 v1, v0, v0, s[20:21]\n" + STORE, "global_store_dword", "s20"),
        ("s_mov_b64 s[8:9], 1\ns_mov_b64 exec, s[8:9]\nv_mov_b32_e32 v1, 1\ns_mov_b64 exec, -1\n" + STORE,
         "global_store_dword", "v1, which was never written"),
    ],
)  # fmt: skip
def test_what_depends_on_something_never_written_is_a_fault(setup: str, needle: str, origin: str) -> None:
    fault = faulting(NeverWritten, f"{HEAD}\n{setup}", needle, lds=256)
    assert origin in str(fault)


def test_reading_a_poisoned_buffer_names_it() -> None:
    fault = faulting(NeverWritten, f"{HEAD}\nglobal_load_dword v1, v2, s[4:5]\nglobal_store_dword v2, v1, s[6:7]",
                     "global_store_dword", poison=True)  # fmt: skip
    assert "buffer 'weights'" in str(fault) and "never written, read in line 4" in str(fault)


@pytest.mark.parametrize(
    "setup",
    [
        "v_and_b32_e32 v1, 0, v3",  # a bit that cannot matter
        "v_or_b32_e32 v1, -1, v3",
        "v_mov_b32_e32 v3, 5\nv_add_u32_e32 v1, v3, v0",
        "v_cndmask_b32_e64 v1, v0, v3, 0",
        "v_mov_b32_e32 v3, v9\nv_mov_b32_e32 v1, 1",  # copied, never used
        "v_lshrrev_b32_e32 v1, 16, v3\nv_and_b32_e32 v1, 0xffff0000, v1",
        "v_bfe_u32 v1, v3, 8, 0",
        "v_mov_b32_e32 v4, 9\nv_mad_u64_u32 v[6:7], s[8:9], v4, v4, v[4:5]\nv_mov_b32_e32 v1, v6",  # high word unused
        "v_mov_b32_e32 v4, 9\nv_lshl_add_u64 v[6:7], v[4:5], 2, v[4:5]\nv_mov_b32_e32 v1, v6",
        "v_cvt_pk_bf16_f32 v1, v0, v3\nv_and_b32_e32 v1, 0xffff, v1",
        "v_mov_b32_e32 v4, 9\ns_mov_b32 s8, 0x0c0c0100\nv_perm_b32 v1, v3, v4, s8",
        "v_pk_add_u16 v1, v0, v3\nv_mov_b32_e32 v1, v0",
        "s_mov_b32 s8, 3\ns_lshl_b64 s[10:11], s[8:9], 2\nv_mov_b32_e32 v1, s10",
        "s_mov_b32 s8, 3\ns_cmp_eq_u32 s8, 3\ns_cselect_b32 s10, s8, s20\nv_mov_b32_e32 v1, s10",
        "s_mov_b32 s8, 3\ns_add_u32 s10, s8, s8\ns_addc_u32 s11, s8, s20\nv_mov_b32_e32 v1, s10",
        "s_mov_b64 exec, 0xff\nv_mov_b32_e32 v1, 1\nds_write_b32 v2, v1\nds_read_b32 v1, v2\ns_nop 0",
    ],
)
def test_never_written_bits_that_cannot_matter_are_no_fault(setup: str) -> None:
    a, b = HostArray("weights", np.zeros(64, np.uint32)), HostArray("result", np.zeros(64, np.uint32))
    run([launch(f"{HEAD}\n{setup}\n{STORE}", a, b, lds=256)], memory_of(a, b))


def test_a_short_store_needs_only_its_low_half() -> None:
    a = HostArray("weights", np.arange(64, dtype=np.uint32))
    body = f"{HEAD}\nglobal_load_short_d16 v1, v2, s[4:5]\nglobal_store_short v2, v1, s[4:5] offset:2"
    run([launch(body, a, a)], memory_of(a))
    assert a.array.tolist() == [n | n << 16 for n in range(64)]
    with pytest.raises(NeverWritten):
        run([launch(body.replace("store_short", "store_dword").replace(" offset:2", ""), a, a)], memory_of(a))


def test_poison_ends_with_the_store_and_returns_with_the_next_mark() -> None:
    a, b = HostArray("box", np.zeros(64, np.uint32)), HostArray("result", np.zeros(64, np.uint32))
    memory = memory_of(a, b)
    memory.poison("box")
    first = f"{HEAD}\nglobal_store_dword v2, v0, s[4:5]"
    body = f"{first}\nglobal_load_dword v1, v2, s[4:5]\nglobal_store_dword v2, v1, s[6:7]"
    run([launch(body, a, b)], memory)
    assert b.array.tolist() == list(range(64))
    memory.poison("box")
    with pytest.raises(NeverWritten):
        run([launch(body.replace("global_store_dword v2, v0, s[4:5]", "s_nop 0"), a, b)], memory)
    with pytest.raises(UsageError, match="no buffer"):
        memory.poison("mailbox")


def test_matrix_result_is_never_written_only_where_its_row_or_column_is() -> None:
    vgprs = {r: [0] * 64 for r in range(16, 24)} | {r: [0] * 64 for r in (48, 49, 50, 51)}
    vgprs.pop(17)
    after = run_wave("v_mfma_f32_16x16x16_bf16 v[80:83], v[16:17], v[18:19], v[48:51]", vgprs)
    assert not after.is_written(80)
    vgprs[17] = [0] * 64
    after = run_wave("v_mfma_f32_16x16x16_bf16 v[80:83], v[16:17], v[18:19], v[48:51]", vgprs)
    assert all(after.is_written(r) for r in (80, 81, 82, 83))


def test_registers_of_a_second_generation_of_workgroups_are_never_written_again() -> None:
    """What the first workgroup in a slot left behind must not be read by the next one."""
    a, b = HostArray("weights", np.zeros(64, np.uint32)), HostArray("result", np.zeros(64, np.uint32))
    body = f"""{HEAD}
    v_and_b32_e32 v2, 0xfc, v2
    s_cmp_lt_u32 s2, 4
    s_cbranch_scc0 .LBB0_1
    v_mov_b32_e32 v1, 7
    s_branch .LBB0_2
    .LBB0_1:
    s_nop 0
    .LBB0_2:
    {STORE}"""
    from dieplace.emulator.isa import LogicalDevice

    small = LogicalDevice("gpu0/p0", xcds=(0,), cus_per_xcd=1)
    with pytest.raises(NeverWritten):
        run([launch(body, a, b, grid=8, device=small, vgprs=512, block=256)], memory_of(a, b))


def test_memory_survives_a_random_out_of_bounds_campaign() -> None:
    """Wild addresses are faults, never a crash of the process or a write elsewhere."""
    guard = ctypes.create_string_buffer(b"\x5a" * 4096, 4096)
    rng, a = random.Random(5), HostArray("weights", np.zeros(64, np.uint32))
    for _ in range(40):
        wild = rng.choice(
            [rng.getrandbits(47), rng.getrandbits(20), (1 << 47) - 4, a.buffer.base - 4, a.buffer.base + 256]
        )
        vgprs = {2: [wild & 0xFFFFFFFC] * 64, 3: [wild >> 32] * 64, 4: [1] * 64}
        with pytest.raises(KernelFault):
            run_wave("global_store_dword v[2:3], v4, off", vgprs, buffers=(a.buffer,))
    assert guard.raw == b"\x5a" * 4096 and not a.array.any()
