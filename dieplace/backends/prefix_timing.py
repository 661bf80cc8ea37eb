"""Stage times without events inside a graph: one graph for each prefix of the stages, a stage being a difference.

For runtimes whose captured graphs hold no events, ROCm above all (rocm-systems issue 2380). Prefixes take turns, so
that a drift of the clocks spreads over all of them. What a stage gains from running beside its neighbours counts for
the later one; events between stages, where there are any, add some microseconds to each instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from dieplace.backends.torch_timing import Launch, StageTime, capture, time_once

METHOD = "differences between graphs that end after each stage"
BELOW_NOISE = "the graphs with and without this stage take equally long, within their spread"


def stage_times_by_prefix(
    stages: Sequence[tuple[str, Launch]], device: int, *, replays: int = 20, cuda: Any = None
) -> tuple[float, tuple[StageTime, ...]]:
    """(median total in ns, time of each stage): the answer of `torch_timing.stage_times`, taken another way.

    A difference that is not above the spread of the two medians is None with the reason, never 0 or negative.
    """
    launches = [launch for _, launch in stages]
    graphs = [capture(launches[: end + 1], device, cuda=cuda) for end in range(len(stages))]
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, taken in zip(graphs, samples, strict=True):
            taken.append(time_once(graph, cuda=cuda) * graph.launches)
    ends = [median(taken) for taken in samples]
    spreads = [median(abs(value - end) for value in taken) for taken, end in zip(samples, ends, strict=True)]
    found = []
    for number, (name, _) in enumerate(stages):
        before, spread = (ends[number - 1], spreads[number - 1]) if number else (0.0, 0.0)
        value = ends[number] - before
        told = value > max(spread, spreads[number])
        found.append(StageTime(name, value if told else None, None if told else BELOW_NOISE))
    return ends[-1], tuple(found)
