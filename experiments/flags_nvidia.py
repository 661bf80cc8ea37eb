"""flags on two NVIDIA GPUs: two kernels at the same time, flags in the memory of either, or in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dieplace.backends.base import require
from dieplace.errors import Unsupported
from dieplace.experiments.flags import HOMES, NOTES, POLLERS, SEED, Arm, points_of
from dieplace.experiments.harness import Measured, Plan
from dieplace.experiments.link import NOT_MI355X
from dieplace.experiments.link_run import conditions_of
from dieplace.experiments.registry import Options, Progress
from dieplace.experiments.statistics import drift
from dieplace.experiments.torch_rig import TorchRig, hash_of, without_serials
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.policy import Policy
from dieplace.run import Point, Run

TIMER = "%globaltimer of the writing GPU"
LINE_WORDS = 32
ROUNDS, SETTLING = 240, 40  # rounds of a launch, and those at its start that are not timed: kernels start apart
SPIN_LIMIT = 1 << 23  # polls of a whole launch: some seconds
LAST_VALUE = 1 << 30
PLAN = Plan(seed=SEED, warmups=2, min_blocks=20, max_blocks=60, budget_s=25.0)


def run_nvidia(options: Options, progress: Progress) -> Iterator[Run]:
    """One Run; Unsupported with fewer than two visible GPUs."""
    from dieplace.discover import discover

    machine = discover("nvidia")
    with TorchRig(machine) as rig:
        if len(rig.readers) < 2:
            raise Unsupported("flags needs two visible GPUs", hint="see CUDA_VISIBLE_DEVICES")
        before = rig.telemetry()
        with PairOfGpus(machine, rig) as pair:
            progress("flags placed in both GPUs' memory and in the host's")
            points, measured = points_of(pair, PLAN, tell=options.watch.tell)
            progress(f"flags: {measured.stopped}")
            yield _as_run(machine, rig, options, points, measured, before, pair)


class PairOfGpus:
    """A writer on the first GPU, pollers on the second and, for some arms, beside the writer."""

    def __init__(self, machine: Machine, rig: TorchRig) -> None:
        import torch

        self.machine = machine
        self.names = rig.readers[:2]
        self.index = [int(rig.devices[name].runtime_index or 0) for name in self.names]
        self.buffers: dict[str, Buffer] = {}
        self.host = torch.zeros(LINE_WORDS, dtype=torch.int32, pin_memory=True)
        self.value = 1

    def __enter__(self) -> PairOfGpus:
        import torch

        for home, device in (("consumer", 1), ("producer", 0)):
            # One line is polled; the rest makes the buffer large enough to be probed.
            self.buffers[home] = self._lines(device, max(POLLERS), f"flag at the {home}")
        self.buffers["acks"] = self._lines(0, max(POLLERS), "acknowledgements")
        self.flags = {home: self._words(home)[:LINE_WORDS] for home in ("consumer", "producer")}
        self.flags["host"] = self.host
        self.place = [torch.zeros(1 + max(POLLERS), dtype=torch.int32, device=f"cuda:{i}") for i in self.index]
        return self

    def __exit__(self, *what: Any) -> None:
        self.flags = {}
        for buffer in self.buffers.values():
            buffer.free()

    def round_trip(self, arm: Arm) -> Callable[[], float]:
        """ns of one round: a launch on each GPU, the mean over its rounds behind the settling ones."""
        import torch

        from dieplace.kernels.arrival import require_rounds

        stamps = [torch.zeros(1 + arm.pollers, ROUNDS, dtype=torch.int64, device=f"cuda:{i}") for i in self.index]
        acks = self._words("acks")[: LINE_WORDS * arm.pollers]
        flag = self.flags[arm.home]

        def sample() -> float:
            self.value = 1 if self.value > LAST_VALUE else self.value
            first, self.value = self.value, self.value + ROUNDS
            for device, one in zip(self.index, stamps, strict=True):
                one.zero_()
                torch.cuda.synchronize(device)
            # The pollers first: the writer would wait for them in its first round, which is not timed either way.
            for side, party, count in ((1, 1 + arm.near, arm.far), (0, 0, 1 + arm.near)):
                self._launch(side, flag, acks, stamps[side], first, party, count)
            for device in self.index:
                torch.cuda.synchronize(device)
            for side, party, count in ((0, 0, 1 + arm.near), (1, 1 + arm.near, arm.far)):
                parties, waiter = range(party, party + count), self.names[side]
                require_rounds(stamps[side].cpu(), flag.cpu(), acks.cpu(), first=first, parties=parties, waiter=waiter)
            start, end = stamps[0][0, [SETTLING, -1]].tolist()
            return float(end - start) / (ROUNDS - 1 - SETTLING)

        return sample

    def residency(self, home: str) -> Mapping[str, Any]:
        """Where a flag lies: by audit with a probe; of host memory by what the driver says of its address."""
        from dieplace.residency import audit

        if home == "host":
            memory = require(self.machine.require_session("locate"), "memory").memory
            kind = memory.runtime.pointer(self.host.data_ptr()).kind
            told = {"evidence": "accounted", "moved_evidence": "accounted", "driver_says": kind}
            return told | {"bytes_by_role_and_domain": {"sync_flag": {kind: self.host.nbytes}}}
        found = audit(self.buffers[home], self.buffers["acks"], probe=True).require_placed()
        flag = audit(self.buffers[home], probe=True)
        return {
            "evidence": found.evidence,
            "moved_evidence": flag.evidence,
            "bytes_by_role_and_domain": {"sync_flag": flag.bytes_by_domain("sync_flag")},
        }

    def _launch(self, side: int, flag: Any, acks: Any, stamps: Any, first: int, party: int, parties: int) -> None:
        from dieplace.kernels import registry

        operands = {"flag": flag, "acks": acks, "stamps": stamps, "xcc": self.place[side][: stamps.shape[0]]}
        attrs = {"first": first, "spin_limit": SPIN_LIMIT, "party": party, "parties": parties}
        registry.run("flag_visibility", operands, attrs, backend="triton", strict=True)

    def _lines(self, device: int, count: int, name: str) -> Buffer:
        return self.machine.allocate(
            count * LINE_WORDS * 4, device=self.names[device], policy=Policy.local(), role="sync_flag", name=name
        )

    def _words(self, name: str) -> Any:
        import torch

        words = self.buffers[name].tensor.view(torch.int32)
        words.zero_()
        return words


def _as_run(
    machine: Machine,
    rig: TorchRig,
    options: Options,
    points: tuple[Point, ...],
    measured: Measured,
    before: Mapping[str, Any],
    pair: PairOfGpus,
) -> Run:
    after = rig.telemetry()
    ran, why = hash_of(rig.launched)
    conditions = conditions_of(machine, after, ran, why, "flags", TIMER)
    return Run(
        experiment="flags",
        block="-".join(name.partition("/")[0] for name in pair.names),
        origin="measured",
        source=machine.source,
        points=points,
        conditions=conditions,
        workload={"name": "flags", "rounds": ROUNDS, "rounds_not_timed": SETTLING, "pollers": list(POLLERS)},
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=measured.seed,
        code_hash=ran,
        code_hash_why=why,
        notes=(NOT_MI355X, *NOTES),
        facts={
            "headline": "round_trip_ns",
            "writer": pair.names[0],
            "pollers_on_the_other_device": pair.names[1],
            "homes": list(HOMES),
            "stopped": measured.stopped,
            "order": [list(block) for block in measured.order],
            "warmups_ns": {arm: list(values) for arm, values in measured.warmups.items()},
            "drift": {arm: drift(samples).words for arm, samples in measured.samples.items()},
            "telemetry_before": dict(before),
            "telemetry_after": after,
            "clock_share": after["clock_share"],
        },
    )
