"""What two shards share: mailboxes that the audit knows, and a gate by which both GPUs start a timed replay together.

Without the gate the first GPU would wait for the second one's launch inside the timed region, some ten microseconds of
the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dieplace.kernels import exchange, registry
from dieplace.kernels.arrival import RECORD_WORDS, require_arrival
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import Policy

NS_PER_MS = 1e6
LINE_WORDS = 32


class Mailboxes:
    """An exchange whose memory is allocated as sync flags, each side's in its own GPU's memory."""

    def __init__(self, machine: Machine, names: Sequence[str], *, slots: int, width: int) -> None:
        self.machine, self.names = machine, tuple(names)
        self.buffers: list[Buffer] = []
        first, second = self.names
        self.exchange = exchange.between((first, second), self.make, slots=slots, width=width)

    def make(self, side: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros in a side's own memory, which the other device can write."""
        import torch

        kind = getattr(torch, dtype)
        count = 1
        for extent in shape:
            count *= extent
        buffer = self.machine.allocate(
            count * kind.itemsize, device=self.names[side], policy=Policy.local(), role="sync_flag",
            name=f"mailboxes of shard {side}",
        )  # fmt: skip
        self.buffers.append(buffer)
        return buffer.tensor.view(kind).view(shape).zero_()

    def require_arrival(self) -> None:
        """KernelFault when a wait of either side gave up."""
        self.exchange.require_arrival()

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()


class Gate:
    """Flags by which two GPUs wait for one another before a timed region begins."""

    def __init__(self, mailboxes: Mailboxes, indices: Sequence[int]) -> None:
        self.indices, self.names = tuple(indices), mailboxes.names
        self.flags = [mailboxes.make(side, (LINE_WORDS,), "int32") for side in (0, 1)]
        self.status = [mailboxes.make(side, (2,), "int32") for side in (0, 1)]
        self.record = [mailboxes.make(side, (RECORD_WORDS,), "int32") for side in (0, 1)]
        self.counter = [mailboxes.make(side, (1,), "int32") for side in (0, 1)]  # stays 0: the host counts here
        self.value = 0

    def open(self) -> None:
        """Both sides meet once, so that nothing is compiled in a timed region; both are synchronised afterwards."""
        import torch

        for value in (0, 1):  # flags hold 0 already: the first round waits for nobody, and compiles
            self.value = value
            for own in (0, 1):
                self._set(own)
                self._wait(own)
            for index in self.indices:
                torch.cuda.synchronize(index)
        self.require()

    def time(self, graphs: Sequence[Any]) -> list[float]:
        """ns of one replay on each GPU, from behind the gate to its own end."""
        import torch

        self.value = 1 if self.value > 1 << 30 else self.value + 1
        for index in self.indices:
            torch.cuda.synchronize(index)  # nothing older is under way
        marks = []
        for own, (index, graph) in enumerate(zip(self.indices, graphs, strict=True)):
            with torch.cuda.device(index):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._set(own)
                self._wait(own)
                start.record()
                graph.replay()
                end.record()
                marks.append((start, end))
        for _, end in marks:
            end.synchronize()
        self.require()
        return [start.elapsed_time(end) * NS_PER_MS for start, end in marks]

    def require(self) -> None:
        """KernelFault where a GPU waited at the gate in vain."""
        for own, name in enumerate(self.names):
            require_arrival(
                self.status[own], flag="the gate", expected=self.value, waiter=name, record=self.record[own]
            )

    def _set(self, own: int) -> None:
        """Into the other's memory, launched on the device of the own counter."""
        operands = {"flag": self.flags[1 - own][:1], "epoch": self.counter[own]}
        registry.run("flag_set", operands, {"value": self.value}, backend="triton", strict=True)

    def _wait(self, own: int) -> None:
        operands = {"flag": self.flags[own][:1], "status": self.status[own], "record": self.record[own]}
        attrs = {"value": self.value, "spin_limit": exchange.SPIN_LIMIT}
        registry.run("flag_wait", operands, attrs, backend="triton", strict=True)
