"""What the kernel driver accepts: compute modes by XCC count and NPS, and the mode it picks by itself at load.

Plain functions over plain data. Source: amdgpu `aqua_vanjaram.c` in the newest tree, the 2025 kernels and the
older ROCK-Kernel-Driver, as named at each table.
"""

from __future__ import annotations

from dieplace.modes import Mode, partitions_of

# `aqua_vanjaram.c`: NPS modes that each compute mode runs under.
NPS_2025 = {"SPX": (1,), "DPX": (1, 2), "TPX": (1, 4), "QPX": (1, 4), "CPX": (1, 4)}
# The newest amdgpu tree adds NPS2 to QPX and CPX for GC 9.5.0 (gfx950) only.
NPS_NEWEST_GFX950 = {**NPS_2025, "QPX": (1, 2, 4), "CPX": (1, 2, 4)}


def supported_compute(xccs: int) -> tuple[str, ...]:
    """Compute modes by XCC count, in the order of `supported_xcp_configs`."""
    by_count = {8: ("SPX", "DPX", "QPX", "CPX"), 6: ("SPX", "TPX", "CPX"), 4: ("SPX", "DPX", "CPX")}
    return by_count.get(xccs, ("SPX", "CPX"))


def nps_of(compute: str, gfx: str, table: str) -> tuple[int, ...]:
    """NPS numbers that `compute` runs under, by kernel table `newest` or `2025`."""
    return (NPS_NEWEST_GFX950 if table == "newest" and gfx == "gfx950" else NPS_2025)[compute]


def available_compute(xccs: int, nps: int, gfx: str, table: str) -> tuple[str, ...]:
    """Compute modes valid under the current NPS."""
    return tuple(word for word in supported_compute(xccs) if nps in nps_of(word, gfx, table))


def modes_of(xccs: int, memory_caps: tuple[str, ...], gfx: str, table: str = "newest") -> tuple[Mode, ...]:
    """Every mode that a card can be in: NPS1 always, others if the firmware lists them."""
    ranges = sorted({1} | {int(word[3:]) for word in memory_caps})
    return tuple(Mode(compute, f"NPS{nps}") for nps in ranges for compute in available_compute(xccs, nps, gfx, table))


def automatic_compute(xccs: int, nps: int, apu: bool, rule: str) -> str | None:
    """The compute mode chosen at driver load, or None: no compatible mode, the load fails with EINVAL.

    `rule` is `newer` or `older`: they differ where there is one range for two XCCs on a discrete card (CPX or QPX).
    """
    if nps == 1:
        return "SPX"
    if nps == xccs:
        return "CPX"
    if nps * 2 == xccs:
        if apu:
            return "TPX"
        return "QPX" if rule == "older" else "CPX"
    return "DPX" if nps == 2 and not apu else None


def read_compute_word(text: str, xccs: int) -> str | None:
    """The mode a written text names, or None (EINVAL): prefix match, any case, trailing newline allowed."""
    word = next((w for w in ("SPX", "DPX", "TPX", "QPX", "CPX") if text.upper().startswith(w)), None)
    if word is None or (word == "TPX" and xccs != 6) or (word == "QPX" and xccs != 8):
        return None
    return None if word == "DPX" and xccs % 4 else word


def read_memory_word(text: str) -> str | None:
    """The NPS mode a written text names, or None (EINVAL)."""
    return next((w for w in ("NPS1", "NPS2", "NPS4", "NPS8") if text.upper().startswith(w)), None)


def shared_instances(available: int, partitions: int) -> tuple[int, int]:
    """(instances per partition, partitions that share one): with fewer engines than partitions, one is shared."""
    return (available // partitions, 1) if available >= partitions else (1, partitions // max(available, 1))


def first_range(partition: int, partitions: int, ranges: int) -> int:
    """Memory range of a partition (XCCs and ranges are both in die order)."""
    return partition * ranges // partitions


__all__ = [
    "Mode", "automatic_compute", "available_compute", "first_range", "modes_of", "nps_of", "partitions_of",
    "read_compute_word", "read_memory_word", "shared_instances", "supported_compute",
]  # fmt: skip
