"""One rank of a launch by torchrun: its child measures, and this process says how it went and waits for the others.

Each rank is two processes. The child measures and saves run files; this one sees how the child ends, puts up a notice
every tick on the launch's board, and never ends before the merged run is out: torchrun ends every other rank as soon
as one of its workers has failed. The lowest rank that shows signs of life leads: it gives the word to begin, stops
stragglers, and merges what those alive have measured. A rank is *lost* when its child ended with an error, or when it
shows no signs of life; nobody waits for it.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from dieplace.binding.ranks import Launched
from dieplace.errors import BackendError, UsageError
from dieplace.experiments.rank_board import Board, StoreGone
from dieplace.experiments.rank_child import Child, Work, start, wait_until_ended
from dieplace.experiments.rank_end import Launch, RankEnd, clash, end_of
from dieplace.experiments.rank_others import Limits, Others
from dieplace.run import Run

CUT_SHORT_EXIT = 3  # a merged run that lacks a rank: part of what was asked could not be done here
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WAITING_TOLD_S = 10.0

Answer = Callable[[Launch, list[RankEnd]], int]


def take_part(
    launched: Launched,
    proposal: Launch,
    work: Callable[[Launch], Work],
    answer: Answer,
    *,
    limits: Limits | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Do this rank's part and return its exit code; the process is a rank's for good, its signals are taken over.

    `work(launch)` is done by a child process. `answer(launch, ends)` merges and prints, in one rank only; it gives the
    launch's exit code. Raises StoreGone where torchrun itself is gone, after the child was stopped, and BackendError
    where the rank that was merging is.
    """
    board = Board(launched)
    proposed = f"{proposal.launch_id} {int(proposal.begun)} {proposal.folder}"
    launch_id, begun, folder = board.agree("launch", proposed).split(" ", 2)
    launch = Launch(Path(folder), launch_id, begun == "1")
    rank = _Rank(launched, board, launch, answer, limits or Limits(), say, start(work(launch)))
    for number in ENDING:
        signal.signal(number, rank.on_signal)
    try:
        return rank.run()
    finally:
        rank.child.end(signal.SIGKILL)
        for number in ENDING:  # the exit code is said: torchrun, ending the rest, must not change it
            signal.signal(number, signal.SIG_IGN)


class _Rank:
    """The state of this rank between two ticks."""

    def __init__(
        self,
        launched: Launched,
        board: Board,
        launch: Launch,
        answer: Answer,
        limits: Limits,
        say: Callable[[str], None],
        child: Child,
    ) -> None:
        self.rank, self.launched, self.launch = launched.rank, launched, launch
        self.board, self.answer, self.limits, self.say, self.child = board, answer, limits, say, child
        self.started_at = time.monotonic()
        self.others = Others(board, launched.rank, launched.world_size, limits, self.started_at)
        self.began_at: float | None = None
        self.refused: dict[str, Any] | None = None  # the error for which nothing is measured
        self.ended_by: signal.Signals | None = None  # the signal that asked the launch to end
        self.stopped_at: float | None = None  # when the child was asked to stop
        self.why_stopped = ""
        self.sent: int | None = None  # runs on the board, once the child has ended
        self.took_s: float | None = None
        self.beats = 0
        self.told_at = 0.0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """torchrun passes on Ctrl-C as SIGINT, and sends SIGTERM when another of its workers has failed."""
        self.ended_by = signal.Signals(number)
        if self.others.ending_at is None:
            self.others.ending_at = time.monotonic()

    def run(self) -> int:
        """Until the merged run is out."""
        try:
            while True:
                now = time.monotonic()
                self._mind_child(now)
                self._show_life()
                merged = self.board.seen("merged")
                if merged is not None:
                    return self._leave(merged)
                if self.others.leader(now) == self.rank and self._lead(now):
                    return self._merge()
                time.sleep(self.limits.tick_s)
        except StoreGone:
            self.child.end(signal.SIGINT)
            wait_until_ended(self.child, self.limits.stop_s)
            raise

    def _mind_child(self, now: float) -> None:
        self.child.poll()
        if self.child.code is None:
            self._begin_when_told(now)
            self._stop_when_due(now)
        elif self.sent is None:
            self.took_s = None if self.began_at is None else now - self.began_at
            for number, path in enumerate(self.child.saved):
                self.board.send(f"run/{self.rank}/{number}", path.read_text(encoding="utf-8"))
            self.sent = len(self.child.saved)

    def _begin_when_told(self, now: float) -> None:
        begin = self.board.seen("begin") if self.began_at is None else None
        if begin is not None:
            self.began_at, self.refused, self.told_at = now, begin["refused"], now
            self.child.let_go(measure=self.refused is None)

    def _stop_when_due(self, now: float) -> None:
        """Ask the child to stop, keeping what it has; kill it where it does not."""
        if self.stopped_at is not None:
            if now > self.stopped_at + self.limits.stop_s:
                self.child.end(signal.SIGKILL)
            return
        grace_s = 0.0 if self.ended_by == signal.SIGINT else self.limits.grace_s
        stragglers = self.board.seen("stop") or {}
        if self.others.ending_at is not None and self.ended_by and now > self.others.ending_at + grace_s:
            self.why_stopped = f"the launch was ended by {self.ended_by.name}"
        elif str(self.rank) in stragglers:
            self.why_stopped = stragglers[str(self.rank)]
        else:
            return
        self.stopped_at = now
        self.child.end(signal.SIGINT)

    def _show_life(self) -> None:
        self.beats += 1
        self.board.tell(f"rank/{self.rank}", self._notice())

    def _notice(self) -> dict[str, Any]:
        child, ended = self.child, self.sent is not None
        notice = {
            "beat": self.beats,
            "node": self.launched.node,
            "hostname": socket.gethostname(),
            "cards": child.cards,
            "ended": ended,
        }
        if not ended:
            return notice
        error = self.refused or child.error
        return notice | {
            "code": UsageError.exit_code if self.refused else child.code,
            "why": self._why(error),
            "error": error,
            "runs": self.sent,
            "files": [str(path.relative_to(self.launch.folder)) for path in child.saved],
            "took_s": self.took_s,
        }

    def _why(self, error: dict[str, Any] | None) -> str | None:
        if error is not None:
            return str(error["message"])
        if self.stopped_at is not None:
            return self.why_stopped
        if self.child.signalled is not None:
            return f"its process was killed by {signal.Signals(self.child.signalled).name}"
        return f"its process ended with exit code {self.child.code} and no word" if self.child.code else None

    def _lead(self, now: float) -> bool:
        """The leader's part of a tick; True when it is time to merge."""
        for rank in self.others:
            self.others.look(rank, now)
        notices = {**{rank: self.others.notice(rank) for rank in self.others}, self.rank: self._notice()}
        waited_for = [rank for rank in self.others if not self.others.settled(rank, now)]
        if self.sent is None:
            waited_for.append(self.rank)
        if self.began_at is None:
            self._give_the_word(notices, now)
        elif waited_for:
            self._mind_stragglers(notices, sorted(waited_for), now)
        ending_at = self.others.ending_at
        return not waited_for or (ending_at is not None and now > ending_at + self.limits.merge_by_s)

    def _give_the_word(self, notices: dict[int, Any], now: float) -> None:
        expected = [n for rank, n in notices.items() if rank == self.rank or not self.others.gone(rank, now)]
        ready = [n is not None and (n["cards"] is not None or n["ended"]) for n in expected]
        if not all(ready) and now < self.started_at + self.limits.first_s and self.others.ending_at is None:
            return
        if self.board.seen("begin") is None:  # an earlier leader may have given it
            known = {rank: notice["cards"] for rank, notice in notices.items() if notice and notice["cards"]}
            self.board.tell("begin", {"refused": clash(known)})

    def _mind_stragglers(self, notices: dict[int, Any], waited_for: list[int], now: float) -> None:
        done = {rank: n for rank, n in notices.items() if n and n["ended"] and n["code"] == 0 and n["took_s"]}
        if not done or self.began_at is None:
            return
        if now > self.told_at + WAITING_TOLD_S:
            self.told_at = now
            self.say(f"waiting for rank {', '.join(map(str, waited_for))}")
        first = min(done, key=lambda rank: float(done[rank]["took_s"]))
        limit_s = max(self.limits.straggling_least_s, self.limits.straggling * done[first]["took_s"])
        if now > self.began_at + limit_s and self.board.seen("stop") is None:
            why = f"stopped after {limit_s:.0f} s without an end, where rank {first} took {done[first]['took_s']:.0f} s"
            self.board.tell("stop", {str(rank): why for rank in waited_for})

    def _merge(self) -> int:
        if self.board.agree("merging", str(self.rank)) != str(self.rank):
            return self._wait_for_merged()
        ends = [self._end_of(rank) for rank in range(self.launched.world_size)]
        lost = [end.rank for end in ends if end.lost]
        try:
            code = self.answer(self.launch, ends)
        finally:  # also where it failed: nobody shall wait for it
            self.board.tell("merged", {"lost": lost})
        self._outlast(ends)
        return ends[self.rank].code or code

    def _end_of(self, rank: int) -> RankEnd:
        notice = self._notice() if rank == self.rank else self.others.notice(rank)
        count = notice["runs"] if notice and notice["ended"] else 0
        texts = [self.board.fetch(f"run/{rank}/{number}") for number in range(count)]
        return end_of(rank, notice, tuple(Run.from_json(json.loads(text)) for text in texts if text is not None))

    def _outlast(self, ends: list[RankEnd]) -> None:
        """Let the others leave first, so that torchrun's report names the rank that failed and not this one."""
        until = time.monotonic() + self.limits.stop_s
        waiting = [end.rank for end in ends if end.code is not None and end.rank != self.rank]
        while waiting and time.monotonic() < until:
            waiting = [rank for rank in waiting if self.board.seen(f"left/{rank}") is None]
            time.sleep(self.limits.tick_s / 4)
        if any(end.lost for end in ends):
            time.sleep(5 * self.limits.tick_s)

    def _wait_for_merged(self) -> int:
        until = time.monotonic() + self.limits.answer_s
        while time.monotonic() < until:
            self._show_life()
            merged = self.board.seen("merged")
            if merged is not None:
                return self._leave(merged)
            time.sleep(self.limits.tick_s)
        raise BackendError(
            "the rank that was merging is gone",
            hint=f"what the ranks measured is whole: dieplace bench show {self.launch.folder}",
        )

    def _leave(self, merged: dict[str, Any]) -> int:
        self.board.tell(f"left/{self.rank}", True)
        code = self._notice().get("code") or 0
        return int(code) or (CUT_SHORT_EXIT if self.rank in merged["lost"] else 0)
