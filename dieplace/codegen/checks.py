"""What a compiled kernel must satisfy: FlyDSL delivers objects that the card cannot run, some without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dieplace.codegen.metadata import KernelResources, is_empty_body
from dieplace.errors import CompileError

if TYPE_CHECKING:
    from dieplace.codegen.flydsl import Compiled

LDS_LIMIT_BYTES = 163840  # 160 KB a workgroup on gfx950 (CDNA 4 ISA guide); 164864 compiles with only a printed error
WORKGROUP_LIMIT = 1024  # threads; FlyDSL compiles 2048 and records 1024 as the maximum


def check(compiled: Compiled) -> None:
    """CompileError when the compiler printed an error, or a kernel must not run; says every reason at once."""
    reasons = [line.strip() for line in compiled.compiler_output.splitlines() if "error:" in line]
    for kernel in compiled.kernels:
        reasons += [f"{kernel.name}: {text}" for text in _objections(kernel, is_empty_body(compiled.isa, kernel.name))]
    if reasons:
        raise CompileError(
            f"{compiled.name} compiled to something that must not run: " + "; ".join(dict.fromkeys(reasons)),
            hint="`dieplace kernel lint` names operations that FlyDSL accepts and drops",
            reasons=reasons,
        )


def _objections(kernel: KernelResources, empty: bool) -> list[str]:
    found = []
    if kernel.vgpr_spills or kernel.sgpr_spills:
        found.append(f"{kernel.vgpr_spills} VGPR and {kernel.sgpr_spills} SGPR spills")
    if kernel.scratch_bytes:
        found.append(f"{kernel.scratch_bytes} bytes of scratch a lane")
    if kernel.lds_bytes > LDS_LIMIT_BYTES:
        found.append(f"{kernel.lds_bytes} bytes of LDS, the limit is {LDS_LIMIT_BYTES}")
    if max(kernel.threads, kernel.max_workgroup) > WORKGROUP_LIMIT:
        found.append(f"a workgroup of {kernel.threads} threads, the limit is {WORKGROUP_LIMIT}")
    if empty:
        found.append("the body is empty: an operation was dropped, or nothing the kernel computes is stored")
    return found
