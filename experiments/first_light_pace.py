"""How far first light is, and about how long the rest will take: guesses by kind of step, corrected as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Seconds a step is guessed to take, on hardware (experiments and questions as on two H200s, a reload 20 to 50 s as in
# public reports) and emulated.
GUESSES = {
    "preflight": (3.0, 1.0),
    "visit": (40.0, 2.0),
    "question": (2.0, 2.0),
    "experiment": (30.0, 12.0),
    "restore": (60.0, 3.0),
    "report": (2.0, 1.0),
}


@dataclass
class Pace:
    """Steps by kind, in order; `now` is a clock in seconds."""

    kinds: Sequence[str]
    emulated: bool
    now: Callable[[], float] = time.monotonic
    done: int = 0
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def step(self) -> str:
        """Begin the next step and say about how long is left: `about 4 min left`."""
        left = self.left_s()
        self.done = min(self.done + 1, len(self.kinds))
        return f"about {words(left)} left"

    def left_s(self) -> float:
        """Seconds that the steps not yet begun are guessed to take, at the speed seen so far."""
        guesses = [GUESSES[kind][1 if self.emulated else 0] for kind in self.kinds]
        behind, ahead = sum(guesses[: self.done]), sum(guesses[self.done :])
        if behind <= 0:
            return ahead
        spent = self.now() - self.begun
        # Half weight to the guess until as much again has been seen: the first steps are short and tell little.
        seen = behind / (behind + ahead)
        factor = (1 - seen) + seen * spent / behind
        return ahead * max(factor, 0.1)


def words(seconds: float) -> str:
    """`40 s`, `4 min`."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
