"""Running an experiment on an emulated node: place the whole model, move roles, audit, and let the clock time it.

Shared by all experiments of modelled time. What the clock is told is what the audit counted, not what an arm's name
promises. Values and ranges over parameter sets; no samples, no noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dieplace.clock import Placement, parameter_set, time_token
from dieplace.clock.parameters import HEADLINE_SET
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments.model_storage import pieces
from dieplace.experiments.modelled_run import PLACED_ROLES, as_run, quantities, residency_json, stage_rows
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options, Progress
from dieplace.kernels.models import model_shape
from dieplace.kernels.step import stages
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy
from dieplace.residency import Residency, audit
from dieplace.run import Point, Run
from dieplace.workload import Workload

BYTES_FROM = ("shapes", "counted")
_Key = tuple[str, str, str, int]  # name, role, device and bytes of a buffer: what makes it the same one again


@dataclass(frozen=True)
class Spec:
    """One point to make: its arm, the share of each role that lies on the peer, and what else differs.

    `workload` None is the block's. `cached_as_remote` are roles that stay local but are mapped NC.
    """

    arm: str
    peer_share: Mapping[str, float] = field(default_factory=dict)
    cached_as_remote: frozenset[str] = frozenset()
    workload: Workload | None = None
    factors: Mapping[str, Any] = field(default_factory=dict)


def refuse_elsewhere(experiment: str, backend: str, why: str | None, options: Options) -> None:
    """Unsupported unless `why` is None, UsageError for a number of shards that no experiment here has."""
    if why is not None:
        raise Unsupported(f"{experiment} cannot run on the {backend} backend: {why}", hint="name --backend emulated")
    if options.shards != 2:
        raise UsageError(f"{experiment} has no {options.shards}-shard form yet", hint="use --shards 2")
    if options.bytes_from not in BYTES_FROM:
        raise UsageError(f"bytes from {options.bytes_from!r}?", hint=f"one of {', '.join(BYTES_FROM)}")


def emulated_only(backend: str) -> str | None:
    """None on the emulated backend; elsewhere why not."""
    if backend == "emulated":
        return None
    return "a decode step is timed on GPUs, and this backend has none"


def workload_of(options: Options, **changes: Any) -> Workload:
    """The decode step that the options name."""
    asked = {"precision": options.precision, "context_tokens": options.context_tokens, "shards": options.shards}
    return stages(options.model, **{**asked, **changes})


def timed_workloads(
    workloads: Sequence[Workload], options: Options, progress: Progress = lambda text: None
) -> tuple[Workload, ...]:
    """What the clock is given: the steps themselves, or the same steps with their bytes counted on the emulator.

    Everything is refused before anything is counted: Unsupported for formats that no decode kernel reads, UsageError
    for rounds of several tokens. Counting takes up to a minute a step where the kernels changed since the last time.
    """
    if options.bytes_from == "shapes":
        return tuple(workloads)
    if any(workload.tokens != 1 for workload in workloads):
        raise UsageError("bytes are counted for one token only", hint="use --bytes shapes")
    from dieplace.kernels.counts import counted_stages

    counted = {
        workload: counted_stages(
            options.model,
            precision=options.precision,
            context_tokens=workload.context_tokens,
            shards=workload.shards,
            progress=progress,
        )
        for workload in dict.fromkeys(workloads)
    }
    return tuple(counted[workload] for workload in workloads)


def run_block(
    experiment: str, block: str, mode: str, specs: Sequence[Spec], options: Options, progress: Progress
) -> Run:
    """One block on a private node in `mode`: every spec placed, audited before and after, and timed."""
    work = prepare(specs, options, progress)
    with private_node(mode, cards=options.cards) as machine:
        progress(f"{mode}: a private emulated node")
        return block_on(machine, experiment, (block, mode), specs, work, options, progress)


@dataclass(frozen=True)
class Work:
    """The steps of some specs: as they are placed, and as they are timed."""

    placed: tuple[Workload, ...]
    timed: tuple[Workload, ...]


def prepare(specs: Sequence[Spec], options: Options, progress: Progress) -> Work:
    """What a block needs before there is a node: everything that can be refused is refused here."""
    placed = tuple(spec.workload or workload_of(options) for spec in specs)
    return Work(placed, timed_workloads(placed, options, progress))


def block_on(
    machine: Machine,
    experiment: str,
    named: tuple[str, str],
    specs: Sequence[Spec],
    work: Work,
    options: Options,
    progress: Progress,
) -> Run:
    """One block on a node that is in its mode; `named` is the block and the mode.

    Where memory spans both dies (NPS1) there is no far side to move to: specs that move anything are left out.
    """
    block, mode = named
    workloads, timed = work.placed, work.timed
    movable = all(device.local_guaranteed for device in machine.devices_of(options.card))
    points: list[Point] = []
    held: dict[_Key, Buffer] = {}
    placed: Workload | None = None
    for spec, workload, as_timed in zip(specs, workloads, timed, strict=True):
        if not movable and any(spec.peer_share.values()):
            continue
        if placed != workload:
            held, placed = _place(machine, workload, options, held), workload
            progress(f"{mode}: {sum(b.nbytes for b in held.values()) / 1e9:.1f} GB placed on {options.card}")
        points.append(_point(machine, as_timed, tuple(held.values()), spec, options.card, movable))
        progress(f"{mode}: {spec.arm} audited and timed")
    for buffer in held.values():
        buffer.free()
    return as_run(experiment, block, mode, machine, (workloads[0], timed[0]), options, tuple(points), movable)


def _place(machine: Machine, workload: Workload, options: Options, held: Mapping[_Key, Buffer]) -> dict[_Key, Buffer]:
    """The whole model; buffers of `held` that it needs again stay as they are, the others are freed."""
    devices = machine.devices_of(options.card)
    wanted = {
        (piece.name, piece.role, device.id, nbytes): None
        for piece in pieces(model_shape(options.model), workload, options.precision)
        for index, device in enumerate(devices)
        if (nbytes := piece.shard(index, len(devices)))
    }
    for key, buffer in held.items():
        if key not in wanted:
            buffer.free()
    return {key: held[key] if key in held else _allocate(machine, key) for key in wanted}


def _allocate(machine: Machine, key: _Key) -> Buffer:
    name, role, device, nbytes = key
    return machine.allocate(nbytes, device=device, policy=Policy.local(), role=role, name=f"{name}@{device}")


def _point(
    machine: Machine, workload: Workload, buffers: tuple[Buffer, ...], spec: Spec, card: str, movable: bool
) -> Point:
    if movable:
        _move(buffers, spec.peer_share)
    before = audit(*buffers).require_placed()
    placement = _placement(machine, before, spec, card)
    after = audit(*buffers).require_placed()
    return Point(
        arm=spec.arm,
        quantities=quantities(workload, placement),
        factors={
            "roles_moved": sorted(role for role, share in spec.peer_share.items() if share),
            "bytes_per_token_by_role": workload.bytes_by_role(),
            **spec.factors,
        },
        stages=stage_rows(time_token(workload, placement, parameter_set(HEADLINE_SET))),
        residency_before=residency_json(before),
        residency_after=residency_json(after),
    )


def _move(buffers: tuple[Buffer, ...], shares: Mapping[str, float]) -> None:
    objects: dict[tuple[str, str], int] = {}  # of a role and device so far: its pattern goes on from buffer to buffer
    for buffer in buffers:
        wanted = Policy.local()
        share = shares.get(buffer.role, 0.0)
        if share:
            start = objects.get((buffer.role, buffer.device), 0)
            wanted = Policy.peer() if share == 1.0 else Policy.peer_share(round(share * 8), start=start)
            objects[buffer.role, buffer.device] = start - -buffer.nbytes // OBJECT_BYTES
        if buffer.policy != wanted:
            buffer.move(wanted)


def _placement(machine: Machine, found: Residency, spec: Spec, card: str) -> Placement:
    devices = machine.devices_of(card)
    if any(len(machine.domain(str(d.domain)).dies) > 1 for d in devices):
        return Placement(spec.arm, interleaved=True)
    own = {device.id: str(device.domain) for device in devices}
    shares = {role: found.peer_share(role, own) for role in PLACED_ROLES}
    known = {role: share for role, share in shares.items() if share is not None}
    return Placement(spec.arm, peer_share=known, cached_as_remote=spec.cached_as_remote)
