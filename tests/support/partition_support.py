"""Shared by the partition tests: a small emulated node under an injected clock, and the truth about it.

`truth` reads the emulated driver's own state, never the product's view of the tree, so that a check made with it is
independent of what it checks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dieplace.backends.amd.control import AmdControl
from dieplace.backends.amd.control_emulated import emulated_control
from dieplace.emulator.node import Node, create
from dieplace.errors import DieplaceError
from dieplace.modes import Mode, partitions_of
from dieplace.partition.control import Limits
from dieplace.partition.entry import build, carry_out
from dieplace.partition.execute import Outcome
from dieplace.partition.plan import Plan
from dieplace.partition.store import Store

# Runs the real command in a real process and kills it, by SIGKILL, before or after the n-th mutating call.
KILLER = """
import os, signal, sys
from dieplace.backends.amd.control import AmdControl
from dieplace.cli.main import main
when, at = sys.argv[1], int(sys.argv[2])
calls = 0
def wrap(name):
    real = getattr(AmdControl, name)
    def call(self, *a, **k):
        global calls
        calls += 1
        if calls == at and when == "before": os.kill(os.getpid(), signal.SIGKILL)
        answer = real(self, *a, **k)
        if calls == at and when == "after": os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(AmdControl, name, call)
for name in ("set_memory", "unload", "load", "set_compute"): wrap(name)
sys.exit(main(sys.argv[3:]))
"""
FAST = Limits(unload_s=60, ready_s=120, poll_s=5, reset_s=10, retry_s=2)


class FakeClock:
    """Time that passes only when somebody sleeps; `at` runs things when their time comes."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for moment, action in [item for item in self.due if item[0] <= self.time]:
            self.due.remove((moment, action))
            action()

    def at(self, seconds_from_now: float, action: Callable[[], None]) -> None:
        self.due.append((self.time + seconds_from_now, action))


def small_node(directory: Path, clock: FakeClock, *, cards: int = 2, **styles: object) -> Node:
    """A node with few files: two cards, one CPU."""
    few: dict[str, object] = {"cpu_nodes": 1, "cores_per_node": 1, "threads_per_core": 1}
    return create(directory, cards=cards, clock=clock.now, sleep=clock.sleep, **(few | styles))  # type: ignore[arg-type]


def control_for(node: Node, clock: FakeClock, state: Path) -> AmdControl:
    """A fresh control, as a fresh process would have one, with its record in `state`."""
    control = emulated_control(node, clock=clock)
    control.store = Store(state)
    return control


def plan_for(control: AmdControl, mode: str | Mode, **options: object) -> Plan:
    """A plan for every card."""
    facts = control.read()
    wanted = Mode.parse(mode) if isinstance(mode, str) else mode
    return build(control, facts, {card.id: wanted for card in facts.cards}, **options)  # type: ignore[arg-type]


def switch(control: AmdControl, mode: str, *, limits: Limits = FAST, wait_s: float = 0.0, **options: object) -> Outcome:
    """Plan and carry out."""
    return carry_out(plan_for(control, mode, **options), control, limits=limits, wait_s=wait_s)


@dataclass(frozen=True)
class Truth:
    """The emulated driver's own state: per card its modes and KFD partitions, memory wishes, loaded or not."""

    loaded: bool
    memory: tuple[str, ...]
    compute: tuple[str | None, ...]
    partitions: tuple[tuple[int, ...], ...]
    wishes: tuple[str | None, ...]

    def is_in(self, mode: str | Mode) -> bool:
        """Whether every card is in `mode` with all its devices and no wish waits."""
        wanted = Mode.parse(mode) if isinstance(mode, str) else mode
        count = partitions_of(wanted.compute, 8)
        return (
            self.loaded
            and set(self.memory) == {wanted.memory}
            and set(self.compute) == {wanted.compute}
            and all(ids == tuple(range(count)) for ids in self.partitions)
            and set(self.wishes) == {None}
        )


def truth(node: Node) -> Truth:
    """Read the state machine itself."""
    node.refresh()
    state = node.state
    cards = range(len(state.cards))
    return Truth(
        state.loaded,
        tuple(state.memory_of(card) for card in cards),
        tuple(state.cards[card].compute for card in cards),
        tuple(tuple(sorted(p for c, p in state.kfd_order if c == card)) for card in cards),
        tuple(hive.wish for hive in state.hives),
    )


def hash_tree(root: Path, *, skip: tuple[str, ...] = ()) -> str:
    """A hash over every name, link, mode and content below `root`."""
    digest = hashlib.sha256()
    for folder, names, files in sorted(os.walk(root)):
        names.sort()
        for name in sorted([*names, *files]):
            path = Path(folder, name)
            if any(str(path.relative_to(root)).startswith(part) for part in skip):
                continue
            found = path.lstat()
            digest.update(f"{path.relative_to(root)}|{found.st_mode:o}|".encode())
            if path.is_symlink():
                digest.update(os.readlink(path).encode())
            elif path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


def story(act: Callable[[], Outcome]) -> tuple[str, DieplaceError | None]:
    """How a switch says it ended: its outcome word, `refused` for an error before anything began, and the error."""
    try:
        return act().word, None
    except DieplaceError as error:
        return str(error.facts.get("outcome") or "refused"), error


def without_faults(node: Node) -> None:
    """End every process, fault and slow start, as if the trouble were over."""
    node.clear_faults()
    state = node.state
    style = replace(state.style, slow_start_s=0.0, slow_eperm_s=0.0)
    node.replace_state(replace(state, processes=(), style=style))
