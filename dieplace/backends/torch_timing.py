"""Times on a GPU that torch drives, NVIDIA or AMD: work captured in a graph once, replayed between two device events.

The timed region holds the captured work only: a flush runs before the first event and is never subtracted
(facebookexperimental/triton PR 1679, helion PR 2986). Stage times come from events inside the graph, where the runtime
has them; a runtime that raises or answers 0 gives None with the reason, never 0 (rocm-systems issue 2380).
`cuda` is torch.cuda, which is HIP under a ROCm build of torch, or a stand-in in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

TIMER = "CUDA events around the replay of a captured graph"
HIP_TIMER = "HIP events around the replay of a captured graph"
# torch refuses them on ROCm only when the first one is recorded, which would be in the middle of a capture.
NO_EVENTS_ON_ROCM = (
    "events inside a captured graph do not give times on ROCm (rocm-systems issue 2380); torch refuses external events"
)
NS_PER_MS = 1e6
Launch = Callable[[], object]


@dataclass(frozen=True)
class Captured:
    """A graph on one device (its runtime index) and how many launches of the same kind it holds."""

    device: int
    graph: Any
    launches: int
    marks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Eager:
    """Stands where a graph does, for work that cannot be captured: a copy between devices runs on both of them."""

    launches: tuple[Launch, ...]

    def replay(self) -> None:
        """Launch everything in order."""
        for launch in self.launches:
            launch()


def uncaptured(launches: Sequence[Launch], device: int) -> Captured:
    """The same launches without a graph: their launch times count where the device outruns the host."""
    return Captured(device, Eager(tuple(launches)), len(launches))


@dataclass(frozen=True)
class StageTime:
    """Median time of one stage in ns; None with `why` where the runtime does not tell."""

    name: str
    value_ns: float | None
    why: str | None = None


def capture(launches: Sequence[Launch], device: int, *, cuda: Any = None) -> Captured:
    """Run `launches` once (they compile and allocate), then capture them in one graph on `device`."""
    return Captured(device, _graph(list(launches), device, cuda or _torch_cuda()), len(launches))


def time_once(work: Captured, *, flush: Launch | None = None, cuda: Any = None) -> float:
    """Device time of one replay in ns a launch. `flush` runs before and outside the timed region."""
    return time_together([work], flush=flush, cuda=cuda)[0]


class Gate(Protocol):
    """Holds devices back until all of them have their work: graphs that wait for one another start together."""

    def hold(self, device: int) -> None:
        """Launch something on `device` that ends when the gate is opened."""

    def open(self) -> None:
        """Let every device go."""


def time_together(
    works: Sequence[Captured], *, flush: Launch | None = None, gate: Gate | None = None, cuda: Any = None
) -> list[float]:
    """Start every graph before waiting for any; device time of each in ns a launch, in their order.

    Without a gate the first device begins some ten microseconds of the host's time before the last one.
    """
    cuda = cuda or _torch_cuda()
    if flush is not None:
        flush()
    for work in works:
        cuda.synchronize(work.device)  # nothing older is under way where a timed region begins
    marks = []
    for work in works:
        with cuda.device(work.device):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            if gate is not None:
                gate.hold(work.device)
            start.record()
            work.graph.replay()
            end.record()
            marks.append((start, end))
    if gate is not None:
        gate.open()
    for _, end in marks:
        end.synchronize()
    return [
        start.elapsed_time(end) * NS_PER_MS / work.launches for (start, end), work in zip(marks, works, strict=True)
    ]


def stage_times(
    stages: Sequence[tuple[str, Launch]], device: int, *, replays: int = 20, cuda: Any = None
) -> tuple[float, tuple[StageTime, ...]]:
    """(median total in ns, median of each stage) of stages in one graph; the total is measured whatever events do."""
    return times_of([with_marks(stages, device, cuda=cuda)], replays=replays, cuda=cuda)[0]


@dataclass(frozen=True)
class Marked:
    """Stages captured with an event between any two; `why` where the runtime has no events in a graph."""

    names: tuple[str, ...]
    work: Captured
    why: str | None


def times_of(
    works: Sequence[Marked], *, replays: int = 20, gate: Gate | None = None, cuda: Any = None
) -> list[tuple[float, tuple[StageTime, ...]]]:
    """`stage_times` of stages captured before, on several devices at once: all are started before any is waited for."""
    whys = [one.why for one in works]
    totals: list[list[float]] = [[] for _ in works]
    spans: list[list[list[float]]] = [[[] for _ in one.names] for one in works]
    for _ in range(replays):
        for n, ns in enumerate(time_together([one.work for one in works], gate=gate, cuda=cuda)):
            totals[n].append(ns * works[n].work.launches)
            if whys[n] is None:
                whys[n] = _read_marks(works[n].work.marks, spans[n])
    return [(median(totals[n]), _medians(one.names, spans[n], whys[n])) for n, one in enumerate(works)]


def _medians(names: Sequence[str], spans: Sequence[Sequence[float]], why: str | None) -> tuple[StageTime, ...]:
    if why is not None:
        return tuple(StageTime(name, None, why) for name in names)
    return tuple(StageTime(name, median(one)) for name, one in zip(names, spans, strict=True))


def with_marks(stages: Sequence[tuple[str, Launch]], device: int, *, cuda: Any = None) -> Marked:
    """Capture stages with events between them; the launches run once before, and the graph is replayed once."""
    cuda = cuda or _torch_cuda()
    names, plain = tuple(name for name, _ in stages), [launch for _, launch in stages]
    if is_rocm(cuda):
        return Marked(names, capture(plain, device, cuda=cuda), NO_EVENTS_ON_ROCM)
    try:
        with cuda.device(device):
            marks = [cuda.Event(enable_timing=True, external=True) for _ in range(len(stages) + 1)]
            marked: list[Launch] = [marks[0].record]
            for launch, mark in zip(plain, marks[1:], strict=True):
                marked += [launch, mark.record]
        graph = _graph(marked, device, cuda, warm=plain)
        return Marked(names, Captured(device, graph, len(plain), tuple(marks)), None)
    except (RuntimeError, TypeError) as error:
        why = f"events cannot be recorded in a captured graph here: {str(error).splitlines()[0]}"
        return Marked(names, capture(plain, device, cuda=cuda), why)


def _read_marks(marks: Sequence[Any], spans: list[list[float]]) -> str | None:
    try:
        found = [a.elapsed_time(b) * NS_PER_MS for a, b in pairwise(marks)]
    except RuntimeError as error:
        return f"events inside the graph cannot be read: {str(error).splitlines()[0]}"
    if any(span <= 0 for span in found):
        return "events inside the graph recorded nothing"
    for span, values in zip(found, spans, strict=True):
        values.append(span)
    return None


def _graph(launches: Sequence[Launch], device: int, cuda: Any, *, warm: Sequence[Launch] | None = None) -> Any:
    """`warm` runs first: without the marks, which would else keep times of that run where a graph has no events."""
    with cuda.device(device):
        # A stream of this device: torch's default capture stream belongs to the device that captured first.
        stream = cuda.Stream(device=device)
        for launch in launches if warm is None else warm:
            launch()
        cuda.synchronize(device)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        cuda.synchronize(device)
    return graph


def is_rocm(cuda: Any = None) -> bool:
    """Whether this torch was built for ROCm; a stand-in says so by its own `version_hip`."""
    if cuda is not None and hasattr(cuda, "version_hip"):
        return bool(cuda.version_hip)
    import torch

    return torch.version.hip is not None


def _torch_cuda() -> Any:
    import torch

    return torch.cuda
