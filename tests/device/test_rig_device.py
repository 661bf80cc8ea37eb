"""The rig's two kinds of buffers on real GPUs: torch's own, and placed ones as on AMD, must give the same figures.

Run by hand: python -m pytest tests/device/test_rig_device.py -s -rs
"""

from __future__ import annotations

from statistics import median

import pytest

from dieplace.discover import probes
from dieplace.experiments.torch_rig import MIB, TorchRig, hash_of
from dieplace.machine import Machine
from dieplace.workload import Workload

pytestmark = pytest.mark.device
NBYTES = 256 * MIB


@pytest.fixture(scope="module")
def machine() -> Machine:
    answer = probes()["nvidia"]
    if not answer.available:
        pytest.skip(f"no NVIDIA GPU to measure on: {answer.reason}")
    import dieplace

    found = dieplace.discover("nvidia")
    if sum(d.runtime_index is not None for d in found.devices) < 2:
        pytest.skip("two visible GPUs are needed for far memory")
    return found


def figures(rig: TorchRig) -> dict[str, float]:
    """ns of a far and a near hop, of reads and of pulls, medians of a few."""
    reader, far = rig.readers[0], next(iter(rig.far_homes(rig.readers[0]).values()))
    cycles: list[float] = []
    arms = {
        "hop near": rig.latency(reader, reader, NBYTES, cycles),
        "hop far": rig.latency(reader, far, NBYTES, cycles),
        "read near": rig.stream("read", reader, reader, NBYTES),
        "read far": rig.stream("read", reader, far, NBYTES),
        "pull": rig.stream("pull", reader, far, NBYTES),
        "push": rig.stream("push", reader, far, NBYTES),
        "torch pull": rig.stream("torch_pull", reader, far, NBYTES),
        "read far, both at once": rig.together("read", True, NBYTES),
    }
    found = {name: median(arm() for _ in range(9)) for name, arm in arms.items()}
    assert all(value > 0 for value in cycles)
    return found


def test_placed_buffers_give_the_figures_of_torchs_own(machine: Machine) -> None:
    with TorchRig(machine, words_bytes=NBYTES) as own:
        by_torch = figures(own)
    with TorchRig(machine, placed=True, words_bytes=NBYTES) as placed:
        by_group = figures(placed)
        told = placed.facts()["buffers"]
    for name, ns in by_torch.items():
        print(f"FIGURE {name}: torch {ns:.1f} ns, placed {by_group[name]:.1f} ns")
    assert told["misplaced_bytes"] == 0 and told["evidence"] in ("accounted", "probed")
    assert hash_of(own.launched)[0] == hash_of(placed.launched)[0] is not None
    for name in ("hop near", "hop far", "read near", "read far", "pull"):
        assert by_group[name] == pytest.approx(by_torch[name], rel=0.08), name
    # torch copies between devices by the copy engine, within one by a kernel: the same link, not the same path.
    assert by_group["hop far"] > 1.5 * by_group["hop near"] and by_group["read far"] > 3 * by_group["read near"]


def test_the_execution_group_times_what_it_launched(machine: Machine) -> None:
    import torch

    session = machine.require_session("launch")
    device = next(d for d in machine.devices if d.runtime_index == 0)
    counter = torch.zeros(1, device="cuda:0")
    prepared = session.execution.prepare(Workload.of_launches("count", [lambda: counter.add_(1)] * 4), device)
    session.execution.synchronize(device)
    before = counter.item()
    session.execution.launch(prepared)
    session.execution.synchronize(device)
    assert counter.item() == before + 4
    (timing,) = session.execution.time(prepared)
    assert timing.origin == "measured" and timing.samples_ns[0] > 0 and counter.item() == before + 8


def test_prefixes_of_a_graph_agree_with_events_inside_it(machine: Machine) -> None:
    """How stage times are taken on ROCm, where graphs hold no events, beside how they are taken here."""
    import torch

    from dieplace.backends.prefix_timing import stage_times_by_prefix
    from dieplace.backends.torch_timing import stage_times
    from dieplace.probes import triton_stream

    words = torch.randint(0, 2**31 - 1, (256 * MIB // 4,), dtype=torch.int32, device="cuda:0")
    out = torch.empty(triton_stream.programs_for(words.numel()), dtype=torch.int32, device="cuda:0")
    sizes = {"all": 1, "half": 2, "quarter": 4, "again": 1}
    parts = {name: words[: words.numel() // n] for name, n in sizes.items()}
    stages = [(name, lambda part=part: triton_stream.read(part, out, device=0)) for name, part in parts.items()]
    by_event, by_prefix = stage_times(stages, 0), stage_times_by_prefix(stages, 0)
    print("FIGURE total", by_event[0], by_prefix[0])
    for event, prefix in zip(by_event[1], by_prefix[1], strict=True):
        print(f"FIGURE {event.name}: events {event.value_ns}, prefixes {prefix.value_ns}")
        assert event.value_ns is not None and prefix.value_ns is not None
        assert abs(event.value_ns - prefix.value_ns) < 8_000 + 0.05 * event.value_ns  # an event adds some microseconds
