"""A stand-in for torch.cuda with two devices whose clocks, in ms, the test owns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any


class FakeCuda:
    """Two devices with a clock each, in ms; launches add to the clock of the device that runs them."""

    def __init__(self, in_graph: str = "works") -> None:
        self.now = {0: 0.0, 1: 0.0}
        self.current = 0
        self.capturing: list[Callable[[], None]] | None = None
        self.in_graph = in_graph

    def work(self, ms: float) -> Callable[[], None]:
        def launch() -> None:
            if self.capturing is not None:
                self.capturing.append(lambda: self.advance(ms))
            else:
                self.advance(ms)

        return launch

    def advance(self, ms: float) -> None:
        self.now[self.current] += ms

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, index: int) -> None:
        assert self.capturing is None

    def Stream(self, device: int) -> int:
        return device

    def CUDAGraph(self) -> SimpleNamespace:
        nodes: list[Callable[[], None]] = []
        return SimpleNamespace(nodes=nodes, replay=lambda: [node() for node in nodes])

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: int) -> Iterator[None]:
        assert stream == self.current  # another device's stream would capture nothing of this one
        self.capturing = graph.nodes
        try:
            yield
        finally:
            self.capturing = None

    def Event(self, enable_timing: bool, external: bool = False) -> FakeEvent:
        return FakeEvent(self, external)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, external: bool) -> None:
        self.cuda, self.external, self.at = cuda, external, 0.0

    def record(self) -> None:
        if self.cuda.capturing is not None:
            if self.cuda.in_graph == "raises":
                raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
            if self.cuda.in_graph == "works":
                self.cuda.capturing.append(self.stamp)
        else:
            self.stamp()

    def stamp(self) -> None:
        self.at = self.cuda.now[self.cuda.current]

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at
