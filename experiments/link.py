"""link: latency and bandwidth of near and far memory, by working set, in one direction and in both at once.

Every share of a ceiling is of one measured in the same run; datasheets serve as a sanity bound only. A working set
that the last cache holds is *warm* and gets no share. Where one device is visible, far figures are null and say why.
On AMD the two logical devices of one card read each other's die; memory of another card of the hive is a further
kind of far, told apart by the factors `hop` and `home`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from dieplace.errors import PlacementError, Unsupported, UsageError
from dieplace.experiments.link_points import Case, Rig, ceilings, points_of
from dieplace.experiments.registry import Experiment, Options, Progress, refuse_arms
from dieplace.experiments.rig_parts import NOT_MI355X, ONE_DEVICE, OTHER_CARD, SAME_CARD
from dieplace.experiments.rig_parts import cannot as no_rig

if TYPE_CHECKING:
    from dieplace.experiments.harness import Measured, Plan
    from dieplace.run import Point, Run

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LATENCY_SETS = (256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, GIB)
STREAM_SETS = (16 * MIB, 256 * MIB, GIB)
SEED = 20261130
_WHY_NOT = {
    "emulated": "the clock takes the link's bandwidth and distance as parameters: a run would print its own inputs",
    "cpu": "host memory nodes have no device that reads them",
}
_NEAR_COPIES = (("near", "copy"), ("near Tensor.copy_", "torch_copy"))
_FAR_COPIES = (("far to near", "pull"), ("near to far", "push"), ("far to near Tensor.copy_", "torch_pull"))


def cases(rig: Rig) -> Iterator[Callable[[], Case]]:
    """Every case as a function that prepares it: all working sets for the first reader, the largest for the others.

    Where another card is far too, the first reader also takes the largest sets of its memory.
    """
    for number, reader in enumerate(rig.readers):
        kinds = rig.far_homes(reader)
        hops = [hop for hop in (SAME_CARD, OTHER_CARD) if hop in kinds] or [""]
        for hop in hops if number == 0 else hops[:1]:
            every = number == 0 and hop == hops[0]
            prepare = partial(_prepare, rig, reader, hop if len(kinds) > 1 else "", kinds.get(hop))
            for nbytes in LATENCY_SETS if every else LATENCY_SETS[-1:]:
                yield partial(prepare, "latency", nbytes)
            for nbytes in STREAM_SETS if every else STREAM_SETS[-1:]:
                yield partial(prepare, "read", nbytes)
                yield partial(prepare, "copy", nbytes)
    for kind in ("read", "copy"):
        yield partial(_together, rig, kind, STREAM_SETS[-1])


def count_of_cases(readers: int) -> int:
    """How many cases there are where every reader has one kind of far memory."""
    return len(LATENCY_SETS) + 2 * len(STREAM_SETS) + 3 * (readers - 1) + 2


def _prepare(rig: Rig, reader: str, hop: str, far: str | None, what: str, nbytes: int) -> Case:
    """The case with its far arms; without them, and with the reason, where far memory cannot be had."""
    make = {"latency": _latency, "read": _read, "copy": _copy}[what]
    if far is None:
        return make(rig, reader, None, nbytes, hop, rig.no_far_because(reader) or ONE_DEVICE)
    try:
        return make(rig, reader, far, nbytes, hop, "")
    except PlacementError as refused:
        return make(rig, reader, None, nbytes, hop, refused.message)


def _latency(rig: Rig, reader: str, far: str | None, nbytes: int, hop: str, why: str) -> Case:
    cycles: dict[str, list[float]] = {"near": [], "far": []}
    arms = {"near": rig.latency(reader, reader, nbytes, cycles["near"])}
    if far is not None:
        arms["far"] = rig.latency(reader, far, nbytes, cycles["far"])
    missing = () if far else ("far",)
    return Case("latency", reader, nbytes, "one", arms, missing=missing, cycles=cycles, hop=hop, home=far, why=why)


def _read(rig: Rig, reader: str, far: str | None, nbytes: int, hop: str, why: str) -> Case:
    arms = {"near": rig.stream("read", reader, reader, nbytes)}
    if far is not None:
        arms["far"] = rig.stream("read", reader, far, nbytes)
    counted, missing = dict.fromkeys(arms, nbytes), () if far else ("far",)
    return Case("read", reader, nbytes, "one", arms, counted, missing, hop=hop, home=far, why=why)


def _copy(rig: Rig, reader: str, far: str | None, nbytes: int, hop: str, why: str) -> Case:
    arms = {name: rig.stream(kind, reader, reader, nbytes) for name, kind in _NEAR_COPIES}
    counted = dict.fromkeys(arms, 2 * nbytes)  # read and written
    names = [name for name, _ in _FAR_COPIES]
    if far is None:
        return Case("copy", reader, nbytes, "one", arms, counted, tuple(names), hop=hop, why=why)
    arms |= {name: rig.stream(kind, reader, far, nbytes) for name, kind in _FAR_COPIES}
    counted |= dict.fromkeys(names, nbytes)  # crossing the link
    return Case("copy", reader, nbytes, "one", arms, counted, hop=hop, home=far)


def _together(rig: Rig, kind: str, nbytes: int) -> Case:
    near_bytes = nbytes * (2 if kind == "copy" else 1)
    if len(rig.readers) < 2:
        return Case(kind, "all", nbytes, "both at once", {}, missing=("near", "far"), why=ONE_DEVICE)
    why = rig.no_far_because(rig.readers[0])
    arms = {"near": rig.together(kind, False, nbytes)}
    counted = {"near": near_bytes * 2, "far": nbytes * 2}
    if why is None:
        try:
            arms["far"] = rig.together(kind, True, nbytes)
        except PlacementError as refused:
            why = refused.message
    missing = () if "far" in arms else ("far",)
    return Case(kind, "all", nbytes, "both at once", arms, counted, missing, why=why or "")


def run_link(
    rig: Rig,
    plan: Plan,
    progress: Progress,
    *,
    now: Callable[[], float] | None = None,
    tell: Progress = lambda text: None,
) -> tuple[list[Point], str]:
    """Measure every case and put shares of the measured ceilings on the points; with them why measuring ended.

    Ctrl-C ends it with the cases that there are, and is told as `interrupted`; KeyboardInterrupt where there are none.
    """
    from dieplace.experiments.harness import INTERRUPTED, ctrl_c_held

    found: list[tuple[Case, Measured | None]] = []
    stopped = "every case is measured"
    with ctrl_c_held() as asked:
        for prepare in cases(rig):
            try:
                case = prepare()
                measured = _measured(case, plan, now, tell)
            except KeyboardInterrupt:
                if not found:
                    raise
                stopped = INTERRUPTED
                break
            found.append((case, measured))
            progress(f"{case.what} {case.directions} {case.nbytes >> 10} KiB by {case.reader}")
            if asked() or (measured is not None and measured.stopped == INTERRUPTED):
                stopped = INTERRUPTED
                break
    limits = ceilings(found, rig)
    return [point for case, measured in found for point in points_of(case, measured, rig, limits)], stopped


def _measured(case: Case, plan: Plan, now: Callable[[], float] | None, tell: Progress) -> Measured | None:
    """None where a case has no arms here; KeyboardInterrupt where Ctrl-C came before its first block."""
    from dieplace.experiments.harness import measure

    arms = dict(case.arms)
    if not arms:
        return None
    if len(arms) == 1:  # the harness compares: one arm alone stands against itself
        arms["again"] = arms["near"]
    name = f"{case.what} {case.nbytes >> 10} KiB by {case.reader}"
    timed = measure if now is None else partial(measure, now=now)
    found = timed(arms, plan, progress=lambda blocks, left_s: tell(f"{name}: block {blocks}, {left_s:.0f} s left"))
    if not found.order:
        raise KeyboardInterrupt
    return found


def cannot(backend: str) -> str | None:
    """None on NVIDIA, and on AMD where a ROCm build of torch finds a GPU; elsewhere one sentence why not."""
    if backend in ("nvidia", "amd"):
        return no_rig(backend)
    return _WHY_NOT.get(backend, "it has no devices to time")


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run over all visible devices; on AMD over the logical devices of the first visible card."""
    why = cannot(backend)
    if why is not None:
        raise Unsupported(
            f"link cannot run on the {backend} backend: {why}", hint="name --backend nvidia, or amd where it has a GPU"
        )
    refuse_arms("link", options)
    from dieplace.allocator_settings import require_fixed_segments
    from dieplace.discover import discover
    from dieplace.experiments.harness import Plan
    from dieplace.experiments.link_run import as_run
    from dieplace.experiments.torch_rig import TorchRig

    require_fixed_segments()

    machine = discover(backend)
    with TorchRig(machine) as rig:
        if not rig.readers:
            raise UsageError(f"no device is visible to {backend}", hint="see: dieplace env")
        plan = Plan(seed=SEED, min_blocks=20, max_blocks=60, budget_s=2.5)
        before = rig.telemetry()
        points, stopped = run_link(rig, plan, progress, tell=options.watch.tell)
        yield as_run(machine, rig, options, plan, tuple(points), before, stopped)


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
