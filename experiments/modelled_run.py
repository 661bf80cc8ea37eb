"""What a modelled experiment writes down: quantities of the clock, stages, audited bytes, and the run around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dieplace.clock import PARAMETER_SETS, Placement, Ranged, TokenTime, over_sets, parameter_set, time_token
from dieplace.clock.parameters import HEADLINE_SET
from dieplace.conditions import Unknown, collect
from dieplace.experiments.model_storage import pieces, total_bytes
from dieplace.experiments.registry import Options
from dieplace.kernels.models import model_shape
from dieplace.machine import Machine
from dieplace.residency import Residency
from dieplace.run import Point, Quantity, Run
from dieplace.workload import Workload

PLACED_ROLES = ("weights", "kv_cache", "sync_flag")
RANGE_METHOD = f"value of set {HEADLINE_SET}; range over parameter sets {', '.join(s.name for s in PARAMETER_SETS)}"
NOTES = (
    "modelled: time comes from the clock's parameter sets, not from hardware; there are no samples",
    "sets A and B are calibrated on AMD's blog of 2026-10-20 as a second article reports it; C has nothing fitted",
)
SAME_NOTE = "the model cannot tell DPX/NPS1 from SPX/NPS1: crossings between two devices are not modelled"
_BYTES_NOTES = {
    "shapes": "bytes are computed from the model's shape; what is placed and audited is the full model in emulated HBM",
    "counted": "bytes are counted by running the kernels' own ISA on the emulator; what is placed and audited is the"
    " full model in emulated HBM",
}
_NOTHING_RAN = "no kernel ran: the clock times the workload's bytes and hand-offs"
NO_TELEMETRY = {
    "core_clock_mhz": Unknown("an emulated node has no clocks"),
    "memory_clock_mhz": Unknown("an emulated node has no clocks"),
    "power_w": Unknown("an emulated node draws no power"),
    "temperature_c": Unknown("an emulated node has no temperature"),
}


def as_quantity(found: Ranged, unit: str) -> Quantity:
    """A modelled number of the clock as a run keeps it."""
    return Quantity(unit, "modelled", found.value, found.low, found.high, RANGE_METHOD, by_set=found.by_set)


def quantities(workload: Workload, placement: Placement) -> dict[str, Quantity]:
    """Token time, penalty and what a placement adds by cause, each with its range over the parameter sets."""

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


def stage_rows(token: TokenTime) -> tuple[Mapping[str, Any], ...]:
    """One row a stage, microseconds of one repeat."""
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


def residency_json(found: Residency) -> dict[str, Any]:
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


def as_run(
    experiment: str,
    block: str,
    mode: str,
    machine: Machine,
    workloads: tuple[Workload, Workload],
    options: Options,
    points: tuple[Point, ...],
    movable: bool,
) -> Run:
    """The run of one block; `workloads` are the first point's: as it was placed, and as it was timed."""
    workload = workloads[1]
    code = workload.bytes_from.rpartition(" ")[2] if options.bytes_from == "counted" else None
    conditions = collect(
        machine,
        code_hash=code or Unknown(_NOTHING_RAN),
        timer="clock",
        workload=_swept(workload, options, points),
        parameter_sets=[s.name for s in PARAMETER_SETS],
        **NO_TELEMETRY,
    )
    return Run(
        experiment=experiment,
        block=block,
        origin="modelled",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload=_workload_json(*workloads, options),
        machine=machine.to_json(),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed_why="modelled: nothing is shuffled",
        code_hash=code,
        code_hash_why=None if code else _NOTHING_RAN,
        notes=_notes(workload, options, movable),
        facts=_facts(mode, movable),
    )


def _swept(workload: Workload, options: Options, points: Sequence[Point]) -> str:
    """The condition that two runs must share: model, every context and number of tokens of the points, and bytes."""
    contexts = dict.fromkeys(point.factors.get("context_tokens", workload.context_tokens) for point in points)
    tokens = dict.fromkeys(point.factors.get("tokens", workload.tokens) for point in points)
    rounds = "" if list(tokens) == [1] else f", rounds of {'/'.join(map(str, tokens))} tokens"
    return (
        f"{workload.name}, context {'/'.join(map(str, contexts))}{rounds}, {options.shards} shards, bytes from"
        f" {options.bytes_from}"
    )


def _notes(workload: Workload, options: Options, movable: bool) -> tuple[str, ...]:
    same = () if movable else (SAME_NOTE,)
    return (NOTES[0], _BYTES_NOTES[options.bytes_from], *NOTES[1:], *same, *workload.notes)


def _facts(mode: str, movable: bool) -> dict[str, Any]:
    sets = [
        {"name": s.name, "label": s.label, "source": s.source, "fitted_to": s.fitted_to, **s.knobs()}
        for s in PARAMETER_SETS
    ]
    return {"mode": mode, "local_guaranteed": movable, "parameter_sets": sets}


def _workload_json(placed: Workload, workload: Workload, options: Options) -> dict[str, Any]:
    """Of the first point; a point of another context or round says its own in its factors."""
    stored = pieces(model_shape(options.model), placed, options.precision)
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
