"""A register that is used before its load was waited for: found in the text, on every path, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from isa_bench import HostArray, isa_text, launch, memory_of

from dieplace.emulator.isa import MissingWait, Program, run
from dieplace.emulator.isa.waits import hazards

ADDRESS = "s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32_e32 v2, 2, v0\n"

LOAD = "global_load_dword v1, v2, s[4:5]"
TWO_LOADS = f"{LOAD}\nglobal_load_dword v3, v2, s[4:5]"
SCALAR = "s_load_dword s8, s[0:1], 0x8"


def found(body: str) -> list[tuple[int, int]]:
    """(line that uses, line that loads) for every hazard; the label is line 1."""
    return [(h.step.inst.line, h.load.inst.line) for h in hazards(Program.parse(isa_text(body, lds=1024), "t"))]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("global_load_dword v1, v2, s[4:5]\nv_add_u32_e32 v3, 1, v1", [(6, 5)]),
        ("global_load_dword v1, v2, s[4:5]\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v3, 1, v1", []),
        ("global_load_dword v1, v2, s[4:5]\ns_waitcnt lgkmcnt(0)\nv_add_u32_e32 v3, 1, v1", [(7, 5)]),
        # two loads in flight: vmcnt(1) lets the first arrive, not the second
        (f"{TWO_LOADS}\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v1", []),
        (f"{TWO_LOADS}\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v3", [(8, 6)]),
        # a store counts too
        (f"{LOAD}\nglobal_store_dword v2, v0, s[4:5]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v1", []),
        # overwriting a register in flight is as wrong as reading it
        ("global_load_dword v1, v2, s[4:5]\nv_mov_b32_e32 v1, 0", [(6, 5)]),
        ("ds_read_b32 v1, v2\nv_mov_b32_e32 v4, v1", [(6, 5)]),
        ("ds_read_b32 v1, v2\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v4, v1", []),
        # scalar memory returns out of order: only lgkmcnt(0) is enough
        (f"{SCALAR}\ns_load_dword s9, s[0:1], 0xc\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s10, s8", [(8, 5)]),
        ("s_load_dword s8, s[0:1], 0x8\ns_waitcnt lgkmcnt(0)\ns_mov_b32 s10, s8", []),
        ("ds_swizzle_b32 v1, v0 offset:swizzle(SWAP,1)\nv_mov_b32_e32 v3, v1", [(6, 5)]),
        ("global_atomic_add v1, v2, v0, s[4:5] sc0\nv_mov_b32_e32 v3, v1", [(6, 5)]),
        ("buffer_load_dword v1, v2, s[8:11], 0 offen\nglobal_store_dword v2, v1, s[4:5]", [(6, 5)]),
    ],
)  # fmt: skip
def test_straight_line(body: str, want: list[tuple[int, int]]) -> None:
    assert found(ADDRESS + body) == want


def test_a_wait_on_one_path_only_is_not_enough() -> None:
    body = (
        ADDRESS
        + """global_load_dword v1, v2, s[4:5]
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc1 .LBB0_1
    s_waitcnt vmcnt(0)
    .LBB0_1:
    v_mov_b32_e32 v3, v1"""
    )
    assert found(body) == [(10, 5)]
    assert found(body.replace(".LBB0_1:\n", ".LBB0_1:\ns_waitcnt vmcnt(0)\n")) == []


def test_a_load_at_the_end_of_a_loop_reaches_its_head() -> None:
    body = (
        ADDRESS
        + """v_mov_b32_e32 v1, 0
    s_mov_b32 s8, 3
    .LBB0_1:
    v_add_u32_e32 v3, 1, v1
    global_load_dword v1, v2, s[4:5]
    s_sub_u32 s8, s8, 1
    s_cmp_lg_u32 s8, 0
    s_cbranch_scc1 .LBB0_1"""
    )
    assert found(body) == [(8, 9)]


def test_such_a_program_does_not_run_and_the_fault_names_both_lines() -> None:
    out = HostArray("out", np.zeros(64, np.uint32))
    body = ADDRESS + "global_load_dword v1, v2, s[4:5]\nv_add_u32_e32 v3, 1, v1\nglobal_store_dword v2, v3, s[4:5]"
    with pytest.raises(MissingWait) as caught:
        run([launch(body, out)], memory_of(out))
    text = str(caught.value)
    assert "line 6: `v_add_u32_e32 v3, 1, v1`" in text and "uses v1 before the load of line 5" in text
    run([launch(body.replace("v_add_u32", "s_waitcnt vmcnt(0)\nv_add_u32"), out)], memory_of(out))
    assert out.array.tolist() == [1] * 64


def test_compiled_kernels_have_every_wait_and_lose_it_when_one_is_removed() -> None:
    """LLVM places the waits of a FlyDSL kernel: none is missing, and most removals are noticed."""
    import re

    import torch
    import trial_kernels as trial

    from dieplace.codegen.flydsl import compile_launcher

    w, x, y = torch.zeros(64, 2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16), torch.zeros(64)
    compiled = compile_launcher(trial.gemv_bf16(64, 2048), w, x, y)
    name = compiled.kernels[0].name
    assert hazards(Program.parse(compiled.isa, name)) == []
    waits = [m.start() for m in re.finditer(r"\ts_waitcnt [^\n]*", compiled.isa)]
    noticed = sum(
        bool(hazards(Program.parse(compiled.isa[:at] + compiled.isa[at:].replace("s_waitcnt", "s_nop 0 ;", 1), name)))
        for at in waits
    )
    assert len(waits) >= 2 and noticed >= 0.6 * len(waits), f"{noticed} of {len(waits)}"
