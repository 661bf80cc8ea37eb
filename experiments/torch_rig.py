"""The measuring side of experiments on devices that torch drives: buffers near and far, arms as captured graphs.

One rig for NVIDIA GPUs and for the logical devices of AMD cards; what differs between vendors is in `rig_parts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from dieplace.backends import triton_binaries as binaries
from dieplace.backends.base import Execution, require
from dieplace.errors import PlacementError
from dieplace.experiments.rig_buffers import WORDS_BYTES, Buffers, PlacedBuffers, TorchBuffers
from dieplace.experiments.rig_parts import far_homes, no_far_because, parts_of, seen_devices
from dieplace.machine import Device, Machine
from dieplace.workload import Stage, Workload

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SEED = 20261130
HOPS = 2048
CALIBRATION_HOPS = 65536
CLOCK_TOLERANCE = 0.05
CAPTURED_COPY_BYTES = 256 << 20  # smaller copies last less than their launch
BYTES_A_REPLAY = 2 * GIB  # half a millisecond at 4 TB/s: far above the grain of event timers


class TorchRig:
    """Arms on the devices that this process sees; use as a context manager, which notes what kernels ran.

    The executing device is named in each launch, whatever device the bytes lie on. `placed` takes every buffer from the
    memory group, as a user's placed tensors are, so that the audit knows them: always on AMD, on request on NVIDIA,
    where buffers are torch's own on each GPU and a copy each way enables peer access. `words_bytes` is the largest
    working set of streams; `execution` stands in for the backend's in tests.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        placed: bool | None = None,
        words_bytes: int = WORDS_BYTES,
        execution: Execution | None = None,
    ) -> None:
        self.machine = machine
        self.parts = parts_of(machine.backend)
        seen = seen_devices(machine)
        self.devices: dict[str, Device] = {device.id: device for device in seen}
        self.readers = self.parts.readers(seen)
        self.cache_bytes, self.part = self.parts.cache_bytes(seen), self.parts.part(machine, seen)
        self.share_of_card = self.parts.share_of_card(machine, seen)
        self.timer, self.latency_clock = self.parts.timer, self.parts.latency_clock
        self.cycle_unit = self.parts.cycle_unit
        self.not_this_part = self.parts.note(self.part)
        in_group = self.parts.placed if placed is None else placed
        self.buffers: Buffers = (
            PlacedBuffers(machine, words_bytes) if in_group else TorchBuffers(self._index, words_bytes)
        )
        self.ns_scale = 1.0  # what a constant-rate tick is worth over what the probe takes it for
        self._execution = execution
        self._random = random.Random(SEED)
        self._watch = binaries.watch()

    def __enter__(self) -> TorchRig:
        self.launched = self._watch.__enter__()
        self.buffers.open(self.readers)
        if self.readers and self.parts.checks_clock:
            self.ns_scale = self._clock_scale(self.readers[0])
        return self

    def __exit__(self, *what: Any) -> None:
        self._watch.__exit__(*what)
        self.buffers.clear()

    @property
    def execution(self) -> Execution:
        """The backend's execution group, opened on first use."""
        if self._execution is None:
            self._execution = require(self.machine.require_session("launch"), "execution").execution
        return self._execution

    def far_homes(self, reader: str) -> dict[str, str]:
        """`same card` and `other card` to the device whose memory is that far; empty where there is no far memory."""
        return far_homes(self.machine, self.devices, self.devices[reader])

    def no_far_because(self, reader: str) -> str | None:
        """Why a device has no far memory here, or None."""
        return None if self.far_homes(reader) else no_far_because(self.machine, self.devices[reader])

    def latency(self, reader: str, home: str, nbytes: int, cycles: list[float]) -> Callable[[], float]:
        """ns of one dependent load: a chase that begins at a random line each time; `cycles` gets the core's cycles."""
        import torch

        from dieplace.probes.triton_chase import LINE_BYTES, chase

        index = self._executing(reader)
        following = self.buffers.chain(reader, home, nbytes, seed=SEED)
        out = torch.zeros(3, dtype=torch.int64, device=self.buffers.device(reader))
        lines = nbytes // LINE_BYTES
        with unreachable_told(home):
            chase(following, out, start=0, hops=2, device=index)

        def sample() -> float:
            start = self._random.randrange(lines) * (LINE_BYTES // 4)
            chase(following, out, start=start, hops=HOPS, device=index)
            _, ticks, nanoseconds = out.tolist()
            cycles.append(ticks / (HOPS - 1))
            return float(nanoseconds) * self.ns_scale / (HOPS - 1)

        self.execution.synchronize(self.devices[home])
        return sample

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]:
        """ns of one pass over the working set: read, copy, torch_copy, pull, push or torch_pull."""
        passes = max(1, BYTES_A_REPLAY // nbytes)
        # A copy between devices cannot be captured from one of them. A captured local one of 1 GiB ran at 2,683 GB/s on
        # an H200 where one of 256 MiB ran at 4,116: users launch copies, so launched ones are the yardstick.
        alone = kind == "torch_pull" or (kind == "torch_copy" and nbytes >= CAPTURED_COPY_BYTES)
        work = passes_of(kind, self._launch(kind, reader, home, nbytes), passes)
        with unreachable_told(home):
            prepared = self.execution.prepare(work, self.devices[reader], graph=not alone)
        return lambda: sum(self.execution.time(prepared)[0].samples_ns) / passes

    def together(self, kind: str, far: bool, nbytes: int) -> Callable[[], float]:
        """ns of one pass of the slower of two devices that work at the same time."""
        first, second = self.readers[:2]
        passes = max(4, 8 * GIB // nbytes)
        prepared = []
        for reader, other in ((first, second), (second, first)):
            named = "pull" if far and kind == "copy" else kind
            launch = self._launch(named, reader, other if far else reader, nbytes)
            with unreachable_told(other if far else reader):
                prepared.append(self.execution.prepare(passes_of(named, launch, passes), self.devices[reader]))
        return lambda: max(sum(one.samples_ns) for one in self.execution.time(*prepared)) / passes

    def telemetry(self) -> dict[str, Any]:
        """Clocks, power and temperature now, of the visible cards."""
        bdfs = sorted({self.machine.card(d.card).bdf for d in self.devices.values()})
        version, readings, why = self.parts.telemetry(self.machine, bdfs)
        shares = [r.clock_share for r in readings if r.bdf in bdfs and r.clock_share]
        return {
            "driver_version": version,
            "gpus": [r.to_json() for r in readings if r.bdf in bdfs],
            **({} if why is None else {"driver_version_why": why}),
            "clock_share": min(shares, default=None),
        }

    def facts(self) -> dict[str, Any]:
        """What ran: hops, bytes a replay, the last cache; where buffers were placed, what the audit says of them."""
        told: dict[str, Any] = {"hops": HOPS, "bytes_a_replay": BYTES_A_REPLAY, "cache_bytes": self.cache_bytes}
        if self.parts.checks_clock:
            told["constant_clock_scale"] = self.ns_scale
        return told | self.buffers.facts()

    def _launch(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], None]:
        import torch

        from dieplace.probes import triton_stream

        index, words = self._executing(reader), nbytes // 4
        mine = self.buffers.words(reader, reader, "a")[:words]
        other = self.buffers.words(reader, home, "b")[:words]
        if kind == "read":
            source = mine if home == reader else other
            programs = triton_stream.programs_for(words)
            out = torch.empty(programs, dtype=torch.int32, device=self.buffers.device(reader))
            return lambda: (triton_stream.read(source, out, device=index), None)[1]
        target, source = (other, mine) if kind == "push" else (mine, other)
        if kind.startswith("torch"):
            return lambda: (target.copy_(source), None)[1]
        return lambda: triton_stream.copy(source, target, device=index)

    def _clock_scale(self, reader: str) -> float:
        """Device events over the constant-rate clock, for one long chase; 1 where they agree within 5 %."""
        import torch

        from dieplace.probes.triton_chase import chase

        index = self._executing(reader)
        following = self.buffers.chain(reader, reader, 4 * MIB, seed=SEED)
        out = torch.zeros(3, dtype=torch.int64, device=self.buffers.device(reader))
        work = Workload.of_launches(
            "chase", [lambda: chase(following, out, start=0, hops=CALIBRATION_HOPS, device=index)]
        )
        prepared = self.execution.prepare(work, self.devices[reader], graph=False)
        by_event = median(self.execution.time(prepared)[0].samples_ns[0] for _ in range(3))
        by_clock = float(out[2].item())
        return scale_of(by_event, by_clock)

    def _executing(self, reader: str) -> int | None:
        """What the probes take as the executing device; None where tensors are the host's, as on the emulated card."""
        return self._index(reader) if self.buffers.device(reader).startswith("cuda") else None

    def _index(self, device: str) -> int:
        found = self.devices[device].runtime_index
        assert found is not None
        return found


@contextmanager
def unreachable_told(home: str) -> Iterator[None]:
    """PlacementError where Triton's launcher asks the runtime about a pointer and does not like the answer."""
    try:
        yield
    except ValueError as error:
        if "accessed from Triton" not in str(error):
            raise
        raise PlacementError(f"Triton's launcher refuses a pointer into the memory of {home}: {error}") from error


def scale_of(by_event_ns: float, by_clock_ns: float) -> float:
    """What to multiply the constant-rate clock's ns by; 1 for a small difference, which is the launch itself."""
    if by_clock_ns <= 0:
        return 1.0
    ratio = by_event_ns / by_clock_ns
    return 1.0 if abs(ratio - 1) <= CLOCK_TOLERANCE else ratio


def passes_of(kind: str, launch: Callable[[], object], passes: int) -> Workload:
    """Work of one stage that goes over its operands again and again."""
    return Workload(kind, (Stage(kind, repeats=passes, launches=(launch,) * passes),), bytes_from="not counted")


def hash_of(launched: binaries.Launched) -> tuple[str | None, str | None]:
    """(hash of the machine code that ran, None), or (None, why)."""
    try:
        return binaries.code_hash(launched.binaries()), None
    except (LookupError, AttributeError) as error:
        return None, str(error)


def without_serials(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The machine without what tells one card of a model from another: a run file names nobody's hardware."""
    body = dict(machine)
    for group, keys in (("cards", ("uuid", "unique_id")), ("devices", ("unique_id",))):
        body[group] = [_without(one, keys) for one in machine[group]]
    return body


def _without(one: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    told = {f"{key}_why": "left out of run files" for key in keys if key in one}
    return {**one, **dict.fromkeys((key for key in keys if key in one), None), **told}
