"""The execution group of the emulated backend: launches run on the interpreter, their time is the clock's.

Nothing is timed here. `time` runs the launches once, counts where each role's bytes were read from, and asks the clock
how long the described workload takes with that share of each role on the peer die: a value and its range over the
parameter sets, marked as modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dieplace.backends.base import Prepared, Timing
from dieplace.emulator.execution import KernelRecord, Session, concurrent
from dieplace.errors import Unsupported

if TYPE_CHECKING:
    from dieplace.clock import Placement
    from dieplace.emulator.hbm import EmulatedHBM
    from dieplace.machine import Device
    from dieplace.workload import Workload

NS_PER_US = 1000.0


class EmulatedExecution:
    """Runs on the emulated HBM of one node; `records` of a prepared workload's last run are in `prepared.work`."""

    def __init__(self, memory: EmulatedHBM) -> None:
        self._memory = memory

    def prepare(self, workload: Workload, device: Device, *, graph: bool = True) -> Prepared:
        """Launches are synchronous, so there is nothing to capture: `graph` changes nothing."""
        workload.launches()
        return Prepared(workload, device, Session(device=device, memory=self._memory))

    def launch(self, prepared: Prepared) -> None:
        """Run it to its end."""
        session: Session = prepared.work
        session.records.clear()
        with session:
            for launch in prepared.workload.launches():
                launch()

    def synchronize(self, device: Device) -> None:
        """Nothing is ever under way."""

    def time(self, *prepared: Prepared, flush: Callable[[], None] | None = None) -> tuple[Timing, ...]:
        """The clock's time of each in ns, modelled; several run together on the interpreter, which the clock ignores.

        Unsupported for a workload whose stages have no bytes: the clock has nothing to go by.
        """
        for one in prepared:
            if not any(one.workload.bytes_by_role().values()):
                raise Unsupported(
                    f"the clock cannot time {one.workload.name!r}: its stages name no bytes",
                    hint="launch it, or describe its operands",
                )
        if flush is not None:
            flush()
        with ExitStack() as stack:
            if len(prepared) > 1:
                stack.enter_context(concurrent())
            for one in prepared:
                self.launch(one)
        return tuple(_modelled(one) for one in prepared)


def _modelled(prepared: Prepared) -> Timing:
    from dieplace.clock import over_sets

    kernels = [kernel for record in prepared.work.records for kernel in record.kernels]
    placement = placement_of(kernels)
    found = over_sets(prepared.workload, placement, lambda token: token.token_us)
    span = (found.low * NS_PER_US, found.high * NS_PER_US)
    detail = {"peer_share": dict(placement.peer_share), "kernels": len(kernels)}
    return Timing("modelled", value_ns=found.value * NS_PER_US, range_ns=span, detail=detail)


def placement_of(kernels: list[KernelRecord]) -> Placement:
    """Where the launches read their bytes: the share of each role's distinct bytes that came from the peer die.

    A device over both dies has no local and peer bytes: its memory is interleaved.
    """
    from dieplace.clock import Placement

    near: dict[str, int] = {}
    far: dict[str, int] = {}
    for kernel in kernels:
        for role, (read, _) in (kernel.traffic.by_role() if kernel.traffic is not None else {}).items():
            if read.distinct_local is None or read.distinct_peer is None:
                return Placement("counted", interleaved=True)
            near[role] = near.get(role, 0) + read.distinct_local
            far[role] = far.get(role, 0) + read.distinct_peer
    shares = {role: far[role] / (far[role] + near[role]) for role in far if far[role] + near[role]}
    return Placement("counted", peer_share=shares)
