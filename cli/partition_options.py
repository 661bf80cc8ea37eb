"""The options that the commands of `dieplace partition` share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options(*decorators: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):  # "nan" passes click's range check
        raise click.BadParameter(f"{value} is not a number of {(param.metavar or 'seconds').lower()}", ctx, param)
    return value


CARDS = click.option(
    "--card",
    "cards",
    multiple=True,
    metavar="CARD",
    help="A card by id, index, PCI address or UUID, or all (the default); may be given again.",
)
ROCM = click.option("--rocm-path", metavar="DIR", help="Use AMD's library from this ROCm instead of the default one.")
UNVALIDATED = click.option(
    "--allow-unvalidated", is_flag=True, help="Take a mode that the driver offers and AMD does not list as supported."
)
UNITS = click.option(
    "--stop-service",
    "units",
    multiple=True,
    metavar="UNIT",
    help="Stop this systemd unit for the switch, and start it again; may be given again.",
)
PROFILE = options(
    click.option("-f", "--file", "path", required=True, metavar="FILE", help="A TOML profile."),
    click.option("--profile", metavar="NAME", help="The named mode in it; not needed where there is one."),
)
CHANGING = options(
    click.option("--dry-run", is_flag=True, help="Only the plan: the same checks, no write."),
    click.option("-y", "--yes", is_flag=True, help="Do not ask. Skips the question, never the checks."),
    click.option(
        "--wait",
        type=click.FloatRange(min=0, max=86400),
        default=0.0,
        callback=finite,
        metavar="SECONDS",
        help="Wait so long for blockers or another switch to end.",
    ),
    click.option(
        "--unload-limit",
        type=click.FloatRange(min=1, max=86400),
        default=60.0,
        show_default=True,
        callback=finite,
        metavar="SECONDS",
        help="How long unloading the driver may take.",
    ),
    click.option(
        "--ready-limit",
        type=click.FloatRange(min=1, max=86400),
        default=300.0,
        show_default=True,
        callback=finite,
        metavar="SECONDS",
        help="How long the driver may take to load and become ready.",
    ),
    ROCM,
)
