"""Merging from a folder: the rank files of a launch whose merged run was never written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dieplace.errors import UsageError
from dieplace.experiments.rank_end import Launch, RankEnd
from dieplace.experiments.scale_out_merge import merge
from dieplace.run import Run

RANK_FOLDERS = "rank-*"


def merge_folder(folder: Path) -> list[Run]:
    """One run a block from `rank-N/*.json`; UsageError where these are no ranks' files.

    Of several launches into one folder the last is taken, and the files of the others are named in a note.
    """
    taken: dict[str, list[Run]] = {}
    for path in sorted(folder.glob(f"{RANK_FOLDERS}/*.json")):
        run = Run.load(path)
        place = run.facts.get("rank")
        if not isinstance(place, dict) or not isinstance(place.get("rank"), int):
            raise UsageError(f"{path} does not say of which rank it is", hint="name run files, not the folder")
        taken.setdefault(str(place.get("session")), []).append(run)
    if not taken:
        raise UsageError(f"there is no run of a rank in {folder}", hint="name the folder of a launch by torchrun")
    session = max(taken, key=lambda one: max(run.created for run in taken[one]))
    return merge(_ends(taken[session]), Launch(folder, session))


def _ends(runs: Sequence[Run]) -> list[RankEnd]:
    world = max(int(run.facts["rank"].get("world_size", 1)) for run in runs)
    ends = {rank: RankEnd(rank, why="it left no run here") for rank in range(world)}
    for run in runs:
        place = run.facts["rank"]
        rank = place["rank"]
        before = ends[rank].runs if rank in ends else ()
        files = tuple(f"rank-{rank}/{one.block}.json" for one in (*before, run))
        ends[rank] = RankEnd(rank, place.get("node"), place, None, None, None, (*before, run), files)
    return [ends[rank] for rank in sorted(ends)]
