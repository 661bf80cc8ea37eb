"""A handle on an emulated node: every event is one locked step from state to state, then the tree follows."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dieplace.errors import NoSuchDevice, UsageError

from . import driver, store
from .entries import Entries, driven_cards, live_partitions
from .state import Fault, NodeState, Process
from .tree import tree
from .view import NodeSysfs

STEPS = ("write_compute", "write_memory", "unload", "load", "nps_switch", "kfd_init", "read")
DELAY_STEP_S = 2.0


class Node:
    """A handle on a node; several handles, in several processes, see one state."""

    def __init__(self, directory: Path, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.directory = directory
        self.clock = clock
        self._sleep = sleep
        self.on_delay: Callable[[float], None] | None = None  # hears every DELAY_STEP_S how long an event has slept
        self._mark = (0, 0, 0)
        self._state = store.read_state(directory)
        self._built: tuple[NodeState | None, Entries] = (None, {})  # the tree last made here, and of which state
        self.refresh()

    @property
    def state(self) -> NodeState:
        """The state as last read; `refresh` brings it up to date, and every event and Sysfs access does."""
        return self._state

    @property
    def boot_id(self) -> str:
        """The kernel's boot id."""
        self.refresh()
        return self._state.boot_id

    @property
    def generation_id(self) -> int:
        """KFD's generation id: grows with every logical device that comes or goes."""
        self.refresh()
        return self._state.generation

    @property
    def loaded(self) -> bool:
        """Whether the driver is loaded."""
        self.refresh()
        return self._state.loaded

    @property
    def uid(self) -> int:
        """The virtual user that commands run as; 0 is root."""
        self.refresh()
        return self._state.uid

    @property
    def log(self) -> tuple[str, ...]:
        """The kernel log, oldest line first."""
        self.refresh()
        return self._state.log

    def bdfs(self) -> tuple[str, ...]:
        """PCI addresses of the cards in probe order."""
        return tuple(card.bdf for card in self._state.cards)

    def sysfs(self, *, uid: int | None = None, hidden_cards: tuple[int, ...] = ()) -> NodeSysfs:
        """The tree as the virtual user sees it; `hidden_cards` are outside the viewer's device cgroup."""
        return NodeSysfs(self, uid=uid, hidden_cards=hidden_cards)

    def refresh(self) -> None:
        """Take over what other processes did, let due cards appear, and finish a tree that a killed process left."""
        mark = store.state_mark(self.directory)
        if mark != self._mark:
            self._state, self._mark = store.read_state(self.directory), mark
            if not store.tree_is_current(self.directory, self._state):
                self._step(lambda state: (state, None), rewrite=True)
        if driver.settle(self._state, self.clock()) is not self._state:
            self._step(lambda state: (state, None))

    def fire(self, event: str, bdf: str, word: str, *, path: str | None = None) -> None:
        """One write to a file of a card, by the event's name; OSError with the driver's errno."""
        index = self._state.index(bdf)
        if index is None:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), path or bdf)
        self._delay(event)
        act = getattr(driver, event)
        self._raise(self._step(lambda state: act(state, index, word)), path or bdf)

    def write_compute(self, bdf: str, word: str) -> None:
        """Write a compute mode to a card; OSError EINVAL, EBUSY, EPERM (reset), EACCES, EIO or ENODEV."""
        self.fire("write_compute", bdf, word)

    def write_memory(self, bdf: str, word: str) -> None:
        """Record a memory mode for the card's whole hive; OSError EINVAL, EPERM (reset), EACCES or ENODEV."""
        self.fire("write_memory", bdf, word)

    def unload(self) -> None:
        """Remove the driver; OSError EAGAIN while something uses it, EPERM for a virtual non-root user."""
        self._delay("unload")
        self._raise(self._step(driver.unload), "amdgpu")

    def load(self) -> None:
        """Insert the driver; OSError EINVAL where no compute mode fits the memory mode."""
        self._delay("load")
        self._raise(self._step(lambda state: driver.load(state, self.clock())), "amdgpu")

    def reload(self) -> None:
        """Unload, then load."""
        self.unload()
        self.load()

    def reboot(self, keep_memory_mode: bool | None = None) -> None:
        """A new boot; whether the memory mode survives is the node's style unless given."""
        keep = self._state.style.nps_after_reboot == "keep" if keep_memory_mode is None else keep_memory_mode
        self._raise(self._step(lambda state: driver.reboot(state, self.clock(), keep)), "reboot")

    def begin_reset(self, bdf: str) -> None:
        """The card's mode files answer EPERM until `end_reset`."""
        self._set_card(bdf, in_reset=True)

    def end_reset(self, bdf: str) -> None:
        """The reset is over."""
        self._set_card(bdf, in_reset=False)

    def forget_mode(self, bdf: str) -> None:
        """The driver no longer knows the card's compute mode: the file reads UNKNOWN and KFD has no node of it."""
        self._set_card(bdf, compute=None)

    def become(self, uid: int) -> None:
        """Change the virtual user."""
        self._step(lambda state: (replace(state, uid=uid), None))

    def start_process(
        self,
        name: str = "python3",
        *,
        pid: int | None = None,
        host_pid: int | None = None,
        uid: int = 0,
        cgroup: str = "0::/user.slice",
        kfd: bool = True,
        render: tuple[str, ...] = (),
        excluded_cards: tuple[int, ...] = (),
        vram_bytes: int = 0,
        in_this_pid_namespace: bool = True,
    ) -> int:
        """Start somebody who uses cards and return the pid.

        With `kfd` it opens /dev/kfd and so attaches to every card that its device cgroup does not exclude, whatever
        it was told to see; `render` names open render nodes (`gpu0/p1`, `0000:05:00.0/p1`). OSError ENOENT: no driver.
        """

        def begin(state: NodeState) -> driver.Outcome:
            if not state.loaded:
                return state, errno.ENOENT
            number = pid if pid is not None else 20000 + max([0, *(p.pid - 19999 for p in state.processes)])
            outside = host_pid if host_pid is not None else number + (0 if in_this_pid_namespace else 100000)
            attached = tuple(c for c in driven_cards(state) if kfd and c not in excluded_cards)
            opened = tuple(_logical(state, item) for item in render)
            process = Process(
                number, outside, name, uid, cgroup, kfd, attached, opened, vram_bytes, in_this_pid_namespace
            )
            others = tuple(p for p in state.processes if p.pid != number)
            return replace(state, processes=(*others, process)), None

        self._raise(self._step(begin), "/dev/kfd")
        return self._state.processes[-1].pid

    def close_descriptors(self, pid: int) -> None:
        """The process closes its device files and stays in KFD: a ghost, gone only when it exits."""
        self._processes(lambda p: replace(p, kfd_open=False, render=()) if p.pid == pid else p)

    def end_process(self, pid: int) -> None:
        """The process exits."""
        self._processes(lambda p: None if p.pid == pid else p)

    def inject(
        self, step: str, error: int | str | None = None, *, card: int | None = None, times: int | None = 1,
        seconds: float = 0.0, path: str | None = None, status: str | None = None,
    ) -> None:  # fmt: skip
        """Make a step fail: `error` is an errno or its name, `times` None is for ever, `seconds` a delay first.

        Steps: write_compute, write_memory, unload, load; nps_switch (the wish is dropped at unload); kfd_init (the card
        loses its KFD nodes, EIO); read (with `path`, a pattern); `smi:<call>` with `status`, for a layer above.
        """
        if step not in STEPS and not step.startswith("smi:"):
            raise UsageError(f"no step {step!r} can be made to fail", hint=f"steps are {', '.join(STEPS)}, smi:CALL")
        if step == "read" and not path:
            raise UsageError("a read fault needs the path it is for", hint="give an absolute path; * matches anything")
        fault = Fault(step, _errno(error), card, times, seconds, path, status)
        self._step(lambda state: (replace(state, faults=(*state.faults, fault)), None))

    def take_fault(self, step: str, card: int | None = None) -> Fault | None:
        """Use up the first fault for this step, if there is one."""
        taken: list[Fault | None] = []

        def take(state: NodeState) -> driver.Outcome:
            state, fault = driver.take_fault(state, step, card)
            taken.append(fault)
            return state, None

        self._step(take)
        return taken[0]

    def clear_faults(self) -> None:
        """Forget every fault that has not happened yet."""
        self._step(lambda state: (replace(state, faults=()), None))

    def replace_state(self, state: NodeState) -> None:
        """Put another state in the place of this one, as one event."""
        self._step(lambda _: (state, None))

    def note(self, line: str) -> None:
        """Add a line to the kernel log."""
        self._step(lambda state: (driver.noted(state, line), None))

    def _set_card(self, bdf: str, **changes: Any) -> None:
        index = self._state.index(bdf)
        if index is None:
            raise NoSuchDevice(f"no card {bdf} on this node", hint=f"there is {', '.join(self.bdfs())}")
        self._step(lambda state: (state.with_card(index, **changes), None))

    def _processes(self, change: Callable[[Process], Process | None]) -> None:
        def act(state: NodeState) -> driver.Outcome:
            left = tuple(p for p in map(change, state.processes) if p is not None)
            return replace(state, processes=left), None

        self._step(act)

    def _delay(self, step: str) -> None:
        self.refresh()
        fault = next((f for f in self._state.faults if f.step == step and f.seconds), None)
        if fault is not None:
            self._sleep_told(fault.seconds)
            if fault.error is None:
                self.take_fault(step)

    def _sleep_told(self, seconds: float) -> None:
        if self.on_delay is None:
            self._sleep(seconds)
            return
        slept = 0.0
        while slept < seconds:
            part = min(DELAY_STEP_S, seconds - slept)
            self._sleep(part)
            slept += part
            if slept < seconds:
                self.on_delay(slept)

    def _step(self, act: Callable[[NodeState], driver.Outcome], rewrite: bool = False) -> int | None:
        with store.locked(self.directory):
            old = store.read_state(self.directory)
            state, error = act(driver.settle(old, self.clock()))
            current = store.tree_is_current(self.directory, old)
            if state != old:
                state = replace(state, revision=old.revision + 1)
                store.write_state(self.directory, state)
            if state != old or rewrite or not current:
                before = None if not current else self._built[1] if self._built[0] == old else tree(old)
                self._built = (state, tree(state))
                store.write_tree(self.directory, self._built[1], state.revision, before)
            self._state, self._mark = state, store.state_mark(self.directory)
        return error

    def _raise(self, error: int | None, what: str) -> None:
        if error is not None:
            raise OSError(error, os.strerror(error), what)


def _logical(state: NodeState, name: str) -> tuple[int, int]:
    for card, item in enumerate(state.cards):
        for p in live_partitions(state, card):
            if name in (f"gpu{card}/p{p}", f"{item.bdf}/p{p}"):
                return card, p
    raise NoSuchDevice(f"no logical device {name!r} on this node", hint="write gpuN/pM or BDF/pM", asked=name)


def _errno(error: int | str | None) -> int | None:
    if error is None or isinstance(error, int):
        return error
    code = getattr(errno, error.upper(), None)
    if not isinstance(code, int):
        raise UsageError(f"no error is called {error!r}", hint="write its errno name, for example EBUSY")
    return code
