"""Timed cases of kernel speed: every sample kept, rates against a ceiling measured in the same run.

Each case is captured in a CUDA graph that walks over distinct operands, so that no weight is in the last-level cache
when it is used again. Samples are device event times of whole replays divided by the launches in them; ratios need no
clock of the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dieplace.errors import DieplaceError

REPLAYS, WARM_REPLAYS = 25, 3
NO_BYTES = "moves next to no bytes"
OTHER_BYTES = "reads bf16 copies of these weights: a rate of the packed bytes would be of bytes that it does not read"


class WrongResult(DieplaceError):
    """A case gave another result than it should: its time would not be of the same work, so nothing is timed."""

    word = "wrong-result"


@dataclass(frozen=True)
class Speed:
    """One timed case: bytes that must move for a launch, and every sample in ns. `no_rate` says why it has no rate."""

    name: str
    bytes_per_launch: int
    launches_per_replay: int
    samples_ns: tuple[float, ...]
    no_rate: str | None = None

    @property
    def median_ns(self) -> float:
        """Median time of one launch."""
        return statistics.median(self.samples_ns)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over median time; None where next to none move, or others than these: a rate would say nothing."""
        return self.bytes_per_launch / self.median_ns if self.bytes_per_launch and self.no_rate is None else None


def timed(name: str, nbytes: int, launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Speed:
    """Capture `launches` in one graph on the current device and keep every sample; the first replays are not timed."""
    import torch

    from dieplace.backends import torch_timing as timing

    work = timing.capture([_without_result(launch) for launch in launches], torch.cuda.current_device())
    for _ in range(WARM_REPLAYS):
        timing.time_once(work)
    return Speed(name, nbytes, len(launches), tuple(timing.time_once(work) for _ in range(replays)))


def rows(speeds: Sequence[Speed], ceiling: Speed) -> list[dict[str, Any]]:
    """Every case with its median, its rate and the ratio to the ceiling's; null with a reason where none is."""
    top = ceiling.gb_per_s
    assert top is not None
    found = []
    for speed in speeds:
        rate = speed.gb_per_s
        row = {**asdict(speed), "median_ns": speed.median_ns, "gb_per_s": rate}
        why = row.pop("no_rate") or NO_BYTES
        row["of_ceiling"] = None if rate is None else rate / top
        found.append(row if rate is not None else {**row, "gb_per_s_why": why, "of_ceiling_why": why})
    return found


def _without_result(launch: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        launch()

    return run
