"""weight-swap on two NVIDIA GPUs: layers run on one of them, their weights change home under the same addresses.

One captured graph is replayed in every arm: same binary, same pointers; only the physical memory behind each layer's
weights lies on the executing GPU or on its peer. Every 2 MiB object of the weights is probed by latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.backends.nvidia import binaries, timing
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments import layer_speed
from dieplace.experiments import weight_swap_live as live
from dieplace.experiments.harness import Plan, measure
from dieplace.experiments.link import GIB
from dieplace.experiments.link_nvidia import NvidiaRig, hash_of
from dieplace.experiments.registry import Options, Progress
from dieplace.experiments.weight_swap_result import NOT_WEIGHTS, Look, Taken, as_run
from dieplace.machine import Device, Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy, resolve
from dieplace.residency import audit
from dieplace.run import Run

LAYERS = 8
HOPS = 64
SETTLING = 5  # untimed replays before each sample: translations of a fresh mapping, clocks after the pause of a move
SEED = 20261130
CALIBRATION_BYTES = 256 << 20


@dataclass(frozen=True)
class Placed:
    """One layer: its operands as views of two buffers, one a role."""

    layer: layer_speed.Layer
    weights: Buffer
    kv: Buffer


def run_nvidia(options: Options, progress: Progress) -> Iterator[Run]:
    """One Run; Unsupported with fewer than two visible GPUs, UsageError for what has no form here."""
    from dieplace.allocator_settings import require_fixed_segments
    from dieplace.discover import discover

    require_fixed_segments()
    arms = options.arms or live.DEFAULT_ARMS
    for arm in arms:
        live.policy_of(arm)
    if arms[0] != "local" or len(arms) < 2:
        raise UsageError("weight-swap compares with local", hint="put local first in --arms, and one more behind it")
    asked = (options.model, options.precision, options.context_tokens, options.shards)
    if asked != ("gpt-oss-120b", "mxfp4", layer_speed.CONTEXT, 1):
        raise UsageError(
            f"weight-swap on nvidia has the form gpt-oss-120b, mxfp4, {layer_speed.CONTEXT} tokens, one shard; asked:"
            f" {options.model}, {options.precision}, {options.context_tokens}, {options.shards}",
            hint="add --shards 1",
        )
    machine = discover("nvidia")
    with NvidiaRig(machine) as rig:
        if len(rig.readers) < 2:
            raise Unsupported(
                "weight-swap needs a second visible GPU to move weights to", hint="see CUDA_VISIBLE_DEVICES"
            )
        yield _Bench(machine, rig, options, arms).run(progress)


class _Bench:
    """The layers on the first visible GPU, their graph, and the arms."""

    def __init__(self, machine: Machine, rig: NvidiaRig, options: Options, arms: Sequence[str]) -> None:
        import torch

        self.machine, self.rig, self.options, self.arms = machine, rig, options, tuple(arms)
        self.device: Device = machine.device(rig.readers[0])
        self.index = int(self.device.runtime_index or 0)
        torch.cuda.set_device(self.index)
        self.home = "local"
        self.plan = Plan(seed=SEED, warmups=1, min_blocks=20, max_blocks=40, budget_s=40.0)

    def run(self, progress: Progress) -> Run:
        """Rates, calibration, placement, the paired measurement, and an audit with probes of every arm."""
        before = self.rig.telemetry()
        rates = (self._rate(self.rig.readers[0]), self._rate(self.rig.readers[1]))
        calibration = live.Calibration(self._known(self.rig.readers[0]), self._known(self.rig.readers[1]))
        progress("read rates and latency levels of near and far memory")
        self.placed = [self._place(number) for number in range(LAYERS)]
        self.work = self._workspace()
        self.stages = [layer_speed.triton_stages(one.layer, self.work) for one in self.placed]
        graph = timing.capture([_all(one) for one in self.stages], self.index)
        progress(f"{LAYERS} layers placed and captured")
        looks = {arm: self._look(arm, calibration) for arm in self.arms}
        progress("every arm audited, probed, and its code and result compared")
        measured = measure({arm: self._arm(arm, graph) for arm in self.arms}, self.plan)
        again = {arm: self._look(arm, calibration) for arm in self.arms}
        self._to("local")
        progress(f"measured: {measured.stopped}")
        taken = Taken(self.machine, self.rig, self.placed[0].layer, LAYERS, measured, looks, again, calibration, rates)
        return as_run(taken, before, self.options)

    def _rate(self, home: str) -> float:
        from statistics import median

        sample = self.rig.stream("read", self.rig.readers[0], home, GIB)
        return GIB / median(sample() for _ in range(15))

    def _known(self, home: str) -> tuple[float, ...]:
        import torch

        index = self.rig.devices[home].runtime_index
        words = torch.randint(0, 2**31 - 1, (CALIBRATION_BYTES // 4,), dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.synchronize(index)
        return self._walk(words)

    def _walk(self, words: Any) -> tuple[float, ...]:
        """Cycles a hop of each 2 MiB window; a first walk from other lines brings the translations."""
        import torch

        from dieplace.probes.triton_chase import walk

        out = torch.zeros(words.numel() * 4 // OBJECT_BYTES, 3, dtype=torch.int64, device=f"cuda:{self.index}")
        for first in (7919, 1):
            walk(words, out, window_bytes=OBJECT_BYTES, hops=HOPS, device=self.index, first=first)
        return tuple(cycles / (HOPS - 1) for cycles in out[:, 1].tolist())

    def _place(self, number: int) -> Placed:
        made = layer_speed.make_layer(number).t
        weights = self._pack({n: t for n, t in made.items() if n not in NOT_WEIGHTS}, "weights", number)
        kv = self._pack({n: made[n] for n in ("k", "v")}, "kv_cache", number)
        return Placed(layer_speed.Layer({"x": self._small(made["x"]), **weights[1], **kv[1]}), weights[0], kv[0])

    def _pack(self, tensors: Mapping[str, Any], role: str, number: int) -> tuple[Buffer, dict[str, Any]]:
        """One movable buffer of whole objects with all tensors in it, each at a multiple of 256 bytes."""
        ends, at = {}, 0
        for name, tensor in tensors.items():
            ends[name] = (at, tensor.nbytes)
            at += -(-tensor.nbytes // 256) * 256
        buffer = self.machine.allocate(
            -(-at // OBJECT_BYTES) * OBJECT_BYTES, device=self.device, policy=Policy.local(), role=role,
            name=f"layer {number}", movable=True,
        )  # fmt: skip
        flat, views = buffer.tensor, {}
        for name, tensor in tensors.items():
            start, nbytes = ends[name]
            views[name] = flat[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            views[name].copy_(tensor)
        return buffer, views

    def _small(self, tensor: Any) -> Any:
        with self.device.local(role="activation"):
            return tensor.clone()

    def _workspace(self) -> dict[str, Any]:
        with self.device.local(role="activation"):
            return layer_speed.workspace()

    def _to(self, arm: str) -> None:
        if arm == self.home:
            return
        objects = 0
        for one in self.placed:
            policy = live.policy_of(arm)
            if policy.kind == "share":
                policy = Policy.peer_share(policy.eighths, start=objects)
                objects += one.weights.nbytes // OBJECT_BYTES
            one.weights.move(policy)
        self.home = arm

    def _arm(self, arm: str, graph: timing.Captured) -> Callable[[], float]:
        def sample() -> float:
            self._to(arm)
            for _ in range(SETTLING):
                graph.graph.replay()
            return timing.time_once(graph)

        return sample

    def _look(self, arm: str, calibration: live.Calibration) -> Look:
        """Audit, probe of every object of the weights, hash of the code that ran, checksum of the result, stages."""
        import torch

        self._to(arm)
        weights, rest = (
            audit(*[p.weights for p in self.placed]),
            audit(*[p.kv for p in self.placed], self.work, *[p.layer.t["x"] for p in self.placed]),
        )
        cycles: list[float] = []
        asked: list[bool] = []
        for one in self.placed:
            cycles += self._walk(one.weights.tensor.view(torch.int32))
            pattern = resolve(one.weights.policy, self.machine, self.device).pattern
            asked += [
                pattern[i % len(pattern)] != self.device.domain for i in range(one.weights.nbytes // OBJECT_BYTES)
            ]
        with binaries.watch() as seen:
            for stages in self.stages:
                _all(stages)()
        torch.cuda.synchronize(self.index)
        total, spans = timing.stage_times([s for one in self.stages for s in one], self.index, replays=10)
        ran, why = hash_of(seen)
        result = self.work["y"].double().sum().item()
        probed = live.judge(cycles, asked, calibration)
        return Look(weights.require_placed(), rest, probed, ran, why, result, total / 1000 / LAYERS, spans)


def _all(stages: Sequence[tuple[str, Callable[[], None]]]) -> Callable[[], None]:
    def run() -> None:
        for _, launch in stages:
            launch()

    return run
