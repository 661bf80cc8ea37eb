"""The execution group: one seam over devices that torch drives, on a stand-in whose clock the test owns."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
from fake_cuda import FakeCuda

from dieplace.backends import torch_timing as timing
from dieplace.backends.base import require
from dieplace.backends.prefix_timing import stage_times_by_prefix
from dieplace.backends.torch_execution import TorchExecution
from dieplace.discover import BACKENDS
from dieplace.errors import Unsupported, UsageError
from dieplace.machine import Device
from dieplace.workload import Operand, Stage, Workload


def device(index: int) -> Device:
    return Device(
        f"gpu{index}/p0", f"gpu{index}", 0, "", 8, 256, None, f"gpu{index}/mem0", True, True, runtime_index=index
    )


def on(cuda: Any) -> TorchExecution:
    return TorchExecution("nvidia", lambda found: int(found.runtime_index or 0), cuda=cuda)


def test_one_graph_is_replayed_in_every_sample() -> None:
    cuda = FakeCuda()
    ran: list[str] = []
    work = Workload("step", (
        Stage("qkv", launches=(lambda: (ran.append("qkv"), cuda.work(1.0)())[1],)),
        Stage("mlp", repeats=2, launches=(cuda.work(2.0), cuda.work(2.0))),
    ))  # fmt: skip
    execution = on(cuda)
    prepared = execution.prepare(work, device(0))
    traced = len(ran)
    samples = [execution.time(prepared)[0] for _ in range(5)]
    assert [one.samples_ns for one in samples] == [pytest.approx((5e6,))] * 5  # the whole workload, repeats counted
    assert all(one.origin == "measured" and one.value_ns is None for one in samples)
    assert len(ran) == traced  # nothing was launched from Python again
    before = cuda.now[0]
    execution.launch(prepared)
    execution.synchronize(device(0))
    assert cuda.now[0] - before == pytest.approx(5.0)


def test_devices_run_at_the_same_time_each_by_its_own_clock() -> None:
    cuda = FakeCuda()
    execution = on(cuda)
    works = [
        execution.prepare(Workload.of_launches("w", [cuda.work(ms)]), device(i)) for i, ms in enumerate((3.0, 5.0))
    ]
    flushed: list[int] = []
    times = execution.time(*works, flush=lambda: flushed.append(1))
    assert [one.samples_ns[0] for one in times] == pytest.approx([3e6, 5e6]) and flushed == [1]


def test_work_that_cannot_be_captured_is_launched() -> None:
    cuda = FakeCuda()
    launches: list[int] = []
    work = Workload.of_launches("copy", [lambda: (launches.append(1), cuda.work(1.0)())[1]] * 3)
    prepared = on(cuda).prepare(work, device(0), graph=False)
    assert on(cuda).time(prepared)[0].samples_ns == pytest.approx((3e6,)) and len(launches) == 3


def test_a_description_is_not_run() -> None:
    described = Workload("step", (Stage("qkv", (Operand("w", "weights", 64),)),))
    with pytest.raises(UsageError, match="describes bytes and has no launches"):
        on(FakeCuda()).prepare(described, device(0))
    with_launches = Workload("step", (Stage("qkv", (Operand("w", "weights", 64),), launches=(lambda: None,)),))
    assert described == with_launches and hash(described) == hash(with_launches)  # launches are no part of it


def test_rocm_has_no_stage_times_and_is_not_asked_for_them() -> None:
    """Case h5: torch refuses external events on ROCm only when one is recorded, in the middle of a capture."""
    cuda = FakeCuda("raises")
    cuda.version_hip = "7.0"
    events = []
    make = cuda.Event
    cuda.Event = lambda **how: (events.append(how.get("external", False)), make(**how))[1]
    total, stages = timing.stage_times([("qkv", cuda.work(1.0)), ("mlp", cuda.work(3.0))], 0, cuda=cuda)
    assert total == pytest.approx(4e6) and not any(events)
    assert all(one.value_ns is None and "rocm-systems issue 2380" in str(one.why) for one in stages)


def test_prefixes_give_stage_times_where_graphs_hold_no_events() -> None:
    cuda = FakeCuda("raises")
    given = [("qkv", 1.0), ("attention", 0.25), ("mlp", 3.0), ("nothing", 0.0)]
    total, stages = stage_times_by_prefix([(n, cuda.work(ms)) for n, ms in given], 0, cuda=cuda)
    assert total == pytest.approx(4.25e6)
    assert [one.value_ns for one in stages[:3]] == pytest.approx([1e6, 0.25e6, 3e6])
    assert stages[3].value_ns is None and "equally long" in str(stages[3].why)  # never 0 us


def test_a_stage_within_the_noise_is_not_told() -> None:
    cuda = FakeCuda()
    noise = random.Random(4)

    def noisy(ms: float) -> Any:
        def launch() -> None:
            steps = lambda: cuda.advance(ms + noise.uniform(0, 0.2))  # noqa: E731
            cuda.capturing.append(steps) if cuda.capturing is not None else steps()

        return launch

    stages = [("qkv", noisy(2.0)), ("tiny", cuda.work(0.001)), ("mlp", noisy(5.0))]
    _, found = stage_times_by_prefix(stages, 0, replays=40, cuda=cuda)
    assert found[1].value_ns is None and found[0].value_ns == pytest.approx(2.1e6, rel=0.05)
    assert found[2].value_ns == pytest.approx(5.1e6, rel=0.05)


def test_every_backend_names_only_what_it_has() -> None:
    """`groups` is what callers ask: a name there without its object would fail at the first use."""
    has = {}
    for name, target in BACKENDS.items():
        module, attribute = target.split(":")
        kind = getattr(importlib.import_module(module), attribute)
        for group, member in (("execution", "execution"), ("memory", "memory"), ("partitioning", "set_mode")):
            assert (group in kind.groups) == hasattr(kind, member), (name, group)
        has[name] = "execution" in kind.groups
    assert has == {"amd": True, "nvidia": True, "emulated": True, "cpu": False, "replayed": False}


def test_a_backend_without_it_says_which_has_it() -> None:
    from dieplace.backends.cpu import CpuBackend

    with pytest.raises(Unsupported, match="cpu backend has no execution"):
        require(CpuBackend(), "execution")


@pytest.mark.parametrize(("backend", "words"), [("amd", "not for ROCm"), ("nvidia", "not for CUDA")])
def test_a_torch_for_the_cpu_is_told(backend: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dieplace.backends.torch_build.built_for", lambda *_: {"version": "2.13.0+cpu"})
    with pytest.raises(Unsupported, match=words):
        TorchExecution(backend, lambda found: 0)
