"""A bench run that is gone on with, interrupted, or done: what the command does around the measuring."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dieplace.cli import render
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.cli.bench_measure import Taken
    from dieplace.experiments.registry import Experiment, Options

# Parameters of the command by the options that they set.
_PARAMETERS = {
    "model": "model",
    "precision": "precision",
    "context": "context_tokens",
    "shards": "shards",
    "bytes_from": "bytes_from",
    "arms": "arms",
}


def begun(ctx: click.Context, name: str | None, resume: str | None, *, ranks: bool) -> tuple[str, str | None]:
    """The experiment to run, and the backend that a run to go on with was begun on; None: it is yet to be chosen.

    Both come from the folder where the command line leaves them out; UsageError where it names another backend.
    """
    if name is None and (resume is None or ranks):
        raise click.MissingParameter(ctx=ctx, param_hint="'NAME'", param_type="argument")
    if resume is None or ranks:  # each rank's own folder is read in its child
        return str(name), None
    from dieplace.cli.options import settings
    from dieplace.experiments.unfinished import begun_as

    found = begun_as(Path(resume))
    if found is None and name is not None:
        return name, None  # refused in a moment, with what else is wrong
    if found is None:
        raise UsageError(f"no run is unfinished in {resume}", hint="measure anew: leave --resume out")
    experiment, backend = found
    asked = settings(ctx).backend
    if asked is not None and asked != backend:
        raise UsageError(
            f"the unfinished run in {resume} was begun on backend {backend}, and {asked} is named",
            hint=f"leave --backend out, or name {backend}; measure anew with another --out",
            differing=["backend"],
        )
    return name or experiment, backend


def going_on(ctx: click.Context, name: str, options: Options, resume: str | None, out: str | None) -> Options:
    """The options of the run to go on with: those it was begun with; a contradiction on the command line is refused."""
    if resume is None:
        return options
    if out is not None and Path(out).resolve() != Path(resume).resolve():
        raise UsageError(f"--resume {resume} and --out {out} are two folders", hint="leave --out out")
    from dieplace.experiments.unfinished import continued

    given = {key for word, key in _PARAMETERS.items() if ctx.get_parameter_source(word) is ParameterSource.COMMANDLINE}
    return continued(Path(resume), name, options, given)


def watched(options: Options, folder: Path, steps: render.Steps) -> Options:
    """Options by which a live run keeps its blocks in the run's folder and tells of them."""
    from dieplace.experiments.registry import Watch

    return replace(options, watch=Watch(folder, steps.within))


def interrupted(ctx: click.Context, experiment: Experiment, folder: Path, taken: Taken) -> bool:
    """Whether Ctrl-C ended a run; then says what is kept and how to go on, else forgets the blocks kept for that."""
    from dieplace.experiments.unfinished import cases, clear, read

    runs = taken.runs
    if taken.cut_short:
        missing = [block for block in experiment.blocks if block not in {run.block for run in runs}]
        render.say(ctx, f"interrupted: {', '.join(path.name for path in taken.paths)} in {folder} is whole and kept")
        if cases(folder):
            render.say(ctx, f"  go on with: dieplace bench run {experiment.name} --resume {shlex.quote(str(folder))}")
        elif missing:
            render.say(ctx, f"  not done: {', '.join(missing)}; run it again, into another folder, to have all")
        return True
    if not any(run.facts.get("stopped") == "interrupted" for run in runs):
        clear(folder, experiment.name, str(runs[0].conditions.get("backend")) if runs else "")
        return False
    render.say(ctx, "interrupted: what was measured is saved")
    if read(folder) is not None:
        render.say(ctx, f"  go on with: dieplace bench run {experiment.name} --resume {shlex.quote(str(folder))}")
    return True


@contextmanager
def nothing_kept(ctx: click.Context, experiment: Experiment, backend: str, folder: Path) -> Iterator[None]:
    """Inside, Ctrl-C before anything could be saved is told of; the way to a first block is forgotten."""
    from dieplace.experiments.unfinished import cases, clear

    try:
        yield
    except KeyboardInterrupt:
        if cases(folder):
            render.note("interrupted: the blocks measured so far are kept")
            render.note(f"  go on with: dieplace bench run {experiment.name} --resume {shlex.quote(str(folder))}")
        else:
            clear(folder, experiment.name, backend)
            render.note("interrupted before anything was whole: nothing was kept")
        raise
