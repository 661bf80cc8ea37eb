"""dieplace place: would it fit, per die, and where the memory of a running process is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.options import machine
from dieplace.cli.table import Column, Table
from dieplace.errors import Unsupported, UsageError
from dieplace.policy import OBJECT_BYTES

if TYPE_CHECKING:
    from dieplace.fit import DomainFit, Wanted
    from dieplace.machine import Machine
    from dieplace.process_audit import ProcessResidency


@click.group()
def place() -> None:
    """Plan where memory goes, and audit where it is."""


@place.command("plan")
@click.argument("spec", required=False, metavar="[SPEC]")
@click.option("--model", help="Instead of SPEC: a whole model, sharded over the devices of --card.")
@click.option("--precision", default="mxfp4", show_default=True, help="With --model: released, fp8 or mxfp4.")
@click.option("--context", default=8192, show_default=True, type=click.IntRange(1), help="With --model: tokens.")
@click.option("--card", default="gpu0", show_default=True, help="With --model: the card.")
@click.option("--policy", default="local", show_default=True, help="With --model: local, peer or interleave-k/8.")
@click.pass_context
def plan(
    ctx: click.Context, spec: str | None, model: str | None, precision: str, context: int, card: str, policy: str
) -> None:
    """Does SPEC (a TOML file) or a model fit, per die? Exit 1 if not. Nothing is allocated."""
    from dieplace.fit import plan_fit, read_spec

    if (spec is None) == (model is None):
        raise UsageError("name a placement file or --model", hint="dieplace place plan SPEC, or --model gpt-oss-120b")
    found_machine = machine(ctx)
    wanted = read_spec(spec) if spec else _of_model(found_machine, str(model), precision, context, card, policy)
    found = plan_fit(found_machine, wanted)
    rows = [_fit_row(one) for one in (*found.domains, *found.devices)]
    known = {True: "it fits", False: "it does not fit", None: "unknown: a size could not be read"}[found.fits]
    columns = [
        Column("place", "domain or device"),
        *(Column(key, head, right=True, show=render.gigabytes) for key, head in _NUMBERS),
    ]
    title, notes = "GB a domain and a device would hold, by role", [*found.notes, *_rounding(wanted)]
    render.answer(
        ctx,
        "place-plan/1",
        {"fits": found.fits, "fits_why": None if found.fits is not None else known, "places": rows},
        source=found_machine.source,
        ok=found.fits is True,
        table=lambda: [Table(columns, rows, title=title, notes=notes), known],
    )
    if found.fits is False:
        ctx.exit(1)
    if found.fits is None:
        raise Unsupported("it cannot be said whether it fits: a domain's size is unknown", hint="see: dieplace doctor")


_NUMBERS = (
    ("total_bytes", "total"),
    ("weights_bytes", "weights"),
    ("kv_cache_bytes", "kv_cache"),
    ("sync_flag_bytes", "sync_flag"),
    ("activation_bytes", "activation"),
    ("left_bytes", "left"),
)


ROUNDED_MUCH = 1.1


def _rounding(wanted: Sequence[Wanted]) -> Iterator[str]:
    """That a buffer takes whole objects, and of which roles that makes much more than their bytes."""
    yield "counted in whole objects of 2 MiB, as memory is taken: a small buffer takes one of its own"
    for role in dict.fromkeys(one.role for one in wanted):
        mine = [one for one in wanted if one.role == role]
        asked = sum(one.nbytes * one.count for one in mine)
        taken = sum(-(-one.nbytes // OBJECT_BYTES) * OBJECT_BYTES * one.count for one in mine)
        if taken > ROUNDED_MUCH * asked:
            count = sum(one.count for one in mine)
            yield f"{role}: {_megabytes(asked)} MB in {count:,} buffers take {_megabytes(taken)} MB, over all devices"


def _fit_row(one: DomainFit) -> dict[str, Any]:
    row: dict[str, Any] = {"place": one.domain, "total_bytes": one.total_bytes, "left_bytes": one.left_bytes}
    if one.total_bytes is None:
        row["total_bytes_why"] = row["left_bytes_why"] = one.why
    for role in ("weights", "kv_cache", "sync_flag", "activation"):
        row[f"{role}_bytes"] = one.by_role.get(role, 0)
    return row


def _of_model(found: Machine, model: str, precision: str, context: int, card: str, policy: str) -> tuple[Wanted, ...]:
    from dieplace.experiments.model_storage import pieces
    from dieplace.fit import Wanted
    from dieplace.kernels.models import model_shape
    from dieplace.kernels.step import stages
    from dieplace.policy import Policy

    devices = found.devices_of(found.card(card).id)
    shape = model_shape(model)
    shards = len(devices)
    step = stages(shape, precision=precision, context_tokens=context)
    chosen = Policy.parse(policy)
    return tuple(
        Wanted(piece.name, piece.role, nbytes, device.id, chosen)
        for piece in pieces(shape, step, precision)
        for index, device in enumerate(devices)
        if (nbytes := piece.shard(index, shards))
    )


@place.command("audit")
@click.argument("pid", required=False, type=click.IntRange(1))
@click.pass_context
def audit(ctx: click.Context, pid: int | None) -> None:
    """Where a process's memory is; without PID, every process that the driver knows.

    From outside only the driver's and the kernel's counters can be seen, and not what was asked for: for a proof,
    call dieplace.audit() inside the program.
    """
    from dieplace.process_audit import audit_process, audit_processes

    found = machine(ctx)
    sysfs = getattr(found.session, "sysfs", None)
    if sysfs is None:
        raise Unsupported(
            f"the {found.backend} backend cannot look into other processes", hint="call dieplace.audit() inside it"
        )
    seen, missed = ((audit_process(found, sysfs, pid),), ()) if pid else audit_processes(found, sysfs)
    rows = [row for one in seen for row in _process_rows(one)]
    whys = [f"{one.pid}: {key}: {why}" for one in seen for key, why in one.whys.items()]
    whys += [f"{one}: nothing of it can be read; it may have ended" for one in missed]
    columns = [
        Column("pid", "pid", right=True),
        Column("name", "name"),
        Column("device", "device"),
        Column("domain", "domain"),
        Column("die", "die", right=True),
        Column("bytes", "MB", right=True, show=_megabytes),
    ]
    told = "evidence: accounted (driver and kernel counters); what was asked for is not known from outside"
    empty = [] if rows else ["no process holds memory of these devices"]
    render.answer(
        ctx,
        "place-audit/1",
        {"evidence": "accounted", "items": rows, "whys": whys},
        source=found.source,
        table=lambda: [Table(columns, rows, notes=render.legend(whys)), *empty, told],
    )


def _process_rows(one: ProcessResidency) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"pid": one.pid, "name": one.name}
    if one.name is None:
        base["name_why"] = one.whys.get("name", "not read")
    rows = []
    for part in one.devices:
        row = {**base, "device": part.device, "domain": part.domain, "die": part.die, "bytes": part.nbytes}
        rows.append({**row, **{f"{key}_why": part.why for key in ("domain", "die") if row[key] is None}})
    whys = {"device_why": "host memory", "die_why": "host memory"}
    for name, nbytes in sorted(one.host_bytes.items()):
        rows.append({**base, "device": None, "domain": name, "die": None, "bytes": nbytes, **whys})
    return rows


def _megabytes(value: int) -> str:
    return f"{value / 1e6:,.1f}"
