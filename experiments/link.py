"""link: latency and bandwidth of near and far memory, by working set, in one direction and in both at once.

Every share of a ceiling is of one measured in the same run; datasheets serve as a sanity bound only. A working set
that the last cache holds is *warm* and gets no share. Where one device is visible, far figures are null and say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dieplace.errors import Unsupported, UsageError
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms

if TYPE_CHECKING:
    from dieplace.experiments.harness import Measured, Plan
    from dieplace.run import Point, Quantity, Run

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LATENCY_SETS = (256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, GIB)
STREAM_SETS = (16 * MIB, 256 * MIB, GIB)
SEED = 20261130
ONE_DEVICE = "one device is visible: there is no far memory"
NOT_MI355X = "measured on NVIDIA GPUs: it validates the harness and the code and says nothing about an MI355X"
# Vendor's figure in GB/s: a cold rate above it was no memory rate, whatever the label says.
DATASHEET_GB_PER_S = {"H200": 4800}
_WHY_NOT = {
    "emulated": "the clock takes the link's bandwidth and distance as parameters: a run would print its own inputs",
    "amd": "its probes are not wired to the AMD backend's buffers yet",
    "cpu": "host memory nodes have no device that reads them",
}


class Rig(Protocol):
    """What a backend brings: arms as functions that give one sample. Bytes are of the working set."""

    readers: tuple[str, ...]  # device ids, in runtime order
    cache_bytes: int
    part: str

    def latency(self, reader: str, home: str, nbytes: int, cycles: list[float]) -> Callable[[], float]: ...
    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]: ...
    def together(self, kind: str, far: bool, nbytes: int) -> Callable[[], float]: ...
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Case:
    """One measurement: its arms in order, the first being the base; `counted` bytes a pass of each arm (0: latency)."""

    what: str
    reader: str
    nbytes: int
    directions: str
    arms: Mapping[str, Callable[[], float]]
    counted: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    cycles: Mapping[str, list[float]] = field(default_factory=dict)


def cases(rig: Rig) -> Iterator[Callable[[], Case]]:
    """Every case as a function that prepares it: all working sets for the first reader, the largest for the others."""
    for number, reader in enumerate(rig.readers):
        others = [name for name in rig.readers if name != reader]
        far = others[0] if others else None
        for nbytes in LATENCY_SETS if number == 0 else LATENCY_SETS[-1:]:
            yield lambda r=reader, f=far, n=nbytes: _latency(rig, r, f, n)  # type: ignore[misc]
        for nbytes in STREAM_SETS if number == 0 else STREAM_SETS[-1:]:
            yield lambda r=reader, f=far, n=nbytes: _read(rig, r, f, n)  # type: ignore[misc]
            yield lambda r=reader, f=far, n=nbytes: _copy(rig, r, f, n)  # type: ignore[misc]
    for kind in ("read", "copy"):
        yield lambda k=kind: _together(rig, k, STREAM_SETS[-1])  # type: ignore[misc]


def count_of_cases(readers: int) -> int:
    """How many cases there are."""
    return len(LATENCY_SETS) + 2 * len(STREAM_SETS) + 3 * (readers - 1) + 2


def _latency(rig: Rig, reader: str, far: str | None, nbytes: int) -> Case:
    cycles: dict[str, list[float]] = {"near": [], "far": []}
    arms = {"near": rig.latency(reader, reader, nbytes, cycles["near"])}
    if far is not None:
        arms["far"] = rig.latency(reader, far, nbytes, cycles["far"])
    return Case("latency", reader, nbytes, "one", arms, missing=() if far else ("far",), cycles=cycles)


def _read(rig: Rig, reader: str, far: str | None, nbytes: int) -> Case:
    arms = {"near": rig.stream("read", reader, reader, nbytes)}
    if far is not None:
        arms["far"] = rig.stream("read", reader, far, nbytes)
    return Case("read", reader, nbytes, "one", arms, dict.fromkeys(arms, nbytes), () if far else ("far",))


def _copy(rig: Rig, reader: str, far: str | None, nbytes: int) -> Case:
    arms = {name: rig.stream(kind, reader, reader, nbytes) for name, kind in _NEAR_COPIES}
    counted = dict.fromkeys(arms, 2 * nbytes)  # read and written
    names = [name for name, _ in _FAR_COPIES]
    if far is None:
        return Case("copy", reader, nbytes, "one", arms, counted, tuple(names))
    arms |= {name: rig.stream(kind, reader, far, nbytes) for name, kind in _FAR_COPIES}
    return Case("copy", reader, nbytes, "one", arms, counted | dict.fromkeys(names, nbytes))  # crossing the link


def _together(rig: Rig, kind: str, nbytes: int) -> Case:
    near_bytes = nbytes * (2 if kind == "copy" else 1)
    devices = len(rig.readers)
    if devices < 2:
        return Case(kind, "all", nbytes, "both at once", {}, missing=("near", "far"))
    arms = {"near": rig.together(kind, False, nbytes), "far": rig.together(kind, True, nbytes)}
    return Case(kind, "all", nbytes, "both at once", arms, {"near": near_bytes * 2, "far": nbytes * 2})


_NEAR_COPIES = (("near", "copy"), ("near Tensor.copy_", "torch_copy"))
_FAR_COPIES = (("far to near", "pull"), ("near to far", "push"), ("far to near Tensor.copy_", "torch_pull"))


def run_link(rig: Rig, plan: Plan, progress: Progress, *, now: Callable[[], float] | None = None) -> list[Point]:
    """Measure every case and put shares of the measured ceilings on the points."""
    from dieplace.experiments.harness import measure

    found: list[tuple[Case, Measured | None]] = []
    for prepare in cases(rig):
        case = prepare()
        arms = dict(case.arms)
        if len(arms) == 1:  # the harness compares: one arm alone stands against itself
            arms["again"] = arms["near"]
        timed = measure if now is None else partial(measure, now=now)
        found.append((case, timed(arms, plan) if arms else None))
        progress(f"{case.what} {case.directions} {case.nbytes >> 10} KiB by {case.reader}")
    limits = ceilings(found, rig)
    return [point for case, measured in found for point in _points(case, measured, rig, limits)]


def ceilings(found: list[tuple[Case, Measured | None]], rig: Rig) -> dict[str, float]:
    """The highest cold one-direction rate in GB/s of near and of far memory in this run."""
    from statistics import median

    best: dict[str, float] = {}
    for case, measured in found:
        if measured is None or case.directions != "one" or not is_cold(case.nbytes, rig.cache_bytes):
            continue
        for arm, counted in case.counted.items():
            side = _side(arm)
            best[side] = max(best.get(side, 0.0), counted / median(measured.samples[arm]))
    return best


def is_cold(nbytes: int, cache_bytes: int) -> bool:
    """Whether a buffer swept again and again comes from memory: two last caches lie between two uses."""
    from dieplace.experiments.rotation import rotation

    return rotation(nbytes, cache_bytes, 1, fixed=True).cold


def _side(arm: str) -> str:
    return "near" if arm.startswith("near") and "far" not in arm else "far"


def _points(case: Case, measured: Measured | None, rig: Rig, limits: Mapping[str, float]) -> Iterator[Point]:
    from dieplace.run import Point

    cold = is_cold(case.nbytes, rig.cache_bytes)
    factors = {
        "what": case.what,
        "reader": case.reader,
        "working_set_bytes": case.nbytes,
        "directions": case.directions,
        "cache": "cold" if cold else "warm",
    }
    for arm in (*case.arms, *case.missing):
        if measured is None or arm in case.missing:
            yield Point(arm, _unknown(case), factors)
            continue
        rate = case.what != "latency"
        quantities = _rates(case, arm, measured, cold, limits) if rate else _hops(case, arm, measured)
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


def _unknown(case: Case) -> dict[str, Quantity]:
    from dieplace.run import Quantity

    names = {"latency_ns": "ns", "latency_cycles": "SM cycles"} if case.what == "latency" else {"gb_per_s": "GB/s"}
    return {
        name: Quantity(unit, "measured", None, why=ONE_DEVICE)
        for name, unit in {**names, "time_over_near": "x"}.items()
    }


def _hops(case: Case, arm: str, measured: Measured) -> dict[str, Quantity]:
    from dieplace.experiments.statistics import median
    from dieplace.run import Quantity

    def quantity(unit: str, samples: tuple[float, ...], why: str) -> Quantity:
        if not samples or not any(samples):
            return Quantity(unit, "measured", None, why=why)
        got = median(samples, seed=measured.seed)
        return Quantity(unit, "measured", got.value, got.low, got.high, got.method, samples)

    cycles = tuple(case.cycles.get(arm, ()))
    return {
        "latency_ns": quantity("ns", measured.samples[arm], "no clock"),
        "latency_cycles": quantity("SM cycles", cycles, "the device has no cycle counter to read"),
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

    side = _side(arm)
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
    bound = next((figure for part, figure in DATASHEET_GB_PER_S.items() if part in rig.part), None)
    rate = quantities["gb_per_s"].value
    if bound is None or rate is None or _side(arm) == "far" or case.directions != "one" or rate <= bound:
        return ()
    return (f"{rate:.0f} GB/s is above the datasheet's {bound}: a cache served it, do not use it",)


def _drifts(samples: tuple[float, ...]) -> tuple[str, ...]:
    from dieplace.experiments.statistics import drift

    found = drift(samples)
    return (found.words,) if found.found or found.first_block_found else ()


def cannot(backend: str) -> str | None:
    """None on NVIDIA; elsewhere one sentence why not."""
    return None if backend == "nvidia" else _WHY_NOT.get(backend, "it has no devices to time")


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run over all visible devices."""
    why = cannot(backend)
    if why is not None:
        raise Unsupported(f"link cannot run on the {backend} backend: {why}", hint="name --backend nvidia")
    refuse_arms("link", options)
    from dieplace.allocator_settings import require_fixed_segments
    from dieplace.discover import discover
    from dieplace.experiments.harness import Plan
    from dieplace.experiments.link_nvidia import NvidiaRig, as_run

    require_fixed_segments()

    machine = discover(backend)
    with NvidiaRig(machine) as rig:
        if not rig.readers:
            raise UsageError("no device is visible", hint="see CUDA_VISIBLE_DEVICES")
        plan = Plan(seed=SEED, min_blocks=20, max_blocks=60, budget_s=2.5)
        before = rig.telemetry()
        points = run_link(rig, plan, progress)
        yield as_run(machine, rig, options, plan, tuple(points), before)


EXPERIMENT = Experiment(
    name="link",
    summary="near and far memory: latency and bandwidth, one and both directions",
    factors={
        "what": "latency, read, copy",
        "arm": "near, far, and both directions of copies",
        "working set": "256 KiB to 1 GiB",
        "directions": "one, both at once",
    },
    run=run,
    cannot=cannot,
    steps=count_of_cases(2),
    notes=(NOT_MI355X,),
)
