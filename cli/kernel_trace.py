"""`dieplace kernel trace`: run one op's kernel from its gfx950 code on the emulated card, and count what it moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.table import Column, Table

if TYPE_CHECKING:
    from dieplace.emulator.isa.traffic import Bytes

ROLES = ("weights", "kv_cache", "sync_flag", "activation")
LEGEND = (
    "all in bytes. contract: what the op's operands say; read (local + peer), written: each byte once a launch; "
    "asked: the loads of every lane; type: how lines are mapped (docs/emulator.md)"
)


@click.command("trace")
@click.argument("name")
@click.option("--case", "number", default=0, show_default=True, help="Which of the op's check cases to run.")
@click.option("--device", default="gpu0/p0", show_default=True, help="gpu0 for a whole card, gpu0/p0 or gpu0/p1.")
@click.option("--peer", multiple=True, type=click.Choice(ROLES), help="Put this role's buffers on the other die.")
@click.option("--seed", default=0, show_default=True, help="Reproduces the interleaving of waves.")
@click.pass_context
def trace(ctx: click.Context, name: str, number: int, device: str, peer: tuple[str, ...], seed: int) -> None:
    """Run the FlyDSL kernel NAME on the emulated card: bytes by buffer and role, local and peer; instructions by kind.

    Distinct bytes count once a launch, requested bytes for every lane. The result is emulated, nothing is timed.
    """
    from dieplace.kernels.tracing import trace_op

    with render.progress(ctx, f"tracing {name}"):
        traced = trace_op(name, case=number, device=device, peer=frozenset(peer), seed=seed)
    buffers = [_row(b, traced.contract_bytes.get(b.name)) for b in traced.buffers]
    roles = [_role_row(role, *moved) for role, moved in traced.by_role().items()]
    payload = {
        "op": name,
        "case": traced.label,
        "device": device,
        "seed": seed,
        "peer_roles": sorted(peer),
        "kernels": [{"kernel": k.name, "grid": k.grid, "block": k.block} for k in traced.kernels],
        "wave_instructions": traced.instructions,
        "instructions_by_kind": traced.by_kind,
        "buffers": buffers,
        "roles": roles,
        "contract_bytes": traced.contract_bytes,
        "code_hashes": traced.code_hashes,
        "old_loads": [
            {"cause": o.cause, "count": o.count, "buffer": o.first.buffer, "instruction": o.first.text}
            for o in traced.old_loads
        ],
    }
    notes = [f"{o.count} loads of old bytes of {o.first.buffer} ({o.cause}): {o.first.text}" for o in traced.old_loads]
    title = f"{name}, case {traced.label}, on {device} (emulated)"
    render.answer(
        ctx,
        "kernel-trace/1",
        payload,
        source="emulated",
        ok=True,
        table=lambda: [
            Table(_columns("buffer"), buffers, title=title),
            Table(_columns("role"), roles, title="by role", notes=[LEGEND]),
            f"{traced.instructions} wave-instructions: "
            + ", ".join(f"{n} {kind}" for kind, n in sorted(traced.by_kind.items(), key=lambda x: -x[1])),
            *notes,
        ],
    )


def _columns(first: str) -> list[Column]:
    names = {
        "read_bytes": "read",
        "read_local_bytes": "local",
        "read_peer_bytes": "peer",
        "read_requested_bytes": "asked",
        "written_bytes": "written",
    }
    more = [Column("role", "role"), Column("contract_bytes", "contract", right=True)] if first == "buffer" else []
    head = [Column(first, first), *more]
    return [*head, *(Column(key, text, right=True) for key, text in names.items()), Column("types", "type")]


def _row(buffer: Any, contract_bytes: int | None) -> dict[str, Any]:
    moved = _numbers(buffer.read, buffer.written)
    return {"buffer": buffer.name, "role": buffer.role, "contract_bytes": contract_bytes, **moved}


def _role_row(role: str, read: Bytes, written: Bytes) -> dict[str, Any]:
    return {"role": role, **_numbers(read, written)}


def _numbers(read: Bytes, written: Bytes) -> dict[str, Any]:
    types: Mapping[str, int] = {**read.requested_by_type, **written.requested_by_type}
    return {
        "read_bytes": read.distinct,
        "read_local_bytes": read.distinct_local,
        "read_peer_bytes": read.distinct_peer,
        "read_requested_bytes": read.requested,
        "written_bytes": written.distinct,
        "written_peer_bytes": written.distinct_peer,
        "types": ", ".join(sorted(types)),
        "read_requested_by_type": dict(read.requested_by_type),
        "read_requested_by_side": dict(read.requested_by_side),
    }
