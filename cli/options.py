"""The options that every command takes, before or after its name, and the machine they select.

Command modules use plain click; `LazyGroup` (main.py) adds these options to each command that it loads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.machine import Machine

FORMATS = ("table", "json", "csv")
DRAWINGS = ("svg",)
BACKENDS = ("amd", "nvidia", "cpu", "emulated", "replayed")
OFF_WORDS = ("0", "false", "no", "off")
ON_WORDS = ("1", "true", "yes", "on")


@dataclass
class Settings:
    """What the global options said; one a run, kept as the root context's `obj`."""

    backend: str | None = None
    node: str | None = None
    output: str = "table"
    quiet: bool = False
    answered: bool = False  # the one JSON value has been printed


def settings(ctx: click.Context) -> Settings:
    """The run's settings, shared by every context of one invocation."""
    root = ctx.find_root()
    if not isinstance(root.obj, Settings):
        root.obj = Settings()
    return root.obj


def machine(ctx: click.Context, *, backend: str | None = None, links: bool = True) -> Machine:
    """Discover the machine that `--backend` and `--node` select; `backend` is used where none was named.

    `links=False` is quicker and leaves `machine.links` empty.
    """
    from dieplace.discover import discover, discover_devices

    chosen = settings(ctx)
    take = discover if links else discover_devices
    name = backend_name(ctx, backend)
    first = chosen.backend == "emulated" and chosen.node is not None and not os.path.exists(chosen.node)
    found = take(backend=name, node=chosen.node)
    if first and not chosen.quiet:  # perhaps a slip of the fingers
        click.echo(f"dieplace: {chosen.node} was not there: an emulated node was made in it (8 x MI355X)", err=True)
    return found


def backend_name(ctx: click.Context, default: str | None) -> str | None:
    """The named backend, else `default`; UsageError where a node was named alone, for the live one is never meant."""
    chosen = settings(ctx)
    if chosen.backend is None and chosen.node is not None:
        from dieplace.discover import backend_missing

        raise backend_missing(chosen.node)
    return chosen.backend or default


def switch(name: str) -> bool | None:
    """An on/off variable of the environment: empty is unset (None), an unknown word is a UsageError."""
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return None
    if text in OFF_WORDS or text in ON_WORDS:
        return text in ON_WORDS
    raise UsageError(
        f"the variable {name} is {text!r}, which is neither on nor off",
        hint=f"set it to one of {', '.join(ON_WORDS + OFF_WORDS)}, or unset it",
    )


def add_global_options(command: click.Command) -> None:
    """Append each global option to `command` unless the command has an option of that spelling itself."""
    taken = {spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)}
    for option in global_options():
        if not taken.intersection(option.opts):
            command.params.append(option)


def global_options(*, root: bool = False) -> list[click.Option]:
    """Fresh option objects; only the root ones read DIEPLACE_BACKEND and DIEPLACE_NODE."""
    return [
        click.Option(
            ["--backend"],
            type=click.Choice(BACKENDS, case_sensitive=False),
            envvar="DIEPLACE_BACKEND" if root else None,
            help="Use this backend; cpu, emulated and replayed only when named."
            + (" Also DIEPLACE_BACKEND." if root else ""),
            **_storing("backend"),
        ),
        click.Option(
            ["--node"],
            metavar="PATH",
            envvar="DIEPLACE_NODE" if root else None,
            help="The emulated node's folder, or the recording to replay." + (" Also DIEPLACE_NODE." if root else ""),
            **_storing("node"),
        ),
        click.Option(
            ["-o", "--output"],
            type=click.Choice(FORMATS + DRAWINGS if root else FORMATS),
            help="Form of the answer.  [default: table]",
            **_storing("output"),
        ),
        click.Option(["--json"], is_flag=True, help="Short for -o json.", **_storing("output", constant="json")),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            help="No progress and no warnings on stderr.",
            **_storing("quiet", constant=True),
        ),
    ]


def _storing(name: str, *, constant: Any = None) -> dict[str, Any]:
    """Keyword arguments of an option that stores into Settings: the place nearest to the command's name wins."""

    def store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value not in (None, False, ""):
            setattr(settings(ctx), name, constant if constant is not None else value)

    return {"callback": store, "expose_value": False}
