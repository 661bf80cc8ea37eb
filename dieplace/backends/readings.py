"""What a driver says of one card at one moment: clocks, power, temperature. Read and never set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Reading:
    """One card at one moment; None where the driver does not say.

    `sm_clock_mhz` is the clock of the compute units (SMs, or CUs on AMD). `throttle_reasons` is NVML's bit mask.
    """

    bdf: str
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: int | None

    @property
    def clock_share(self) -> float | None:
        """Compute clock over its maximum."""
        if self.sm_clock_mhz is None or not self.sm_clock_max_mhz:
            return None
        return self.sm_clock_mhz / self.sm_clock_max_mhz

    def to_json(self) -> dict[str, Any]:
        """Plain data; an unknown number has its why beside it."""
        body = asdict(self)
        return body | {f"{key}_why": "the driver does not say" for key, value in body.items() if value is None}
