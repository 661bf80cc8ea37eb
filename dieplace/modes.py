"""What a card can become: the mode words and how they are read and printed.

Which modes a card offers is asked of the driver (`Backend.modes`), never of a table: compat tables are
validation statements, not the driver's accept list (ROCm documentation, "GPU partitioning").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dieplace.errors import UsageError

COMPUTE_WORDS = ("SPX", "DPX", "TPX", "QPX", "CPX")
MEMORY_WORDS = ("NPS1", "NPS2", "NPS4", "NPS8")

_MODE = re.compile(r"^\s*([A-Za-z]+)\s*[/+_ ]\s*([A-Za-z]+[0-9]+)\s*$")


@dataclass(frozen=True, order=True)
class Mode:
    """A compute (accelerator) partition mode and a memory partition mode; prints as `DPX/NPS2`."""

    compute: str
    memory: str

    def __str__(self) -> str:
        return f"{self.compute}/{self.memory}"

    @property
    def memory_ranges(self) -> int:
        """Number of memory ranges the card's HBM is divided into (NPS2 is 2)."""
        return int(self.memory[3:])

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read `DPX/NPS2`, `dpx+nps2` or `dpx_nps2`; any other word is a UsageError, never a default."""
        match = _MODE.match(text)
        words = (match.group(1).upper(), match.group(2).upper()) if match else None
        if words is None or words[0] not in COMPUTE_WORDS or words[1] not in MEMORY_WORDS:
            raise UsageError(
                f"cannot read {text!r} as a mode",
                hint=f"write COMPUTE/MEMORY, one of {', '.join(COMPUTE_WORDS)} and one of {', '.join(MEMORY_WORDS)},"
                " for example DPX/NPS2",
                asked=text,
            )
        return cls(*words)


def partitions_of(compute: str, xccs: int) -> int:
    """Logical devices that one card with `xccs` XCCs becomes (driver file aqua_vanjaram.c)."""
    return {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": xccs}[compute]
