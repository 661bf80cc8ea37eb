"""Measured step experiments without a device: placing, moving and auditing are real, on emulated memory; times and
latencies are simulated from where the bytes are.

Run as a program it is the `dieplace` command whose NVIDIA backend is simulated so: for tests that interrupt or kill it.
`DELAY_S` is how long a sample takes, `DRIVER` the driver's version, `CODE` the hash of the machine code.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dieplace.backends import torch_timing as timing
from dieplace.experiments import layer_speed, step_bench, step_recipe, step_result, step_run
from dieplace.experiments.step_bench import PlacedLayers
from dieplace.policy import OBJECT_BYTES

NEAR, FAR = 4500.0, 375.0  # bytes a ns of the simulated memory
LOCAL_NS = 50_000.0
FLAG_NS = 1_400.0  # what two far hand-offs cost a layer
_NOISE = random.Random(7)
CODE = os.environ.get("SIMULATED_CODE", "ab12")
DELAY_S = float(os.environ.get("SIMULATED_DELAY_S", "0"))
DRIVER = os.environ.get("SIMULATED_DRIVER", "1.0")
AS_NVIDIA = {"backend": "nvidia"}  # the memory is the emulated backend's


class SimulatedRig:
    """Rates and devices of a pair; nothing runs."""

    cache_bytes = 1 << 20
    part = "simulated"
    timer = "simulated"
    not_this_part = "simulated"

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.readers = ("gpu0/p0", "gpu0/p1")
        self.devices = {name: machine.device(name) for name in self.readers}

    def __enter__(self) -> SimulatedRig:
        return self

    def __exit__(self, *what: Any) -> None:
        return None

    def far_homes(self, reader: str) -> dict[str, str]:
        return {"same card": next(name for name in self.readers if name != reader)}

    def no_far_because(self, reader: str) -> None:
        return None

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Any:
        return lambda: nbytes / (NEAR if reader == home else FAR)

    def telemetry(self) -> dict[str, Any]:
        return {"driver_version": DRIVER, "gpus": [], "clock_share": 1.0}


def small_layer(seed: int, *, context: int = 1024, tokens: int = 1) -> layer_speed.Layer:
    """Operands with the real names and a few MB of weights; the cache grows with the context."""
    g = torch.Generator().manual_seed(seed)
    kv = context * 2048
    sizes = {
        "qkv_b": 3 << 20,
        "up_b": 2 << 20,
        "down_b": 1 << 20,
        "router": 1 << 19,
        "k": kv,
        "v": kv,
        "x": 256 * tokens,
    }
    whole = ("qkv_s", "o_b", "o_s", "up_s", "down_s")
    sizes |= dict.fromkeys(whole, 1024)
    return layer_speed.Layer(
        {n: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g) for n, size in sizes.items()}
    )


def small_workspace(*, context: int = 1024, tokens: int = 1, splits: int = 16) -> dict[str, Any]:
    """A result, and the experts of a round: each token brings three of its own and shares one."""
    ids = torch.tensor([[0, *range(1 + 3 * t, 4 + 3 * t)] for t in range(tokens)], dtype=torch.int32)
    return {"y": torch.ones(tokens, 4), "ids": ids}


def with_flags(context: int = 1024, tokens: int = 1, *, handoffs: bool = False) -> step_recipe.Recipe:
    """The recipe of simulated layers: with hand-offs a layer has flags, which no kernel polls here."""

    def layer(number: int) -> layer_speed.Layer:
        made = small_layer(number, context=context, tokens=tokens)
        return layer_speed.Layer({**made.t, "flags": torch.zeros(2, 32, dtype=torch.int32)}) if handoffs else made

    return step_recipe.Recipe(
        layer,
        lambda: small_workspace(context=context, tokens=tokens),
        lambda one, work: [("qkv", lambda: None), ("down", lambda: None)],
    )


def install(patch: Callable[[Any, str, Any], None], machine: Any) -> None:
    """Put simulated devices of `machine` in the real ones' place; `patch` is `monkeypatch.setattr`, or `setattr`."""
    # The package offers a function of the module's name.
    patch(importlib.import_module("dieplace.discover"), "discover", lambda backend: machine)
    patch(torch.cuda, "set_device", lambda index: None)
    patch(torch.cuda, "synchronize", lambda index: None)
    unfinished, conditions_of = step_run.Unfinished, step_result.conditions_of
    patch(step_run, "Unfinished", lambda folder, identity, *rest: unfinished(folder, {**identity, **AS_NVIDIA}, *rest))
    patch(step_result, "conditions_of", lambda *known: conditions_of(*known) | AS_NVIDIA)
    patch(step_run, "gpt_oss", with_flags)
    patch(step_run, "SWEEP_LAYERS", 2)
    patch(step_run, "TorchRig", SimulatedRig)
    patch(step_bench, "hash_of", lambda seen: (CODE, None))
    patch(step_bench.binaries, "watch", contextlib.nullcontext)
    patch(timing, "capture", lambda launches, index: SimpleNamespace(graph=SimpleNamespace(replay=int)))
    marked = tuple[float, tuple[timing.StageTime, ...]]

    def stage_times(stages: Any, index: int, replays: int) -> marked:
        return 80.0, tuple(timing.StageTime(n, 10.0) for n, _ in stages)

    patch(timing, "stage_times", stage_times)
    patch(step_bench, "known", lambda rig, reader, home: (700.0, 705.0) if home == reader else (2000.0, 2010.0))
    patch(PlacedLayers, "sample", sample)
    patch(PlacedLayers, "walk", walk)


def far_share(layers: PlacedLayers, role: str) -> float:
    """The share of a role's bytes in the first layer that lies on the other die."""
    buffer = layers.layers[0].buffers[role]
    far = sum(n for domain, n in buffer.locate().bytes_by_domain.items() if domain != "gpu0/mem0")
    return far / buffer.nbytes


def sample(layers: PlacedLayers) -> float:
    """What a replay takes by where the bytes are: the rule that the prediction states, with noise."""
    time.sleep(DELAY_S)
    total = LOCAL_NS
    for role in layers.layers[0].buffers:
        moved = layers.reads[role] * far_share(layers, role)
        total += FLAG_NS * far_share(layers, role) if role == "sync_flag" else moved * (1 / FAR - 1 / NEAR)
    return total * _NOISE.lognormvariate(0, 0.0005)


def walk(layers: PlacedLayers, words: torch.Tensor) -> tuple[float, ...]:
    """Latencies of each 2 MiB window by the die that it is on."""
    hbm = layers.machine.session.memory.hbm
    starts = words.data_ptr() + np.arange(words.numel() * 4 // OBJECT_BYTES, dtype=np.int64) * OBJECT_BYTES
    return tuple(2000.0 if die == 1 else 700.0 for die in hbm.die_of(starts))


def main() -> int:
    """`dieplace` with the simulated device."""
    from dieplace.cli import main as frame
    from dieplace.experiments.private_node import private_node

    with private_node("DPX/NPS2") as machine:
        install(setattr, machine)
        return frame.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
