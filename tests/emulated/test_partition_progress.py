"""While a driver reload blocks, the user hears about it: elapsed time, pid and state, every few seconds."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
from partition_support import FAST, FakeClock, control_for, plan_for, small_node, truth

from dieplace.backends.amd import reload
from dieplace.backends.amd.reload import ModprobeReloader, wait_for
from dieplace.errors import Pending
from dieplace.partition.control import TICK_S, Answer, Limits, Tick, silent
from dieplace.partition.entry import carry_out

STILL = re.compile(r"still (un)?loading the driver, (\d+) s of at most (\d+) s")


def slow_wait(clock: FakeClock, ends_s: float) -> reload.Wait:
    """A program that takes `ends_s` by the injected clock, whatever it takes by the real one."""

    def wait(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        clock.sleep(seconds)
        if clock.time < ends_s:
            return None
        return wait_for(process, 30)

    return wait


class SlowModprobe(ModprobeReloader):
    """The live reloader: a real child process for modprobe, which acts on an emulated node when it ends."""

    def __init__(self, node: object, program: Path, clock: FakeClock, seconds: float) -> None:
        super().__init__(str(program), wait=lambda process, part: self._now(process, part))
        self.node, self.clock, self.seconds, self.ends = node, clock, seconds, 0.0

    def _now(self, process: subprocess.Popen[bytes], part: float) -> bytes | None:
        return slow_wait(self.clock, self.ends)(process, part)

    def unload(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        return self._then("unload", super().unload, timeout_s, keep_open, tick)

    def load(self, timeout_s: float, keep_open: tuple[int, ...], tick: Tick = silent) -> Answer:
        return self._then("load", super().load, timeout_s, keep_open, tick)

    def _then(self, event: str, run: object, timeout_s: float, keep_open: tuple[int, ...], tick: Tick) -> Answer:
        self.ends = self.clock.time + self.seconds
        answer: Answer = run(timeout_s, keep_open, tick)  # type: ignore[operator]
        if answer.ok:
            getattr(self.node, event)()
        return answer


@pytest.fixture
def program(memory_path: Path) -> Path:
    path = memory_path / "modprobe"
    path.write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
    path.chmod(0o755)
    return path


def test_a_blocking_modprobe_is_told_about_every_few_seconds(memory_path: Path, program: Path) -> None:
    clock, said = FakeClock(), list[tuple[float, str]]()
    node = small_node(memory_path / "node", clock)
    control = control_for(node, clock, memory_path / "state")
    control.reloader = SlowModprobe(node, program, clock, 25.0)
    plan = plan_for(control, "DPX/NPS2")
    outcome = carry_out(plan, control, limits=FAST, progress=lambda text: said.append((clock.time, text)))
    assert outcome.word == "done" and truth(node).is_in("DPX/NPS2")
    still = [(moment, match) for moment, text in said if (match := STILL.search(text))]
    for unloading in ("un", None):
        seconds = [int(match.group(2)) for _, match in still if match.group(1) == unloading]
        assert seconds == list(range(2, 26, 2)), "elapsed time, each line later than the one before"
    moments = [moment for moment, _ in said]
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) <= 5.0
    assert all(re.search(r"\(modprobe, pid \d+, state [A-Z?]\)", text) for _, text in said if STILL.search(text))


def test_one_that_never_ends_is_told_about_until_the_limit_and_not_killed(memory_path: Path, program: Path) -> None:
    clock, said = FakeClock(), list[str]()
    node = small_node(memory_path / "node", clock)
    control = control_for(node, clock, memory_path / "state")
    control.reloader = SlowModprobe(node, program, clock, 1e9)
    with pytest.raises(Pending, match="did not end within 33 s"):
        carry_out(plan_for(control, "DPX/NPS2"), control, limits=Limits(unload_s=33), progress=said.append)
    assert sum(bool(STILL.search(text)) for text in said) == 16
    assert truth(node).wishes == ("NPS2",)


def test_a_quick_one_says_nothing_more(memory_path: Path, program: Path) -> None:
    ticks: list[float] = []
    reloader = ModprobeReloader(str(program))
    assert reloader.unload(60, (), lambda elapsed_s, what: ticks.append(elapsed_s)).ok and ticks == []


def test_a_slow_event_of_an_emulated_node_is_told_about_too(memory_path: Path) -> None:
    clock, said = FakeClock(), list[str]()
    node = small_node(memory_path / "node", clock)
    node.inject("unload", seconds=11.0)
    control = control_for(node, clock, memory_path / "state")
    carry_out(plan_for(control, "DPX/NPS2"), control, limits=FAST, progress=said.append)
    seconds = [int(match.group(2)) for text in said if (match := STILL.search(text))]
    assert seconds == [2, 4, 6, 8, 10] and TICK_S == 2.0
