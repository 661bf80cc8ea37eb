"""`dieplace env`: the facts that belong into a bug report, and `--record`, which makes the report replayable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click

from dieplace import __version__
from dieplace.cli import render
from dieplace.cli.doctor import package_versions, python_facts
from dieplace.cli.options import settings
from dieplace.cli.table import Column, Table
from dieplace.errors import NoBackend, UsageError
from dieplace.whole_file import write_whole

VARIABLES = (
    "DIEPLACE_BACKEND",
    "DIEPLACE_NODE",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
    "ROCM_PATH",
    "NO_COLOR",
    "FORCE_COLOR",
)


@click.command()
@click.option("--record", "target", metavar="FILE", help="Write a replayable recording of this node to FILE.")
@click.pass_context
def env(ctx: click.Context, target: str | None) -> None:
    """Print the facts that a bug report needs; --record FILE also captures what discovery reads.

    In the recording unique ids, hive ids, UUIDs and the boot id are replaced by numbers, equal ones by equal numbers.
    Replay it with: dieplace --backend replayed --node FILE list
    """
    from dieplace.discover import open_backend

    chosen = settings(ctx)
    node: dict[str, Any]
    try:
        backend = open_backend(chosen.backend, node=chosen.node)
    except NoBackend as error:
        if target is not None:
            raise
        node = {"backend": None, "backend_why": error.message, "cards": 0, "devices": 0, "notes": []}
        source = None
    else:
        if target is not None:
            _record(backend, target)
        found = backend.snapshot(links=False)
        source = found.source
        node = {
            "backend": found.backend,
            "cards": len(found.cards),
            "devices": len(found.devices),
            "parts": sorted({card.part or "unknown" for card in found.cards}),
            "modes": sorted({str(card.mode) for card in found.cards}),
            "notes": list(found.notes),
        }
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    payload = {
        "dieplace": __version__,
        "host": python_facts(),
        "packages": package_versions(),
        "environment": variables,
        "node": node,
        "recording": target,
    }
    render.answer(ctx, "env/1", payload, source=source, table=lambda: _body(payload))


def _body(payload: dict[str, Any]) -> Iterator[Table | str]:
    rows = [{"key": "dieplace", "value": payload["dieplace"]}]
    for section in ("host", "packages", "environment", "node"):
        for key, value in payload[section].items():
            shown = "; ".join(map(str, value)) if isinstance(value, list) else value
            rows.append({"key": f"{section}.{key}", "value": "absent" if value is None else shown})
    if payload["recording"]:
        rows.append({"key": "recording", "value": payload["recording"]})
    yield Table([Column("key", "fact"), Column("value", "value")], rows)


def _record(backend: Any, target: str) -> None:
    """Record an AMD (live or emulated) node through its Sysfs; any other backend as a saved machine."""
    from dieplace.backends.amd.backend import AmdBackend
    from dieplace.recording import record

    if not isinstance(backend, AmdBackend):
        raise UsageError(
            f"the {backend.name} backend reads no files that could be recorded",
            hint="save its machine instead: dieplace.discover().save(FILE)",
        )
    text = render.to_json(record(backend.sysfs, backend.environ, package_versions()))
    write_whole(target, text, hint="name another file")
