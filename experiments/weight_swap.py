"""weight-swap: what one token costs when each die's weights lie in the other die's HBM.

The published controlled experiment: DPX/NPS2, two tensor-parallel shards, one per die; then the same buffers at the
same addresses with every shard's weights moved to its peer at once. A mode is a block: `dpx-nps2` has the arms,
`spx-nps1` and `dpx-nps1` are separate runs that are compared afterwards. On the emulated backend the memory is placed
and audited in full size, and time comes from the clock: values and ranges over parameter sets, no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dieplace.clock import (
    PARAMETER_SETS,
    Placement,
    Ranged,
    TokenTime,
    arm,
    over_sets,
    parameter_set,
    placement_from_shares,
    time_token,
)
from dieplace.clock.parameters import HEADLINE_SET
from dieplace.conditions import Unknown, collect
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments.model_storage import Piece, pieces, total_bytes
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Experiment, Options, Progress
from dieplace.kernels.models import model_shape
from dieplace.kernels.step import stages
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy
from dieplace.residency import Residency, audit
from dieplace.run import Point, Quantity, Run
from dieplace.workload import Workload

CARD = "gpu0"
BLOCKS = ("dpx-nps2", "spx-nps1", "dpx-nps1")
DEFAULT_ARMS = ("local", "swapped")
RANGE_METHOD = f"value of set {HEADLINE_SET}; range over parameter sets {', '.join(s.name for s in PARAMETER_SETS)}"
NOTES = (
    "modelled: time comes from the clock's parameter sets, not from hardware; there are no samples",
    "bytes are computed from the model's shape; what is placed and audited is the full model in emulated HBM",
    "sets A and B are calibrated on AMD's blog of 2026-10-20 as a second article reports it; C has nothing fitted",
)
SAME_NOTE = "the model cannot tell DPX/NPS1 from SPX/NPS1: crossings between two devices are not modelled"
_NOTHING_RAN = "no kernel ran: the clock times the workload's bytes and hand-offs"


def run(backend: str, options: Options, progress: Progress) -> Iterator[Run]:
    """One Run a block, as each is done, on private emulated nodes.

    Unsupported on other backends; UsageError for an unknown model, precision or arm, before anything is placed.
    """
    why = cannot(backend)
    if why is not None:
        raise Unsupported(f"weight-swap cannot run on the {backend} backend: {why}", hint="name --backend emulated")
    if options.shards != 2:
        raise UsageError(f"weight-swap has no {options.shards}-shard form yet", hint="use --shards 2")
    arms = options.arms or DEFAULT_ARMS
    for name in arms:
        _check_arm(name)
    workload = stages(
        options.model, precision=options.precision, context_tokens=options.context_tokens, shards=options.shards
    )
    for block in BLOCKS:
        yield _run_block(block, workload, options, arms, progress)


def cannot(backend: str) -> str | None:
    """None on the emulated backend; elsewhere why not."""
    if backend == "emulated":
        return None
    return "timing it on hardware needs kernels that run a decode step there, which this release does not have"


def _check_arm(name: str) -> None:
    placement = arm(name)
    if placement.stages is not None or placement.cached_as_remote:
        raise UsageError(
            f"weight-swap has no arm {name!r}: it moves whole roles",
            hint="use local, swapped, swapped-kv_cache, swapped-sync_flag or interleave-k/8",
        )


def _run_block(block: str, workload: Workload, options: Options, arms: tuple[str, ...], progress: Progress) -> Run:
    mode = block.upper().replace("-", "/")
    with private_node(mode) as machine:
        progress(f"{mode}: a private emulated node")
        buffers = _place(machine, workload, options)
        progress(f"{mode}: {sum(b.nbytes for b in buffers) / 1e9:.1f} GB placed on {CARD}")
        # Only a mode whose devices each own a domain has a far side to move to.
        movable = all(device.local_guaranteed for device in machine.devices_of(CARD))
        points = []
        for name in arms if movable else ("local",):
            points.append(_point(machine, workload, buffers, name, movable))
            progress(f"{mode}: {name} audited and timed")
        for buffer in buffers:
            buffer.free()
        return _as_run(block, machine, workload, options, tuple(points), movable)


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


def _point(machine: Machine, workload: Workload, buffers: tuple[Buffer, ...], name: str, movable: bool) -> Point:
    if movable:
        _move(buffers, name)
    before = audit(*buffers).require_placed()
    placement = _placement(machine, before, name)
    after = audit(*buffers).require_placed()
    return Point(
        arm=name,
        quantities=_quantities(workload, placement),
        factors={"roles_moved": sorted(role for role, share in arm(name).peer_share.items() if share)},
        stages=_stage_rows(time_token(workload, placement, parameter_set(HEADLINE_SET))),
        residency_before=_residency(before),
        residency_after=_residency(after),
    )


def _move(buffers: tuple[Buffer, ...], name: str) -> None:
    shares = arm(name).peer_share
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


def _placement(machine: Machine, found: Residency, name: str) -> Placement:
    """What the clock is told is what the audit counted, not what the arm's name promises."""
    devices = machine.devices_of(CARD)
    interleaved = any(len(machine.domain(str(d.domain)).dies) > 1 for d in devices)
    if interleaved:
        return Placement(name, interleaved=True)
    own = {device.id: str(device.domain) for device in devices}
    shares = {role: found.peer_share(role, own) for role in ("weights", "kv_cache", "sync_flag")}
    return placement_from_shares(name, interleaved=False, peer_share={r: s for r, s in shares.items() if s is not None})


def _quantities(workload: Workload, placement: Placement) -> dict[str, Quantity]:
    def ranged(pick: Any, unit: str) -> Quantity:
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
        found["data_share"] = ranged(lambda t: t.data_share, "share")
        for name in time_token(workload, placement, parameter_set(HEADLINE_SET)).gains():
            found[f"gain_{name}"] = ranged(lambda t, name=name: t.gains()[name], "share")
    return found


def as_quantity(found: Ranged, unit: str) -> Quantity:
    """A modelled number of the clock as a run keeps it."""
    return Quantity(unit, "modelled", found.value, found.low, found.high, RANGE_METHOD, by_set=found.by_set)


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
    block: str, machine: Machine, workload: Workload, options: Options, points: tuple[Point, ...], movable: bool
) -> Run:
    name = f"{workload.name}, context {options.context_tokens}, {options.shards} shards"
    conditions = collect(
        machine,
        code_hash=Unknown(_NOTHING_RAN),
        timer="clock",
        workload=name,
        parameter_sets=[s.name for s in PARAMETER_SETS],
        core_clock_mhz=Unknown("an emulated node has no clocks"),
        memory_clock_mhz=Unknown("an emulated node has no clocks"),
        power_w=Unknown("an emulated node draws no power"),
        temperature_c=Unknown("an emulated node has no temperature"),
    )
    stored = pieces(model_shape(options.model), workload, options.precision)
    return Run(
        experiment="weight-swap",
        block=block,
        origin="modelled",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload=_workload_json(workload, options, stored),
        machine=_card_only(machine),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed_why="modelled: nothing is shuffled",
        code_hash_why=_NOTHING_RAN,
        notes=(*NOTES, *(() if movable else (SAME_NOTE,)), *workload.notes),
        facts={
            "mode": block.upper().replace("-", "/"),
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
        "bytes_placed_by_role": {role: total_bytes(stored, role) for role in ("weights", "kv_cache", "sync_flag")},
    }


def _card_only(machine: Machine) -> dict[str, Any]:
    """The snapshot cut down to the card that was used: the other seven are the same."""
    full = machine.to_json()
    keep = {d.id for d in machine.devices_of(CARD)}
    return {
        **full,
        "cards": [c for c in full["cards"] if c["id"] == CARD],
        "devices": [d for d in full["devices"] if d["card"] == CARD],
        "domains": [d for d in full["domains"] if d["card"] == CARD],
        "links": [x for x in full["links"] if x["initiator"] in keep and x["target"] in keep],
    }


EXPERIMENT = Experiment(
    name="weight-swap",
    summary="each die's weights in the other die's HBM: the penalty on one token",
    factors={"arm": "local, swapped, swapped-kv_cache, swapped-sync_flag, interleave-k/8", "block": ", ".join(BLOCKS)},
    run=run,
    cannot=cannot,
    steps=len(BLOCKS) * 3 + 1,
    blocks=BLOCKS,
)
