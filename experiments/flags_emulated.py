"""flags on the emulated card: every combination run from the kernel's gfx950 ISA, seed by seed, and timed by the clock.

What the runs show is that each poller sees every round, whatever the order; their times mean nothing. Time is the
clock's hand-off by the flag's home: a value with its range over the parameter sets, no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dieplace.backends.base import require
from dieplace.clock.parameters import HEADLINE_SET, PARAMETER_SETS, ParameterSet
from dieplace.conditions import Unknown, collect
from dieplace.errors import KernelFault
from dieplace.experiments.flags import NOTES
from dieplace.experiments.modelled_run import NO_TELEMETRY, RANGE_METHOD
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options, Progress
from dieplace.machine import Machine
from dieplace.policy import Policy
from dieplace.residency import Residency, audit
from dieplace.run import Point, Quantity, Run

BLOCK, MODE = "dpx-nps2", "DPX/NPS2"
HOMES = ("consumer", "producer")
CLASSES = ("coarse", "fine", "uncached")
POLLERS = (1, 2, 4)
SEEDS, ROUNDS, FIRST = range(4), 4, 100
SPIN_LIMIT = 1 << 20
WRITER, READER = "gpu0/p0", "gpu0/p1"
POLLERS_UNKNOWN = "the clock has no figure for further pollers of a flag in their own die's memory"
CLASSES_UNKNOWN = "the clock does not tell memory classes apart: no public figure does"
NO_ROUND_TRIP = "the clock models a hand-off, not a round trip with its acknowledgements"
_ADDED_BY_POLLERS = "0.027 us for each further wave that polls a far (NC) line: FLEET fork, ROOT-CAUSE"


@dataclass(frozen=True)
class Shown:
    """What the seeds of one combination showed: how many runs, the hash of their ISA, the two audits around them."""

    runs: int
    code_hash: str | None
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def run_emulated(options: Options, progress: Progress) -> Iterator[Run]:
    """One Run; KernelFault where a poller missed a round or saw it before it was raised."""
    with private_node(MODE) as machine:
        progress(f"{MODE}: a private emulated node")
        points, hashes = [], set()
        for home in HOMES:
            for memory_class, pollers in product(CLASSES, POLLERS):
                shown = show(machine, home, memory_class, pollers)
                points.append(_point(home, memory_class, pollers, shown))
                hashes.add(shown.code_hash)
            progress(f"flag at the {home}: {len(SEEDS) * len(CLASSES) * len(POLLERS)} runs from the ISA are right")
        fault = planted_fault(machine)
        progress("a poll at device scope is reported as a stale read")
        yield _as_run(machine, options, tuple(points), hashes, fault)


def show(machine: Machine, home: str, memory_class: str, pollers: int, scope: str = "system") -> Shown:
    """Run one combination with every seed, and check rounds and order of every party."""
    device = READER if home == "consumer" else WRITER
    made = [
        machine.allocate(nbytes, device=owner, policy=Policy.local(), role="sync_flag", memory_class=memory_class)
        for nbytes, owner in ((128, device), (128 * pollers, WRITER))
    ]
    try:
        before = _residency(*(audit(one) for one in made))
        flag, acks = (one.tensor for one in made)
        hashes = {_run_once(machine, flag, acks, pollers, seed, scope) for seed in SEEDS}
        after = _residency(*(audit(one) for one in made))
        return Shown(len(SEEDS), hashes.pop() if len(hashes) == 1 else None, before, after)
    finally:
        for buffer in made:
            buffer.free()


def _run_once(machine: Machine, flag: Any, acks: Any, pollers: int, seed: int, scope: str) -> str | None:
    """The hash of the ISA that both launches ran."""
    import torch

    from dieplace.emulator.execution import Session, concurrent
    from dieplace.kernels import registry

    lines = [t.view(torch.int32) for t in (flag, acks)]
    for line in lines:
        line.zero_()
    own = [machine.device(name).local(role="activation") for name in (WRITER, READER)]
    stamps, place = [], []
    for context in own:
        with context:
            stamps.append(torch.zeros(1 + pollers, ROUNDS, dtype=torch.int64))
            place.append(torch.zeros(1 + pollers, dtype=torch.int32))
    hbm = require(machine.require_session("launch"), "memory").memory.hbm
    patience = {"patience": 100} if scope != "system" else {}
    with concurrent(seed=seed) as records:
        for side, (name, party, parties) in enumerate(((WRITER, 0, 1), (READER, 1, pollers))):
            operands = {"flag": lines[0], "acks": lines[1], "stamps": stamps[side], "xcc": place[side]}
            attrs = {"first": FIRST, "spin_limit": SPIN_LIMIT, "party": party, "parties": parties, "scope": scope}
            with Session(device=name, memory=hbm, memory_options=patience):
                registry.run("flag_visibility", operands, attrs, backend="flydsl", strict=True)
    require_order(stamps[0][0], stamps[1][1:], lines[1].view(-1, 32)[:, 0].tolist(), seed)
    hashes = {record.code_hash for record in records}
    return hashes.pop() if len(hashes) == 1 else None


def require_order(written: Any, seen: Any, acknowledged: list[int], seed: int) -> None:
    """KernelFault unless every round was seen after it was raised, and before the next one was."""
    last = FIRST + ROUNDS - 1
    right = (
        bool((seen > written).all())
        and bool((written[1:] > seen[:, :-1].amax(0)).all())
        and acknowledged == [last] * len(acknowledged)
    )
    if not right:
        raise KernelFault(
            f"seed {seed}: a poller missed a round of the flag, or saw it out of turn",
            hint="the emulated caches and the kernel's scopes disagree",
            seed=seed,
            acknowledged=acknowledged,
        )


def planted_fault(machine: Machine) -> dict[str, Any]:
    """The same kernel at device scope, polling across the dies: the emulator must report a stale read."""
    from dieplace.emulator.isa.hierarchy_watch import StaleRead

    try:
        show(machine, "producer", "coarse", 1, scope="agent")
    except StaleRead as error:
        return {"what": "the same kernel at device scope, flag at the producer", "reported": str(error.facts["cause"])}
    raise KernelFault(
        "a poll at device scope across the dies was not reported",
        hint="the emulated caches do not keep old lines: nothing that they show counts",
    )


def handoff_us(home: str, pollers: int, p: ParameterSet) -> float:
    """One hand-off by a release word: local, or with a far step and what further waves add that poll a far line."""
    far = p.far_step_us + (pollers - 1) * p.nc_polling_wave_us
    return p.handoff_us + (far if home == "producer" else 0.0)


def _point(home: str, memory_class: str, pollers: int, shown: Shown) -> Point:
    return Point(
        f"{home} {memory_class} {pollers}",
        {
            "handoff_us": _handoff(home, memory_class, pollers),
            "round_trip_ns": Quantity("ns", "modelled", None, why=NO_ROUND_TRIP),
        },
        factors={
            "home": home,
            "memory_class": memory_class,
            "pollers": pollers,
            "pollers_on": "the other device",
            "runs_from_isa": shown.runs,
            "rounds_a_run": ROUNDS,
        },
        residency_before=shown.before,
        residency_after=shown.after,
    )


def _handoff(home: str, memory_class: str, pollers: int) -> Quantity:
    if memory_class != CLASSES[0]:
        return Quantity("us", "modelled", None, why=CLASSES_UNKNOWN)
    if home == "consumer" and pollers > 1:
        return Quantity("us", "modelled", None, why=POLLERS_UNKNOWN)
    by_set = {p.name: handoff_us(home, pollers, p) for p in PARAMETER_SETS}
    method = RANGE_METHOD + (f"; {_ADDED_BY_POLLERS}" if home == "producer" and pollers > 1 else "")
    low, high = min(by_set.values()), max(by_set.values())
    return Quantity("us", "modelled", by_set[HEADLINE_SET], low, high, method, by_set=by_set)


def _residency(flag: Residency, acks: Residency) -> dict[str, Any]:
    """Where the flag is; the acknowledgements, which lie with the writer in every combination, must be placed too."""
    checked = [found.require_placed() for found in (flag, acks)]
    return {
        "evidence": acks.evidence,
        "moved_evidence": flag.evidence,
        "misplaced_bytes": sum(item.misplaced_bytes for found in checked for item in found.items),
        "bytes_by_role_and_domain": {"sync_flag": flag.bytes_by_domain("sync_flag")},
    }


def _as_run(
    machine: Machine, options: Options, points: tuple[Point, ...], hashes: set[str | None], fault: dict[str, Any]
) -> Run:
    code = next(iter(hashes)) if len(hashes) == 1 else None
    why = None if code else "the combinations did not run the same ISA"
    conditions = collect(
        machine,
        code_hash=code or Unknown(str(why)),
        timer="clock",
        workload=f"flags, {len(SEEDS)} seeds, {ROUNDS} rounds",
        parameter_sets=[s.name for s in PARAMETER_SETS],
        **NO_TELEMETRY,
    )
    return Run(
        experiment="flags",
        block=BLOCK,
        origin="modelled",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload={"name": "flags", "rounds": ROUNDS, "seeds": list(SEEDS), "pollers": list(POLLERS)},
        machine=machine.to_json(),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed_why="every combination ran with all its seeds",
        code_hash=code,
        code_hash_why=why,
        notes=(
            "modelled: time comes from the clock's parameter sets, not from hardware; there are no samples",
            "correctness is of the kernel's own gfx950 ISA on emulated caches: every poller saw every round in order",
            *NOTES,
        ),
        facts={
            "headline": "handoff_us",
            "mode": MODE,
            "writer": WRITER,
            "pollers_on_the_other_device": READER,
            "planted_fault": fault,
            "parameter_sets": [{"name": s.name, "label": s.label, "source": s.source} for s in PARAMETER_SETS],
        },
    )
