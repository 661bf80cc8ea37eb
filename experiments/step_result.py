"""The Run of a measured step experiment: points with times, predictions and audits, and what else is to be known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.backends import prefix_timing
from dieplace.backends import torch_timing as timing
from dieplace.experiments import weight_swap_live as rules
from dieplace.experiments.harness import INTERRUPTED, Measured
from dieplace.experiments.link_run import block_of, conditions_of
from dieplace.experiments.registry import Options
from dieplace.experiments.rotation import Rotation, rotation
from dieplace.experiments.statistics import drift
from dieplace.experiments.step_bench import Look
from dieplace.experiments.step_cases import MODEL, PRECISION, Case, StepArm
from dieplace.experiments.torch_rig import TorchRig, without_serials
from dieplace.machine import Machine
from dieplace.probing import Levels
from dieplace.residency import Residency
from dieplace.run import Point, Quantity, Run

_SHORT = {"weights": "weights", "kv_cache": "KV cache", "sync_flag": "flags"}
_QUANTITIES = (("layer_us", "us"), ("time_over_local", "x"), ("penalty", "share"))


@dataclass(frozen=True)
class CaseTaken:
    """One case as it was taken: bytes a layer reads by role and in all, and the looks around the measurement."""

    case: Case
    reads: Mapping[str, float]
    layer_bytes: float
    experts: float
    measured: Measured
    before: Mapping[str, Look]
    after: Mapping[str, Look]

    def moved_bytes(self, arm: StepArm) -> float:
        """Bytes a layer reads from the peer in an arm."""
        return sum(self.reads[role] * arm.share(role) for role in arm.homes)

    def moved_role_bytes(self, arm: StepArm) -> float:
        """Bytes a layer reads of the roles that an arm moves, wherever they lie."""
        return sum(self.reads[role] for role in arm.homes)

    def median_us(self, arm: str) -> float:
        """Median time of a layer."""
        from statistics import median

        return median(self.measured.samples[arm]) / 1000


@dataclass(frozen=True)
class Taken:
    """Everything a run took; `pair` is the device that computes and the one whose memory is far from it.

    `left` are cases that were not begun, `sittings` the conditions of each process.
    """

    experiment: str
    machine: Machine
    rig: TorchRig
    pair: tuple[str, str]
    layers: int
    cases: tuple[CaseTaken, ...]
    levels: Levels
    rates: tuple[float, float]
    left: tuple[str, ...]
    sittings: tuple[Mapping[str, Any], ...]

    @property
    def stopped(self) -> str:
        """Why measuring ended: exactly `interrupted` where Ctrl-C ended it, else each case's reason."""
        if self.left or any(one.measured.stopped == INTERRUPTED for one in self.cases):
            return INTERRUPTED
        if len(self.cases) == 1:
            return self.cases[0].measured.stopped
        return "; ".join(f"{one.case.name}: {one.measured.stopped}" for one in self.cases)


def as_run(taken: Taken, telemetry_before: Mapping[str, Any], options: Options) -> Run:
    """The Run, with conditions before and after."""
    telemetry, rig, machine = taken.rig.telemetry(), taken.rig, taken.machine
    code_hash, why = _hash_of_all(taken)
    conditions = conditions_of(machine, telemetry, code_hash, why, _condition(taken), rig.timer)
    return Run(
        experiment=taken.experiment,
        block=block_of(machine, taken.pair),
        origin="measured",
        source=machine.source,
        points=tuple(point for one in taken.cases for point in _points(one, taken, telemetry["clock_share"])),
        conditions=conditions,
        workload=_workload(taken),
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=taken.cases[0].measured.seed,
        code_hash=code_hash,
        code_hash_why=why,
        notes=_notes(taken),
        facts=_facts(taken)
        | {"telemetry_before": dict(telemetry_before), "telemetry_after": telemetry}
        | {"clock_share": telemetry["clock_share"]},
    )


def _condition(taken: Taken) -> str:
    """What two runs must have in common to be compared."""
    what = f"{taken.layers} layers of {MODEL}"
    if taken.experiment == "weight-swap":
        return what
    contexts = "/".join(map(str, dict.fromkeys(one.case.context_tokens for one in taken.cases)))
    tokens = "/".join(map(str, dict.fromkeys(one.case.tokens for one in taken.cases)))
    handoffs = ", hand-offs" if any(one.case.handoffs for one in taken.cases) else ""
    return f"{what}, context {contexts}, rounds of {tokens} tokens{handoffs}"


def _workload(taken: Taken) -> dict[str, Any]:
    first = taken.cases[0]
    body = {
        "name": f"{MODEL} {PRECISION}",
        "model": MODEL,
        "precision": PRECISION,
        "shards": 1,
        "context_tokens": first.case.context_tokens,
        "layers": taken.layers,
    }
    return body | ({"bytes_per_layer": round(first.layer_bytes)} if len(taken.cases) == 1 else {})


def _notes(taken: Taken) -> tuple[str, ...]:
    roles = list(dict.fromkeys(role for one in taken.cases for role in one.case.roles))
    moved = ", ".join(_SHORT[role] for role in roles)
    left = f"Ctrl-C came before {', '.join(name or 'the case' for name in taken.left)}: not measured"
    handoffs = "each layer sets and awaits two flags, as two shards would: here one GPU does both"
    return (
        *((taken.rig.not_this_part,) if taken.rig.not_this_part else ()),
        f"one GPU computes; {taken.layers} layers in one graph; moved under the same addresses: {moved}",
        "the layer's norms, attention and router run too; embedding and head do not",
        *((handoffs,) if any(one.case.handoffs for one in taken.cases) else ()),
        *((left,) if taken.left else ()),
    )


def _facts(taken: Taken) -> dict[str, Any]:
    def by_arm(pick: Any) -> dict[str, Any]:
        return {arm: pick(one, arm) for one in taken.cases for arm in one.before}

    same = all(len({look.result for look in (*one.before.values(), *one.after.values())}) == 1 for one in taken.cases)
    first = taken.cases[0].measured
    return {
        "stopped": taken.stopped,
        "drift": {
            _named(one, arm): drift(samples).words
            for one in taken.cases
            for arm, samples in one.measured.samples.items()
        },
        "order": [list(block) for block in first.order],
        "warmups_ns": by_arm(lambda one, arm: list(one.measured.warmups[arm])),
        **({} if len(taken.cases) == 1 else {"order_by_case": _orders(taken)}),
        "sittings": [dict(sitting) for sitting in taken.sittings],
        "blocks_at_sittings": {one.case.name or taken.experiment: list(one.measured.sittings) for one in taken.cases},
        "code_hash_by_arm": by_arm(lambda one, arm: one.before[arm].code_hash),
        "same_result_in_all_arms": same,
        **({"stage_method": prefix_timing.METHOD} if timing.is_rocm() else {}),
        "calibration_cycles": {"near": list(taken.levels.near), "far": list(taken.levels.far)},
        "prediction": {
            "formula": rules.FORMULA,
            "together_formula": rules.TOGETHER_FORMULA,
            "near_gb_per_s": taken.rates[0],
            "far_gb_per_s": taken.rates[1],
            "rates_from": "reads of 1 GiB by the same GPU in the same process, as the link run does them",
            "misses": _misses(taken),
        },
    }


def _misses(taken: Taken) -> dict[str, str]:
    found = {arm.name: _miss(one, arm, taken) for one in taken.cases for arm in one.case.arms}
    return {arm: why for arm, why in found.items() if why is not None}


def _named(one: CaseTaken, arm: str) -> str:
    """The control of each case has one name in all of them."""
    return f"{one.case.name} {arm}" if one.case.name and arm not in one.before else arm


def _orders(taken: Taken) -> dict[str, list[list[str]]]:
    return {one.case.name: [list(block) for block in one.measured.order] for one in taken.cases}


def _points(one: CaseTaken, taken: Taken, clock_share: float | None) -> Iterator[Point]:
    for arm in one.case.arms:
        yield _point(arm, one, taken, clock_share)
    for name, why in one.case.missing.items():
        unknown = {key: Quantity(unit, "measured", None, why=why) for key, unit in _QUANTITIES}
        yield Point(name, unknown, dict(one.case.factors) | _case_factor(one), notes=(why,))


def _point(arm: StepArm, one: CaseTaken, taken: Taken, clock_share: float | None) -> Point:
    moved, before = one.moved_bytes(arm), one.before[arm.name]
    spread = rotation(max(1, round(one.layer_bytes)), taken.rig.cache_bytes, taken.layers, fixed=True)
    quantities = rules.quantities(
        arm.name,
        one.measured,
        moved_bytes=moved,
        rates=taken.rates,
        refused=_refused(arm, one, spread, clock_share),
        role_bytes=one.moved_role_bytes(arm) if arm.partial else None,
    )
    miss = _miss(one, arm, taken)
    return Point(
        arm.name,
        quantities,
        factors={
            **one.case.factors,
            **_case_factor(one),
            "roles_moved": list(arm.homes),
            "moved_bytes_per_layer": moved,
            "bytes_read": one.layer_bytes,
            "bytes_read_far": moved,
            "experts_read_per_layer": one.experts,
            "cache": "cold" if spread.cold else "warm",
            "bytes_between_uses": round(taken.layers * one.layer_bytes),
            "with_stage_events_us": before.marked_us,
        },
        stages=tuple(_stage_rows(before, taken.layers)),
        residency_before=_residency(before, arm),
        residency_after=_residency(one.after[arm.name], arm),
        notes=(*((rules.SHARED_NOTE,) if arm.partial else ()), *((miss,) if miss else ())),
    )


def _case_factor(one: CaseTaken) -> dict[str, str]:
    return {"case": one.case.name} if one.case.name else {}


def _miss(one: CaseTaken, arm: StepArm, taken: Taken) -> str | None:
    if not arm.homes:
        return None
    local = one.median_us(one.case.arms[0].name)
    why = rules.why_missed(local, one.median_us(arm.name), one.moved_bytes(arm), *taken.rates)
    return None if why is None else f"{arm.name}: {why}"


def _refused(arm: StepArm, one: CaseTaken, spread: Rotation, clock_share: float | None) -> str | None:
    looks = [*one.before.values(), *one.after.values()]
    if len({look.result for look in looks}) != 1:
        return "the arms did not give the same result"
    hashes = {str(number): look.code_hash for number, look in enumerate(looks)}
    control = one.measured.control
    ratio = control if arm == one.case.arms[0] else one.measured.against_first(arm.name)
    for look in (one.before[arm.name], one.after[arm.name]):
        for role, probed in look.probed.items():
            evidence = str(look.rest.evidence)
            why = rules.no_penalty_because(
                probed, evidence, spread.cold, hashes, ratio,
                control=control, clock_share=clock_share, role=_SHORT[role],
            )  # fmt: skip
            if why is not None:
                return why
    return None


def _residency(look: Look, arm: StepArm) -> dict[str, Any]:
    """Bytes by role and home; `probe` is of the roles that the experiment moves, in one where they are several."""
    agree = all(probed.agrees for probed in look.probed.values())
    several = {role: probed.to_json() for role, probed in look.probed.items()}
    first = next(iter(arm.homes), next(iter(look.probed)))
    return {
        "evidence": look.rest.evidence,
        "moved_evidence": "probed" if agree else look.moved.evidence,
        "probe": several[first],
        **({"probe_by_role": several} if len(several) > 1 else {}),
        "bytes_by_role_and_domain": {**_by_role(look.moved), **_by_role(look.rest)},
    }


def _by_role(found: Residency) -> dict[str, dict[str, int]]:
    return {role: found.bytes_by_domain(role) for role in sorted({item.role for item in found.items})}


def _stage_rows(look: Look, layers: int) -> Sequence[dict[str, Any]]:
    """us of each stage a layer, the layers' mean; null with the reason where events do not tell."""
    rows: dict[str, dict[str, Any]] = {}
    for span in look.spans:
        row = rows.setdefault(span.name, {"stage": span.name, "us": 0.0})
        if span.value_ns is None or row["us"] is None:
            row["us"], row["us_why"] = None, span.why
        else:
            row["us"] += span.value_ns / 1000 / layers
    return list(rows.values())


def _hash_of_all(taken: Taken) -> tuple[str | None, str | None]:
    """The one hash of the only case; of several, a hash over theirs in order."""
    looks = [one.before[one.case.arms[0].name] for one in taken.cases]
    if len(looks) == 1 or any(look.code_hash is None for look in looks):
        found = next((look for look in looks if look.code_hash is None), looks[0])
        return found.code_hash, found.code_hash_why
    return hashlib.sha256("\n".join(str(look.code_hash) for look in looks).encode()).hexdigest()[:16], None
