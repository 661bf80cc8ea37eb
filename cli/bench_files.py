"""Run files by name, and the folder that a new run is written to."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.run import Run


def load_runs(names: Sequence[str]) -> tuple[Run, ...]:
    """Run files by name; a folder stands for its `*.json` in order of name, or for what its ranks left, merged."""
    from dieplace.experiments.run_shape import check_shape
    from dieplace.run import Run

    found: list[Run] = []
    for name in names:
        if _left_by_ranks(Path(name)):
            from dieplace.experiments.scale_out_files import merge_folder

            found += merge_folder(Path(name))
        else:
            found += [check_shape(Run.load(path), str(path)) for path in run_paths([name])]
    return _in_block_order(found)


def held_words(names: Sequence[str]) -> str:
    """A line a file: the command that shows it alone, then the run in it and its workload."""
    from dieplace.run import Run

    said = []
    for path in run_paths([name for name in names if not _left_by_ranks(Path(name))]):
        run = Run.load(path)
        context = run.workload.get("context_tokens")
        what = f"{run.workload['name']}, {context:,} tokens" if isinstance(context, int) else str(run.workload["name"])
        said.append(f"\n  dieplace bench show {shlex.quote(str(path))}  ({run.name}: {what}, {run.origin})")
    return "".join(said)


def _left_by_ranks(folder: Path) -> bool:
    """Whether ranks left runs in it, and no merged run is beside them."""
    return not any(folder.glob("*.json")) and any(folder.glob("rank-*/*.json"))


def run_paths(names: Sequence[str]) -> list[Path]:
    """The files that names stand for: themselves, and for a folder its `*.json` in order of name."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"there is no run file in the folder {name}", hint="run files end in .json")
        paths += inside
    return paths


def one_run(name: str) -> Run:
    """The one run that a name stands for; UsageError where a folder holds several."""
    found = load_runs([name])
    if len(found) > 1:
        blocks = ", ".join(run.block for run in found)
        raise UsageError(f"{name} holds {len(found)} runs ({blocks}): one is compared with one", hint="name a run file")
    return found[0]


def _in_block_order(runs: Sequence[Run]) -> tuple[Run, ...]:
    from dieplace.experiments import registry

    def place(run: Run) -> int:
        known = run.experiment in registry.experiment_names()
        blocks = registry.get(run.experiment).blocks if known else ()
        return blocks.index(run.block) if run.block in blocks else len(blocks)

    return tuple(sorted(runs, key=place))


@contextmanager
def run_folder(name: str, out: str | None, *, again: bool = False) -> Iterator[Path]:
    """The folder for runs and report of experiment `name`: the one named, else a new one in `dieplace-runs`.

    UsageError where it cannot be written or holds runs that would be overwritten or mixed with others; `again`: of a
    run that is gone on with they are its own. Folders that this made are removed on leaving while nothing is in them.
    """
    if out == "":  # of a variable that is not set: "." would scatter files in the current folder
        raise UsageError("--out is empty", hint="name a folder, or leave --out out")
    if out is not None and not again:
        require_free(Path(out), name)
    made = [one for one in (Path(out or "dieplace-runs"), *Path(out or "dieplace-runs").parents) if not one.exists()]
    folder = _made(name, out)
    try:
        yield folder
    finally:
        for one in dict.fromkeys((folder, *made) if out is None else made):
            with suppress(OSError):  # something is in it
                one.rmdir()


def _made(name: str, out: str | None) -> Path:
    try:
        folder = own_folder(name) if out is None else Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {out or 'dieplace-runs'}: {error.strerror}", hint="name another with --out"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {folder} cannot be written", hint="name another with --out")
    return folder


def require_free(folder: Path, name: str, *, among: str = "*.json") -> None:
    """UsageError where a folder holds finished runs, unless an unfinished one of the same experiment is there as well:
    measuring goes on with that, or refuses it itself."""
    found = sorted(path.name for path in folder.glob(among)) if folder.is_dir() else []
    if not found or _unfinished_of(folder) == name:
        return
    first = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    what = "a first-light bundle already" if "bundle.json" in found else "finished runs already"
    raise UsageError(
        f"{folder} holds {what}, which would be overwritten or mixed with others: {first}",
        hint="name another folder with --out, or remove these files",
        found=found,
    )


def _unfinished_of(folder: Path) -> str | None:
    """The experiment that is unfinished in a folder; damaged files are told of by whoever goes on with them."""
    from dieplace.experiments.unfinished import read

    try:
        found = read(folder)
    except UsageError:
        return None
    return None if found is None else str(found["identity"].get("experiment"))


def own_folder(name: str) -> Path:
    """A new folder named after the time: two runs that start in one second (exec --per-device) get two."""
    stem = Path("dieplace-runs") / f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}"
    for number in range(2, 1000):
        try:
            stem.mkdir(parents=True)
            return stem
        except FileExistsError:
            stem = stem.with_name(f"{stem.name.partition('_')[0]}_{number}")
    return stem
