"""Two shards that exchange partial sums through mailboxes in each other's memory, replay after replay of a graph.

Each side has its inboxes, a counter of steps, a status and a record in its own memory; the other side writes across.
Tags are counted on the device, so that a replay waits for its own step's words and takes no old ones. A program (what
one graph captures) has slots of its own in the set, and all programs of a set share its counter: two graphs that use
one set never take one another's words, and shards that run them in different order end in a time-out that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dieplace.errors import UsageError
from dieplace.kernels import registry
from dieplace.kernels.arrival import RECORD_WORDS, require_arrival

if TYPE_CHECKING:
    from torch import Tensor

STEP = 64  # values a step counts on by: one a slot, and 0 is an empty mailbox
# 2^21 polls of 2,880 words took 2.8 s on an H200: a partner that is most of a second late has failed.
SPIN_LIMIT = 1 << 19
Make = Callable[[int, tuple[int, ...], str], "Tensor"]


@dataclass(frozen=True)
class Side:
    """One shard's end. inboxes (slots, width) int64, epoch (1), status (2), record (4) int32 in its own memory.

    `outboxes` are the other side's inboxes. `run(op, operands, attrs)` launches on this shard's device.
    """

    name: str
    inboxes: Tensor
    outboxes: Tensor
    epoch: Tensor
    status: Tensor
    record: Tensor
    run: Callable[[str, dict[str, Any], dict[str, Any]], Any]
    spin_limit: int = SPIN_LIMIT

    def put(self, slot: int, x: Tensor) -> None:
        """Send fp32 x (width) to the other shard's mailbox of this slot."""
        operands = {"x": x, "mailbox": self.outboxes[slot], "epoch": self.epoch}
        self.run("handoff_put", operands, {"tag": slot + 1})

    def sum(self, slot: int, own: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = own + what the other shard puts into this slot in this step (+ residual), all (width)."""
        operands = {
            "own": own,
            "mailbox": self.inboxes[slot],
            "residual": residual,
            "out": out,
            "status": self.status,
            "epoch": self.epoch,
            "record": self.record,
        }
        self.run("handoff_sum", operands, {"tag": slot + 1, "spin_limit": self.spin_limit})

    def next(self) -> None:
        """The last launch of a step: the counter goes on."""
        self.run("epoch_next", {"epoch": self.epoch}, {"step": STEP})

    def require_arrival(self) -> None:
        """KernelFault when a wait of this side gave up since the last reset; synchronise before."""
        expected = int(self.record[1])
        slot = (expected & (STEP - 1)) - 1
        require_arrival(self.status, flag=f"mailbox of slot {slot}", waiter=self.name, record=self.record)


@dataclass
class Exchange:
    """Both sides of a set of `slots` mailboxes of `width` fp32 values; made by `between`."""

    sides: tuple[Side, Side]
    slots: int
    taken: int = 0

    def program(self, hand_offs: int) -> range:
        """Slots for one graph's hand-offs, of its own in this set; each is put and summed once a step, in order.

        UsageError for fewer than two (with one, a fast shard would overwrite what a slow one has yet to read: it is the
        later hand-offs of a step that hold it back) and where the set has too few left.
        """
        if hand_offs < 2:
            raise UsageError(
                f"a step of {hand_offs} hand-off cannot use mailboxes again safely",
                hint="give it two: the second one tells that the first was read",
            )
        if self.taken + hand_offs > self.slots:
            raise UsageError(
                f"{hand_offs} hand-offs do not fit: {self.taken} of {self.slots} slots are taken by other graphs",
                hint="make the set with more slots",
            )
        self.taken += hand_offs
        return range(self.taken - hand_offs, self.taken)

    def require_arrival(self) -> None:
        """KernelFault when a wait of either side gave up; synchronise both devices before."""
        for side in self.sides:
            side.require_arrival()

    def reset(self) -> None:
        """Empty mailboxes, counters at 0, nothing noted: for use after a time-out, while nothing runs on the set."""
        for side in self.sides:
            for tensor in (side.inboxes, side.epoch, side.status, side.record):
                tensor.zero_()


def between(
    names: tuple[str, str],
    make: Make,
    *,
    slots: int,
    width: int,
    spin_limit: int = SPIN_LIMIT,
    backend: str = "triton",
) -> Exchange:
    """A set between two shards. `make(side, shape, dtype)` gives memory of side 0 or 1 that both devices can access.

    `backend` is that of the kernels. UsageError for more slots than a step has values.
    """
    if not 2 <= slots < STEP:
        raise UsageError(f"a set of {slots} slots cannot be", hint=f"from 2 to {STEP - 1}")
    run = partial(registry.run, backend=backend, strict=True)
    inboxes = [make(side, (slots, width), "int64") for side in (0, 1)]

    def side(number: int) -> Side:
        epoch, status, record = (make(number, (count,), "int32") for count in (1, 2, RECORD_WORDS))
        return Side(
            names[number], inboxes[number], inboxes[1 - number], epoch, status, record, run=run, spin_limit=spin_limit
        )

    made = Exchange((side(0), side(1)), slots)
    made.reset()
    return made
