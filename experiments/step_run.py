"""A measured step experiment from devices to Run: cases in turn, each placed, looked at, measured, looked at again.

Every block is kept in the run's folder as soon as it is measured. Ctrl-C ends the case under way after its sample; what
is there becomes a complete Run that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

from dieplace.errors import Unsupported
from dieplace.experiments.harness import INTERRUPTED, Plan, ctrl_c_held, measure
from dieplace.experiments.registry import Options, Progress
from dieplace.experiments.step_bench import PlacedLayers, levels, read_rates, sweeper
from dieplace.experiments.step_cases import Case, StepArm
from dieplace.experiments.step_recipe import gpt_oss
from dieplace.experiments.step_result import CaseTaken, Taken, as_run
from dieplace.experiments.torch_rig import TorchRig
from dieplace.experiments.unfinished import OPTIONS, Unfinished
from dieplace.machine import Machine
from dieplace.probing import Levels
from dieplace.run import Run

SEED = 20261130
LAYERS = 8
PLAN = Plan(seed=SEED, warmups=1, min_blocks=20, max_blocks=40, budget_s=40.0)
SWEEP_LAYERS = 4  # 279 MB between two uses of a buffer at 1K: still more than two last caches of 60 MB
SWEEP_PLAN = Plan(seed=SEED, warmups=1, min_blocks=20, max_blocks=40, budget_s=20.0)


def run_cases(
    experiment: str, backend: str, options: Options, progress: Progress, cases: Sequence[Case], *,
    layers: int = LAYERS, plan: Plan = PLAN,
) -> Iterator[Run]:  # fmt: skip
    """One Run over all cases; Unsupported where a device sees no far memory. Validate the options before."""
    from dieplace.discover import discover

    machine = discover(backend)
    with TorchRig(machine) as rig:
        why = rig.no_far_because(rig.readers[0]) if rig.readers else f"no device is visible to {backend}"
        if why is not None:
            raise Unsupported(f"{experiment} has nowhere to move memory to: {why}", hint="see: dieplace topo")
        yield StepRun(experiment, machine, rig, options, cases, layers, plan).run(progress)


class StepRun:
    """The cases of one experiment on the first visible device, with the next one's memory as its far memory."""

    def __init__(
        self, experiment: str, machine: Machine, rig: TorchRig, options: Options, cases: Sequence[Case], layers: int,
        plan: Plan,
    ) -> None:  # fmt: skip
        self.experiment, self.machine, self.rig, self.options = experiment, machine, rig, options
        self.cases, self.count, self.plan = tuple(cases), layers, plan
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.device = machine.device(rig.readers[0])
        self.pair = (self.device.id, next(iter(rig.far_homes(self.device.id).values())))

    def run(self, progress: Progress) -> Run:
        """The Run; KeyboardInterrupt where Ctrl-C came before the first block was measured."""
        with ctrl_c_held() as self.asked_to_stop:
            return self._run(progress)

    def _run(self, progress: Progress) -> Run:
        before = self.rig.telemetry()
        work = Unfinished(self.options.watch.folder, self.identity(before["driver_version"]), before)
        try:
            self.rates, self.levels = self.measure_surroundings()
            self.sweep = sweeper(self.rig, *self.pair)
            progress("read rates and latency levels of near and far memory")
            done = self._all_cases(work, progress)
        finally:
            work.close()
        taken = Taken(
            self.experiment, self.machine, self.rig, self.pair, self.count, tuple(done), self.levels, self.rates,
            tuple(case.name for case in self.cases[len(done) :]), tuple(work.sittings),
        )  # fmt: skip
        return as_run(taken, before, self.options)

    def measure_surroundings(self) -> tuple[tuple[float, float], Levels]:
        """GB/s of near and far reads for the prediction, and latency levels of near and far memory for the probes."""
        return read_rates(self.rig, *self.pair), levels(self.rig, *self.pair)

    def identity(self, driver_version: str | None) -> dict[str, Any]:
        """What has to be equal for samples of two processes to belong together."""
        options = self.options
        plan = {f"plan.{key}": value for key, value in asdict(self.plan).items() if key != "seed"}
        devices = [self.rig.devices[name] for name in self.pair]
        return {
            "experiment": self.experiment,
            "backend": self.machine.backend,
            **{key: getattr(options, key) for key in OPTIONS},
            "device": [f"{self.rig.part} {device.bdf}" for device in devices],
            "driver_version": driver_version,
            "seed": self.plan.seed,
            "layers": self.count,
            **plan,
            **{f"{name}_version": _version(name) for name in ("dieplace", "torch", "triton")},
        }

    def _all_cases(self, work: Unfinished, progress: Progress) -> list[CaseTaken]:
        """The cases until Ctrl-C; KeyboardInterrupt where it came before the first block of the first."""
        done: list[CaseTaken] = []
        for number, case in enumerate(self.cases):
            later = len(self.cases) - number - 1
            try:
                done.append(self._case(case, later, work, progress))
            except KeyboardInterrupt:
                if not done:
                    raise
                break
            if done[-1].measured.stopped == INTERRUPTED or self.asked_to_stop():
                break
        return done

    def _case(self, case: Case, later: int, work: Unfinished, progress: Progress) -> CaseTaken:
        recipe = gpt_oss(case.context_tokens, case.tokens, handoffs=case.handoffs)
        layers = PlacedLayers(self.machine, self.device, self.count, recipe, self.sweep)
        label = case.name or self.experiment
        try:
            progress(f"{label}: {self.count} layers placed and captured")
            before = {arm.name: self._look(layers, arm, case.roles) for arm in case.arms if self._goes_on()}
            progress(f"{label}: every arm audited, probed, and its code and result compared")
            code_hash = before[case.arms[0].name].code_hash

            def tell(blocks: int, left_s: float) -> None:
                at_most = left_s + later * self.plan.budget_s
                self.options.watch.tell(f"{label}: block {blocks}, at most {at_most:.0f} s left")

            measured = measure(
                {arm.name: partial(self._sample, layers, arm) for arm in case.arms},
                self.plan,
                progress=tell,
                earlier=work.earlier(case.name, code_hash),
                keep=work.keeper(case.name, code_hash),
            )
            if not measured.order:
                raise KeyboardInterrupt
            after = {arm.name: self._look(layers, arm, case.roles, stages=False) for arm in case.arms}
            progress(f"{label}: {measured.stopped}")
            nbytes = sum(layers.reads.values())
            return CaseTaken(case, dict(layers.reads), nbytes, layers.experts, measured, before, after)
        finally:
            layers.free()

    def _goes_on(self) -> bool:
        """True; KeyboardInterrupt where Ctrl-C was pressed: between two looks, for memory is moved within one."""
        if self.asked_to_stop():
            raise KeyboardInterrupt
        return True

    def _look(self, layers: PlacedLayers, arm: StepArm, roles: Sequence[str], *, stages: bool = True) -> Any:
        layers.move(arm.homes)
        return layers.look(self.levels, roles, stages=stages)

    def _sample(self, layers: PlacedLayers, arm: StepArm) -> float:
        layers.move(arm.homes)
        return layers.sample()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
