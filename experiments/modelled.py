"""Running an experiment on an emulated node: place the whole model, move roles, audit, and let the clock time it.

Shared by all experiments of modelled time. What the clock is told is what the audit counted, not what an arm's name
promises. Values and ranges over parameter sets; no samples, no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dieplace.clock import PARAMETER_SETS, Placement, Ranged, TokenTime, over_sets, parameter_set, time_token
from dieplace.clock.parameters import HEADLINE_SET
from dieplace.conditions import Unknown, collect
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments.model_storage import Piece, pieces, total_bytes
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options, Progress
from dieplace.kernels.models import model_shape
from dieplace.kernels.step import stages
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy
from dieplace.residency import Residency, audit
from dieplace.run import Point, Quantity, Run
from dieplace.workload import Workload

CARD = "gpu0"
PLACED_ROLES = ("weights", "kv_cache", "sync_flag")
RANGE_METHOD = f"value of set {HEADLINE_SET}; range over parameter sets {', '.join(s.name for s in PARAMETER_SETS)}"
BYTES_FROM = ("shapes", "counted")
_BYTES_NOTES = {
    "shapes": "bytes are computed from the model's shape; what is placed and audited is the full model in emulated HBM",
    "counted": "bytes are counted by running the kernels' own ISA on the emulator; what is placed and audited is the"
    " full model in emulated HBM",
}
NOTES = (
    "modelled: time comes from the clock's parameter sets, not from hardware; there are no samples",
    "sets A and B are calibrated on AMD's blog of 2026-10-20 as a second article reports it; C has nothing fitted",
)
SAME_NOTE = "the model cannot tell DPX/NPS1 from SPX/NPS1: crossings between two devices are not modelled"
_NOTHING_RAN = "no kernel ran: the clock times the workload's bytes and hand-offs"


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
    return "timing it on hardware needs kernels that run a decode step there, which this release does not have"


def workload_of(options: Options, **changes: Any) -> Workload:
    """The decode step that the options name."""
    asked = {"precision": options.precision, "context_tokens": options.context_tokens, "shards": options.shards}
    return stages(options.model, **{**asked, **changes})


def timed_workload(workload: Workload, options: Options) -> Workload:
    """What the clock is given: the step itself, or the same step with its bytes counted on the emulator.

    Counting takes seconds to a minute where the kernels changed since the last time; Unsupported for formats that no
    decode kernel reads, UsageError for rounds of several tokens.
    """
    if options.bytes_from == "shapes":
        return workload
    if workload.tokens != 1:
        raise UsageError("bytes are counted for one token only", hint="use --bytes shapes")
    from dieplace.kernels.counts import counted_stages

    return counted_stages(
        options.model,
        precision=options.precision,
        context_tokens=workload.context_tokens,
        shards=workload.shards,
    )


def run_block(
    experiment: str, block: str, mode: str, specs: Sequence[Spec], options: Options, progress: Progress
) -> Run:
    """One block on a private node in `mode`: every spec placed, audited before and after, and timed.

    Where memory spans both dies (NPS1) there is no far side to move to: specs that move anything are left out.
    """
    with private_node(mode) as machine:
        progress(f"{mode}: a private emulated node")
        movable = all(device.local_guaranteed for device in machine.devices_of(CARD))
        chosen = [spec for spec in specs if movable or not any(spec.peer_share.values())]
        base = workload_of(options)
        points: list[Point] = []
        placed: tuple[Workload | None, tuple[Buffer, ...]] = (None, ())
        for spec in chosen:
            workload = spec.workload or base
            timed = timed_workload(workload, options)
            if placed[0] != workload:
                _free(placed[1])
                placed = (workload, _place(machine, workload, options))
                progress(f"{mode}: {sum(b.nbytes for b in placed[1]) / 1e9:.1f} GB placed on {CARD}")
            points.append(_point(machine, timed, placed[1], spec, movable))
            progress(f"{mode}: {spec.arm} audited and timed")
        _free(placed[1])
        timed = timed_workload(base, options)
        return _as_run(experiment, block, mode, machine, (base, timed), options, tuple(points), movable)


def as_quantity(found: Ranged, unit: str) -> Quantity:
    """A modelled number of the clock as a run keeps it."""
    return Quantity(unit, "modelled", found.value, found.low, found.high, RANGE_METHOD, by_set=found.by_set)


def _free(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.free()


def _place(machine: Machine, workload: Workload, options: Options) -> tuple[Buffer, ...]:
    devices = machine.devices_of(CARD)
    found: list[Buffer] = []
    for piece in pieces(model_shape(options.model), workload, options.precision):
        for index, device in enumerate(devices):
            nbytes = piece.shard(index, len(devices))
            if nbytes:
                name = f"{piece.name}@{device.id}"
                found.append(machine.allocate(nbytes, device=device, policy=Policy.local(), role=piece.role, name=name))
    return tuple(found)


def _point(machine: Machine, workload: Workload, buffers: tuple[Buffer, ...], spec: Spec, movable: bool) -> Point:
    if movable:
        _move(buffers, spec.peer_share)
    before = audit(*buffers).require_placed()
    placement = _placement(machine, before, spec)
    after = audit(*buffers).require_placed()
    return Point(
        arm=spec.arm,
        quantities=_quantities(workload, placement),
        factors={
            "roles_moved": sorted(role for role, share in spec.peer_share.items() if share),
            "bytes_per_token_by_role": workload.bytes_by_role(),
            **spec.factors,
        },
        stages=_stage_rows(time_token(workload, placement, parameter_set(HEADLINE_SET))),
        residency_before=_residency(before),
        residency_after=_residency(after),
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


def _placement(machine: Machine, found: Residency, spec: Spec) -> Placement:
    devices = machine.devices_of(CARD)
    if any(len(machine.domain(str(d.domain)).dies) > 1 for d in devices):
        return Placement(spec.arm, interleaved=True)
    own = {device.id: str(device.domain) for device in devices}
    shares = {role: found.peer_share(role, own) for role in PLACED_ROLES}
    known = {role: share for role, share in shares.items() if share is not None}
    return Placement(spec.arm, peer_share=known, cached_as_remote=spec.cached_as_remote)


def _quantities(workload: Workload, placement: Placement) -> dict[str, Quantity]:
    def ranged(pick: Callable[[TokenTime], float], unit: str) -> Quantity:
        return as_quantity(over_sets(workload, placement, pick), unit)

    found = {
        "token_us": ranged(lambda t: t.token_us, "us"),
        "all_local_us": ranged(lambda t: t.local_us, "us"),
        "penalty": ranged(lambda t: t.penalty, "share"),
        "distance_us": ranged(lambda t: t.extra.distance_us, "us"),
        "link_us": ranged(lambda t: t.extra.link_us, "us"),
        "cache_type_us": ranged(lambda t: t.extra.cache_type_us, "us"),
        "wait_us": ranged(lambda t: t.extra.wait_us, "us"),
        "extra_per_layer_us": ranged(lambda t: t.extra_per_layer_us, "us"),
    }
    if placement.interleaved:
        found["data_share"] = ranged(lambda t: t.data_share or 0.0, "share")
        for name in time_token(workload, placement, parameter_set(HEADLINE_SET)).gains():
            found[f"gain_{name}"] = ranged(lambda t, name=name: t.gains()[name], "share")  # type: ignore[misc]
    return found


def _stage_rows(token: TokenTime) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {
            "stage": stage.name,
            "handoff": stage.handoff,
            **({} if stage.handoff else {"handoff_why": "no hand-off follows"}),
            "repeats": stage.repeats,
            "stream_us": stage.stream_us,
            "handoff_us": stage.handoff_us,
            "distance_us": stage.extra.distance_us,
            "link_us": stage.extra.link_us,
            "cache_type_us": stage.extra.cache_type_us,
            "wait_us": stage.extra.wait_us,
            "total_us": stage.total_us,
        }
        for stage in token.stages
    )


def _residency(found: Residency) -> dict[str, Any]:
    """Totals only: several hundred buffers a point would bury the run; the audit itself looked at each."""
    by_device: dict[str, dict[str, dict[str, int]]] = {}
    for item in found.items:
        dies = by_device.setdefault(item.role, {}).setdefault(str(item.device), {})
        for die, nbytes in (item.bytes_by_die or {}).items():
            dies[str(die)] = dies.get(str(die), 0) + nbytes
    return {
        "evidence": found.evidence,
        "items": len(found.items),
        "misplaced_bytes": sum(item.misplaced_bytes for item in found.items),
        "bytes_by_role_and_domain": {role: found.bytes_by_domain(role) for role in sorted(by_device)},
        "bytes_by_role_device_die": by_device,
    }


def _as_run(
    experiment: str,
    block: str,
    mode: str,
    machine: Machine,
    workloads: tuple[Workload, Workload],
    options: Options,
    points: tuple[Point, ...],
    movable: bool,
) -> Run:
    placed, workload = workloads
    code = workload.bytes_from.rpartition(" ")[2] if options.bytes_from == "counted" else None
    conditions = collect(
        machine,
        code_hash=code or Unknown(_NOTHING_RAN),
        timer="clock",
        workload=f"{workload.name}, context {options.context_tokens}, {options.shards} shards, bytes from"
        f" {options.bytes_from}",
        parameter_sets=[s.name for s in PARAMETER_SETS],
        core_clock_mhz=Unknown("an emulated node has no clocks"),
        memory_clock_mhz=Unknown("an emulated node has no clocks"),
        power_w=Unknown("an emulated node draws no power"),
        temperature_c=Unknown("an emulated node has no temperature"),
    )
    stored = pieces(model_shape(options.model), placed, options.precision)
    return Run(
        experiment=experiment,
        block=block,
        origin="modelled",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload=_workload_json(workload, options, stored),
        machine=machine.to_json(),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed_why="modelled: nothing is shuffled",
        code_hash=code,
        code_hash_why=None if code else _NOTHING_RAN,
        notes=(
            NOTES[0],
            _BYTES_NOTES[options.bytes_from],
            *NOTES[1:],
            *(() if movable else (SAME_NOTE,)),
            *workload.notes,
        ),
        facts={
            "mode": mode,
            "local_guaranteed": movable,
            "parameter_sets": [
                {"name": s.name, "label": s.label, "source": s.source, "fitted_to": s.fitted_to, **s.knobs()}
                for s in PARAMETER_SETS
            ],
        },
    )


def _workload_json(workload: Workload, options: Options, stored: tuple[Piece, ...]) -> dict[str, Any]:
    return {
        "name": workload.name,
        "model": options.model,
        "precision": options.precision,
        "context_tokens": workload.context_tokens,
        "tokens": workload.tokens,
        "shards": workload.shards,
        "layers": workload.layers,
        "bytes_from": workload.bytes_from,
        "bytes_per_token_by_role": workload.bytes_by_role(),
        "bytes_placed_by_role": {role: total_bytes(stored, role) for role in PLACED_ROLES},
    }
