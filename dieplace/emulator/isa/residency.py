"""How many workgroups of a kernel a CU holds at once, from its registers, LDS and waves."""

from __future__ import annotations

from dataclasses import dataclass

from dieplace.emulator.isa.state import Launch
from dieplace.errors import UsageError


@dataclass(frozen=True)
class CuLimits:
    """Resources of one gfx950 CU: 4 SIMDs of 512 VGPRs a lane and 8 waves each, 160 KB LDS (AMD CDNA 4 ISA, LLVM
    AMDGPU).
    """

    simds: int = 4
    vgprs_per_simd: int = 512
    waves_per_simd: int = 8
    lds_bytes: int = 160 * 1024
    workgroups: int = 32


def workgroups_per_cu(launch: Launch, limits: CuLimits | None = None) -> int:
    """Workgroups of this launch that one CU holds at once; UsageError when not even one fits."""
    limits = limits or CuLimits()
    metadata = launch.program.metadata
    waves_per_simd = min(limits.waves_per_simd, limits.vgprs_per_simd // metadata.allocated_vgprs)
    waves = launch.waves_per_workgroup
    lds = metadata.lds_bytes + launch.dynamic_lds_bytes
    by_waves = waves_per_simd * limits.simds // waves
    by_lds = limits.lds_bytes // lds if lds else limits.workgroups
    fits = min(by_waves, by_lds, limits.workgroups)
    if fits < 1:
        raise UsageError(
            f"one workgroup of kernel {launch.program.name} does not fit a CU: {waves} waves of"
            f" {metadata.allocated_vgprs} VGPRs and {lds} bytes of LDS, where a CU has {waves_per_simd * limits.simds}"
            f" such waves and {limits.lds_bytes} bytes",
            hint="use a smaller block, fewer registers or less LDS",
        )
    return fits


def resident_workgroups(launch: Launch, share: float = 1.0, limits: CuLimits | None = None) -> int:
    """Workgroups that the launch's device holds at once, when `share` of each CU is free for them."""
    per_cu = max(1, int(workgroups_per_cu(launch, limits) * share))
    return per_cu * launch.device.cus_per_xcd * len(launch.device.xcds)
