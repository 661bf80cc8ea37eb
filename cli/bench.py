"""dieplace bench: list, run, show, compare and report experiments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import first_light, render
from dieplace.cli.bench_compare import compare
from dieplace.cli.bench_files import held_words, load_runs, run_folder
from dieplace.cli.bench_going_on import begun, going_on, interrupted, nothing_kept
from dieplace.cli.bench_measure import backend_of, measure
from dieplace.cli.bench_tables import live_parts, tables
from dieplace.cli.options import BACKENDS
from dieplace.cli.table import Column, Table, wrapped

if TYPE_CHECKING:
    from dieplace.experiments.registry import Experiment, Options
    from dieplace.run import Run


@click.group()
def bench() -> None:
    """List, run, show and compare experiments."""


@bench.command("list")
@click.pass_context
def list_experiments(ctx: click.Context) -> None:
    """The experiments, their factors, and on which backends they can run."""
    from dieplace.experiments import registry

    rows: list[dict[str, Any]] = []
    for name in registry.experiment_names():
        found = registry.get(name)
        whys = {backend: found.cannot(backend) for backend in BACKENDS if backend != "replayed"}
        rows.append(
            {
                "experiment": name,
                "summary": found.summary,
                "backends": [backend for backend, why in whys.items() if why is None],
                "factors": dict(found.factors),
                "blocks": list(found.blocks),
                "cannot": {backend: why for backend, why in whys.items() if why is not None},
            }
        )

    def table() -> list[Table | str]:
        columns = [Column("experiment", "experiment"), Column("backends", "runs on", show=" ".join)]
        return [Table([*columns, Column("summary", "what it compares")], rows, notes=list(_cannot(rows)))]

    render.answer(ctx, "bench-list/1", {"experiments": rows}, table=table)


def _cannot(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each reason once, with the backends and experiments it stands for."""
    by_why: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for backend, why in row["cannot"].items():
            by_why.setdefault(why, {}).setdefault(row["experiment"], []).append(backend)
    if by_why:
        yield "Cannot run:"
    for why, names in by_why.items():
        same: dict[str, list[str]] = {}
        for name, backends in names.items():
            same.setdefault(", ".join(backends), []).append(name)
        where = "; ".join(f"{', '.join(found)} on {backends}" for backends, found in same.items())
        yield f"  {where}: {why}"


@bench.command("run")
@click.argument("name", required=False)
@click.option("--model", default="gpt-oss-120b", show_default=True, help="Model shape.")
@click.option("--precision", default="mxfp4", show_default=True, help="Of the dense parts: released, fp8 or mxfp4.")
@click.option("--context", default=1024, show_default=True, type=click.IntRange(1), help="Tokens of context.")
@click.option(
    "--shards",
    default=2,
    show_default=True,
    type=click.IntRange(1, 2),
    help="2: halves of the model, one a die or GPU; 1: one device alone, measured only.",
)
@click.option(
    "--bytes",
    "bytes_from",
    type=click.Choice(["shapes", "counted"]),
    default="shapes",
    show_default=True,
    help="What a step reads: from the model's sizes, or counted by running the kernels on the emulator.",
)
@click.option("--arms", default="", metavar="A,B", help="Arms to compare.  [default: the experiment's own]")
@click.option(
    "--allow-unvalidated", is_flag=True, help="Take modes too that the driver offers and AMD does not list (mode)."
)
@click.option(
    "-y", "--yes", is_flag=True, help="Do not ask before switching modes. Skips the question, never the checks."
)
@click.option("--label", default="", help="A line of your own, kept in the run.")
@click.option(
    "--out", metavar="DIR", help="Folder for runs and report.  [default: dieplace-runs/NAME-TIME in this folder]"
)
@click.option(
    "--resume", metavar="DIR", help="Go on with the interrupted run in this folder, by the options it was begun with."
)
@first_light.OPTIONS
@click.pass_context
def run_experiment(
    ctx: click.Context,
    name: str | None,
    model: str,
    precision: str,
    context: int,
    shards: int,
    bytes_from: str,
    arms: str,
    allow_unvalidated: bool,
    yes: bool,
    label: str,
    out: str | None,
    resume: str | None,
    **of_first_light: Any,
) -> None:
    """Run one experiment; writes one run file a block and a report.

    Ctrl-C keeps what is whole (exit 130): measured, every block of samples,
    and --resume goes on, after a kill too; modelled, every run file. With
    --resume, NAME and --backend are those that the run was begun with.
    """
    from dieplace.binding.ranks import torchrun
    from dieplace.experiments import registry

    def asked() -> Options:
        named = tuple(arm.strip() for arm in arms.split(",") if arm.strip())
        return registry.Options(
            model, precision, context, shards, named, label, bytes_from, allow_unvalidated=allow_unvalidated
        )

    launched = torchrun(os.environ)
    name, begun_on = begun(ctx, name, resume, ranks=launched is not None)
    if launched is not None:
        from dieplace.cli.bench_ranks import run_rank

        show_all = partial(_show, ctx, "bench-run/1")
        ctx.exit(run_rank(ctx, launched, name, asked, show_all, out=out, resume=resume))
    from dieplace.experiments import report

    if first_light.is_meant(name, of_first_light, asked, resume):
        chosen = {"allow_unvalidated": allow_unvalidated, "yes": yes, **of_first_light}
        with run_folder(name, out) as folder:
            first_light.run_first_light(ctx, backend_of(ctx), folder, **chosen)
        return
    experiment = registry.get(name)
    backend, options = begun_on or backend_of(ctx, experiment), asked()
    options = replace(options, consent=_agreed(ctx, experiment, backend, options, yes=yes))
    options = going_on(ctx, name, options, resume, out)
    with run_folder(name, resume or out, again=resume is not None) as folder:
        with nothing_kept(ctx, experiment, backend, folder):
            taken = measure(ctx, experiment, backend, options, folder)
        page = report.write(taken.runs, folder / "report.html")
        stopped = interrupted(ctx, experiment, folder, taken)
    files = {"folder": str(folder), "runs": [str(path) for path in taken.paths], "report": str(page)}
    _show(ctx, "bench-run/1", taken.runs, files)
    if stopped:
        ctx.exit(130)


@bench.command("show")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.pass_context
def show(ctx: click.Context, runs: tuple[str, ...]) -> None:
    """Tables of run files, or of all run files in a folder; the answers of a first-light bundle."""
    from dieplace.experiments import report

    if (bundle := first_light.bundle_among(runs)) is not None:
        first_light.show_bundle(ctx, bundle)
        return
    found = load_runs(runs)
    report.check_together(found, partial(held_words, runs))
    _show(ctx, "bench-show/1", found, {"runs": [str(r) for r in runs]}, whole=True)


@bench.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", "target", metavar="FILE", help="The page to write.  [default: report.html, with --md report.md]")
@click.option("--md", is_flag=True, help="Markdown instead of HTML: charts give way to the numbers behind them.")
@click.pass_context
def write_report(ctx: click.Context, runs: tuple[str, ...], target: str | None, md: bool) -> None:
    """One self-contained page from run files, or from a first-light bundle.

    Runs of several experiments make one page; a link run's matrix and ceilings then serve the others.
    """
    from dieplace.experiments import report

    target = target or ("report.md" if md else "report.html")
    if (bundle := first_light.bundle_among(runs)) is not None:
        first_light.report_bundle(ctx, bundle, target, markdown=md)
        return
    found = load_runs(runs)
    report.check_origins(found, partial(held_words, runs))
    page = report.write(found, target, markdown=md)
    render.answer(
        ctx, "bench-report/1", {"report": str(page)}, source=found[0].source, table=lambda: [f"report: {page}"]
    )


bench.add_command(compare)


def _agreed(ctx: click.Context, experiment: Experiment, backend: str, options: Options, *, yes: bool) -> bool:
    """Whether the person agrees to the partition switches of an experiment; True where it makes none."""
    lines = experiment.switches(backend, options) if experiment.switches is not None else ()
    for line in lines:
        render.say(ctx, wrapped(line)) if yes else render.note(wrapped(line))
    if lines:
        render.confirm(ctx, f"Switch through these modes for {experiment.name}, and back?", yes=yes)
    return True


def _show(
    ctx: click.Context,
    schema: str,
    runs: Sequence[Run],
    files: dict[str, Any],
    ok: bool = True,
    *,
    whole: bool = False,
) -> None:
    from dieplace.experiments import live_tables, published, summary

    if live_tables.is_live(runs):
        _show_live(ctx, schema, runs, files, ok, whole=whole)
        return

    why = published.why_not(runs[0])
    figures = [] if why else [row.to_json() for row in published.rows(runs)]
    payload: dict[str, Any] = {
        **files,
        "origin": summary.title_word(runs),
        "verdicts": summary.verdicts(runs),
        "left_out": summary.left_out(runs),
        "arms": summary.arm_rows(runs),
        "terms": summary.term_rows(runs),
        "stages": summary.stage_rows(runs),
        "residency": summary.residency_rows(runs),
        "published": figures,
        "notes": summary.notes(runs),
    }
    if why:
        payload["published_why"] = why
    if whole:
        payload["documents"] = [run.to_json() for run in runs]
    lines = [f"runs: {', '.join(files['runs'])}"]
    if "report" in files:
        lines.append(f"report: {files['report']}")
    render.answer(ctx, schema, payload, source=runs[0].source, table=lambda: [*tables(runs, payload, why), "", *lines])


def _show_live(
    ctx: click.Context, schema: str, runs: Sequence[Run], files: dict[str, Any], ok: bool, *, whole: bool
) -> None:
    from dieplace.experiments import live_tables, summary

    found = live_tables.tables(runs)
    payload: dict[str, Any] = {
        **files,
        "origin": summary.title_word(runs),
        "verdicts": live_tables.sentences(runs),
        "tables": [{"title": one.title, "rows": list(one.rows), "note": one.note} for one in found],
        "notes": summary.notes(runs),
    }
    if whole:
        payload["documents"] = [run.to_json() for run in runs]
    lines = [f"runs: {', '.join(files['runs'])}", *([f"report: {files['report']}"] if "report" in files else [])]
    parts = [*live_parts(found, payload), "", *lines]
    render.answer(ctx, schema, payload, source=runs[0].source, ok=ok, table=lambda: parts)
