"""Measuring into a folder: the loop that `bench run` and each rank under torchrun go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dieplace.cli import render
from dieplace.cli.bench_going_on import watched

if TYPE_CHECKING:
    from dieplace.experiments.registry import Experiment, Options
    from dieplace.run import Run


@dataclass(frozen=True)
class Taken:
    """Runs and their files, one a block; `cut_short`: Ctrl-C came before the last of them was done."""

    runs: list[Run]
    paths: list[Path]
    cut_short: bool = False


def backend_of(ctx: click.Context, experiment: Experiment | None = None) -> str:
    """The backend that was named, else the first of those on hardware that is there.

    Where there is none, only those are suggested on which the experiment can run.
    """
    from dieplace.cli.options import settings
    from dieplace.discover import open_backend
    from dieplace.errors import NoBackend

    named = settings(ctx).backend
    if named is not None or experiment is None:
        return named or open_backend().name
    try:
        return open_backend().name
    except NoBackend as error:
        other = [name for name in ("emulated", "cpu") if experiment.cannot(name) is None]
        hint = (
            f"name another backend: --backend {' or '.join(other)}"
            if other
            else (
                f"run {experiment.name} where there is a GPU; on an emulated node it cannot run: "
                f"{experiment.cannot('emulated')}"
            )
        )
        raise NoBackend(error.message, hint=hint, **error.facts) from error


def measure(
    ctx: click.Context,
    experiment: Experiment,
    backend: str,
    options: Options,
    folder: Path,
    *,
    mark: Callable[[Run], Run] = lambda run: run,
    saved: Callable[[Path], None] = lambda path: None,
) -> Taken:
    """Run an experiment; its runs, each `mark`ed and saved in the folder as soon as it is there, and their files.

    Ctrl-C that the experiment does not hold back ends it: what was saved before stands, and KeyboardInterrupt passes
    only where that is nothing.
    """
    from dieplace.experiments import registry

    if options.bytes_from == "counted":
        render.say(ctx, "counting bytes by running the kernels on the emulator: a minute or more unless cached")
    steps = registry.steps_of(experiment, backend, options)
    # Counting adds a step for each stage that has to be run again: how many is not known before.
    with render.progress(ctx, experiment.name, None if options.bytes_from == "counted" else steps) as step:
        done = Taken([], [])
        # Each is saved as soon as it is there: Ctrl-C and a reader of stdout that goes away must not lose the work.
        try:
            with registry.taking(experiment, backend, watched(options, folder, step), step) as taken:
                for run in taken:
                    done.runs.append(mark(run))
                    done.paths.append(done.runs[-1].save(folder / f"{run.block}.json"))
                    saved(done.paths[-1])
        except KeyboardInterrupt:
            if not done.paths:
                raise
            # One that was interrupted while it was saved is measured and has no file.
            return Taken(done.runs[: len(done.paths)], done.paths, cut_short=True)
    return done
