"""The Run of `link`, and what every run of a torch rig records: hash of the code, conditions, a nameless machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dieplace.conditions import Unknown, collect
from dieplace.experiments.harness import Plan
from dieplace.experiments.link import LATENCY_SETS, STREAM_SETS
from dieplace.experiments.registry import Options
from dieplace.experiments.torch_rig import TorchRig, hash_of, without_serials
from dieplace.machine import Machine
from dieplace.run import Point, Run


def as_run(
    machine: Machine, rig: TorchRig, options: Options, plan: Plan, points: Sequence[Point], before: Mapping[str, Any],
    stopped: str,
) -> Run:  # fmt: skip
    """The Run with conditions before and after; `stopped` is why measuring ended."""
    after = rig.telemetry()
    ran, why = hash_of(rig.launched)
    conditions = conditions_of(machine, after, ran, why, "link", f"{rig.timer}; {rig.latency_clock} for latency")
    return Run(
        experiment="link",
        block=block_of(machine, rig.readers),
        origin="measured",
        source=machine.source,
        points=tuple(points),
        conditions=conditions,
        workload={"name": "link", "latency_sets_bytes": list(LATENCY_SETS), "stream_sets_bytes": list(STREAM_SETS)},
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=plan.seed,
        code_hash=ran,
        code_hash_why=why,
        notes=notes_of(machine, rig),
        facts={
            "stopped": stopped,
            "telemetry_before": dict(before),
            "telemetry_after": after,
            "clock_share": after["clock_share"],
            "visible": list(rig.readers),
            **rig.facts(),
        },
    )


def notes_of(machine: Machine, rig: TorchRig) -> tuple[str, ...]:
    """What a reader must know: another part than an MI355X, and memory that is near as a mean only."""
    notes = [] if rig.not_this_part is None else [rig.not_this_part]
    for domain in dict.fromkeys(machine.device(name).domain for name in rig.readers):
        if domain is not None and len(machine.domain(domain).dies) > 1:
            notes.append(f"{domain} is interleaved over both dies: near is the mean of them, not the memory of one die")
    return tuple(notes)


def block_of(machine: Machine, readers: Sequence[str]) -> str:
    """`gpu0-gpu1`; where cards have modes, the mode too, for a mode is a block: `gpu0-dpx-nps2`."""
    cards = tuple(dict.fromkeys(name.partition("/")[0] for name in readers))
    mode = machine.card(cards[0]).mode
    return "-".join((*cards, *([] if mode is None else [str(mode).lower().replace("/", "-")])))


def conditions_of(
    machine: Machine, telemetry: Mapping[str, Any], ran: str | None, why: str | None, workload: str, timer: str
) -> dict[str, Any]:
    """All conditions of a run on real devices; clocks are those right after the work."""
    gpu = (telemetry["gpus"] or [{}])[0]

    def of(key: str) -> Any:
        value = gpu.get(key)
        return Unknown("the driver does not say") if value is None else float(value)

    return collect(
        machine,
        driver_version=telemetry["driver_version"] or Unknown(telemetry.get("driver_version_why") or "nobody says"),
        code_hash=ran or Unknown(why or "no kernel was seen"),
        timer=timer,
        workload=workload,
        parameter_sets=Unknown("measured: no model was asked"),
        core_clock_mhz=of("sm_clock_mhz"),
        memory_clock_mhz=of("memory_clock_mhz"),
        power_w=of("power_w"),
        temperature_c=of("temperature_c"),
    )
