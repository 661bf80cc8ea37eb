"""The execution group of backends whose devices torch drives: NVIDIA GPUs, and AMD ones under a ROCm build of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dieplace.backends import torch_build, torch_timing
from dieplace.backends.base import Prepared, Timing
from dieplace.errors import Unsupported

if TYPE_CHECKING:
    from dieplace.machine import Device
    from dieplace.workload import Workload


class TorchExecution:
    """`index` gives a device's runtime index, checked; `cuda` is torch.cuda, or a stand-in in tests."""

    def __init__(self, backend: str, index: Callable[[Device], int], *, cuda: Any = None) -> None:
        why = torch_build.why_not(backend) if cuda is None else None
        if why is not None:
            raise Unsupported(f"nothing can be launched on the {backend} backend: {why}", hint="see: dieplace doctor")
        self._index, self._cuda = index, cuda

    def prepare(self, workload: Workload, device: Device, *, graph: bool = True) -> Prepared:
        """Run the launches once, so that they compile and allocate, and capture them in one graph on the device."""
        launches = workload.launches()
        index = self._index(device)
        if graph:
            return Prepared(workload, device, torch_timing.capture(launches, index, cuda=self._cuda))
        return Prepared(workload, device, torch_timing.uncaptured(launches, index))

    def launch(self, prepared: Prepared) -> None:
        """Start it on its device's current stream."""
        with self._torch().device(prepared.work.device):
            prepared.work.graph.replay()

    def synchronize(self, device: Device) -> None:
        """Wait for all work of a device."""
        self._torch().synchronize(self._index(device))

    def time(self, *prepared: Prepared, flush: Callable[[], None] | None = None) -> tuple[Timing, ...]:
        """One measured sample of each in ns; all are started before any is waited for."""
        works = [one.work for one in prepared]
        samples = torch_timing.time_together(works, flush=flush, cuda=self._cuda)
        return tuple(Timing("measured", (ns * work.launches,)) for ns, work in zip(samples, works, strict=True))

    def _torch(self) -> Any:
        if self._cuda is not None:
            return self._cuda
        import torch

        return torch.cuda
