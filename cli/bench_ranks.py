"""`bench run` under torchrun: what a rank's child does, and the one answer of all ranks."""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.bench_files import require_free
from dieplace.cli.bench_going_on import going_on
from dieplace.cli.bench_measure import backend_of, measure
from dieplace.cli.options import settings
from dieplace.errors import BackendError, DieplaceError, UsageError
from dieplace.whole_file import write_whole

if TYPE_CHECKING:
    from dieplace.binding.ranks import Launched
    from dieplace.experiments.rank_child import Line
    from dieplace.experiments.rank_end import Launch, RankEnd
    from dieplace.experiments.registry import Options
    from dieplace.run import Run

DONE = "done"  # beside a rank's runs: none is missing
Show = Callable[[Sequence["Run"], dict[str, Any], bool], None]


def run_rank(
    ctx: click.Context,
    launched: Launched,
    name: str,
    options: Callable[[], Options],
    show: Show,
    *,
    out: str | None,
    resume: str | None,
) -> int:
    """This rank's part; the exit code. `show(runs, files, ok)` prints the merged runs, in one rank only.

    Everything that can be refused, from the experiment's name on, is refused in the children, so that one answer
    tells of it.
    """
    from dieplace.experiments.rank_end import Launch
    from dieplace.experiments.scale_out import take_part

    folder = Path(os.path.abspath(resume or out or _named_after_now(name)))
    answers: list[int] = []

    def answer(launch: Launch, ends: list[RankEnd]) -> int:
        answers.append(launched.rank)
        return _answer(ctx, show, launch, ends)

    try:
        return take_part(
            launched,
            Launch(folder, uuid.uuid4().hex[:12], folder.is_dir()),
            lambda launch: partial(_child, ctx, launched, launch, name, options, resume is not None),
            answer,
            say=partial(render.say, ctx),
        )
    except DieplaceError as error:
        if answers or launched.rank == 0:
            raise
        # Not as this command's answer: there is one on stdout, of another rank.
        render.note(f"dieplace: rank {launched.rank}: {error}")
        return error.exit_code


def _named_after_now(name: str) -> Path:
    return Path("dieplace-runs") / f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-ranks"


def _child(
    ctx: click.Context,
    launched: Launched,
    launch: Launch,
    name: str,
    options: Callable[[], Options],
    resume: bool,
    line: Line,
) -> None:
    """What one rank measures, on its own card and into its own folder. SystemExit with 130 where it was interrupted."""
    from dieplace.experiments import rank_cards, registry
    from dieplace.experiments.rank_end import with_place
    from dieplace.experiments.unfinished import clear

    settings(ctx).quiet = settings(ctx).quiet or launched.rank != 0  # one bar is enough
    folder = launch.rank_folder(launched.rank)
    experiment, asked, backend = registry.get(name), options(), backend_of(ctx)
    mine = rank_cards.take(launched, backend, settings(ctx).node, experiment)
    if resume and not launch.begun:
        raise UsageError(f"there is no folder {launch.folder} to go on with", hint="measure anew: leave --resume out")
    if not resume:
        require_free(launch.folder, name)
        require_free(folder, name)
    _make(folder)
    done = _done(folder, name) if resume else []
    line.begin(mine.to_json())

    def mark(run: Run) -> Run:
        placed = with_place(run, launched, launch, mine.to_json())
        return replace(placed, notes=tuple(dict.fromkeys((*placed.notes, *mine.notes))))

    for run in done:
        line.saved(mark(run).save(folder / f"{run.block}.json"))
    if done:
        return
    if resume and (folder / "unfinished").is_dir():
        asked = going_on(ctx, name, asked, str(folder), None)
    if backend == "emulated":
        asked = replace(asked, card=mine.cards[0], cards=mine.of)
    (folder / DONE).unlink(missing_ok=True)
    taken = measure(ctx, experiment, backend, asked, folder, mark=mark, saved=line.saved)
    if taken.cut_short or any(run.facts.get("stopped") == "interrupted" for run in taken.runs):
        raise SystemExit(130)
    clear(folder, name, backend)
    write_whole(folder / DONE, "every run of this rank is here\n")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {folder}: {error.strerror}", hint="name another with --out"
        ) from error


def _done(folder: Path, name: str) -> list[Run]:
    """The runs of a rank that had finished before; UsageError where they are of another experiment."""
    from dieplace.run import Run

    if not (folder / DONE).exists():
        return []
    runs = [Run.load(path) for path in sorted(folder.glob("*.json"))]
    for run in runs:
        if run.experiment != name:
            raise UsageError(f"{folder} holds a {run.experiment} run, not {name}", hint="name another folder")
    return runs


def _answer(ctx: click.Context, show: Show, launch: Launch, ends: list[RankEnd]) -> int:
    """Merge, save, report, print; the exit code of the launch. Raises where no rank measured anything."""
    from dieplace.experiments import report
    from dieplace.experiments.rank_child import STOPPED
    from dieplace.experiments.scale_out import CUT_SHORT_EXIT
    from dieplace.experiments.scale_out_merge import merge

    lost = [end for end in ends if end.lost]
    _refuse_nothing(ends, lost)
    runs = merge(ends, launch)
    paths = [run.save(launch.folder / f"{run.block}.json") for run in runs]
    page = report.write(runs, launch.folder / "report.html")
    stopped = any(end.code == STOPPED for end in ends)
    if stopped:
        render.say(ctx, f"interrupted: go on with the same command and --resume {launch.folder}")
    files = {
        "folder": str(launch.folder),
        "runs": [str(path) for path in paths],
        "report": str(page),
        "ranks": [end.to_json() for end in ends],
        "lost": [end.rank for end in lost],
        "hosts": _hosts(launch.folder, ends),
    }
    show(runs, files, not lost)
    return STOPPED if stopped else CUT_SHORT_EXIT if lost else 0


def _hosts(folder: Path, ends: Sequence[RankEnd]) -> dict[str, str]:
    """Each host's own name: printed, and kept in `hosts.txt` where there are several; run files name no machine."""
    names = {f"host{end.node}": end.hostname for end in ends if end.node is not None and end.hostname}
    if len(names) > 1:
        write_whole(folder / "hosts.txt", "".join(f"{host} {name}\n" for host, name in names.items()))
    return names


def _refuse_nothing(ends: Sequence[RankEnd], lost: Sequence[RankEnd]) -> None:
    """Where no rank measured: the one error that all told, else one that names each rank's."""
    from dieplace.experiments.rank_end import as_error
    from dieplace.experiments.scale_out_merge import lost_words

    if len(lost) < len(ends):
        return
    told = {str(end.error): end.error for end in ends}
    error = next(iter(told.values()))
    if len(told) == 1 and error is not None:
        raise as_error(error)
    raise BackendError(
        "no rank measured anything: " + "; ".join(lost_words(end) for end in ends),
        hint="what each rank printed stands above",
        ranks=[end.to_json() for end in ends],
    )
