"""Compile an op's FlyDSL kernels for gfx950 as a check case needs them, and say what they take of a compute unit."""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.errors import Unsupported
from dieplace.kernels import registry
from dieplace.kernels.cases import cases

# CDNA 3 and 4: 512 vector registers a lane and SIMD, handed out by eights, at most 8 waves (AMD CDNA ISA guides,
# "VGPRs"; LLVM AMDGPUUsage, "granulated_workitem_vgpr_count").
VGPRS_PER_SIMD, VGPR_GRANULE, MAX_WAVES = 512, 8, 8


@dataclass(frozen=True)
class Built:
    """One compiled kernel; spills and scratch are refused by the compiler module, so they are always zero here."""

    op: str
    kernel: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    waves_per_simd: int
    instructions: int
    code_hash: str
    seconds: float
    from_cache: bool


def waves_per_simd(vgprs: int) -> int:
    """Waves that fit one SIMD by their vector registers alone (`vgprs` counts AGPRs too)."""
    allocated = -(-max(1, vgprs) // VGPR_GRANULE) * VGPR_GRANULE
    return min(MAX_WAVES, VGPRS_PER_SIMD // allocated)


def build_op(name: str, case: int = 0) -> list[Built]:
    """Compile the launches of one check case; CompileError when one does not compile, Unsupported when none exists."""
    from dieplace.codegen.flydsl import CompileOptions, compile_launcher

    kernel = registry.implementation(name, "flydsl")
    if kernel is None:
        raise Unsupported(f"no FlyDSL kernel implements {name}", hint="`dieplace kernel list` shows which ops have one")
    chosen = cases(name)[case]
    call = registry.check_call(name, chosen.operands, chosen.attrs)
    built = []
    for launch in kernel.plan(call.operands, call.attrs):  # type: ignore[attr-defined]
        made = compile_launcher(launch.launcher, *launch.args, options=CompileOptions(hints=dict(launch.hints)))
        built += [
            Built(
                name,
                resources.name,
                resources.vgpr,
                resources.agpr,
                resources.sgpr,
                resources.lds_bytes,
                waves_per_simd(resources.vgpr),
                _instructions(made.isa),
                made.code_hash,
                made.seconds,
                made.from_cache,
            )
            for resources in made.kernels
        ]
    return built


def _instructions(isa: str) -> int:
    """Instruction lines of the text: indented, neither directive nor label nor comment."""
    lines = (line.split(";")[0] for line in isa.splitlines())
    return sum(1 for line in lines if line.startswith("\t") and line.strip() and line.strip()[0] not in ".:")
