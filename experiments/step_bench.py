"""Layers of a decode step on one device, every role in movable memory: placed, captured, moved, looked at and timed.

One captured graph is replayed wherever the roles lie: same binary, same pointers; only the physical memory behind them
changes. A look audits everything, probes every 2 MiB object of the roles in question by latency, hashes the machine
code that ran and sums the result.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from dieplace.backends import torch_timing as timing
from dieplace.backends import triton_binaries as binaries
from dieplace.backends.prefix_timing import stage_times_by_prefix
from dieplace.experiments import layer_speed
from dieplace.experiments import weight_swap_live as rules
from dieplace.experiments.step_recipe import Launch, Recipe, Stage, experts_chosen, reads_by_role, role_of, together
from dieplace.experiments.torch_rig import GIB, TorchRig, hash_of
from dieplace.machine import Device, Machine
from dieplace.memory import Buffer
from dieplace.policy import OBJECT_BYTES, Policy, resolve
from dieplace.probing import Levels
from dieplace.residency import Residency, audit

HOPS = 64
SETTLING = 5  # untimed replays before each sample: translations of a fresh mapping, clocks after the pause of a move
CALIBRATION_BYTES = 256 << 20
ALIGNMENT_BYTES = 256  # what torch's own allocator gives, and more than any load needs
LOCAL = Policy.local()


@dataclass(frozen=True)
class Placed:
    """One layer: its operands as views of one buffer a role."""

    layer: layer_speed.Layer
    buffers: Mapping[str, Buffer]


@dataclass(frozen=True)
class Look:
    """What an arm was like: audits, probes by role, hash of the code, sum of the result, stage times and their total.

    `marked_us` is a layer's time with events between its stages; None, with no `spans`, where stages were not asked.
    """

    moved: Residency
    rest: Residency
    probed: Mapping[str, rules.Probed]
    code_hash: str | None
    code_hash_why: str | None
    result: float
    marked_us: float | None
    spans: tuple[timing.StageTime, ...]


class PlacedLayers:
    """`count` layers of a recipe on one device: `layers` in order, `graph` over all of them, `reads` bytes by role.

    `reads` and `experts` (distinct ones that the tokens of a layer choose) are counted and are the layers' means.

    Every role of a layer is one movable buffer of whole 2 MiB objects, at home on the device. `sweep` is called before
    each probe (see `sweeper`). Call `free` when done.
    """

    def __init__(
        self, machine: Machine, device: Device, count: int, recipe: Recipe, sweep: Launch = lambda: None
    ) -> None:
        self.machine, self.device, self.recipe, self.sweep = machine, device, recipe, sweep
        self.index = int(device.runtime_index or 0)
        self._make_current()
        self.layers: list[Placed] = []
        try:
            for number in range(count):
                self.layers.append(self._place(number))
        except BaseException:
            self._free_buffers()
            raise
        with device.local(role="activation"):
            self.work = recipe.workspace()
        self.stages = [list(recipe.stages(one.layer, self.work)) for one in self.layers]
        self.homes: dict[str, Policy | None] = dict.fromkeys(self.layers[0].buffers, LOCAL)
        self.experts, self.reads = self._count_reads()
        per_layer = [*self.stages[:-1], [*self.stages[-1], *recipe.closing(self.work)]]
        self.graph: timing.Captured = timing.capture([together(one) for one in per_layer], self.index)

    @property
    def launches(self) -> list[Stage]:
        """Every launch of a step in order, with the closing ones."""
        return [stage for one in self.stages for stage in one] + list(self.recipe.closing(self.work))

    def move(self, homes: Mapping[str, Policy]) -> None:
        """Bring each role where it is asked, the others home; a share's pattern goes on from layer to layer."""
        for role, now in list(self.homes.items()):
            policy = homes.get(role, LOCAL)
            if policy == now:
                continue
            self.homes[role] = None  # whoever is interrupted below knows nothing
            objects = 0
            for one in self.layers:
                mine = Policy.peer_share(policy.eighths, start=objects) if policy.kind == "share" else policy
                objects += one.buffers[role].nbytes // OBJECT_BYTES
                one.buffers[role].move(mine)
            self.homes[role] = policy

    def settle(self) -> None:
        """Untimed replays."""
        for _ in range(SETTLING):
            self.graph.graph.replay()

    def sample(self) -> float:
        """ns of one layer, the mean over one replay of all layers, after settling."""
        self.settle()
        return timing.time_once(self.graph)

    def look(self, levels: Levels, roles: Sequence[str], *, stages: bool = True) -> Look:
        """The arm as it lies now; `roles` are probed, all else is audited. Misplaced where a role is not as asked."""
        import torch

        self._make_current()
        moved = audit(*[one.buffers[role] for role in roles for one in self.layers])
        others = [b for one in self.layers for role, b in one.buffers.items() if role not in roles]
        rest = audit(*others, self.work, *[one.layer.t["x"] for one in self.layers])
        probed = {role: self.probe(role, levels) for role in roles}
        with binaries.watch() as seen:
            together(self.launches)()
        torch.cuda.synchronize(self.index)
        self.recipe.check(self.work)
        # A capture of its own, or as many as there are stages where a graph holds no events.
        take = stage_times_by_prefix if timing.is_rocm() else timing.stage_times
        total, spans = take(self.launches, self.index, replays=10) if stages else (None, ())
        marked = None if total is None else total / 1000 / len(self.layers)
        result = self.work["y"].double().sum().item()
        ran, why = hash_of(seen)
        return Look(moved.require_placed(), rest, probed, ran, why, result, marked, spans)

    def walk(self, words: Any) -> tuple[float, ...]:
        """Cycles a hop of each 2 MiB window of `words`, as this device sees them."""
        return walk(words, self.index)

    def free(self) -> None:
        """Give everything back, once no replay is under way."""
        import torch

        torch.cuda.synchronize(self.index)
        self.stages, self.work = [], {}
        del self.graph
        self._free_buffers()

    def _free_buffers(self) -> None:
        made, self.layers = self.layers, []
        for one in made:
            one.layer.t.clear()
            for buffer in one.buffers.values():
                buffer.free()
        gc.collect()  # launches hold their operands in closures

    def _make_current(self) -> None:
        import torch

        torch.cuda.set_device(self.index)

    def _place(self, number: int) -> Placed:
        made = self.recipe.layer(number).t
        by_role: dict[str, dict[str, Any]] = {}
        for name, tensor in made.items():
            by_role.setdefault(role_of(name), {})[name] = tensor
        with self.device.local(role="activation"):
            views = {name: tensor.clone() for name, tensor in by_role.pop("activation").items()}
        buffers = {}
        for role, tensors in by_role.items():
            buffers[role], mine = self._pack(tensors, role, number)
            views |= mine
        return Placed(layer_speed.Layer(views), buffers)

    def _pack(self, tensors: Mapping[str, Any], role: str, number: int) -> tuple[Buffer, dict[str, Any]]:
        """One movable buffer of whole objects with all tensors in it."""
        starts, at = {}, 0
        for name, tensor in tensors.items():
            starts[name] = at
            at += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self.machine.allocate(
            -(-at // OBJECT_BYTES) * OBJECT_BYTES, device=self.device, policy=LOCAL, role=role,
            # CUDA has one class of device memory, coherent at system scope (CUDA C++ guide, "memory model"): flags may
            # be VMM memory there, which can move; the uncached class of HIP is none.
            name=f"layer {number}", memory_class=None if self.machine.backend == "amd" else "coarse", movable=True,
        )  # fmt: skip
        flat, views = buffer.tensor, {}
        for name, tensor in tensors.items():
            mine = flat[starts[name] : starts[name] + tensor.nbytes]
            views[name] = mine.view(tensor.dtype).view(tensor.shape)
            views[name].copy_(tensor)
        return buffer, views

    def _count_reads(self) -> tuple[float, dict[str, float]]:
        """Experts that a layer's tokens choose, and bytes it reads by role."""
        import torch

        chosen, found = [], []
        for one, stages in zip(self.layers, self.stages, strict=True):
            together(stages)()
            torch.cuda.synchronize(self.index)
            chosen.append(experts_chosen(self.work["ids"]))
            found.append(reads_by_role(one.layer, chosen[-1]))
        together(self.recipe.closing(self.work))()
        return fmean(chosen), {role: fmean(each[role] for each in found) for role in found[0]}

    def probe(self, role: str, levels: Levels) -> rules.Probed:
        """Every 2 MiB object of a role by its latency, against where it was asked to be."""
        import torch

        cycles: list[float] = []
        asked: list[bool] = []
        for one in self.layers:
            buffer = one.buffers[role]
            self.sweep()
            cycles += self.walk(buffer.tensor.view(torch.int32))
            pattern = resolve(buffer.policy, self.machine, self.device).pattern
            objects = buffer.nbytes // OBJECT_BYTES
            asked += [pattern[i % len(pattern)] != self.device.domain for i in range(objects)]
        return rules.judge(cycles, asked, levels)


def read_rates(rig: TorchRig, reader: str, far: str) -> tuple[float, float]:
    """GB/s of 1 GiB reads of near and of far memory, as the link experiment makes them."""
    samples = [rig.stream("read", reader, home, GIB) for home in (reader, far)]
    near, far_rate = (GIB / median(sample() for _ in range(15)) for sample in samples)
    return near, far_rate


def levels(rig: TorchRig, reader: str, far: str) -> Levels:
    """Latencies of memory known to be near and known to be far."""
    return Levels(known(rig, reader, reader), known(rig, reader, far))


def known(rig: TorchRig, reader: str, home: str) -> tuple[float, ...]:
    """Cycles a hop that a device sees in each window of the rig's own words in the memory of `home`."""
    words = rig.buffers.words(reader, home, "a" if home == reader else "b")[: CALIBRATION_BYTES // 4]
    rig.execution.synchronize(rig.devices[home])
    sweeper(rig, reader, home)()
    return walk(words, int(rig.devices[reader].runtime_index or 0))


def sweeper(rig: TorchRig, reader: str, far: str) -> Launch:
    """What to call before a walk so that no cache answers for memory; nothing where caches show their home anyway.

    An MI355X has a memory-side cache of 256 MiB: it holds a small buffer whole. 1 GiB near and far is read through it.
    """
    if rig.machine.backend != "amd":
        return lambda: None
    samples = [rig.stream("read", reader, home, GIB) for home in dict.fromkeys((reader, far))]

    def sweep() -> None:
        for sample in samples:
            sample()

    return sweep


def walk(words: Any, index: int) -> tuple[float, ...]:
    """Cycles a hop of each 2 MiB window; a first walk from other lines brings the translations."""
    import torch

    from dieplace.probes.triton_chase import walk as chase_windows

    out = torch.zeros(words.numel() * 4 // OBJECT_BYTES, 3, dtype=torch.int64, device=f"cuda:{index}")
    for first in (7919, 1):
        chase_windows(words, out, window_bytes=OBJECT_BYTES, hops=HOPS, device=index, first=first)
    return tuple(cycles / (HOPS - 1) for cycles in out[:, 1].tolist())
