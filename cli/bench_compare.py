"""dieplace bench compare: one run against another, arm by arm."""

from __future__ import annotations

import click

from dieplace.cli import render
from dieplace.cli.bench_files import one_run
from dieplace.cli.bench_tables import one_decimal
from dieplace.cli.partition_options import finite
from dieplace.cli.table import Column, Prose, Table


@click.command("compare")
@click.argument("base")
@click.argument("run")
@click.option("--allow", multiple=True, metavar="KEY", help="Compare although this condition differs; may be repeated.")
@click.option(
    "--fail-on", type=click.FloatRange(0), callback=finite, metavar="PERCENT", help="Exit 1 where slower by more."
)
@click.pass_context
def compare(ctx: click.Context, base: str, run: str, allow: tuple[str, ...], fail_on: float | None) -> None:
    """RUN against BASE, arm by arm; refuses runs whose conditions differ."""
    from dieplace.experiments.comparing import compare_runs

    found = compare_runs(one_run(base), one_run(run), allow=allow, fail_on_percent=fail_on)

    def table() -> list[Table | str]:
        differing = [f"{d['key']}: {d['base']} -> {d['run']}" for d in found.differing]
        columns = [
            Column("arm", "arm"),
            Column("base", "BASE", right=True, show=one_decimal),
            Column("run", "RUN", right=True, show=one_decimal),
            Column("unit", "unit"),
            Column("change_percent", "slower %", right=True, show=one_decimal),
            Column("verdict", "verdict"),
        ]
        head = ["conditions that differ, by your leave:", *(Prose(f"  {d}") for d in differing)] if differing else []
        return [*head, Table(columns, found.rows, title=f"RUN against BASE, {found.origin}")]

    ok = not found.regressions
    payload = {"rows": found.rows, "differing": found.differing, "regressions": found.regressions}
    for row in found.rows if fail_on is not None else ():
        if str(row["verdict"]).startswith("too noisy"):
            render.warn(ctx, f"{row['arm']} is held to no limit: {row['verdict']}")
    render.answer(ctx, "bench-compare/1", payload, source=found.source, ok=ok, table=table)
    if not ok:
        ctx.exit(1)
