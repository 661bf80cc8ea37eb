"""`dieplace kernel lint`: what FlyDSL accepts silently and gets wrong, in kernel sources."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dieplace.cli import render
from dieplace.cli.table import Column, Table


@click.command("lint")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.pass_context
def lint_command(ctx: click.Context, paths: tuple[Path, ...]) -> None:
    """Lint kernel sources: PATHS are files or folders, by default dieplace's own kernels. Exit 1: something found."""
    from dieplace.codegen.lint import RULES, lint

    result = lint(paths or own_sources())
    rows = [{**asdict(f), "message": f.message} for f in result.findings]
    summary = (
        f"{render.count_of(len(result.files), 'file')}, {render.count_of(result.kernels, 'kernel')} and "
        f"{render.count_of(result.helpers, 'helper')} read, "
        f"{render.count_of(len(rows), 'finding')}"
    )
    columns = [
        Column("path", "file"),
        Column("line", "line", right=True),
        Column("function", "function"),
        Column("rule", "rule"),
        Column("message", "what is wrong"),
    ]
    payload = {
        "findings": rows,
        "files": list(result.files),
        "kernels": result.kernels,
        "helpers": result.helpers,
        "rules": RULES,
    }
    render.answer(
        ctx,
        "kernel-lint/1",
        payload,
        source=None,
        ok=not rows,
        table=lambda: [*([Table(columns, rows)] if rows else []), summary],
        csv_table=lambda: [Table(columns, rows)],
    )
    if rows:
        ctx.exit(1)


def own_sources() -> tuple[Path, ...]:
    """The folders of dieplace's FlyDSL kernels and probes."""
    import dieplace.kernels.flydsl
    import dieplace.probes

    modules = (dieplace.kernels.flydsl, dieplace.probes)
    return tuple(Path(module.__path__[0]) for module in modules)
