"""Compile an op's kernels for gfx950 as a check case needs them, and say what they take of a compute unit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dieplace.errors import CompileError, Unsupported
from dieplace.kernels import registry
from dieplace.kernels.cases import cases

if TYPE_CHECKING:
    from dieplace.codegen.metadata import KernelResources

# CDNA 3 and 4: 512 vector registers a lane and SIMD, handed out by eights, at most 8 waves (AMD CDNA ISA guides,
# "VGPRs"; LLVM AMDGPUUsage, "granulated_workitem_vgpr_count").
VGPRS_PER_SIMD, VGPR_GRANULE, MAX_WAVES = 512, 8, 8


@dataclass(frozen=True)
class Built:
    """One compiled kernel; spills and scratch are refused, so they are always zero here."""

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


def build_op(name: str, case: int = 0, kernels: str = "flydsl") -> list[Built]:
    """Compile the launches of one check case for gfx950, with FlyDSL or Triton.

    CompileError when one does not compile, Unsupported when none exists.
    """
    kernel = registry.implementation(name, kernels)
    if kernel is None:
        raise Unsupported(
            f"no {kernels} kernel implements {name}", hint="`dieplace kernel list` shows which ops have one"
        )
    chosen = cases(name)[case]
    call = registry.check_call(name, chosen.operands, chosen.attrs)
    return _triton(name, kernel, call) if kernels == "triton" else _flydsl(name, kernel, call)


def _flydsl(name: str, kernel: Any, call: registry.Call) -> list[Built]:
    from dieplace.codegen.flydsl import CompileOptions, compile_launcher

    built = []
    for launch in kernel.plan(call.operands, call.attrs):
        made = compile_launcher(launch.launcher, *launch.args, options=CompileOptions(hints=dict(launch.hints)))
        told = (made.code_hash, made.seconds, made.from_cache)
        built += [_built(name, resources, made.isa, resources.lds_bytes, *told) for resources in made.kernels]
    return built


def _triton(name: str, kernel: Any, call: registry.Call) -> list[Built]:
    """The op's own host code makes the launches; they are compiled and not run. LDS is what each launch asks for."""
    from dieplace.codegen.flydsl import code_hash
    from dieplace.codegen.triton_host import launching

    built: list[Built] = []
    started = time.monotonic()

    def note(tensors: Any, launch: Any) -> None:
        nonlocal started
        seconds, resources = time.monotonic() - started, launch.resources
        if resources.vgpr_spills or resources.sgpr_spills or resources.scratch_bytes:
            raise CompileError(f"Triton kernel {resources.name} spills registers", hint="give it smaller tiles")
        lds = resources.lds_bytes + launch.dynamic_lds_bytes
        built.append(_built(name, resources, launch.isa, lds, code_hash(launch.isa), seconds, False))
        started = time.monotonic()

    with launching(note):
        kernel(call.operands, call.attrs)
    return built


def _built(
    name: str, resources: KernelResources, isa: str, lds_bytes: int, code: str, seconds: float, from_cache: bool
) -> Built:
    waves = waves_per_simd(resources.vgpr)
    registers = (resources.vgpr, resources.agpr, resources.sgpr)
    return Built(name, resources.name, *registers, lds_bytes, waves, _instructions(isa), code, seconds, from_cache)


def _instructions(isa: str) -> int:
    """Instruction lines of the text: indented, neither directive nor label nor comment."""
    lines = (line.split(";")[0] for line in isa.splitlines())
    return sum(1 for line in lines if line.startswith("\t") and line.strip() and line.strip()[0] not in ".:")
