"""What a wait that gave up says: the flag, what was expected, what was read last, and the block that waited.

Every wait has a limit in polls (tt-umd issue 3111: one without hung four hosts for an hour, and the value that it read
was never printed). Kernels count time-outs in `status` and note the first one in `record`; the host asks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dieplace.errors import KernelFault

if TYPE_CHECKING:
    from torch import Tensor

RECORD_WORDS = 4  # flag index + 1 (0: nothing noted), expected, last read, waiting block
_HINT = "the producer was not launched, gave up itself, or its store is not visible to this device"


def require_arrival(
    status: Any, *, flag: str, expected: int | None = None, waiter: str, record: Tensor | None = None
) -> None:
    """KernelFault when a wait gave up: names the flag, what was expected, what was read last and who waited.

    status (2) int32 as `flag_wait` and `handoff_sum` leave it; `record` (4) int32 tells flag, value and block of the
    first wait that gave up, which under a captured graph only the device knows. Synchronise before.
    """
    failed, seen = (int(v) for v in status.tolist())
    if not failed:
        return
    facts: dict[str, Any] = {"flag": flag, "expected": expected, "last_read": seen, "timeouts": failed}
    which, waiting = flag, waiter
    if record is not None and int(record[0]):
        index, expected, seen, block = (int(v) for v in record.tolist())
        which, waiting = f"{flag} [{index - 1}]", f"{waiter}, block {block},"
        facts |= {"flag_index": index - 1, "expected": expected, "last_read": seen, "block": block}
    raise KernelFault(
        f"{waiting} waited for {which} to hold {expected}: {failed} never did, the last one held {seen}",
        hint=_HINT,
        waiter=waiter,
        **facts,
    )


def require_rounds(stamps: Tensor, flag: Tensor, acks: Tensor, *, first: int, parties: range, waiter: str) -> None:
    """KernelFault when one of `parties` of a `flag_visibility` launch gave up before its last round.

    stamps (P, rounds) int64 were zeroed before the launch; flag (32) and acks (32 (P - 1)) int32 hold what was written
    last. Synchronise before.
    """
    rounds = stamps.shape[1]
    for party in parties:
        missing = (stamps[party] == 0).nonzero()
        done = int(missing[0]) if len(missing) else rounds
        # A writer stamps a round before it waits for that round's acknowledgements; a reader stamps what it has seen.
        expected = first + (done if party else done - 1)
        late = [n for n, held in enumerate(acks.view(-1, 32)[:, 0].tolist()) if held != expected]
        if done == rounds and (party or not late):
            continue
        which, held = "the flag", int(flag[0])
        if not party:
            which, held = f"acknowledgement {late}", int(acks[32 * (late or [0])[0]])
        raise KernelFault(
            f"{waiter}, block {party}, waited for {which} to hold {expected}: it holds {held}",
            hint=_HINT,
            flag=which,
            expected=expected,
            last_read=held,
            block=party,
            waiter=waiter,
        )
