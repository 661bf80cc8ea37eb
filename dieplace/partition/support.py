"""What AMD validates, and what the kernel is known to accept: two different tables, used for two different questions.

The driver's own word always wins over both. Sources: AMD's partitioning support table (ROCm documentation,
`partitioning-support-table.md`, ROCm 7.13 to 10.1), and the accept list of `aqua_vanjaram.c`.
"""

from __future__ import annotations

from dieplace.modes import COMPUTE_WORDS, Mode
from dieplace.partition.facts import CardFacts

_NPS2_FAMILY = ("SPX/NPS1", "DPX/NPS2", "QPX/NPS2", "CPX/NPS2")

VALIDATED: dict[str, tuple[str, ...]] = {
    "MI355X": _NPS2_FAMILY,
    "MI350X": _NPS2_FAMILY,
    "MI350P": ("SPX/NPS1", "DPX/NPS1", "CPX/NPS1"),
    "MI325X": ("SPX/NPS1",),
    "MI300X": ("SPX/NPS1", "DPX/NPS2", "CPX/NPS4"),
    "MI300A": ("SPX/NPS1",),
}
VALIDATED_SINCE = {("MI355X", "QPX/NPS2"): "ROCm 7.13", ("MI350X", "QPX/NPS2"): "ROCm 7.13"}

# aqua_vanjaram.c, newest seen: NPS2 for QPX and CPX is gfx950 (GC 9.5.0) only; older kernels accept less.
_KERNEL = {
    "SPX": ("NPS1",),
    "DPX": ("NPS1", "NPS2"),
    "TPX": ("NPS1", "NPS4"),
    "QPX": ("NPS1", "NPS4"),
    "CPX": ("NPS1", "NPS4"),
}
_KERNEL_GFX950_EXTRA = ("QPX", "CPX")
_GFX950_PARTS = ("MI355X", "MI350X", "MI350P")


def kernel_accepts(part: str | None, mode: Mode) -> bool:
    """Whether the newest kernel source accepts the pair; an expectation until the driver itself is asked."""
    memories = _KERNEL.get(mode.compute, ())
    if mode.compute in _KERNEL_GFX950_EXTRA and (part is None or part in _GFX950_PARTS):
        memories = (*memories, "NPS2")
    return mode.memory in memories


def validated(part: str | None, mode: Mode) -> bool:
    """Whether AMD lists the pair as supported on bare metal for this part; an unknown part has no list."""
    return str(mode) in VALIDATED.get(part or "", ())


def driver_word(card: CardFacts, mode: Mode) -> bool | None:
    """What the driver says now: True, False, or None where only writing its selector would tell."""
    if card.supported_compute and mode.compute not in card.supported_compute:
        return False
    if card.offered_memory and mode.memory not in card.offered_memory:
        return False
    if mode == card.mode:
        return True
    if mode.memory == card.memory and card.offered_compute:
        # An older kernel lists every mode the XCC count allows here, so a yes still needs the kernel's table.
        return mode.compute in card.offered_compute and kernel_accepts(card.part, mode)
    if card.selected and card.selected[0] == mode.compute and card.selected[1]:
        return mode.memory in card.selected[1]
    return None


def offered_modes(card: CardFacts) -> tuple[Mode, ...]:
    """Every pair this card can be asked for: the driver's word where it gives one, the kernel's table elsewhere."""
    computes = card.supported_compute or card.offered_compute or ((card.compute,) if card.compute else ())
    memories = card.offered_memory or ((card.memory,) if card.memory else ())
    pairs = [Mode(c, m) for m in memories for c in COMPUTE_WORDS if c in computes]
    return tuple(p for p in pairs if (w := driver_word(card, p)) or (w is None and kernel_accepts(card.part, p)))
