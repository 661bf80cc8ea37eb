"""What to say when nothing moves on: barrier deadlocks, and waves that spin until the step limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.isa.faults import BarrierDeadlock, IsaFault, Livelock
from dieplace.emulator.isa.memory import MemoryPort, Poll

if TYPE_CHECKING:
    from dieplace.emulator.isa.dispatch import Dispatch
    from dieplace.emulator.isa.schedule import Cohort

SHOWN = 6


def _workgroups(dispatch: Dispatch, waves: np.ndarray) -> str:
    ids = np.unique(dispatch.st.workgroup[waves])
    shown = ", ".join(str(int(i)) for i in ids[:SHOWN])
    return f"workgroup{'s' if len(ids) > 1 else ''} {shown}{', ...' if len(ids) > SHOWN else ''}"


def _barrier_groups(dispatch: Dispatch) -> list[dict[str, Any]]:
    waves = dispatch.at_barrier()
    found = []
    for block in np.unique(dispatch.waiting[waves]):
        own = waves[dispatch.waiting[waves] == block]
        inst = dispatch.st.program.blocks[int(block) - 1].last.inst
        found.append({
            "kernel": dispatch.st.program.name, "line": inst.line, "instruction": inst.text, "waves": len(own),
            "where": _workgroups(dispatch, own),
        })  # fmt: skip
    return found


def _sentence(group: dict[str, Any]) -> str:
    text = f"{group['waves']} wave(s) of {group['where']} at line {group['line']}: `{group['instruction']}`"
    return f"{text}, {group['poll']}" if group.get("poll") else text


def _deadlock(groups: list[dict[str, Any]], others: list[dict[str, Any]]) -> IsaFault:
    first = groups[0]
    text = "; ".join(map(_sentence, groups[:SHOWN]))
    spinning = "; ".join(map(_sentence, others[:SHOWN]))
    fault = BarrierDeadlock(
        f"a barrier cannot complete: {text}" + (f"; the rest never arrives: {spinning}" if spinning else ""),
        hint="let every wave of a workgroup that has not ended pass the same barriers",
        waiting=groups + others,
    )
    return fault.located(first["kernel"], first["line"], first["instruction"])


def deadlock(dispatches: Iterable[Dispatch]) -> IsaFault:
    """The fault for launches whose remaining waves all wait at barriers."""
    return _deadlock([group for dispatch in dispatches for group in _barrier_groups(dispatch)], [])


def livelock(cohorts: Iterable[Cohort], dispatches: Iterable[Dispatch], memory: MemoryPort, limit: int) -> IsaFault:
    """The fault at the step limit: what each group of waves was doing, and what it last read.

    It is a barrier deadlock when waves of a workgroup wait at a barrier and its other waves spin without loading from
    memory: what they wait for can only come from their own workgroup.
    """
    groups: list[dict[str, Any]] = []
    polls: list[Poll] = []
    blocked: list[dict[str, Any]] = []
    for cohort in cohorts:
        poll = _poll(cohort, memory)
        polls += [poll] if poll else []
        groups.append(_running(cohort, poll, memory))
        if poll is None and _holds_up_a_barrier(cohort):
            blocked.append(groups[-1])
    better = _from_port(polls, memory)
    if better is not None:
        return better
    waiting = [group for dispatch in dispatches for group in _barrier_groups(dispatch)]
    if blocked and waiting:
        return _deadlock(waiting, blocked)
    polled = polls[0] if polls else None
    fault = Livelock(
        f"{limit} wave instructions and no end: " + "; ".join(map(_sentence, [*groups, *waiting][:SHOWN])),
        hint="a flag that is waited for is never set, or workgroups wait for others that are not resident",
        waiting=groups + waiting,
    )
    line, text = (polled.line, polled.instruction) if polled else (groups[0]["line"], groups[0]["instruction"])
    return fault.located(groups[0]["kernel"], line, text)


def _running(cohort: Cohort, poll: Poll | None, memory: MemoryPort) -> dict[str, Any]:
    st = cohort.dispatch.st
    inst = st.program.blocks[cohort.block].steps[0].inst
    return {
        "kernel": st.program.name,
        "line": inst.line,
        "instruction": inst.text,
        "waves": len(cohort.waves),
        "where": _workgroups(cohort.dispatch, cohort.waves),
        "poll": _describe(poll, memory) if poll else "",
    }


def _holds_up_a_barrier(cohort: Cohort) -> bool:
    dispatch = cohort.dispatch
    waiting = np.unique(dispatch.st.slot[dispatch.at_barrier()])
    return bool(np.isin(dispatch.st.slot[cohort.waves], waiting).any())


def explained(cohorts: Iterable[Cohort], memory: MemoryPort) -> IsaFault | None:
    """What the port says about waves that have been loading without anybody storing; None when it knows nothing."""
    polls = [poll for cohort in cohorts if (poll := _poll(cohort, memory)) is not None]
    return _from_port(polls, memory)


def _from_port(polls: list[Poll], memory: MemoryPort) -> IsaFault | None:
    fault = memory.stalled(polls)
    if fault is None or fault.is_located or not polls:
        return fault
    return fault.located(polls[0].request.launch.program.name, polls[0].line, polls[0].instruction)


def _poll(cohort: Cohort, memory: MemoryPort) -> Poll | None:
    """The last load of any of these waves, when it was in the last tenth of the run: what they are polling."""
    st = cohort.dispatch.st
    best, latest = None, st.clock.now * 9 // 10
    for line, (request, data, when) in st.recent.items():
        if when >= latest and len(request.address) and np.isin(request.waves, cohort.waves).any():
            best, latest = Poll(request, data, request.inst.text, line), when
    return best


def _describe(poll: Poll, memory: MemoryPort) -> str:
    mine = 0
    address = int(poll.request.address[mine])
    table = getattr(memory, "table", None)
    where = table.describe(address) if table is not None else f"at {address:#x}"
    value = int.from_bytes(np.ascontiguousarray(poll.data[mine]).tobytes(), "little")
    return f"which last read {value:#x} {where} in line {poll.line}"
