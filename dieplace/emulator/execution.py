"""Runs FlyDSL kernels on an emulated MI355X: FlyDSL's own host code, the real gfx950 ISA, torch CPU tensors as memory.

    record = run(launcher, W, x, y, device="gpu0/p1", memory=hbm, roles={"W": "weights"})
    record.kernels[0].traffic.by_role()

    with Session(device=p0, memory=hbm) as session:     # any code that calls launchers or bound kernels
        layer(x)
    session.records

    with concurrent(seed=7):                            # launches on several devices run together, at the end
        first = run(producer, ..., device=p0)
        second = run(consumer, ..., device=p1)
    first.kernels                                       # filled in now

A tensor whose storage lies in `memory` has the home, role and class of its block; any other CPU tensor is host memory.
Launches are synchronous outside `concurrent`. Without a session a launcher runs on `gpu0/p0` of a DPX card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dieplace.codegen import host_runtime
from dieplace.codegen.flydsl import code_hash as isa_hash
from dieplace.codegen.host_runtime import HostLaunch
from dieplace.emulator.devices import XCDS, logical_device
from dieplace.emulator.isa import Launch, LogicalDevice, Program
from dieplace.emulator.isa import run as run_launches
from dieplace.emulator.isa.hierarchy import TwoDieMemory
from dieplace.emulator.isa.hierarchy_map import MappedBuffer
from dieplace.emulator.isa.hierarchy_watch import FlagEvent, OldLoads
from dieplace.emulator.isa.memory import Buffer, PlainMemory
from dieplace.emulator.isa.residency import resident_workgroups
from dieplace.emulator.isa.traffic import Traffic
from dieplace.emulator.tensors import block_of, home_of, mapped_buffers, merged
from dieplace.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from dieplace.emulator.hbm import EmulatedHBM
    from dieplace.machine import Device

STEP_LIMIT = 50_000_000  # wave-instructions


@dataclass(frozen=True)
class KernelRecord:
    """One kernel launch: its shape, what it executed, and what it moved (None with plain memory)."""

    name: str
    device: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    instructions: int  # wave-instructions
    by_kind: Mapping[str, int]
    traffic: Traffic | None
    old_loads: tuple[OldLoads, ...] = ()


@dataclass
class LaunchRecord:
    """What one call of a launcher did; `kernels` is empty until the launches of a `concurrent` block have run."""

    device: str
    seed: int | None
    code_hash: str | None = None  # of the device code that the launches came from
    kernels: tuple[KernelRecord, ...] = ()
    seconds: float = 0.0
    flag_events: tuple[FlagEvent, ...] = ()  # of all launches that ran together, in their order

    @property
    def instructions(self) -> int:
        """Wave-instructions of all kernels."""
        return sum(kernel.instructions for kernel in self.kernels)


@dataclass
class _Call:
    """One launcher call that is waiting to run."""

    launches: list[HostLaunch]
    device: LogicalDevice
    buffers: list[MappedBuffer]
    session: Session
    record: LaunchRecord


@dataclass
class Session:
    """How launches inside run, and their records.

    `two_die` False takes plain coherent memory (faster, no homes, no traffic). `poison` names launcher parameters whose
    bytes count as never written. `delay_turns` and `memory_options` are those of `TwoDieMemory`. `all_resident` refuses
    a grid that cannot be resident at once (kernels that wait for other workgroups), with `keep_free` places left over.
    """

    device: Device | LogicalDevice | str = "gpu0/p0"
    memory: EmulatedHBM | None = None
    role_of: Callable[[str], str | None] | None = None  # launcher parameter -> role, where no block says it
    roles: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    two_die: bool = True
    step_limit: int = STEP_LIMIT
    poison: tuple[str, ...] = ()
    delay_turns: int = 0
    all_resident: bool = False
    keep_free: int = 0
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    records: list[LaunchRecord] = field(default_factory=list)

    def __enter__(self) -> Session:
        from dieplace.codegen.flydsl import activate

        activate()
        self._token = _session.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _session.reset(self._token)


_session: ContextVar[Session | None] = ContextVar("session", default=None)
_queue: ContextVar[list[_Call] | None] = ContextVar("queue", default=None)


def run(launcher: Any, *args: Any, **options: Any) -> LaunchRecord:
    """Call `launcher` (a `@flyc.jit` function or a bound kernel) once; `options` are those of `Session`.

    Raises KernelFault and its kinds for what a device would not survive, CompileError when it does not compile.
    """
    with Session(**options) as session:
        launcher(*args)
    return session.records[-1]


@contextmanager
def concurrent(*, seed: int | None = None) -> Iterator[list[LaunchRecord]]:
    """Queue the launches made inside and run them together when the block ends; `seed` fixes the interleaving.

    Launches of one device and stream keep their order. Nothing runs when the block ends with an exception.
    """
    calls: list[_Call] = []
    records: list[LaunchRecord] = []
    token = _queue.set(calls)
    try:
        yield records
    finally:
        _queue.reset(token)
    _execute(calls, seed)
    records += [call.record for call in calls]


def implicit_session(arguments: Mapping[str, Any]) -> Session:
    """Where a launch outside any session runs: on the device that its tensors in emulated HBM were allocated for.

    Host tensors alone run on `gpu0/p0`; tensors of two devices are a UsageError that names both.
    """
    memory, device, first = None, None, ""
    for name, value in arguments.items():
        found = block_of(value)
        if found is None or found[1].device is None:
            continue
        if device is not None and found[1].device != device:
            raise UsageError(
                f"{first} was allocated for {device}, {name} for {found[1].device}",
                hint="say where it runs: with Session(device=...), or allocate on one device with policy=peer",
            )
        memory, device, first = found[0], found[1].device, first or name
    return Session() if device is None else Session(device=device, memory=memory)


def launch_call(arguments: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    """Let FlyDSL's host code make its launches for `arguments` (by parameter name), then run or queue them."""
    session = _session.get() or implicit_session(arguments)
    with host_runtime.collect() as launches:
        result = call()
    device = logical_device(session.device)
    record = LaunchRecord(device.name, session.seed, _code_hash(launches[0].isa) if launches else None)
    buffers = mapped_buffers(arguments, session.memory, session.roles, session.role_of)
    pending = _Call(list(launches), device, buffers, session, record)
    session.records.append(record)
    queue = _queue.get()
    if queue is None:
        _execute([pending], session.seed)
    else:
        queue.append(pending)
    return result


@lru_cache(maxsize=256)
def _code_hash(isa: str) -> str:
    return isa_hash(isa)


def _execute(calls: list[_Call], seed: int | None) -> None:
    if not any(call.launches for call in calls):
        return
    start = time.monotonic()
    session = _common(calls)
    buffers = merged([buffer for call in calls for buffer in call.buffers])
    memory = _memory(session, buffers, seed, max(max(call.device.xcds) for call in calls))
    for name in {name for call in calls for name in call.session.poison}:
        memory.poison(name)
    launches = [_launch(host, call) for call in calls for host in call.launches]
    try:
        stats = run_launches(launches, memory, seed=seed, step_limit=session.step_limit)
    finally:
        if isinstance(memory, TwoDieMemory):
            memory.flush()
    _fill(calls, stats, memory, time.monotonic() - start)


def _common(calls: list[_Call]) -> Session:
    """One session for launches that share memory; UsageError where theirs cannot be put together."""
    sessions = [call.session for call in calls]
    memories = {id(s.memory): s.memory for s in sessions if s.memory is not None}
    for what, values in (
        ("emulated HBM", memories),
        ("two_die", {s.two_die for s in sessions}),
        ("delay_turns", {s.delay_turns for s in sessions}),
    ):
        if len(values) > 1:
            raise UsageError(f"launches that run together differ in {what}", hint="give every launch the same")
    return replace(sessions[0], memory=next(iter(memories.values()), None))


def _memory(session: Session, buffers: list[MappedBuffer], seed: int | None, last_xcd: int) -> Any:
    if not session.two_die:
        return PlainMemory([Buffer(b.name, b.address, b.nbytes) for b in buffers])
    options = {"xcds": (last_xcd // XCDS + 1) * XCDS, "delay_turns": session.delay_turns, **session.memory_options}
    return TwoDieMemory(buffers, home_of(session.memory), seed=seed, **options)


def _launch(host: HostLaunch, call: _Call) -> Launch:
    program = Program.parse(host.isa, host.resources.name)
    launch = Launch(program, host.grid, host.block, host.kernarg, call.device, host.dynamic_lds_bytes, host.stream)
    if call.session.all_resident:
        require_resident(launch, call.session.keep_free)
    return launch


def require_resident(launch: Launch, keep_free: int = 0) -> None:
    """Unsupported when the grid needs more places than the device has, by the kernel's registers, LDS and waves."""
    places = resident_workgroups(launch)
    if launch.workgroups > places - keep_free:
        kept = f", {keep_free} kept free" if keep_free else ""
        raise Unsupported(
            f"kernel {launch.program.name}: {launch.workgroups} workgroups must be resident at once, "
            f"{launch.device.name} holds {places}{kept}",
            hint="use fewer workgroups, or fewer registers and less LDS in each",
            asked=launch.workgroups,
            places=places,
        )


def _fill(calls: list[_Call], stats: Any, memory: Any, seconds: float) -> None:
    index = 0
    for call in calls:
        kernels = []
        for host in call.launches:
            two_die = isinstance(memory, TwoDieMemory)
            kernels.append(
                KernelRecord(
                    name=host.resources.name,
                    device=call.device.name,
                    grid=host.grid,
                    block=host.block,
                    instructions=stats.launches[index].wave_instructions,
                    by_kind=stats.launches[index].by_kind,
                    traffic=memory.traffic.result(index) if two_die else None,
                    old_loads=tuple(o for o in memory.old_loads if o.first.launch == index) if two_die else (),
                )
            )
            index += 1
        call.record.kernels = tuple(kernels)
        call.record.seconds = seconds
        call.record.flag_events = tuple(memory.watch.events) if isinstance(memory, TwoDieMemory) else ()
