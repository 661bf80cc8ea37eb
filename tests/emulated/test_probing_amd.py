"""The probe of an audit on the AMD memory group: a stand-in for the card answers with the published latencies.

Its latencies depend on the home of a window and on whether the memory-side cache still holds it, as notes on an MI355X
say: 182 and 279 ns cached, 335 and 433 ns not. Memory that was just written is cached until something sweeps it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hip_machine import hip_machine
from stub_hip import Stub, build

from dieplace import probing
from dieplace.backends import torch_build
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import Misplaced, PlacementError, Unsupported
from dieplace.machine import Machine
from dieplace.policy import OBJECT_BYTES, Policy
from dieplace.probing import Prober
from dieplace.residency import audit

pytestmark = pytest.mark.real_binding
MIB = 1 << 20
SMALL = {"CALIBRATION_BYTES": 8 * MIB, "SWEEP_BYTES": 4 * MIB}


class Card:
    """Latency by window: `homes` overrides what the runtime says of an address; `swept` is what the sweeps emptied."""

    def __init__(self, session: Any, sweeps: bool = True) -> None:
        self.session, self.sweeps = session, sweeps
        self.homes: dict[int, str] = {}
        self.cached = True

    def sweep(self, words: Any, index: int | None) -> None:
        if self.sweeps:
            self.cached = False

    def walk(self, words: Any, window: int, index: int) -> tuple[float, ...]:
        own = next(d for d in self.session.machine.devices if d.runtime_index == index).domain
        times = {True: (182.0, 279.0), False: (335.0, 433.0)}[self.cached]
        found = []
        for number in range(words.numel() * 4 // window):
            address = words.data_ptr() + number * window
            node = self.session.runtime.owner(address).node
            home = self.homes.get(address, self.session.homes.domain_of_node[node])
            found.append(times[home != own] * 2.4)
        # What is not swept stays cached where the walk went last; a buffer that nobody touched is not cached.
        return tuple(found)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    node = create(tmp_path_factory.mktemp("node") / "n", cards=1, mode="DPX/NPS2")
    return EmulatedBackend(node, environ={}).snapshot()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build(tmp_path_factory.mktemp("hip")))


@pytest.fixture
def machine(base: Machine, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name, nbytes in SMALL.items():
        monkeypatch.setattr(probing, name, nbytes)
    yield hip_machine(base, stub, tmp_path, total_bytes=256 * MIB, pid=os.getpid())


@pytest.fixture
def card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(machine.session.memory)  # type: ignore[union-attr]
    monkeypatch.setattr(probing, "_sweep", card.sweep)
    monkeypatch.setattr("dieplace.residency.Prober", lambda: Prober(card.walk))
    return card


def weights(machine: Machine, policy: Policy, nbytes: int = 16 * MIB) -> Any:
    return machine.allocate(nbytes, device="gpu0/p0", policy=policy, role="weights", name=str(policy))


def test_every_window_is_told_by_its_latency(machine: Machine, stub: Stub, card: Card) -> None:
    held = [weights(machine, p) for p in (Policy.local(), Policy.peer(), Policy.peer_share(3))]
    found = audit(*held, probe=True).require_placed("probed")
    near, far, shared = (item.bytes_by_domain for item in found.items)
    assert near == {"gpu0/mem0": 16 * MIB} and far == {"gpu0/mem1": 16 * MIB}
    assert shared == {"gpu0/mem0": 10 * MIB, "gpu0/mem1": 6 * MIB}
    for buffer in held:
        buffer.free()
    assert stub.empty()  # what the sweeps read has been given back


def test_a_home_that_the_books_do_not_know_is_seen(machine: Machine, card: Card) -> None:
    buffer = weights(machine, Policy.local())
    card.homes[buffer.address + 3 * OBJECT_BYTES] = "gpu0/mem1"  # a page that moved behind the driver's accounts
    with pytest.raises(Misplaced, match="evidence disagrees"):
        audit(buffer, probe=True).require_placed()
    assert audit(buffer).require_placed("accounted").items[0].disagreement is None  # the books alone see nothing


def test_without_sweeping_near_memory_would_be_taken_for_far(machine: Machine, card: Card) -> None:
    """The fault that the sweep is there for: levels of cached memory, a buffer that nobody has touched lately."""
    card.sweeps = False
    walk = card.walk

    def calibrated_cached(words: Any, window: int, index: int) -> tuple[float, ...]:
        card.cached = words.numel() * 4 == SMALL["CALIBRATION_BYTES"]
        return walk(words, window, index)

    buffer = weights(machine, Policy.local())
    prober = Prober(calibrated_cached)
    session, allocation = buffer.owner()
    wrong = prober.look(session, allocation, buffer.address, buffer.nbytes)
    prober.close()
    assert wrong == {"gpu0/mem1": 16 * MIB}
    card.sweeps = True
    right = Prober(card.walk)
    assert right.look(session, allocation, buffer.address, buffer.nbytes) == {"gpu0/mem0": 16 * MIB}
    right.close()


def test_equal_latencies_tell_nothing(machine: Machine, card: Card) -> None:
    flat: Callable[..., tuple[float, ...]] = lambda words, window, index: (800.0,) * (words.numel() * 4 // window)  # noqa: E731
    prober = Prober(flat)
    buffer = weights(machine, Policy.local())
    with pytest.raises(PlacementError, match="cannot be told apart"):
        prober.look(*buffer.owner(), buffer.address, buffer.nbytes)
    prober.close()


def test_the_sweep_reads_more_than_the_memory_side_cache_of_a_card() -> None:
    """256 MiB in a whole MI355X (CDNA 4 white paper), and 256 MB of flush, the usual habit, would not clear it."""
    assert probing.SWEEP_BYTES >= 2 * 256 * MIB


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "__version__ = '2.9.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            "built for CUDA 13.0",
        ),
        ("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n", "built for the CPU alone, not for ROCm"),
        (None, "torch is not installed"),
    ],
)
def test_a_torch_that_cannot_run_there_is_told(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    page = tmp_path / "version.py"
    if version is not None:
        page.write_text(version)
    monkeypatch.setattr(torch_build, "_version_file", lambda: page)
    with pytest.raises(Unsupported, match=words):
        audit(weights(machine, Policy.local(), MIB), probe=True)


def test_a_rocm_torch_is_no_reason(tmp_path: Path) -> None:
    page = tmp_path / "version.py"
    page.write_text("__version__ = '2.9.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n")
    assert torch_build.why_not("amd", version_file=page) is None
    assert "built for ROCm 7.0.51831, not for CUDA" in str(torch_build.why_not("nvidia", version_file=page))
