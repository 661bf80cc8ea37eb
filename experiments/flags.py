"""flags: how long a sync flag takes to be seen, by its home, by how many poll it, and by the kind of memory.

One device raises a flag, pollers on the other device (or on both) see it and acknowledge, the writer sees all
acknowledgements and goes on: a round trip on the writer's own clock, as the clocks of two devices are never subtracted.
Acknowledgements lie with the writer in every arm, so that arms differ in the flag's home and the pollers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dieplace.errors import Unsupported, UsageError
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms, refuse_context

if TYPE_CHECKING:
    from dieplace.experiments.harness import Measured, Plan
    from dieplace.run import Point, Quantity, Run

SEED = 20261130
HOMES = ("consumer", "producer", "host")
POLLERS = (1, 2, 4, 8, 16, 32, 64)
ON_BOTH = (2, 8, 64)  # numbers of pollers that are also taken half on each device
# What the pollers on the other device poll, by the flag's home.
MEMORY_CLASS = {"consumer": "device, own", "producer": "device, peer's", "host": "host, pinned"}
METHOD = "writer's own clock, from one round's store to the next one's, mean over the rounds of a launch"
HALF = "half of the round trip: a flag's way and an acknowledgement's way, which need not be equal"
NOTES = (
    "a round: the flag is stored, every poller sees it and stores its acknowledgement, the writer has seen them all",
    "acknowledgements lie in the writer's memory in every arm; stores and polls are relaxed, at system scope",
)


@dataclass(frozen=True)
class Arm:
    """One combination: the flag's home, and how many poll it on the other device and beside the writer."""

    home: str
    far: int
    near: int = 0

    @property
    def pollers(self) -> int:
        """All of them."""
        return self.far + self.near

    @property
    def on(self) -> str:
        """Which devices poll."""
        return "both devices" if self.near else "the other device"

    @property
    def name(self) -> str:
        """`consumer 8`: eight pollers on the other device; `consumer 4+4`: four beside the writer, four there."""
        return f"{self.home} {self.near}+{self.far}" if self.near else f"{self.home} {self.far}"

    @property
    def base(self) -> Arm:
        """The same pollers with the flag at the consumer's."""
        return Arm(HOMES[0], self.far, self.near)

    @property
    def alone(self) -> Arm:
        """The same home with one poller."""
        return Arm(self.home, 1)


class FlagRig(Protocol):
    """What a backend brings: a round trip in ns a sample, and where the flag is, by audit or probe."""

    def round_trip(self, arm: Arm) -> Callable[[], float]: ...
    def residency(self, home: str) -> Mapping[str, Any]: ...


def arms() -> tuple[Arm, ...]:
    """Every arm; the first is the one that all others are paired with."""
    alone = [Arm(home, count) for count in POLLERS for home in HOMES]
    return (*alone, *(Arm(home, count // 2, count // 2) for count in ON_BOTH for home in HOMES))


def points_of(rig: FlagRig, plan: Plan, *, tell: Callable[[str], None] = lambda text: None) -> tuple[
    tuple[Point, ...], Measured
]:  # fmt: skip
    """Measure every arm in shuffled blocks, look at the flags' homes before and after."""
    from dieplace.experiments.harness import measure

    chosen = {arm.name: arm for arm in arms()}
    before = {home: rig.residency(home) for home in HOMES}
    takers = {name: rig.round_trip(arm) for name, arm in chosen.items()}
    measured = measure(takers, plan, progress=lambda n, left_s: tell(f"flags: block {n}, at most {left_s:.0f} s left"))
    if not measured.order:
        raise KeyboardInterrupt
    after = {home: rig.residency(home) for home in HOMES}
    return tuple(_point(arm, measured, before[arm.home], after[arm.home]) for arm in chosen.values()), measured


def _point(arm: Arm, measured: Measured, before: Mapping[str, Any], after: Mapping[str, Any]) -> Point:
    from dieplace.run import Point

    return Point(
        arm.name,
        quantities(arm, measured),
        factors={
            "home": arm.home,
            "memory_class": MEMORY_CLASS[arm.home],
            "pollers": arm.pollers,
            "pollers_on": arm.on,
        },
        residency_before=before,
        residency_after=after,
    )


def quantities(arm: Arm, measured: Measured) -> dict[str, Quantity]:
    """Round trip and its half in ns, and the ratios to the flag at the consumer and to one poller, pair by pair."""
    from dieplace.experiments.harness import CONTROL
    from dieplace.experiments.statistics import median, ratio
    from dieplace.run import Quantity

    def trip(name: str, kind: str = "") -> Quantity:
        samples = measured.samples[name]
        found = median(samples, seed=measured.seed)
        method = f"{kind}{METHOD}; {found.method}"
        return Quantity("ns", "measured", found.value, found.low, found.high, method, samples)

    def over(name: str) -> Quantity:
        found = ratio(measured.samples[name], measured.samples[arm.name], seed=measured.seed)
        return Quantity("x", "measured", found.value, found.low, found.high, f"pair by pair, {found.method}")

    whole = trip(arm.name)
    value, low, high = (None if v is None else v / 2 for v in (whole.value, whole.low, whole.high))
    made = {"round_trip_ns": whole, "half_round_trip_ns": Quantity("ns", "measured", value, low, high, HALF)}
    first = next(iter(measured.samples))
    if arm.name == first:
        control = measured.control
        made["control_round_trip_ns"] = trip(CONTROL, "A/A control, ")
        method = f"A/A control, {control.method}"
        made["time_over_consumer"] = Quantity("x", "measured", control.value, control.low, control.high, method)
    elif arm != arm.base:
        made["time_over_consumer"] = over(arm.base.name)
    if arm.pollers > 1:
        made["time_over_one_poller"] = over(arm.alone.name)
    return made


def cannot(backend: str) -> str | None:
    """None on the emulated and the nvidia backend; elsewhere why not."""
    if backend in ("emulated", "nvidia"):
        return None
    if backend == "amd":
        return "two launches that wait for one another on two dies have not been tried on hardware; see first-light"
    return "it has no two devices that hand flags to one another"


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run: measured between two GPUs, or on the emulated card correct by its ISA and timed by the clock."""
    why = cannot(backend)
    if why is not None:
        raise Unsupported(f"flags cannot run on the {backend} backend: {why}", hint="name --backend emulated or nvidia")
    refuse_arms("flags", options)
    refuse_context("flags", options)
    if options.bytes_from != "shapes":
        raise UsageError("flags counts no bytes, it does not take --bytes", hint="leave --bytes out")
    if backend == "nvidia":
        from dieplace.experiments.flags_nvidia import run_nvidia

        yield from run_nvidia(options, progress)
    else:
        from dieplace.experiments.flags_emulated import run_emulated

        yield from run_emulated(options, progress)


EXPERIMENT = Experiment(
    name="flags",
    summary="how long a sync flag takes to be seen: by home, by pollers, by memory class",
    factors={
        "home": ", ".join(HOMES),
        "pollers": ", ".join(map(str, POLLERS)),
        "pollers on": "the other device, both devices",
    },
    run=run,
    cannot=cannot,
    steps=4,
    live_steps=2,
    blocks=("dpx-nps2",),
    cards_a_rank={"nvidia": 2},
)
