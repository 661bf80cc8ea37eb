"""Sync flags on a chosen die: one 128-byte line each, in the memory class that a cross-die poller can trust.

A hand-off word is 64 bits, `tag << 32 | value`, written by one store: who sees the tag sees the value. Tags only grow,
so a replay that starts without a reset still waits for its own (the fault of a baked-in tag: aiter PR 3928).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dieplace.errors import PlacementError, UsageError
from dieplace.machine import Device, Machine
from dieplace.memory import Buffer, allocate
from dieplace.policy import Policy

if TYPE_CHECKING:
    import torch

LINE_BYTES = 128  # L1 and L2 lines of gfx950: two flags in one line would be polled and written together
_WORDS_PER_LINE = LINE_BYTES // 8
MAX_TAG = (1 << 31) - 1


class SyncFlags:
    """`count` flags, each alone on its line; `words` is an int64 view of (count,) with a stride of 128 bytes.

    Raises PlacementError where the runtime gave host memory instead of device memory (seen for uncached requests on
    one ROCm build).
    """

    def __init__(
        self,
        machine: Machine,
        device: Device | str,
        count: int,
        *,
        policy: Policy | str = "local",
        memory_class: str | None = None,
        name: str = "flags",
    ) -> None:
        if count < 1:
            raise UsageError(f"{count} flags cannot be", hint="ask for at least 1")
        self.count = count
        self._tag = 0
        self._buffer = allocate(
            machine,
            (count, _WORDS_PER_LINE),
            device=device,
            policy=policy,
            role="sync_flag",
            dtype="int64",
            memory_class=memory_class,
            name=name,
        )
        try:
            _require_device_memory(machine, self._buffer)
        except Exception:
            self._buffer.free()
            raise
        self.lines = self._buffer.tensor
        self.reset()

    @property
    def words(self) -> torch.Tensor:
        """The flags themselves, (count,) int64, 128 bytes apart."""
        return self.lines[:, 0]

    @property
    def memory_class(self) -> str:
        return self._buffer.memory_class

    def next_tag(self) -> int:
        """A tag that no word of this set has held: 1, 2, ...; UsageError once 31 bits are spent."""
        if self._tag >= MAX_TAG:
            raise UsageError("the tags of this flag set are spent", hint="reset() it while nobody waits")
        self._tag += 1
        return self._tag

    def put(self, index: int, value: float, tag: int) -> None:
        """Write a word from the host: an fp32 value and its tag in one store."""
        if not 1 <= tag <= MAX_TAG:
            raise UsageError(f"tag {tag} is not between 1 and {MAX_TAG}")
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        self.lines[index, 0] = (tag << 32) | bits

    def read(self, index: int) -> tuple[float, int]:
        """Value and tag of a word, read once."""
        word = int(self.lines[index, 0])
        return struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0], word >> 32

    def reset(self) -> None:
        """Zero every line and start tags anew; only while no kernel waits on them."""
        self.lines.zero_()
        self._tag = 0

    def audited(self) -> Sequence[Buffer]:
        """The buffer, for `audit`."""
        return (self._buffer,)

    def move(self, policy: Policy | str) -> None:
        """Give the flags another home under the same addresses."""
        self._buffer.move(policy)

    def __repr__(self) -> str:
        homes = ", ".join(dict.fromkeys(self._buffer.requested))
        return f"SyncFlags({self.count} flags, {self.memory_class}, {homes})"

    def free(self) -> None:
        """Give the memory back."""
        self._buffer.free()


def release_words(machine: Machine, device: Device, *, policy: Policy | str = "local") -> SyncFlags:
    """One line per XCD of the device, coarse: each XCD polls its own in its own L2, however many wait there."""
    if device.xccs is None:
        raise PlacementError(f"{device.id} has an unknown number of XCDs", hint="see: dieplace list")
    return SyncFlags(machine, device, device.xccs, policy=policy, memory_class="coarse", name="release")


def _require_device_memory(machine: Machine, buffer: Buffer) -> None:
    wrong = [name for name in buffer.locate().bytes_by_domain if machine.domain(name).card is None]
    if wrong:
        raise PlacementError(
            f"the flags were asked in {', '.join(buffer.requested)} and came back in host memory ({', '.join(wrong)})",
            hint="a poller on a die would cross PCIe: use another memory class or ROCm build",
        )
