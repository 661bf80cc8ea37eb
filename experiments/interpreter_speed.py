"""Speed of the gfx950 interpreter in wave instructions a second, alone or beside another interpreter of ISA text.

    python -m dieplace.experiments.interpreter_speed [--against FILE.py] [--waves 32 256 1024] [--repeat 5]

FILE.py names a module with `Program(isa_text, name)` and `Machine(program, grid, block, kernarg, buffers).run()`,
buffers as (address, bytes). Both run the same texts in one process on one core, in turns; the fastest run of each
counts. Host time on this machine, not a figure about any GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dieplace.emulator.isa import Buffer, Launch, PlainMemory, Program, run

K = 2048
WAVES_PER_BLOCK = 4

# One row of W a wave: eight loads of 16 bytes a lane, fused multiply-adds, a DPP sum, one store.
GEMV = """
	s_load_dwordx4 s[4:7], s[0:1], 0x0
	s_load_dwordx2 s[8:9], s[0:1], 0x10
	v_and_b32_e32 v1, 63, v0
	v_lshrrev_b32_e32 v2, 6, v0
	v_readfirstlane_b32 s10, v2
	s_lshl_b32 s11, s2, 2
	s_add_u32 s10, s10, s11
	s_lshl_b32 s11, s10, 13
	s_waitcnt lgkmcnt(0)
	s_add_u32 s4, s4, s11
	s_addc_u32 s5, s5, 0
	v_lshlrev_b32_e32 v3, 4, v1
	v_mov_b32_e32 v20, 0
	v_mov_b32_e32 v21, 0
	s_movk_i32 s12, 0x8
.LBB0_1:
	global_load_dwordx4 v[4:7], v3, s[4:5]
	global_load_dwordx4 v[8:11], v3, s[6:7]
	v_add_u32_e32 v3, 0x400, v3
	s_waitcnt vmcnt(0)
	v_fmac_f32_e32 v20, v4, v8
	v_fmac_f32_e32 v21, v5, v9
	v_pk_mul_f32 v[6:7], v[6:7], v[10:11]
	v_add_f32_e32 v20, v20, v6
	v_add_f32_e32 v21, v21, v7
	s_add_i32 s12, s12, -1
	s_cmp_lg_u32 s12, 0
	s_cbranch_scc1 .LBB0_1
	v_add_f32_e32 v20, v20, v21
	v_add_f32_dpp v20, v20, v20 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_add_f32_dpp v20, v20, v20 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_add_f32_dpp v20, v20, v20 row_shr:4 row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_add_f32_dpp v20, v20, v20 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_mov_b32_e32 v22, 0
	v_mov_b32_dpp v22, v20 row_bcast:15 row_mask:0xa bank_mask:0xf
	v_add_f32_e32 v20, v20, v22
	v_mov_b32_e32 v22, 0
	v_mov_b32_dpp v22, v20 row_bcast:31 row_mask:0xc bank_mask:0xf
	v_add_f32_e32 v20, v20, v22
	v_readlane_b32 s13, v20, 63
	v_cmp_eq_u32_e64 s[14:15], 0, v1
	s_and_saveexec_b64 s[16:17], s[14:15]
	v_mov_b32_e32 v23, s13
	s_lshl_b32 s10, s10, 2
	v_mov_b32_e32 v24, s10
	global_store_dword v24, v23, s[8:9]
	s_endpgm
"""


def isa_text(body: str, vgprs: int = 32) -> str:
    """A kernel called `bench` around a body."""
    return (
        f"bench:\n{body}.Lfunc_end0:\n\t.amdhsa_kernel bench\n\t\t.amdhsa_user_sgpr_count 2\n"
        f"\t\t.amdhsa_system_sgpr_workgroup_id_x 1\n\t\t.amdhsa_next_free_vgpr {vgprs}\n"
        f"\t\t.amdhsa_accum_offset {vgprs}\n\t.end_amdhsa_kernel\n"
    )


class Problem:
    """A float32 GEMV of one row a wave, with its float64 answer."""

    def __init__(self, waves: int) -> None:
        generator = torch.Generator().manual_seed(waves)
        self.w = torch.randn(waves, K, generator=generator)
        self.x = torch.randn(K, generator=generator)
        self.y = torch.zeros(waves)
        self.grid, self.block = (waves // WAVES_PER_BLOCK, 1, 1), (64 * WAVES_PER_BLOCK, 1, 1)
        tensors = (self.w, self.x, self.y)
        self.kernarg = b"".join(t.data_ptr().to_bytes(8, "little") for t in tensors)
        self.ranges = [(t.data_ptr(), t.numel() * 4) for t in tensors]

    def check(self) -> None:
        """Raise when the last run left a wrong answer: a fast wrong interpreter is not fast."""
        want = self.w.double() @ self.x.double()
        if not torch.allclose(self.y.double(), want, rtol=1e-4, atol=1e-3):
            raise AssertionError("the interpreter's result differs from float64")
        self.y.zero_()


def ours(problem: Problem) -> tuple[int, float]:
    """Wave instructions and seconds of one run here."""
    program = Program.parse(isa_text(GEMV), "bench")
    memory = PlainMemory([Buffer(f"b{n}", base, size) for n, (base, size) in enumerate(problem.ranges)])
    started = time.perf_counter()
    stats = run([Launch(program, problem.grid, problem.block, problem.kernarg)], memory)
    return stats.wave_instructions, time.perf_counter() - started


def other(module: Any) -> Callable[[Problem], tuple[int, float]]:
    """The same for another interpreter."""
    program = module.Program(isa_text(GEMV), "bench")

    def once(problem: Problem) -> tuple[int, float]:
        started = time.perf_counter()
        machine = module.Machine(program, problem.grid, problem.block, problem.kernarg, problem.ranges)
        machine.run()
        return int(machine.count), time.perf_counter() - started

    return once


def load(path: Path) -> Any:
    """Import a Python file by path."""
    spec = importlib.util.spec_from_file_location("compared_interpreter", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(waves: int, repeat: int, runners: dict[str, Callable[[Problem], tuple[int, float]]]) -> dict[str, float]:
    """Millions of wave instructions a second for each runner: the best of `repeat` turns."""
    problem = Problem(waves)
    best = dict.fromkeys(runners, 0.0)
    for _ in range(repeat):
        for name, runner in runners.items():
            count, seconds = runner(problem)
            problem.check()
            best[name] = max(best[name], count / seconds / 1e6)
    return best


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print and return one row for each number of waves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a Python file with another interpreter")
    parser.add_argument("--waves", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runners: dict[str, Callable[[Problem], tuple[int, float]]] = {"here": ours}
    if options.against:
        runners["there"] = other(load(options.against))
    rows = []
    for waves in options.waves:
        with np.errstate(all="ignore"):
            best = measure(waves, options.repeat, runners)
        rows.append({"waves": waves, **{f"{k}_m_wave_instructions_per_s": v for k, v in best.items()}})
        print(f"{waves:5d} waves: " + ", ".join(f"{name} {value:6.2f} M/s" for name, value in best.items()))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
