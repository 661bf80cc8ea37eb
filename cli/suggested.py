"""Commands that a text suggests, made to name the backend and node that this command was given: they can be pasted."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

import click

from dieplace.cli.options import settings

# Commands whose answer depends on the machine. Where a sentence starts with the project's name no command is meant.
# A recording is made on the node itself, never of what is replayed.
_OF_A_NODE = "list|topo|partition|place|exec|bench run|doctor|env(?! --record)"
SUGGESTED = re.compile(rf"(?:^\s*|(?<=[:;,] )|(?<=[`'\"(]))dieplace(?= (?:{_OF_A_NODE})\b)")


def named(ctx: click.Context | None, text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` with `--backend` and `--node` of this command line in each command of the same node that it suggests.

    What the environment says (DIEPLACE_BACKEND, DIEPLACE_NODE) holds for the next command too and is not repeated.
    """
    options = "" if ctx is None else _options(ctx, environ)
    return SUGGESTED.sub(lambda found: found.group() + options, text) if options else text


def _options(ctx: click.Context, environ: Mapping[str, str]) -> str:
    chosen = settings(ctx)
    given = (
        ("--backend", chosen.backend, environ.get("DIEPLACE_BACKEND")),
        ("--node", chosen.node, environ.get("DIEPLACE_NODE")),
    )
    return "".join(f" {option} {_quoted(value)}" for option, value, before in given if value and value != before)


def _quoted(value: str) -> str:
    """For a shell; in double quotes where that will do, as texts put whole commands into single ones."""
    single = shlex.quote(value)
    return single if single == value or set(value) & set('"$`\\!') else f'"{value}"'
