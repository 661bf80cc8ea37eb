"""weight-swap with two tensor-parallel shards on two NVIDIA GPUs: every shard's weights move to its peer at once.

Each GPU replays one graph over its halves of the layers; both are let go together and the step has the later end. The
prediction is that of one shard with rates that both GPUs read at when they read at the same time, as both links are
busy here. Results are compared with those of the whole layer on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dieplace.backends import torch_timing as timing
from dieplace.backends import triton_binaries as binaries
from dieplace.errors import KernelFault, Unsupported, UsageError
from dieplace.experiments import layer_speed
from dieplace.experiments import weight_swap_live as rules
from dieplace.experiments.harness import Measured, measure
from dieplace.experiments.link import GIB
from dieplace.experiments.registry import Options, Progress
from dieplace.experiments.shard_gate import Gate, Mailboxes
from dieplace.experiments.shard_recipe import HAND_OFFS, SHARDS, recipe_of
from dieplace.experiments.step_bench import SETTLING, Look, PlacedLayers, levels, sweeper
from dieplace.experiments.step_cases import Case, StepArm
from dieplace.experiments.step_recipe import Launch, together
from dieplace.experiments.step_result import CaseTaken
from dieplace.experiments.step_run import LAYERS, PLAN, StepRun
from dieplace.experiments.torch_rig import TorchRig, hash_of
from dieplace.experiments.unfinished import Unfinished
from dieplace.machine import Machine
from dieplace.probing import Levels
from dieplace.residency import Residency, audit
from dieplace.run import Run

# Both sides round to bf16, at places of their own: fp32 partial sums are added in another order, and what is rounded
# differently is multiplied by weights once more. Four unit roundoffs of the largest output, seen as one number.
AGREEMENT = 4 * 2.0**-8
RATES_FROM = "reads of 1 GiB by both GPUs at the same time, each of its own memory or of the other's, in this process"
STEPS = 4  # a sample is the mean of so many steps in a row
TOGETHER = (
    f"both GPUs held by a flag until both have their work, then {STEPS} steps in a row timed by an event at either end"
    " on each: the later end counts"
)


def run_shards(backend: str, options: Options, progress: Progress, case: Case) -> Iterator[Run]:
    """One Run; Unsupported without two GPUs, UsageError for a form that two measured shards do not have."""
    from dieplace.discover import discover

    if backend != "nvidia":
        raise Unsupported(
            f"two shards cannot be measured on the {backend} backend: launches that wait for one another on two dies"
            " have not been tried on hardware",
            hint="use --shards 1",
        )
    _refuse_other_forms(options)
    machine = discover(backend)
    with TorchRig(machine) as rig:
        if len(rig.readers) < SHARDS:
            raise Unsupported("two shards need two visible GPUs", hint="see CUDA_VISIBLE_DEVICES, or use --shards 1")
        yield ShardRun("weight-swap", machine, rig, options, [case], LAYERS, PLAN).run(progress)


def _refuse_other_forms(options: Options) -> None:
    wanted = ("gpt-oss-120b", "mxfp4", layer_speed.CONTEXT, "shapes")
    asked = (options.model, options.precision, options.context_tokens, options.bytes_from)
    if asked != wanted:
        raise UsageError(
            f"two shards on nvidia have the form {', '.join(map(str, wanted))}; asked: {', '.join(map(str, asked))}",
            hint="leave --model, --precision, --context and --bytes out",
        )


class ShardRun(StepRun):
    """The one case of two shards, each on its GPU with the other as its far memory."""

    def run(self, progress: Progress) -> Run:
        """The Run of one shard's shape, told as what it is."""
        self.agreement: dict[str, float] = {}
        found = super().run(progress)
        devices = " and ".join(name.partition("/")[0] for name in self.rig.readers[:SHARDS])
        facts = dict(found.facts)
        facts["prediction"] = {**facts["prediction"], "rates_from": RATES_FROM}
        facts |= {"executing": list(self.rig.readers[:SHARDS])}
        facts |= {"timed": TOGETHER, "agreement_with_one_shard": self.agreement, "code_hash_by_gpu": self.hashes}
        return replace(
            found,
            block=f"{found.block}-shards2",
            workload={**found.workload, "shards": SHARDS},
            notes=(
                found.notes[0],
                f"{devices} compute, a tensor-parallel half each; {self.count} layers in one graph each; every shard's"
                " weights move to the other GPU at once, under the same addresses",
                "norms, attention, router and two hand-offs a layer run too; embedding and head do not",
                "bytes are those of one shard; both read as many",
            ),
            facts=facts,
        )

    def measure_surroundings(self) -> tuple[tuple[float, float], Levels]:
        """Rates with both GPUs reading, near and far, and latency levels of each GPU; the first one's are told."""
        pair = self.rig.readers[:SHARDS]
        near, far = (GIB / _median(self.rig.together("read", far, GIB)) for far in (False, True))
        self.both_levels = [levels(self.rig, pair[i], pair[1 - i]) for i in range(SHARDS)]
        self.sweeps = [sweeper(self.rig, pair[i], pair[1 - i]) for i in range(SHARDS)]
        return (near, far), self.both_levels[0]

    def _case(self, case: Case, later: int, work: Unfinished, progress: Progress) -> CaseTaken:
        shards = Shards(self.machine, self.rig.readers[:SHARDS], self.count, self.both_levels, self.sweeps)
        try:
            progress(f"{self.count} layers placed and captured as halves on {SHARDS} GPUs")
            self.agreement = shards.compare_with_one_gpu()
            before = {arm.name: shards.look(arm, case.roles, stages=True) for arm in case.arms}
            progress("every arm audited, probed, and its code and result compared")
            code_hash = before[case.arms[0].name].code_hash
            self.hashes = dict(shards.hashes)
            measured = self._measure(case, shards, work, code_hash)
            after = {arm.name: shards.look(arm, case.roles) for arm in case.arms}
            progress(f"two shards: {measured.stopped}")
            reads = dict(shards.each[0].reads)
            return CaseTaken(case, reads, sum(reads.values()), shards.each[0].experts, measured, before, after)
        finally:
            shards.free()

    def _measure(self, case: Case, shards: Shards, work: Unfinished, code_hash: str | None) -> Measured:
        def tell(blocks: int, left_s: float) -> None:
            self.options.watch.tell(f"two shards: block {blocks}, at most {left_s:.0f} s left")

        measured = measure(
            {arm.name: partial(shards.sample, arm) for arm in case.arms},
            self.plan,
            progress=tell,
            earlier=work.earlier(case.name, code_hash),
            keep=work.keeper(case.name, code_hash),
        )
        if not measured.order:
            raise KeyboardInterrupt
        return measured


class Shards:
    """Both halves: placed layers on each GPU, mailboxes between them, and a gate that lets both go together."""

    def __init__(
        self,
        machine: Machine,
        names: Sequence[str],
        count: int,
        both_levels: Sequence[Levels],
        sweeps: Sequence[Launch],
    ) -> None:
        self.names, self.count, self.levels = tuple(names), count, both_levels
        self.mailboxes = Mailboxes(machine, self.names, slots=HAND_OFFS * count, width=layer_speed.HIDDEN)
        self.each: list[PlacedLayers] = []
        self.hashes: dict[str, dict[str, str | None]] = {}
        try:
            slots = self.mailboxes.exchange.program(HAND_OFFS * count)
            for shard, side in enumerate(self.mailboxes.exchange.sides):
                # Alone, a shard waits for its partner in vain, once: what is captured here runs together later.
                self.each.append(
                    PlacedLayers(machine, machine.device(names[shard]), count, recipe_of(shard, side, slots))
                )
            self.gate = Gate(self.mailboxes, [one.index for one in self.each])
            self.marked = [timing.with_marks(one.launches, one.index) for one in self.each]
            self.mailboxes.exchange.reset()
        except BaseException:
            self.free()
            raise

    def sample(self, arm: StepArm) -> float:
        """ns of one layer of the step, by the later end, after untimed replays."""
        self._move(arm)
        for _ in range(SETTLING):
            self._replay()
        steps = [self._steps(one.graph) for one in self.each]
        ends = timing.time_together(steps, gate=self.gate)
        self.gate.require()
        self.mailboxes.require_arrival()
        return max(ends)

    def look(self, arm: StepArm, roles: Sequence[str], *, stages: bool = False) -> Look:
        """Both shards as one look: audits and probes of both, their code hashes as one, and the common result.

        `stages` are those of the shard that takes longer, its waiting for the other one included.
        """
        self._move(arm)
        hashes: list[str | None] = []
        why: str | None = None
        for one in self.each:
            with binaries.watch() as seen:
                together(one.launches)()
            found, why_not = hash_of(seen)
            hashes.append(found)
            why = why or why_not
        self._synchronize()
        self.mailboxes.require_arrival()
        self.hashes[arm.name] = dict(zip(self.names, hashes, strict=True))
        looked = [self._look_at(n, roles) for n in range(SHARDS)]
        moved = Residency(tuple(item for look in looked for item in look[0].items))
        rest = Residency((*(i for look in looked for i in look[1].items), *audit(*self.mailboxes.buffers).items))
        probed = {role: _merged([look[2][role] for look in looked]) for role in roles}
        joined = None if None in hashes else "+".join(str(h) for h in hashes)
        result = self._result()
        marked, spans = self._stages() if stages else (None, ())
        return Look(moved.require_placed(), rest, probed, joined, why, result, marked, spans)

    def compare_with_one_gpu(self) -> dict[str, float]:
        """Largest deviation of any layer's output from the whole layer's on the first GPU, and its limit.

        KernelFault beyond it, or where the two shards' outputs differ by a bit.
        """
        import torch

        worst = 0.0
        for number in range(self.count):
            for one in self.each:
                together(one.stages[number])()
            self._synchronize()
            mine, other = (one.work["y"].float().cpu() for one in self.each)
            whole = whole_layer(number, self.each[0].index).cpu()
            worst = max(worst, float((mine - whole).abs().max() / whole.abs().max()))
            if not torch.equal(mine, other) or not worst <= AGREEMENT:
                raise KernelFault(
                    f"layer {number} of two shards is {worst:.3g} of its largest value off that of one, or its shards"
                    " differ",
                    hint=f"at most {AGREEMENT:.3g} is explained by rounding",
                )
        for side in self.mailboxes.exchange.sides:
            side.next()
        self._synchronize()
        self.mailboxes.require_arrival()
        return {"worst_share_of_largest": worst, "limit": AGREEMENT}

    def free(self) -> None:
        """Give everything back."""
        for one in self.each:
            one.free()
        self.mailboxes.free()

    def _move(self, arm: StepArm) -> None:
        self._synchronize()
        for one in self.each:
            one.move(arm.homes)

    def _steps(self, graph: timing.Captured) -> timing.Captured:
        """The graph several times in a row, as ns a layer."""
        replay = graph.graph.replay
        return timing.Captured(graph.device, timing.Eager((replay,) * STEPS), graph.launches * STEPS)

    def _replay(self) -> None:
        import torch

        for one in self.each:
            with torch.cuda.device(one.index):
                one.graph.graph.replay()

    def _look_at(self, n: int, roles: Sequence[str]) -> tuple[Residency, Residency, Mapping[str, rules.Probed]]:
        import torch

        one = self.each[n]
        torch.cuda.set_device(one.index)
        buffers = [(role, buffer) for placed in one.layers for role, buffer in placed.buffers.items()]
        moved = audit(*[buffer for role, buffer in buffers if role in roles])
        inputs = [placed.layer.t["x"] for placed in one.layers]
        rest = audit(*[buffer for role, buffer in buffers if role not in roles], one.work, *inputs)
        return moved, rest, {role: one.probe(role, self.levels[n]) for role in roles}

    def _stages(self) -> tuple[float, tuple[timing.StageTime, ...]]:
        """us of a layer with events between its stages, and the stages; in graphs of their own."""
        took = timing.times_of(self.marked, replays=10, gate=self.gate)
        self.gate.require()
        self.mailboxes.require_arrival()
        total, spans = max(took, key=lambda one: one[0])
        return total / 1000 / self.count, spans

    def _result(self) -> float:
        return float(sum(one.work["y"].double().sum().item() for one in self.each))

    def _synchronize(self) -> None:
        import torch

        for one in self.each:
            torch.cuda.synchronize(one.index)


def whole_layer(number: int, index: int) -> Any:
    """fp32 output of a whole layer on one GPU, by the launches that `weight-swap --shards 1` makes."""
    import torch

    with torch.cuda.device(index):
        layer, work = layer_speed.make_layer(number), layer_speed.workspace()
        for _, launch in layer_speed.triton_stages(layer, work):
            launch()
        torch.cuda.synchronize(index)
        return work["y"].float()


def _merged(both: Sequence[rules.Probed]) -> rules.Probed:
    """Windows of both shards together; the slower shard's levels are told."""
    near = [p.near_cycles for p in both if p.near_cycles is not None]
    far = [p.far_cycles for p in both if p.far_cycles is not None]
    return rules.Probed(
        sum(p.windows for p in both),
        sum(p.far for p in both),
        sum(p.wrong for p in both),
        max(near) if near else None,
        max(far) if far else None,
        next((p.why_not for p in both if p.why_not is not None), None),
    )


def _median(sample: Any) -> float:
    from statistics import median

    return median(sample() for _ in range(9))
