"""dieplace with one more experiment, `stub`, whose ranks do what a test asks of each.

As a program: `stub_experiment.py '{"2": "exit 86"}' bench run stub ...`, the first word being what single ranks do:
`exit N` ends the process at once, `after N` so once its run is saved, `kill` by SIGKILL, `kill parent` likewise,
`refuse` raises a typed error, `sleep S` takes longer, `hang` never ends and ignores Ctrl-C, `slow F` is slower by F.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping

from dieplace.conditions import Unknown, collect
from dieplace.errors import Unsupported
from dieplace.experiments import registry
from dieplace.run import Point, Quantity, Run

TRUE_US = 100.0
NOISE = 0.02
SAMPLES = 30


def register(what: Mapping[str, str], *, everybody: str = "") -> None:
    """Add `stub` to the experiments of this process."""

    def run(backend: str, options: registry.Options, progress: registry.Progress) -> Iterator[Run]:
        rank = options.card.removeprefix("gpu")
        asked, _, number = what.get(rank, everybody).partition(" ")
        progress("measuring")
        _misbehave(asked, number)
        yield made(int(rank), options.card, scale=float(number) if asked == "slow" else 1.0)
        if asked == "after":
            os._exit(int(number))

    sys.modules["stub_of_dieplace"] = module = type(sys)("stub_of_dieplace")
    module.EXPERIMENT = registry.Experiment("stub", "what a test asks for", {}, run, lambda backend: None, steps=1)
    registry._MODULES["stub"] = "stub_of_dieplace"


def _misbehave(asked: str, number: str) -> None:
    if asked == "exit":
        os._exit(int(number))
    if asked == "kill":
        os.kill(os.getppid() if number == "parent" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    if asked == "refuse":
        raise Unsupported("this card has no stub", hint="take another", asked="stub")
    if asked == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
    if asked == "sleep":
        time.sleep(float(number))


def made(rank: int, card: str, *, scale: float = 1.0, seed: int = 0, noise: float = NOISE) -> Run:
    """A measured run of one arm, `layer_us`, log-normal around `scale` times TRUE_US."""
    noisy = random.Random(1000 * seed + rank)
    samples = tuple(TRUE_US * scale * noisy.lognormvariate(0, noise) for _ in range(SAMPLES))
    value = sorted(samples)[SAMPLES // 2]
    times = Quantity("us", "measured", value, samples=samples)
    conditions = collect(None, code_hash="stub", timer="none", workload="stub", power_w=Unknown("a stub draws none"))
    return Run(
        experiment="stub", block=card, origin="measured", source="emulated",
        points=(Point("local", {"layer_us": times}, {"on": f"{card}/p0"}),),
        conditions=conditions, workload={"name": "stub"}, machine={"cards": []}, created="2026-11-30T00:00:00+00:00",
        seed=seed, code_hash="stub",
    )  # fmt: skip


if __name__ == "__main__":
    from dieplace.cli.main import main

    faults = json.loads(sys.argv[1])
    register(faults, everybody=faults.pop("everybody", ""))
    sys.exit(main(sys.argv[2:]))
