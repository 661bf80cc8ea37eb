"""What `link` writes down of a measured case: points with rates, latencies, ratios, shares of ceilings and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dieplace.experiments.harness import Measured
    from dieplace.run import Point, Quantity

# Vendors' figures of a whole card in GB/s: a cold rate above it was no memory rate, whatever the label says.
DATASHEET_GB_PER_S = {"H200": 4800, "MI355X": 8000}


class Rig(Protocol):
    """What a backend brings: arms as functions that give one sample. Bytes are of the working set.

    `share_of_card` is what part of a card one reader is, `cycle_unit` what its cycle counter counts. `far_homes` names
    a device for each kind of far memory; `no_far_because` says why there is none.
    """

    readers: tuple[str, ...]  # device ids, in runtime order
    cache_bytes: int
    part: str
    share_of_card: float
    cycle_unit: str

    def latency(self, reader: str, home: str, nbytes: int, cycles: list[float]) -> Callable[[], float]: ...
    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]: ...
    def together(self, kind: str, far: bool, nbytes: int) -> Callable[[], float]: ...
    def far_homes(self, reader: str) -> Mapping[str, str]: ...
    def no_far_because(self, reader: str) -> str | None: ...
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Case:
    """One measurement: its arms in order, the first being the base; `counted` bytes a pass of each arm (0: latency).

    `hop` and `home` tell kinds of far memory apart where there are several; `why` is why arms are missing.
    """

    what: str
    reader: str
    nbytes: int
    directions: str
    arms: Mapping[str, Callable[[], float]]
    counted: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    cycles: Mapping[str, list[float]] = field(default_factory=dict)
    hop: str = ""
    home: str | None = None
    why: str = ""


def ceilings(found: list[tuple[Case, Measured | None]], rig: Rig) -> dict[str, float]:
    """The highest cold one-direction rate in GB/s of near and of far memory in this run."""
    from statistics import median

    best: dict[str, float] = {}
    for case, measured in found:
        if measured is None or case.directions != "one" or not is_cold(case.nbytes, rig.cache_bytes):
            continue
        for arm, counted in case.counted.items():
            side = _ceiling_of(case, arm)
            best[side] = max(best.get(side, 0.0), counted / median(measured.samples[arm]))
    return best


def is_cold(nbytes: int, cache_bytes: int) -> bool:
    """Whether a buffer swept again and again comes from memory: two last caches lie between two uses."""
    from dieplace.experiments.rotation import rotation

    return rotation(nbytes, cache_bytes, 1, fixed=True).cold


def _side(arm: str) -> str:
    return "near" if arm.startswith("near") and "far" not in arm else "far"


def _ceiling_of(case: Case, arm: str) -> str:
    """Near memory has one ceiling, each kind of far memory its own."""
    side = _side(arm)
    return f"{side}, {case.hop}" if case.hop and side == "far" else side


def points_of(case: Case, measured: Measured | None, rig: Rig, limits: Mapping[str, float]) -> Iterator[Point]:
    """A point for each arm, measured or missing."""
    from dieplace.run import Point

    cold = is_cold(case.nbytes, rig.cache_bytes)
    factors: dict[str, Any] = {
        "what": case.what,
        "reader": case.reader,
        "working_set_bytes": case.nbytes,
        "directions": case.directions,
        "cache": "cold" if cold else "warm",
        **({"hop": case.hop, "home": case.home} if case.hop else {}),
    }
    for arm in (*case.arms, *case.missing):
        if measured is None or arm in case.missing:
            yield Point(arm, _unknown(case, rig), factors)
            continue
        rate = case.what != "latency"
        quantities = _rates(case, arm, measured, cold, limits) if rate else _hops(case, arm, measured, rig)
        notes = (*(_sanity(case, arm, quantities, rig) if rate and cold else ()), *_drifts(measured.samples[arm]))
        control = _control(case, measured) if arm == next(iter(case.arms)) else {}
        ratio = {"time_over_near": _ratio(case, arm, measured)}
        yield Point(arm, {**quantities, **ratio, **control}, factors, notes=notes)


def _control(case: Case, measured: Measured) -> dict[str, Quantity]:
    """The first arm's second taking in every block, sample by sample: what noise alone looks like."""
    from dieplace.experiments.harness import CONTROL
    from dieplace.experiments.statistics import median
    from dieplace.run import Quantity

    taken = measured.samples[CONTROL]
    rate = case.what != "latency"
    samples = tuple(case.counted[next(iter(case.arms))] / ns for ns in taken) if rate else taken
    if not any(samples):
        return {}
    got = median(samples, seed=measured.seed)
    name, unit = ("control_gb_per_s", "GB/s") if rate else ("control_latency_ns", "ns")
    method = f"A/A control, {got.method}"
    return {name: Quantity(unit, "measured", got.value, got.low, got.high, method, samples)}


def _unknown(case: Case, rig: Rig) -> dict[str, Quantity]:
    from dieplace.run import Quantity

    names = {"latency_ns": "ns", "latency_cycles": rig.cycle_unit} if case.what == "latency" else {"gb_per_s": "GB/s"}
    return {
        name: Quantity(unit, "measured", None, why=case.why) for name, unit in {**names, "time_over_near": "x"}.items()
    }


def _hops(case: Case, arm: str, measured: Measured, rig: Rig) -> dict[str, Quantity]:
    from dieplace.experiments.statistics import median
    from dieplace.run import Quantity

    def quantity(unit: str, samples: tuple[float, ...], why: str) -> Quantity:
        if not samples or not any(samples):
            return Quantity(unit, "measured", None, why=why)
        got = median(samples, seed=measured.seed)
        return Quantity(unit, "measured", got.value, got.low, got.high, got.method, samples)

    # An arm writes its cycles down in every call, warm-ups first (those of `again` are near's): they are no samples.
    warm = sum(len(taken) for name, taken in measured.warmups.items() if name == arm or name not in case.arms)
    cycles = tuple(case.cycles.get(arm, ()))[warm:]
    return {
        "latency_ns": quantity("ns", measured.samples[arm], "no clock"),
        "latency_cycles": quantity(rig.cycle_unit, cycles, "the device has no cycle counter to read"),
    }


def _rates(case: Case, arm: str, measured: Measured, cold: bool, limits: Mapping[str, float]) -> dict[str, Quantity]:
    from dieplace.experiments.statistics import median
    from dieplace.run import Quantity

    counted = case.counted[arm]
    time = median(measured.samples[arm], seed=measured.seed)
    low = counted / time.high if time.high else None
    high = counted / time.low if time.low else None
    samples = tuple(counted / ns for ns in measured.samples[arm])
    rate = counted / time.value
    return {
        "gb_per_s": Quantity("GB/s", "measured", rate, low, high, time.method, samples),
        "of_ceiling": _of_ceiling(case, arm, rate, cold, limits),
    }


def _of_ceiling(case: Case, arm: str, rate: float, cold: bool, limits: Mapping[str, float]) -> Quantity:
    from dieplace.run import Quantity

    side = _ceiling_of(case, arm)
    if not cold:
        why = "warm: the last cache serves it, and the ceiling is one of memory"
    elif case.directions != "one":
        why = "two devices at once: the ceilings are of one direction"
    elif side not in limits:
        why = "no ceiling was measured in this run"
    else:
        method = f"share of the highest cold {side} rate of this run, {limits[side]:.0f} GB/s"
        return Quantity("share", "measured", rate / limits[side], method=method, why="a ratio of two medians")
    return Quantity("share", "measured", None, why=why)


def _ratio(case: Case, arm: str, measured: Measured) -> Quantity:
    """Against the case's first arm; of the first arm itself it is the A/A control."""
    from dieplace.run import Quantity

    first = next(iter(case.arms))
    got = measured.control if arm == first else measured.against_first(arm)
    method = f"{'A/A control, ' if arm == first else 'pair by pair, '}{got.method}"
    return Quantity("x", "measured", got.value, got.low, got.high, method, why=got.why)


def _sanity(case: Case, arm: str, quantities: Mapping[str, Quantity], rig: Rig) -> tuple[str, ...]:
    card = next((figure for part, figure in DATASHEET_GB_PER_S.items() if part in rig.part), None)
    bound = None if card is None else round(card * rig.share_of_card)
    rate = quantities["gb_per_s"].value
    if bound is None or rate is None or _side(arm) == "far" or case.directions != "one" or rate <= bound:
        return ()
    return (f"{rate:.0f} GB/s is above the datasheet's {bound}: a cache served it, do not use it",)


def _drifts(samples: tuple[float, ...]) -> tuple[str, ...]:
    from dieplace.experiments.statistics import drift

    found = drift(samples)
    return (found.words,) if found.found or found.first_block_found else ()
