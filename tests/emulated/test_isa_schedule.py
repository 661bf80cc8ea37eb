"""Several launches at once, seeds, residency, and bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from isa_bench import HostArray, isa_text, launch, memory_of, run

from dieplace.emulator.isa import Launch, Livelock, LogicalDevice, PlainMemory, Program
from dieplace.emulator.isa.residency import resident_workgroups, workgroups_per_cu
from dieplace.errors import UsageError

P0 = LogicalDevice("gpu0/p0", xcds=(0, 1, 2, 3))
P1 = LogicalDevice("gpu0/p1", xcds=(4, 5, 6, 7), xcc_id_base=4)
HEAD = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_mov_b32_e32 v2, 0"

# Producer: counts 1..8 in box, waiting for each acknowledgement. Consumer: acknowledges each and sums what it saw.
PRODUCER = f"""{HEAD}
    s_mov_b64 exec, 1
    s_mov_b32 s8, 1
    .LBB0_1:
    v_mov_b32_e32 v1, s8
    global_store_dword v2, v1, s[4:5] sc0 sc1
    .LBB0_2:
    global_load_dword v3, v2, s[6:7] sc0 sc1
    s_sleep 1
    s_waitcnt vmcnt(0)
    v_cmp_ne_u32_e32 vcc, s8, v3
    s_cbranch_vccnz .LBB0_2
    s_add_u32 s8, s8, 1
    s_cmp_le_u32 s8, 8
    s_cbranch_scc1 .LBB0_1"""
CONSUMER = f"""{HEAD}
    s_mov_b64 exec, 1
    s_mov_b32 s8, 1
    v_mov_b32_e32 v4, 0
    .LBB0_1:
    global_load_dword v3, v2, s[4:5] sc0 sc1
    s_waitcnt vmcnt(0)
    v_cmp_ne_u32_e32 vcc, s8, v3
    s_cbranch_vccnz .LBB0_1
    v_add_u32_e32 v4, v4, v3
    v_mov_b32_e32 v1, s8
    global_store_dword v2, v1, s[6:7] sc0 sc1
    s_add_u32 s8, s8, 1
    s_cmp_le_u32 s8, 8
    s_cbranch_scc1 .LBB0_1
    global_store_dword v2, v4, s[6:7] offset:64"""


def boxes() -> tuple[HostArray, HostArray]:
    return HostArray("box", np.zeros(32, np.uint32)), HostArray("ack", np.zeros(32, np.uint32))


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_launches_on_two_devices_run_together(seed: int | None) -> None:
    box, ack = boxes()
    launches = [launch(PRODUCER, box, ack, device=P0), launch(CONSUMER, box, ack, device=P1)]
    stats = run(launches, memory_of(box, ack), seed=seed, step_limit=200_000)
    assert ack.array[16] == 36 and box.array[0] == 8
    assert [s.kernel for s in stats.launches] == ["t", "t"]


def test_launches_of_one_device_and_stream_run_in_order_and_streams_together() -> None:
    box, ack = boxes()
    both = [launch(PRODUCER, box, ack, device=P0), launch(CONSUMER, box, ack, device=P0)]
    with pytest.raises(Livelock):
        run(both, memory_of(box, ack), step_limit=20_000)
    box, ack = boxes()
    both = [launch(PRODUCER, box, ack, device=P0), launch(CONSUMER, box, ack, device=P0, stream=1)]
    run(both, memory_of(box, ack), step_limit=200_000)
    assert ack.array[16] == 36


RACE = f"""{HEAD}
    s_mov_b64 exec, 1
    global_load_dword v3, v2, s[4:5]
    s_waitcnt vmcnt(0)
    v_add_u32_e32 v3, 1, v3
    global_store_dword v2, v3, s[4:5]"""
ATOMIC = f"""{HEAD}
    s_mov_b64 exec, 1
    v_mov_b32_e32 v3, 1
    global_atomic_add v2, v3, s[4:5]"""


def counted(body: str, seed: int | None) -> int:
    box, ack = boxes()
    run([launch(body, box, ack, grid=6, device=P0)], memory_of(box, ack), seed=seed)
    return int(box.array[0])


def test_seeds_vary_the_interleaving_reproduce_it_and_find_a_race() -> None:
    lost = [counted(RACE, seed) for seed in range(40)]
    assert len(set(lost)) > 2 and min(lost) < 6, "a read-modify-write without an atomic loses updates under some seed"
    assert lost == [counted(RACE, seed) for seed in range(40)]
    assert {counted(ATOMIC, seed) for seed in (None, *range(40))} == {6}


def order_of(seed: int) -> tuple[int, ...]:
    """Tickets that six workgroups draw: the order in which they came."""
    box, ack = boxes()
    body = f"""{HEAD}
    s_mov_b64 exec, 1
    v_mov_b32_e32 v3, 1
    global_atomic_add v4, v2, v3, s[4:5] sc0
    v_mov_b32_e32 v5, s2
    v_lshlrev_b32_e32 v5, 2, v5
    global_store_dword v5, v4, s[6:7]"""
    run([launch(body, box, ack, grid=6, device=P0)], memory_of(box, ack), seed=seed)
    return tuple(int(x) for x in ack.array[:6])


def test_seeds_reach_many_orders() -> None:
    assert len({order_of(seed) for seed in range(200)}) > 100


def test_residency_follows_registers_lds_and_waves() -> None:
    """MI355X: 512 VGPRs a SIMD lane in units of 8, 8 waves a SIMD, 4 SIMDs and 160 KB of LDS a CU."""
    cases = [(dict(vgprs=64, block=256), 8), (dict(vgprs=65, block=256), 7), (dict(vgprs=128, block=256), 4),
             (dict(vgprs=512, block=256), 1), (dict(vgprs=32, block=64), 32), (dict(vgprs=32, block=1024), 2),
             (dict(vgprs=32, block=64, lds=65536), 2), (dict(vgprs=32, block=64, lds=163840), 1)]  # fmt: skip
    for how, want in cases:
        one = launch("s_nop 0", grid=1, **how)  # type: ignore[arg-type]
        assert workgroups_per_cu(one) == want, how
        assert resident_workgroups(one) == want * 32 * 8
    with pytest.raises(UsageError, match="does not fit"):
        workgroups_per_cu(launch("s_nop 0", vgprs=256, block=1024))


# Every wave adds to a counter and waits until all waves of the grid have: they must all be resident.
GRID_BARRIER = f"""{HEAD}
    s_load_dword s10, s[0:1], 0x10
    s_mov_b64 exec, 1
    v_mov_b32_e32 v3, 1
    s_waitcnt lgkmcnt(0)
    global_atomic_add v2, v3, s[4:5] sc1
    .LBB0_1:
    global_load_dword v4, v2, s[4:5] sc1
    s_sleep 1
    s_waitcnt vmcnt(0)
    v_cmp_gt_u32_e32 vcc, s10, v4
    s_cbranch_vccnz .LBB0_1"""


def test_one_workgroup_more_than_is_resident_hangs_a_grid_barrier() -> None:
    tiny = LogicalDevice("gpu0/p0", xcds=(0, 1), cus_per_xcd=2)
    how: dict[str, Any] = dict(device=tiny, vgprs=512, block=256)
    fits = resident_workgroups(launch("s_nop 0", **how))
    assert fits == 4
    box, ack = boxes()
    run([launch(GRID_BARRIER, box, ack, grid=fits, numbers=(4 * fits,), **how)], memory_of(box, ack), step_limit=50_000)
    assert box.array[0] == 4 * fits
    box, ack = boxes()
    with pytest.raises(Livelock) as caught:
        run([launch(GRID_BARRIER, box, ack, grid=fits + 1, numbers=(4 * fits + 4,), **how)], memory_of(box, ack),
            step_limit=50_000)  # fmt: skip
    assert "last read 0x10 at byte 0 of buffer 'box'" in str(caught.value) and "not resident" in str(caught.value)


@pytest.mark.parametrize("seed", [None, 3])
def test_queued_workgroups_take_free_slots_of_their_xcd(seed: int | None) -> None:
    tiny = LogicalDevice("gpu0/p0", xcds=(2, 5), cus_per_xcd=1)
    out = HostArray("out", np.full(40, 99, np.uint32))
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b64 exec, 1
    s_getreg_b32 s6, hwreg(HW_REG_XCC_ID, 0, 4)
    v_mov_b32_e32 v1, s6
    v_mov_b32_e32 v2, s2
    v_lshlrev_b32_e32 v2, 2, v2
    s_and_b32 s7, s2, 7
    .LBB0_1:
    s_sub_u32 s7, s7, 1
    s_cmp_gt_i32 s7, 0
    s_cbranch_scc1 .LBB0_1
    global_store_dword v2, v1, s[4:5]"""
    run([launch(body, out, grid=40, device=tiny, vgprs=512, block=256)], memory_of(out), seed=seed)
    assert out.array.tolist() == [w % 2 for w in range(40)]


def test_memory_is_bounded_for_grids_of_any_size() -> None:
    """Host memory depends on what is resident, not on the grid: ten times the grid, the same peak."""
    device = LogicalDevice("gpu0/p0", xcds=(0, 1), cus_per_xcd=4)
    peaks = []
    for grid in (2_000, 20_000):
        out = HostArray("out", np.zeros(1, np.uint32))
        one = launch(f"{HEAD}\ns_mov_b64 exec, 1\nv_mov_b32_e32 v3, 1\nglobal_atomic_add v2, v3, s[4:5]", out, out,
                     grid=grid, device=device, vgprs=128)  # fmt: skip
        tracemalloc.start()
        run([one], memory_of(out))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert out.array[0] == grid
    assert peaks[1] < 1.3 * peaks[0]


def test_counts_by_kind_and_opcode() -> None:
    out = HostArray("out", np.zeros(64 * 4, np.uint32))
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v2, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v1, v2, s[4:5]
    s_waitcnt vmcnt(0)
    v_add_u32_e32 v1, 1, v1
    global_store_dword v2, v1, s[4:5]"""
    stats = run([launch(body, out, block=256), launch("s_nop 0", out, grid=3)], memory_of(out))
    first, second = stats.launches
    assert first.by_kind == {"smem": 4, "valu": 8, "wait": 8, "vmem_load": 4, "vmem_store": 4, "control": 4}
    assert first.by_opcode["v_add_u32_e32"] == 4 and first.wave_instructions == 32
    assert second.by_opcode == {"s_nop": 3, "s_endpgm": 3}
    assert stats.wave_instructions == 38 and stats.by_kind["control"] == 10


def test_an_empty_grid_is_over_at_once_and_starts_the_next_launch() -> None:
    out = HostArray("out", np.zeros(64, np.uint32))
    body = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v2, 2, v0\nglobal_store_dword v2, v0, s[4:5]"
    run([launch(body, out, grid=0), launch(body, out)], memory_of(out))
    assert out.array.tolist() == list(range(64))
    assert run([], PlainMemory([])).wave_instructions == 0


def test_three_dimensional_grid_ids() -> None:
    out = HostArray("out", np.zeros(24, np.uint32))
    extra = "\t\t.amdhsa_system_sgpr_workgroup_id_y 1\n\t\t.amdhsa_system_sgpr_workgroup_id_z 1\n"
    body = """s_load_dwordx2 s[6:7], s[0:1], 0x0
    s_mov_b64 exec, 1
    s_mul_i32 s8, s4, 6
    s_mul_i32 s9, s3, 2
    s_add_u32 s8, s8, s9
    s_add_u32 s8, s8, s2
    v_mov_b32_e32 v2, s8
    v_lshlrev_b32_e32 v2, 2, v2
    s_lshl_b32 s9, s3, 8
    s_lshl_b32 s10, s4, 16
    s_or_b32 s9, s9, s10
    s_or_b32 s9, s9, s2
    v_mov_b32_e32 v1, s9
    global_store_dword v2, v1, s[6:7]"""
    program = Program.parse(isa_text(body, extra=extra), "t")
    run([Launch(program, (2, 3, 4), (64, 1, 1), out.pointer)], memory_of(out))
    assert out.array.tolist() == [x | y << 8 | z << 16 for z in range(4) for y in range(3) for x in range(2)]


def test_a_device_needs_distinct_xcds() -> None:
    with pytest.raises(UsageError, match="distinct"):
        LogicalDevice("gpu0/p0", xcds=(1, 1))
