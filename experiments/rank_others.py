"""What a rank knows of the others: their last notices, who of them is gone, and which rank leads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dieplace.experiments.rank_board import Board


@dataclass(frozen=True)
class Limits:
    """Seconds. torchrun kills a worker 30 s after SIGTERM (torch.distributed.elastic, PContext.close): all that follows
    one, grace, stop and merging, has to fit into it."""

    tick_s: float = 0.2
    life_s: float = 20.0  # without a new notice a rank is lost
    first_s: float = 120.0  # for a first notice, and for the word to begin
    straggling: float = 3.0  # of the time that the first to finish took
    straggling_least_s: float = 60.0
    grace_s: float = 15.0  # from SIGTERM until the child is asked to stop
    stop_s: float = 5.0  # from there until it is killed
    ending_life_s: float = 4.0  # as life_s, once the launch is being ended
    merge_by_s: float = 22.0  # from SIGTERM until the leader merges whatever is there
    answer_s: float = 60.0  # for the leader to merge


@dataclass
class _Seen:
    changed_at: float
    notice: dict[str, Any] | None = None


class Others:
    """The other ranks as the board shows them. Times are of this process's clock: hosts' clocks are never compared."""

    def __init__(self, board: Board, rank: int, world_size: int, limits: Limits, now: float) -> None:
        self._board, self._rank, self._limits = board, rank, limits
        self._seen = {other: _Seen(now) for other in range(world_size) if other != rank}
        self.ending_at: float | None = None  # when the launch was asked to end

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen)

    def leader(self, now: float) -> int:
        """The lowest rank that is not gone: usually a look at rank 0 alone."""
        for rank in range(self._rank):
            self.look(rank, now)
            if not self.gone(rank, now):
                return rank
        return self._rank

    def look(self, rank: int, now: float) -> None:
        """Read a rank's notice."""
        notice, seen = self._board.seen(f"rank/{rank}"), self._seen[rank]
        if notice is not None and (seen.notice is None or notice["beat"] != seen.notice["beat"]):
            seen.notice, seen.changed_at = notice, now

    def notice(self, rank: int) -> dict[str, Any] | None:
        """What it last put up."""
        return self._seen[rank].notice

    def gone(self, rank: int, now: float) -> bool:
        """No new notice for too long."""
        seen = self._seen[rank]
        limit_s = self._limits.first_s if seen.notice is None else self._limits.life_s
        if self.ending_at is not None:
            limit_s = self._limits.ending_life_s
        return now > max(seen.changed_at, self.ending_at or 0.0) + limit_s

    def settled(self, rank: int, now: float) -> bool:
        """There is nothing to wait for from it."""
        notice = self.notice(rank)
        return bool(notice and notice["ended"]) or self.gone(rank, now)
