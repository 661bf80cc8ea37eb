"""What two shards share: mailboxes that the audit knows, and a gate by which both GPUs start a timed replay together.

Without the gate one GPU waits inside the timed region for the host to launch the other one's work: medians of an eight
layer step moved by 12 % from one set of samples to the next on two H200s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dieplace.kernels import exchange, registry
from dieplace.kernels.arrival import RECORD_WORDS, require_arrival
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import Policy

LINE_WORDS = 32
GATE_LIMIT = 1 << 22  # polls of host memory, each a microsecond or more


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
    """Holds both GPUs by a flag in pinned host memory until the host has launched everything on both.

    Stands where `torch_timing.Gate` is asked for. Both see the flag within some microseconds of one another.
    """

    def __init__(self, mailboxes: Mailboxes, indices: Sequence[int]) -> None:
        import torch

        self.names, self.indices = mailboxes.names, tuple(indices)
        self.flag = torch.zeros(LINE_WORDS, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self.status = {index: mailboxes.make(side, (2,), "int32") for side, index in enumerate(indices)}
        self.record = {index: mailboxes.make(side, (RECORD_WORDS,), "int32") for side, index in enumerate(indices)}
        self.value = 0
        for index in self.indices:
            self._wait(index, 0)  # holds nobody: compiles
            torch.cuda.synchronize(index)

    def hold(self, device: int) -> None:
        """What is launched on the device from here on waits for `open`, some seconds at most."""
        self._wait(device, self.value + 1)

    def open(self) -> None:
        """Let both go."""
        self.value += 1
        self.flag[0] = self.value

    def require(self) -> None:
        """KernelFault where a GPU was held until its limit; synchronise before."""
        for name, index in zip(self.names, self.indices, strict=True):
            told = {"expected": self.value, "waiter": name, "record": self.record[index]}
            require_arrival(self.status[index], flag="the gate", **told)

    def _wait(self, device: int, value: int) -> None:
        operands = {"flag": self.flag[:1], "status": self.status[device], "record": self.record[device]}
        attrs = {"value": value, "spin_limit": GATE_LIMIT}
        registry.run("flag_wait", operands, attrs, backend="triton", strict=True)
