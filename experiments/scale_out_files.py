"""Merging from a folder: the rank files of a launch whose merged run was never written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments.rank_end import Launch, RankEnd
from dieplace.experiments.run_shape import check_shape
from dieplace.experiments.scale_out_merge import merge
from dieplace.run import Run

RANK_FOLDERS = "rank-*"
MOST_RANKS = 1 << 16  # more is damage: each is a line of the merged run


def merge_folder(folder: Path) -> list[Run]:
    """One run a block from `rank-N/*.json`; UsageError where these are no ranks' files.

    Of several launches into one folder the last is taken, and the files of the others are named in a note.
    """
    taken: dict[str, list[Run]] = {}
    for path in sorted(folder.glob(f"{RANK_FOLDERS}/*.json")):
        run = check_shape(Run.load(path), str(path))
        why = _why_no_place(run.facts.get("rank"))
        if why is not None:
            raise UsageError(f"{path} does not say of which rank it is: {why}", hint="name run files, not the folder")
        taken.setdefault(str(run.facts["rank"]["launch_id"]), []).append(run)
    if not taken:
        raise UsageError(f"there is no run of a rank in {folder}", hint="name the folder of a launch by torchrun")
    last = max(taken, key=lambda one: max(run.created for run in taken[one]))
    merged = merge(_ends(taken[last]), Launch(folder, last))
    return [check_shape(run, f"{folder}, merged,") for run in merged]


def _why_no_place(place: Any) -> str | None:
    """What is wrong with what a run says of its rank, None where nothing is."""
    if not isinstance(place, dict):
        return "facts.rank is missing"
    for key, least in (("rank", 0), ("world_size", 1), ("node", 0)):
        value = place.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_RANKS:
            return f"its {key} is {value!r:.40}"
    if place["rank"] >= place["world_size"]:
        return f"it is rank {place['rank']} of {place['world_size']}"
    if not isinstance(place.get("launch_id"), str):
        return "its launch_id is no text"
    for key in ("cards", "bdfs", "parts"):
        names = place.get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"its {key} are {names!r:.40}"
    return None


def _ends(runs: Sequence[Run]) -> list[RankEnd]:
    world = max(run.facts["rank"]["world_size"] for run in runs)
    ends = {rank: RankEnd(rank, why="it left no run here") for rank in range(world)}
    for run in runs:
        place = run.facts["rank"]
        rank = place["rank"]
        before = ends[rank].runs if rank in ends else ()
        files = tuple(f"rank-{rank}/{one.block}.json" for one in (*before, run))
        ends[rank] = RankEnd(rank, place.get("node"), place, None, None, None, (*before, run), files)
    return [ends[rank] for rank in sorted(ends)]
