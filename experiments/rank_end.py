"""How a rank ended, as plain data that ranks send to one another, and the errors that only all of them show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dieplace.binding.ranks import Launched
from dieplace.errors import DieplaceError, UsageError
from dieplace.experiments.rank_child import STOPPED
from dieplace.run import Run

NO_WORD = "torchrun's own report has its exit code"


@dataclass(frozen=True)
class Launch:
    """What all ranks agreed on first: the folder, and a word that tells this launch from others in the same folder.

    `begun` says that the folder was there before any rank of this launch could make it.
    """

    folder: Path
    launch_id: str
    begun: bool = False

    def rank_folder(self, rank: int) -> Path:
        """Where a rank saves its own runs."""
        return self.folder / f"rank-{rank}"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `code` is None where its process was gone without a word; `why` says what went wrong.

    `files` are its run files, relative to the launch's folder on its own host. `hostname` is for the screen only.
    """

    rank: int
    node: int | None = None
    cards: Mapping[str, Any] | None = None
    code: int | None = None
    why: str | None = None
    error: Mapping[str, Any] | None = None
    runs: tuple[Run, ...] = ()
    files: tuple[str, ...] = ()
    hostname: str | None = None

    @property
    def lost(self) -> bool:
        """Whether it is missing from the merged run; one that was stopped and kept what it had is not.

        Runs without a code were read from files, later.
        """
        return not self.runs or self.code not in (None, 0, STOPPED)

    def to_json(self) -> dict[str, Any]:
        """Plain data without the runs, each unknown with a why."""
        cards = self.cards or {}
        body: dict[str, Any] = {
            "rank": self.rank,
            "host": None if self.node is None else f"host{self.node}",
            **{key: list(cards.get(key, ())) for key in ("cards", "bdfs", "parts")},
            "state": "lost" if self.lost else "cut short" if self.code else "measured",
            "exit_code": self.code,
            "files": list(self.files),
        }
        if self.node is None:
            body["host_why"] = self.why
        if self.code is None:
            body["exit_code_why"] = self.why or "read from its files: its exit code was not kept"
        if self.why is not None:
            body["why"] = self.why
        return body


def end_of(rank: int, notice: Mapping[str, Any] | None, runs: tuple[Run, ...]) -> RankEnd:
    """From the last notice that a rank put up."""
    if notice is None:
        return RankEnd(rank, why=f"it gave no sign of life: {NO_WORD}")
    known = RankEnd(rank, notice["node"], notice["cards"], hostname=notice["hostname"])
    if not notice["ended"]:
        return replace(known, why=f"it ended without a word: {NO_WORD}")
    why = "it measured nothing" if notice["code"] == 0 and not runs else notice["why"]
    files = tuple(notice["files"])
    return replace(known, code=notice["code"], why=why, error=notice["error"], runs=runs, files=files)


def clash(cards: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The error, as data, where two ranks are on one card: their times would be of each other; else None."""
    holders: dict[str, int] = {}
    for rank, mine in sorted(cards.items()):
        for place, identity in enumerate(mine["identity"]):
            first = holders.setdefault(identity, rank)
            if first != rank:
                return as_data(
                    UsageError(
                        f"ranks {first} and {rank} are both on {mine['cards'][place]} ({mine['bdfs'][place]})",
                        hint=f"one rank a card, and here a rank takes {len(mine['cards'])}: start fewer ranks on each"
                        " host, or let each see other cards",
                    )
                )
    return None


def as_data(error: DieplaceError) -> dict[str, Any]:
    """An error as a rank tells it."""
    return {**error.to_json(), "exit_code": error.exit_code}


def as_error(found: Mapping[str, Any]) -> DieplaceError:
    """The typed error that a rank told as data: its message, hint, word and exit code."""
    facts = {key: value for key, value in found.items() if key not in ("word", "message", "hint", "exit_code")}
    error = DieplaceError(found["message"], hint=found["hint"], **facts)
    error.exit_code, error.word = found["exit_code"], found["word"]
    return error


def with_place(run: Run, launched: Launched, launch: Launch, cards: Mapping[str, Any]) -> Run:
    """The run, saying of which rank of which launch it is, so that the files of the ranks can be merged later too."""
    place = {
        "rank": launched.rank,
        "world_size": launched.world_size,
        "node": launched.node,
        "launch_id": launch.launch_id,
        **{key: list(cards[key]) for key in ("cards", "bdfs", "parts")},
    }
    return replace(run, facts={**run.facts, "rank": place})
