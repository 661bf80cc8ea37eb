"""The NVIDIA side of `link`: buffers on each visible GPU, arms as captured graphs or timed chases, and the Run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dieplace.backends.nvidia import binaries, timing
from dieplace.backends.nvidia.telemetry import read_all
from dieplace.conditions import Unknown, collect
from dieplace.experiments.harness import Plan
from dieplace.experiments.link import GIB, LATENCY_SETS, NOT_MI355X, SEED, STREAM_SETS
from dieplace.experiments.registry import Options
from dieplace.machine import Device, Machine
from dieplace.run import Point, Run

HOPS = 2048
CAPTURED_COPY_BYTES = 256 << 20  # smaller copies last less than their launch
BYTES_A_REPLAY = 2 * GIB  # half a millisecond at 4 TB/s: far above the grain of event timers


class NvidiaRig:
    """Arms on the GPUs that this process sees; use as a context manager, which notes what kernels ran.

    Buffers are torch's own on each GPU, and peer access is enabled by a copy each way; the executing GPU is named in
    each launch, whatever GPU the bytes lie on.
    """

    def __init__(self, machine: Machine) -> None:
        import torch

        seen = [d for d in machine.devices if d.runtime_index is not None]
        self.devices: dict[str, Device] = {d.id: d for d in sorted(seen, key=lambda d: d.runtime_index or 0)}
        self.readers = tuple(self.devices)
        self.machine = machine
        indices = [self._index(name) for name in self.readers]
        properties = [torch.cuda.get_device_properties(i) for i in indices]
        self.cache_bytes = max((p.L2_cache_size for p in properties), default=0)
        self.part = properties[0].name if properties else ""
        self._buffers: dict[tuple[str, str, int], Any] = {}
        self._random = random.Random(SEED)
        self._watch = binaries.watch()

    def __enter__(self) -> NvidiaRig:
        import torch

        self.launched = self._watch.__enter__()
        for a in self.readers:
            for b in self.readers:  # torch enables access from a to b in a copy between them
                torch.ones(1, device=f"cuda:{self._index(a)}").to(f"cuda:{self._index(b)}")
        return self

    def __exit__(self, *what: Any) -> None:
        self._watch.__exit__(*what)
        self._buffers.clear()

    def latency(self, reader: str, home: str, nbytes: int, cycles: list[float]) -> Callable[[], float]:
        """ns of one dependent load: a chase that begins at a random line each time; `cycles` gets the SM cycles."""
        import torch

        from dieplace.probes.triton_chase import LINE_BYTES, chain, chase

        home_index, index = self._index(home), self._index(reader)
        following = self._once("chain", home, nbytes, lambda: chain(nbytes, f"cuda:{home_index}", seed=SEED))
        out = torch.zeros(3, dtype=torch.int64, device=f"cuda:{index}")
        lines = nbytes // LINE_BYTES

        def sample() -> float:
            start = self._random.randrange(lines) * (LINE_BYTES // 4)
            chase(following, out, start=start, hops=HOPS, device=index)
            _, ticks, nanoseconds = out.tolist()
            cycles.append(ticks / (HOPS - 1))
            return float(nanoseconds) / (HOPS - 1)

        torch.cuda.synchronize(home_index)
        return sample

    def stream(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], float]:
        """ns of one pass over the working set: read, copy, torch_copy, pull, push or torch_pull."""
        launch = self._launch(kind, reader, home, nbytes)
        launches = [launch] * max(1, BYTES_A_REPLAY // nbytes)
        # A copy between devices cannot be captured from one of them. A captured local one of 1 GiB ran at 2,683 GB/s on
        # an H200 where one of 256 MiB ran at 4,116: users launch copies, so launched ones are the yardstick.
        alone = kind == "torch_pull" or (kind == "torch_copy" and nbytes >= CAPTURED_COPY_BYTES)
        make = timing.uncaptured if alone else timing.capture
        work = make(launches, self._index(reader))
        return lambda: timing.time_once(work)

    def together(self, kind: str, far: bool, nbytes: int) -> Callable[[], float]:
        """ns of one pass of the slower of two devices that work at the same time."""
        first, second = self.readers[:2]
        works = []
        for reader, other in ((first, second), (second, first)):
            named = "pull" if far and kind == "copy" else kind
            launch = self._launch(named, reader, other if far else reader, nbytes)
            works.append(timing.capture([launch] * max(4, 8 * GIB // nbytes), self._index(reader)))
        return lambda: max(timing.time_together(works))

    def telemetry(self) -> dict[str, Any]:
        """Clocks, power and temperature now, of the visible GPUs."""
        version, readings, why = read_all()
        visible = {d.bdf for d in self.devices.values()}
        return {
            "driver_version": version,
            "gpus": [r.to_json() for r in readings if r.bdf in visible],
            **({} if why is None else {"driver_version_why": why}),
            "clock_share": min((r.clock_share for r in readings if r.bdf in visible and r.clock_share), default=None),
        }

    def facts(self) -> dict[str, Any]:
        """What ran: hash of the kernels, hops, bytes a replay."""
        return {"hops": HOPS, "bytes_a_replay": BYTES_A_REPLAY, "cache_bytes": self.cache_bytes}

    def _launch(self, kind: str, reader: str, home: str, nbytes: int) -> Callable[[], None]:
        import torch

        from dieplace.probes import triton_stream

        index = self._index(reader)
        words = nbytes // 4
        mine, other = self._words(reader, "a")[:words], self._words(home, "b")[:words]
        if kind == "read":
            source = mine if home == reader else other
            out = torch.empty(triton_stream.programs_for(words), dtype=torch.int32, device=f"cuda:{index}")
            return lambda: (triton_stream.read(source, out, device=index), None)[1]
        target, source = (other, mine) if kind == "push" else (mine, other)
        if kind.startswith("torch"):
            return lambda: (target.copy_(source), None)[1]
        return lambda: triton_stream.copy(source, target, device=index)

    def _words(self, device: str, name: str) -> Any:
        import torch

        index, nbytes = self._index(device), STREAM_SETS[-1]
        make = lambda: torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=f"cuda:{index}")  # noqa: E731
        return self._once(name, device, nbytes, make)

    def _once(self, name: str, device: str, nbytes: int, make: Callable[[], Any]) -> Any:
        key = (name, device, nbytes)
        if key not in self._buffers:
            self._buffers[key] = make()
        return self._buffers[key]

    def _index(self, device: str) -> int:
        found = self.devices[device].runtime_index
        assert found is not None
        return found


def as_run(
    machine: Machine, rig: NvidiaRig, options: Options, plan: Plan, points: Sequence[Point], before: Mapping[str, Any]
) -> Run:
    """The Run with conditions before and after."""
    after = rig.telemetry()
    ran, why = hash_of(rig.launched)
    conditions = conditions_of(machine, after, ran, why, "link", f"{timing.TIMER}; %globaltimer for latency")
    return Run(
        experiment="link",
        block="-".join(name.partition("/")[0] for name in rig.readers),
        origin="measured",
        source=machine.source,
        points=tuple(points),
        conditions=conditions,
        workload={"name": "link", "latency_sets_bytes": list(LATENCY_SETS), "stream_sets_bytes": list(STREAM_SETS)},
        machine=without_serials(machine.to_json()),
        created=str(conditions["taken_at"]),
        label=options.label,
        seed=plan.seed,
        code_hash=ran,
        code_hash_why=why,
        notes=(NOT_MI355X,),
        facts={"telemetry_before": dict(before), "telemetry_after": after, "visible": list(rig.readers), **rig.facts()},
    )


def hash_of(launched: binaries.Launched) -> tuple[str | None, str | None]:
    """(hash of the machine code that ran, None), or (None, why)."""
    try:
        return binaries.code_hash(launched.binaries()), None
    except (LookupError, AttributeError) as error:
        return None, str(error)


def conditions_of(
    machine: Machine, telemetry: Mapping[str, Any], ran: str | None, why: str | None, workload: str, timer: str
) -> dict[str, Any]:
    """All conditions of a run on NVIDIA GPUs; clocks are those right after the work."""
    gpu = (telemetry["gpus"] or [{}])[0]

    def of(key: str) -> Any:
        value = gpu.get(key)
        return Unknown("the driver does not say") if value is None else float(value)

    return collect(
        machine,
        driver_version=telemetry["driver_version"] or Unknown("NVML does not answer"),
        code_hash=ran or Unknown(why or "no kernel was seen"),
        timer=timer,
        workload=workload,
        parameter_sets=Unknown("measured: no model was asked"),
        core_clock_mhz=of("sm_clock_mhz"),
        memory_clock_mhz=of("memory_clock_mhz"),
        power_w=of("power_w"),
        temperature_c=of("temperature_c"),
    )


def without_serials(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The machine without what tells one card of a model from another: a run file names nobody's hardware."""
    body = dict(machine)
    for group, key in (("cards", "uuid"), ("devices", "unique_id")):
        body[group] = [{**one, key: None, f"{key}_why": "left out of run files"} for one in machine[group]]
    return body
