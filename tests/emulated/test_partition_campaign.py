"""The fault campaign: a switch may fail in any way, but what it says at the end must be true.

Each case is a (direction, step, status, kill, holder, slow start) on a private emulated node under an injected clock.
What the switch says is compared with the emulated driver's own state.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from partition_support import FAST, FakeClock, control_for, plan_for, small_node, story, truth, without_faults

from dieplace.emulator.node import Node, NodeState, open_node
from dieplace.errors import Unsupported
from dieplace.partition import execute, run
from dieplace.partition.control import Answer
from dieplace.partition.entry import carry_out, plan_restore
from dieplace.partition.journal import Record, live_wishes, standing

DIRECTIONS = (("SPX/NPS1", "DPX/NPS2"), ("SPX/NPS1", "QPX/NPS2"), ("DPX/NPS2", "SPX/NPS1"), ("SPX/NPS1", "DPX/NPS1"))
STEPS = ("set_memory", "unload", "load", "set_compute gpu0", "set_compute gpu1", "none")
# errno: the driver refuses. lie: success is claimed, nothing done. did-*: done, then another answer. silent: not done,
# no answer. other: somebody else reloads the driver first. nps-fails / kfd-fails: the driver's own later failures.
STATUSES = ("EINVAL", "EBUSY", "EPERM", "EACCES", "EIO", "ENXIO", "ETIMEDOUT", "lie", "did-unknown", "did-refused-late",
            "silent", "other", "nps-fails", "kfd-fails")  # fmt: skip
KILLS = ("none", "before", "after")
HOLDERS = ("none", "compute", "ghost", "drm", "leaves", "late")
START: dict[str, dict[str, float]] = {
    "none": {},
    "slow": {"slow_start_s": 30.0},
    "eperm": {"slow_eperm_s": 20.0},
    "never": {"slow_start_s": 900.0},
}
SLOW = tuple(START)
CASES = 1040


@dataclass(frozen=True)
class Case:
    start: str
    target: str
    step: str
    status: str
    kill: str
    holder: str
    slow: str


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the product catches it, and the lock goes with its descriptor."""


class Saboteur:
    """A control that misbehaves once, at one step; everything else is passed on to the real one."""

    def __init__(self, inner: Any, node: Node, case: Case) -> None:
        self._inner, self._node, self._case, self._used = inner, node, case, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_memory(self, bdf: str, word: str) -> Answer:
        return self._at("set_memory", lambda: self._inner.set_memory(bdf, word))

    def set_compute(self, bdf: str, word: str) -> Answer:
        name = f"gpu{self._node.bdfs().index(bdf)}"
        return self._at(f"set_compute {name}", lambda: self._inner.set_compute(bdf, word))

    def unload(self, *arguments: Any) -> Answer:
        return self._at("unload", lambda: self._inner.unload(*arguments))

    def load(self, *arguments: Any) -> Answer:
        return self._at("load", lambda: self._inner.load(*arguments))

    def _at(self, step: str, act: Any) -> Answer:
        if step != self._case.step or self._used:
            return act()
        self._used = True
        if self._case.kill == "before":
            raise Killed
        if self._case.holder == "late":
            self._node.start_process("latecomer", kfd=True) if self._node.loaded else None
        answer = self._act(step, act)
        if self._case.kill == "after":
            raise Killed
        return answer

    def _act(self, step: str, act: Any) -> Answer:
        event = step.split()[0].replace("set_", "write_")
        match self._case.status:
            case "lie":
                return Answer("ok", "saboteur", "nothing was done")
            case "did-unknown":
                return Answer("unknown", "saboteur", act().detail, name="TIMEOUT")
            case "did-refused-late":
                answer = act()
                return answer if not answer.ok else Answer("broken", "saboteur", "late failure", 42, "UNEXPECTED_SIZE")
            case "silent":
                return Answer("hung", "saboteur", "no answer")
            case "other":
                if not self._node.state.processes:
                    self._node.reload() if self._node.loaded else self._node.load()
                return act()
            case "nps-fails":
                self._node.inject("nps_switch", times=None)
                return act()
            case "kfd-fails":
                self._node.inject("kfd_init", "EIO")
                return act()
            case errno_name:
                self._node.inject(event, errno_name)
                return act()


def all_cases() -> Iterator[Case]:
    """The whole product; where nothing is sabotaged, a status or a kill would only repeat the case."""
    for (start, target), step, status, kill, holder, slow in itertools.product(
        DIRECTIONS, STEPS, STATUSES, KILLS, HOLDERS, SLOW
    ):
        if step != "none" or (status, kill) == (STATUSES[0], KILLS[0]):
            yield Case(start, target, step, status, kill, holder, slow)


def sample(count: int) -> list[Case]:
    """A seeded choice without repeats: every (step, status, kill) at least once in a switch that has that step, and a
    quarter only of the cases that a holder stops before their step."""
    dice = random.Random(20261130)
    every = [c for c in all_cases() if c.holder not in ("compute", "ghost", "drm") or dice.random() < 0.25]
    dice.shuffle(every)
    first: dict[tuple[str, ...], Case] = {}
    for case in every:
        has_step = case.target == "QPX/NPS2" and case.holder in ("none", "late")
        if has_step:
            first.setdefault((case.step, case.status, case.kill), case)
    unspoilt = [case for case in every if case.step == "none"]
    chosen = dict.fromkeys([*first.values(), *unspoilt, *every])
    return list(chosen)[:count]


@functools.cache
def fresh(start: str) -> NodeState:
    """The state of a new node in this mode."""
    with tempfile.TemporaryDirectory() as folder:
        return small_node(Path(folder, "node"), FakeClock(), mode=start).state


def prepare(case: Case, home: Path) -> tuple[Node, FakeClock]:
    """A node in a new node's state; its folder is that of the case before, brought in line, which is much quicker."""
    clock = FakeClock()
    if not (home / "node").exists():
        small_node(home / "node", clock)
    node = open_node(home / "node", clock=clock.now, sleep=clock.sleep)
    state = fresh(case.start)
    node.replace_state(replace(state, style=replace(state.style, **START[case.slow])))
    if case.holder in ("compute", "ghost", "leaves"):
        pid = node.start_process("holder")
        if case.holder == "ghost":
            node.close_descriptors(pid)
        if case.holder == "leaves":
            clock.at(5, lambda: node.end_process(pid))
    elif case.holder == "drm":
        node.start_process("viewer", kfd=False, render=("gpu1/p0",))
    return node, clock


def check(case: Case, home: Path) -> str:
    """Run one case; returns what the switch said. Raises AssertionError where it was not true."""
    node, clock = prepare(case, home)
    state = home / "state"
    control = Saboteur(control_for(node, clock, state), node, case)
    plan = plan_for(control, case.target, allow_unvalidated=True)  # type: ignore[arg-type]
    try:
        word, error = story(lambda: carry_out(plan, control, limits=FAST, wait_s=20.0))  # type: ignore[arg-type]
    except Killed:
        word, error = "killed", None
    after, record = truth(node), Record(control.store)
    where = f"{case}: said {word} ({error}), truth {after}"
    known = {wish.memory for wish in live_wishes(record, control_for(node, clock, state).read())}
    assert set(after.wishes) - {None} <= known, f"a pending memory mode was forgotten; {where}"
    if word == "done":
        assert after.is_in(case.target), f"false success; {where}"
    elif word in ("refused", "unchanged", "rolled-back"):
        assert after.is_in(case.start), f"false claim that nothing changed; {where}"
    elif word == "pending":
        # The wish cannot be read back, so where the driver lies about it, pending is all that can be known.
        lied = (case.step, case.status) == ("set_memory", "lie")
        assert lied or set(after.wishes) != {None}, f"told as pending, but nothing is; {where}"
    else:
        assert word in ("killed", "unknown", "not-verified"), where
        facts = control_for(node, clock, state).read()
        assert standing(record, facts) or after.is_in(case.start) or after.is_in(case.target), f"not told; {where}"
    if word not in ("done", "refused", "unchanged"):
        recover(case, node, clock, state, where)
    return word


def recover(case: Case, node: Node, clock: FakeClock, state: Path, where: str) -> None:
    """When the trouble is over, `restore` leads back, from wherever it stopped."""
    without_faults(node)
    clock.sleep(1000)
    control = control_for(node, clock, state)
    try:
        outcome = carry_out(plan_restore(control), control, limits=FAST)
    except Unsupported:
        assert truth(node).is_in(case.start), f"nothing on record, but the node changed; {where}"
        return
    assert outcome.word in ("done", "already"), where
    assert truth(node).is_in(case.start), f"restore claims success; {where}; now {truth(node)}"
    assert Record(control.store).journal() is None and not Record(control.store).wishes(), where


def campaign(cases: list[Case], home: Path) -> Counter[str]:
    words: Counter[str] = Counter()
    for case in cases:
        words[check(case, home)] += 1
        shutil.rmtree(home / "state", ignore_errors=True)
    return words


def report(cases: list[Case], words: Counter[str]) -> str:
    lines = [f"{len(cases)} cases; said: {dict(words.most_common())}"]
    for name in ("target", "step", "status", "kill", "holder", "slow"):
        lines.append(f"  {name}: {dict(Counter(getattr(case, name) for case in cases).most_common())}")
    return "\n".join(lines)


def test_a_switch_never_says_what_is_not_true_in_some_cases(memory_path: Path) -> None:
    cases = sample(CASES)[::40]
    words = campaign(cases, memory_path)
    print(report(cases, words))
    assert {"done", "killed"} <= set(words)


@pytest.mark.slow
def test_a_switch_never_says_what_is_not_true_in_the_whole_campaign(memory_path: Path) -> None:
    cases = sample(CASES)
    words = campaign(cases, memory_path)
    print(report(cases, words))
    assert len(set(cases)) == CASES >= 1000
    counts = {
        name: Counter(getattr(case, name) for case in cases) for name in ("step", "status", "kill", "holder", "slow")
    }
    assert all(min(counter.values()) >= 15 for counter in counts.values())
    assert {"done", "refused", "unchanged", "rolled-back", "pending", "unknown", "not-verified", "killed"} <= set(words)


def test_the_campaign_catches_a_planted_false_success(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verification cut out, a driver that drops the memory wish is reported as done: the check must see it."""
    case = Case("SPX/NPS1", "DPX/NPS2", "unload", "nps-fails", "none", "none", "none")
    monkeypatch.setattr(run, "mismatches", lambda *a: ())
    monkeypatch.setattr(execute, "mismatches", lambda *a: ())
    with pytest.raises(AssertionError, match="false success"):
        check(case, memory_path)


def test_the_campaign_catches_a_planted_false_rollback(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that forgets its pending wish and claims that nothing changed is caught too."""
    case = Case("SPX/NPS1", "DPX/NPS2", "unload", "ETIMEDOUT", "none", "none", "none")
    monkeypatch.setattr(Record, "put_wish", lambda self, wish: None)
    with pytest.raises(AssertionError, match="forgotten"):
        check(case, memory_path)
