"""About how long the rest of first light will take: guesses by kind of step, corrected by the steps that have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Seconds a step is guessed to take, on hardware (experiments and questions as on two H200s, a reload 20 to 50 s as in
# public reports) and emulated.
GUESSES = {
    "preflight": (3.0, 1.0),
    "visit": (40.0, 2.0),
    "question": (2.0, 0.5),
    "experiment": (30.0, 5.0),
    "restore": (60.0, 3.0),
}


@dataclass
class Pace:
    """The steps that are expected, by kind and in whatever order they come; `now` is a clock in seconds."""

    kinds: Sequence[str]
    emulated: bool
    now: Callable[[], float] = time.monotonic
    _begun: Counter[str] = field(default_factory=Counter, init=False)
    _took: dict[str, list[float]] = field(default_factory=dict, init=False)
    _under_way: tuple[str, float] | None = field(default=None, init=False)

    def step(self, kind: str) -> str:
        """End the step under way, begin one of `kind`, and say how long is left: `roughly 4 min left`."""
        if self._under_way is not None:
            before, begun = self._under_way
            self._took.setdefault(before, []).append(self.now() - begun)
        left = self.left_s()
        self._begun[kind] += 1
        self._under_way = (kind, self.now())
        return f"roughly {words(left)} left"

    def left_s(self) -> float:
        """Seconds that the steps not yet begun are expected to take."""
        return sum(max(0, count - self._begun[kind]) * self.each_s(kind) for kind, count in Counter(self.kinds).items())

    def each_s(self, kind: str) -> float:
        """Seconds of one step: the mean of those of its kind that have ended, and of the guess as one more."""
        seen = [GUESSES[kind][1 if self.emulated else 0], *self._took.get(kind, ())]
        return sum(seen) / len(seen)


def words(seconds: float) -> str:
    """`40 s`, `4 min`."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
