"""The Run of a live weight-swap: points with times, prediction and audits, and what else is to be known of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.backends.nvidia import timing
from dieplace.experiments import layer_speed
from dieplace.experiments import weight_swap_live as live
from dieplace.experiments.harness import Measured
from dieplace.experiments.link import NOT_MI355X
from dieplace.experiments.link_nvidia import NvidiaRig, conditions_of, without_serials
from dieplace.experiments.registry import Options
from dieplace.experiments.rotation import rotation
from dieplace.experiments.statistics import drift
from dieplace.machine import Machine
from dieplace.residency import Residency
from dieplace.run import Point, Run

NOT_WEIGHTS = ("x", "k", "v")
_EXPERT = ("up_", "down_")


@dataclass(frozen=True)
class Look:
    """One arm looked at: audits, probe, hash of the code, sum of the result, stage times with their total in us."""

    weights: Residency
    rest: Residency
    probed: live.Probed
    code_hash: str | None
    code_hash_why: str | None
    result: float
    marked_us: float
    spans: tuple[timing.StageTime, ...]


@dataclass(frozen=True)
class Taken:
    """Everything a run took: `before` and `after` are the looks at each arm around the measurement."""

    machine: Machine
    rig: NvidiaRig
    layer: layer_speed.Layer
    layers: int
    measured: Measured
    before: Mapping[str, Look]
    after: Mapping[str, Look]
    calibration: live.Calibration
    rates: tuple[float, float]


def as_run(taken: Taken, telemetry_before: Mapping[str, Any], options: Options) -> Run:
    """The Run, with conditions before and after."""
    telemetry, rig, machine = taken.rig.telemetry(), taken.rig, taken.machine
    local = taken.before["local"]
    what = f"{taken.layers} layers of gpt-oss-120b"
    conditions = conditions_of(machine, telemetry, local.code_hash, local.code_hash_why, what, timing.TIMER)
    return Run(
        experiment="weight-swap",
        block="-".join(name.partition("/")[0] for name in rig.readers[:2]),
        origin="measured",
        source=machine.source,
        points=tuple(_point(arm, taken) for arm in taken.before),
        conditions=conditions,
        workload={
            "name": "gpt-oss-120b mxfp4",
            "model": "gpt-oss-120b",
            "precision": "mxfp4",
            "shards": 1,
            "context_tokens": layer_speed.CONTEXT,
            "layers": taken.layers,
            "bytes_per_layer": taken.layer.read_bytes,
        },
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=taken.measured.seed,
        code_hash=local.code_hash,
        code_hash_why=local.code_hash_why,
        notes=(
            NOT_MI355X,
            f"one GPU computes; {taken.layers} layers in one graph; weights change home under the same addresses",
            "the layer's norms, attention and router run too; embedding and head do not",
        ),
        facts=_facts(taken)
        | {"telemetry_before": dict(telemetry_before), "telemetry_after": telemetry}
        | {"clock_share": telemetry["clock_share"]},
    )


def _facts(taken: Taken) -> dict[str, Any]:
    measured = taken.measured
    results = {look.result for look in (*taken.before.values(), *taken.after.values())}
    return {
        "stopped": measured.stopped,
        "drift": {arm: drift(samples).words for arm, samples in measured.samples.items()},
        "order": [list(block) for block in measured.order],
        "warmups_ns": {arm: list(values) for arm, values in measured.warmups.items()},
        "code_hash_by_arm": {arm: look.code_hash for arm, look in taken.before.items()},
        "same_result_in_all_arms": len(results) == 1,
        "calibration_cycles": {"near": list(taken.calibration.near), "far": list(taken.calibration.far)},
        "prediction": {
            "formula": live.FORMULA,
            "near_gb_per_s": taken.rates[0],
            "far_gb_per_s": taken.rates[1],
            "rates_from": "reads of 1 GiB by the same GPU in the same process, as the link run does them",
        },
    }


def _point(arm: str, taken: Taken) -> Point:
    moved = moved_bytes(taken.layer) * live.moved_share(arm)
    spread = rotation(taken.layer.read_bytes, taken.rig.cache_bytes, taken.layers, fixed=True)
    return Point(
        arm,
        live.quantities(
            arm, taken.measured, moved_bytes=moved, rates=taken.rates, refused=_refused(arm, taken, spread.cold)
        ),
        factors={
            "roles_moved": ["weights"] if moved else [],
            "moved_bytes_per_layer": moved,
            "cache": "cold" if spread.cold else "warm",
            "bytes_between_uses": taken.layers * taken.layer.read_bytes,
            "with_stage_events_us": taken.before[arm].marked_us,
        },
        stages=tuple(_stage_rows(taken.before[arm].spans, taken.layers)),
        residency_before=_residency(taken.before[arm]),
        residency_after=_residency(taken.after[arm]),
        notes=(live.SHARED_NOTE,) if 0 < live.moved_share(arm) < 1 else (),
    )


def _refused(arm: str, taken: Taken, cold: bool) -> str | None:
    hashes = {name: look.code_hash for name, look in taken.before.items()}
    control = taken.measured.control
    off = None if control.low is None or control.high is None else abs(control.value - 1)
    for look in (taken.before[arm], taken.after[arm]):
        why = live.no_penalty_because(look.probed, str(look.rest.evidence), cold, hashes, off)
        if why is not None:
            return why
    return None


def moved_bytes(layer: layer_speed.Layer) -> float:
    """Bytes of weights that one token reads of a layer: all dense parts, and the chosen experts' share."""
    share = layer_speed.CHOSEN / layer_speed.EXPERTS
    return math.fsum(
        tensor.nbytes * (share if name.startswith(_EXPERT) else 1.0)
        for name, tensor in layer.t.items()
        if name not in NOT_WEIGHTS
    )


def _residency(look: Look) -> dict[str, Any]:
    weights, rest, probed = look.weights, look.rest, look.probed
    return {
        "evidence": rest.evidence,
        "moved_evidence": "probed" if probed.agrees else weights.evidence,
        "probe": probed.to_json(),
        "bytes_by_role_and_domain": {**_by_role(weights), **_by_role(rest)},
    }


def _by_role(found: Residency) -> dict[str, dict[str, int]]:
    return {role: found.bytes_by_domain(role) for role in sorted({item.role for item in found.items})}


def _stage_rows(spans: Sequence[timing.StageTime], layers: int) -> list[dict[str, Any]]:
    """us of each stage a layer, the layers' mean; null with the reason where events do not tell."""
    rows: dict[str, dict[str, Any]] = {}
    for span in spans:
        row = rows.setdefault(span.name, {"stage": span.name, "us": 0.0})
        if span.value_ns is None or row["us"] is None:
            row["us"], row["us_why"] = None, span.why
        else:
            row["us"] += span.value_ns / 1000 / layers
    return list(rows.values())
