"""`dieplace bench run first-light`, and `bench show` and `bench report` of its bundle."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.options import settings
from dieplace.cli.partition_options import ROCM, UNITS, finite, options
from dieplace.cli.table import Column, Table
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.experiments.first_light_bundle import Bundle
    from dieplace.experiments.registry import Options

NAME = "first-light"
OPTIONS = options(
    click.option("--allow-mode-changes", is_flag=True, help="first-light: go through the modes, and back."),
    click.option("--skip", multiple=True, metavar="NAME", help="first-light: leave out a question or experiment."),
    click.option(
        "--wait", type=click.FloatRange(min=0, max=86400), default=0.0, callback=finite, metavar="SECONDS",
        help="first-light: wait so long for whoever holds a card.",
    ),
    UNITS,
    ROCM,
)  # fmt: skip


def is_meant(name: str, given: dict[str, Any], asked: Callable[[], Options], resume: str | None) -> bool:
    """Whether first light is asked for; UsageError where options of one are given for the other."""
    mine = [key for key, value in given.items() if value]
    if name != NAME:
        if mine:
            flags = ", ".join(f"--{key.replace('_', '-')}" for key in mine)
            raise UsageError(f"only first-light takes {flags}, {name} does not", hint="leave it out")
        return False
    from dieplace.experiments.registry import Options

    chosen = asked()
    if resume is not None or chosen != Options(allow_unvalidated=chosen.allow_unvalidated):
        raise UsageError(
            "first-light asks for no model, arms or label, and cannot be resumed",
            hint="it takes --allow-mode-changes, --allow-unvalidated, --skip, --wait, --stop-service, --rocm-path, -y",
        )
    return True


def run_first_light(
    ctx: click.Context,
    backend: str,
    folder: Path,
    *,
    allow_mode_changes: bool = False,
    allow_unvalidated: bool = False,
    yes: bool = False,
    skip: tuple[str, ...] = (),
    wait: float = 0.0,
    units: tuple[str, ...] = (),
    rocm_path: str | None = None,
) -> None:
    """Look, show what would be changed, ask, go, print the answers. Exit 6 where the node is not as it was found."""
    from dieplace.experiments import first_light as command
    from dieplace.experiments.first_light_bundle import require_new
    from dieplace.experiments.first_light_host import host_for
    from dieplace.experiments.first_light_modes import Permission
    from dieplace.partition.control import check_unit

    permission = Permission(allow_mode_changes, allow_unvalidated, tuple(map(check_unit, units)), wait)
    command.check_names(skip)
    require_new(folder)
    host = host_for(backend, node=settings(ctx).node, rocm_path=rocm_path)
    found = command.preflight(host, permission)
    for line in found.lines:
        # Nobody should answer a question about a plan that -q has hidden.
        render.say(ctx, line) if yes or not found.switches else render.note(line)
    if found.why_no_switch is not None:
        render.say(ctx, f"no mode will be changed: {found.why_no_switch}")
    if found.switches:
        render.confirm(ctx, f"Go through these modes on {len(found.machine.cards)} cards and back?", yes=yes)
    begun = time.monotonic()

    def detail(text: str) -> None:
        render.say(ctx, f"[{time.monotonic() - begun:6.1f} s]   {text}")

    render.say(ctx, f"bundle: {folder}")
    with render.progress(ctx, NAME, command.steps(host, found)) as step, _ended_like_ctrl_c():
        try:
            bundle = command.first_light(host, folder, permission, found=found, skip=skip, step=step, detail=detail)
        except KeyboardInterrupt:
            _tell_where_it_stands(folder)
            raise
    answer(ctx, bundle, "bench-run/1")


def _tell_where_it_stands(folder: Path) -> None:
    from dieplace.experiments.first_light_bundle import is_bundle, load
    from dieplace.experiments.first_light_report import head_lines

    for line in head_lines(load(folder)) if is_bundle(folder) else ():
        render.note(line)


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Inside, a hang-up or a polite kill leads the node back as Ctrl-C does: the session over ssh may go away."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bundle_among(names: tuple[str, ...]) -> Path | None:
    """The one bundle among names of runs; UsageError where it stands beside others."""
    from dieplace.experiments.first_light_bundle import is_bundle

    found = [name for name in names if is_bundle(name)]
    if not found:
        return None
    if len(names) > 1:
        raise UsageError(f"{found[0]} is a first-light bundle: name it alone", hint="its runs lie in its folder runs/")
    return Path(found[0])


def show_bundle(ctx: click.Context, path: Path) -> None:
    """The answers of a bundle."""
    from dieplace.experiments.first_light_bundle import load

    answer(ctx, load(path), "bench-show/1")


def report_bundle(ctx: click.Context, path: Path, target: str, *, markdown: bool = False) -> None:
    """The page of a bundle, made anew."""
    from dieplace.experiments.first_light_bundle import load
    from dieplace.experiments.first_light_report import write

    bundle = load(path)
    page = write(bundle, target, markdown=markdown)
    source = "emulated" if bundle.origin == "emulated" else "live"
    render.answer(ctx, "bench-report/1", {"report": str(page)}, source=source, table=lambda: [f"report: {page}"])


def answer(ctx: click.Context, bundle: Bundle, schema: str) -> None:
    """Print a bundle: how it stands, the answers, the experiments."""
    from dieplace.experiments import first_light_report as page

    runs = [str(bundle.folder / name) for outcome in bundle.experiments.values() for name in outcome.runs]
    payload: dict[str, Any] = {
        "folder": str(bundle.folder),
        "report": str(bundle.folder / "report.html"),
        "runs": runs,
        "origin": bundle.origin,
        "bundle": bundle.to_json(),
        "counts": page.counts(bundle),
        "answers": [one.to_json() for one in bundle.answers.values()],
        "notes": list(bundle.notes),
    }
    source = "emulated" if bundle.origin == "emulated" else "live"
    render.answer(ctx, schema, payload, source=source, ok=bundle.restored is not False, table=lambda: _body(bundle))


def _body(bundle: Bundle) -> Iterator[Table | str]:
    from dieplace.experiments import first_light_report as page

    yield from _wrapped(page.head_lines(bundle))
    yield ""
    columns = [Column("question", "question"), Column("answer", "answer"), Column("said", "what was seen")]
    yield Table(columns, page.answer_rows(bundle), title=f"Answers, {bundle.origin}")
    yield ""
    columns = [Column("experiment", "experiment"), Column("status", "status"), Column("runs", "runs", right=True),
               Column("said", "what was seen")]  # fmt: skip
    yield Table(columns, page.experiment_rows(bundle), title=f"Experiments, {bundle.origin}")
    yield ""
    yield f"bundle: {bundle.folder}"
    if (bundle.folder / "report.html").exists():  # a killed run has none
        yield f"report: {bundle.folder / 'report.html'}"


def _wrapped(lines: list[str]) -> Iterator[str]:
    import textwrap

    for line in lines:
        yield from textwrap.wrap(line, 80, break_on_hyphens=False, break_long_words=False) or [""]
