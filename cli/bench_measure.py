"""Measuring into a folder: the loop that `bench run` and each rank under torchrun go through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dieplace.cli import render
from dieplace.cli.bench_going_on import watched

if TYPE_CHECKING:
    from dieplace.experiments.registry import Experiment, Options
    from dieplace.run import Run


def backend_of(ctx: click.Context) -> str:
    """The backend that was named, else the first of those on hardware that is there."""
    from dieplace.cli.options import settings
    from dieplace.discover import open_backend

    return settings(ctx).backend or open_backend().name


def measure(
    ctx: click.Context,
    experiment: Experiment,
    backend: str,
    options: Options,
    folder: Path,
    *,
    mark: Callable[[Run], Run] = lambda run: run,
    saved: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Run], list[Path]]:
    """Run an experiment; its runs, each `mark`ed and saved in the folder as soon as it is there, and their files."""
    from dieplace.experiments import registry

    if options.bytes_from == "counted":
        render.say(ctx, "counting bytes by running the kernels on the emulator: a minute or more unless cached")
    steps = experiment.live_steps if backend in ("nvidia", "amd") and experiment.live_steps else experiment.steps
    # Counting adds a step for each stage that has to be run again: how many is not known before.
    with render.progress(ctx, experiment.name, None if options.bytes_from == "counted" else steps) as step:
        runs, paths = [], []
        # Each is saved as soon as it is there: Ctrl-C and a reader of stdout that goes away must not lose the work.
        with registry.taking(experiment, backend, watched(options, folder, step), step) as taken:
            for run in taken:
                runs.append(mark(run))
                paths.append(runs[-1].save(folder / f"{run.block}.json"))
                saved(paths[-1])
    return runs, paths
