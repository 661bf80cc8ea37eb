"""Ranks without torchrun: one process serves the store and forks them; what each said and gave comes back as JSON.

`forked_ranks.py FOLDER SCENARIO...` runs each scenario of SCENARIOS in a folder of its own and prints one JSON object.
torch and the statistics are imported once, so that a launch of four ranks takes a second and not ten.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import scipy.stats  # noqa: F401 - before the fork, for all
import stub_experiment
from torch.distributed import TCPStore

from dieplace.cli.main import main
from dieplace.experiments import rank_others, report, scale_out, scale_out_merge  # noqa: F401


@dataclass(frozen=True)
class Scenario:
    """`faults` of single ranks (see stub_experiment), `everybody`'s, the words, and the limits that differ."""

    faults: Mapping[str, str] = field(default_factory=dict)
    everybody: str = ""
    words: tuple[str, ...] = ("--json", "--backend", "emulated", "bench", "run", "stub")
    ranks: int = 4
    per_node: int = 4
    limits: Mapping[str, float] = field(default_factory=dict)
    killed: int | None = None  # this rank's parent, once all measure
    interrupted: bool = False  # every parent gets SIGINT then, as torchrun passes on Ctrl-C
    store_dies: bool = False
    resumed_without: int | None = None  # a second launch into the folder, from which this rank's run is gone


SCENARIOS = {
    "plain": Scenario(),
    "slow card": Scenario({"2": "slow 1.1"}),
    "two nodes": Scenario(ranks=6, per_node=3),
    "typed error": Scenario({"1": "refuse"}),
    "same error everywhere": Scenario(everybody="refuse"),
    "unlike errors": Scenario({"0": "exit 9"}, everybody="refuse"),
    "unknown name": Scenario(words=("--json", "--backend", "emulated", "bench", "run", "nothing")),
    "unknown option": Scenario(words=("--json", "--backend", "emulated", "bench", "run", "stub", "--nothing")),
    "nothing to go on with": Scenario(
        words=("--json", "--backend", "emulated", "bench", "run", "stub", "--resume", "no")
    ),
    "child killed": Scenario({"3": "kill"}),
    "leader's child ends with 86": Scenario({"0": "exit 86"}),
    "ends after saving": Scenario({"1": "after 7"}),
    "slow rank": Scenario({"1": "sleep 1.5"}),
    "hung rank": Scenario({"1": "hang"}, limits={"straggling_least_s": 0.6, "straggling": 1, "stop_s": 0.4}),
    "leader killed": Scenario(everybody="sleep 1", killed=0, limits={"life_s": 0.8}),
    "rank killed": Scenario(everybody="sleep 1", killed=2, limits={"life_s": 0.8}),
    "Ctrl-C": Scenario({"3": "sleep 0"}, everybody="sleep 30", interrupted=True),
    "gone on with": Scenario(resumed_without=2),
    "store dies": Scenario(everybody="sleep 30", store_dies=True),
}


def run_scenario(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The ranks' exit codes (negative: the signal), what each printed, and the seconds until all had ended."""
    if scenario.resumed_without is not None:
        again = replace(scenario, resumed_without=None, words=(*scenario.words, "--resume", str(folder / "runs")))
        run_scenario(replace(scenario, resumed_without=None), folder)
        shutil.rmtree(folder / "runs" / f"rank-{scenario.resumed_without}")
        return run_scenario(again, folder)
    server, port = _store()
    began, pids = time.monotonic(), []
    for rank in range(scenario.ranks):
        pids.append(_fork_rank(scenario, rank, port, folder))
    _disturb(scenario, pids, server, folder)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    took_s = time.monotonic() - began
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    out, err = ([(folder / f"{name}-{r}").read_text() for r in range(scenario.ranks)] for name in ("out", "err"))
    return {"codes": codes, "took_s": took_s, "out": out, "err": err, "folder": str(folder / "runs")}


def _store() -> tuple[int, int]:
    """A process that serves the store, as torchrun's agent does, and its port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
        os.write(write, str(store.port).encode())
        time.sleep(300)
        os._exit(0)
    port = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    return pid, port


def _fork_rank(scenario: Scenario, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
        os.environ.update(_environment(scenario, rank, port))
        stub_experiment.register(scenario.faults, everybody=scenario.everybody)
        scale_out.Limits = lambda: rank_others.Limits(**{"tick_s": 0.05, **scenario.limits})  # type: ignore
        code = main([*scenario.words, "--out", str(folder / "runs")])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def _environment(scenario: Scenario, rank: int, port: int) -> dict[str, str]:
    said = {
        "RANK": rank, "WORLD_SIZE": scenario.ranks, "LOCAL_RANK": rank % scenario.per_node,
        "LOCAL_WORLD_SIZE": scenario.per_node, "GROUP_RANK": rank // scenario.per_node, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {key: str(value) for key, value in said.items()}


def _disturb(scenario: Scenario, pids: list[int], server: int, folder: Path) -> None:
    if scenario.killed is None and not scenario.interrupted and not scenario.store_dies:
        return
    until = time.monotonic() + 20
    while time.monotonic() < until and "measuring" not in (folder / "err-0").read_text():
        time.sleep(0.02)
    time.sleep(0.4)  # the others have begun too
    if scenario.killed is not None:
        os.kill(pids[scenario.killed], signal.SIGKILL)
    if scenario.interrupted:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
    if scenario.store_dies:
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    found = {}
    for name in sys.argv[2:] or SCENARIOS:
        place = root / name.replace(" ", "-").replace("'", "")
        place.mkdir(parents=True)
        found[name] = run_scenario(SCENARIOS[name], place)
    print(json.dumps(found))
