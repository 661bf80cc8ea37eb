"""First light's device questions: every answer of each is provoked, by hands that were told what to see, by an emulated
HIP runtime that misbehaves in the ways public reports tell of, and by the gfx950 kernels on the emulated card."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hip_machine import hip_machine
from stub_hip import Stub, build

from dieplace.backends.dlpack import CPU
from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import BackendError, DomainFull, KernelFault, PlacementError, Unsupported
from dieplace.experiments import first_light_devices as devices
from dieplace.experiments.first_light_catalogue import QUESTIONS, question
from dieplace.experiments.first_light_hands import MARKS, TorchHands
from dieplace.experiments.first_light_questions import Answer, NotAsked, safely
from dieplace.experiments.first_light_sights import Filled, Remapped, Rounds, Uncached
from dieplace.machine import Machine

GIB = 1 << 30
DIE_BYTES = 144 * GIB


@pytest.fixture(scope="module")
def base() -> Iterator[Machine]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield EmulatedBackend(create(Path(folder) / "n", cards=1, mode="DPX/NPS2"), environ={}).snapshot()


@dataclass
class Told:
    """Hands that see what they were told; an exception is raised instead."""

    access: Any = True
    wrong: Any = 0
    memory: Any = None
    flags: Any = field(default_factory=list)
    mapping: Any = None
    launch: Any = (900.0, 4000.0)

    def offers_access(self, one: Any, other: Any) -> bool | None:
        return give(self.access)

    def wrong_bytes(self, *_: Any) -> int:
        return give(self.wrong)

    def uncached(self, device: Any) -> Uncached:
        return give(self.memory)

    def rounds(self, writer: Any, reader: Any, **_: Any) -> Rounds:
        return give(self.flags[0] if writer.id == reader.id else self.flags[-1])

    def remap(self, device: Any) -> Remapped:
        return give(self.mapping)

    def launch_ns(self, device: Any) -> tuple[float, float]:
        return give(self.launch)

    def fill(self, device: Any) -> Filled:
        return Filled(0, None, "")


def give(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def flag(missed: int = 0, round_ns: float | None = None) -> Rounds:
    return Rounds(100, (100 - missed, 100), () if round_ns is None else (round_ns,) * 9, (0, 1, 2, 3))


def remapped(old: int, new: int, *, busy: bool = True, before: int = 1000) -> Remapped:
    return Remapped(100, 10, old, new, before, busy)


class Stale(KernelFault):
    word = "stale-read"


FULL = DomainFull("gpu0/mem1 is full", hint="")
# question, what the hands see, the word (None: none), the status
CASES: list[tuple[str, Told, str | None, str]] = [
    ("peer-access", Told(), "yes", "answered"),
    ("peer-access", Told(access=None), "yes", "answered"),
    ("peer-access", Told(access=False), "no", "answered"),
    ("peer-access", Told(wrong=4096), "runtime and kernels disagree", "answered"),
    ("peer-access", Told(wrong=PlacementError("no mapping")), "runtime and kernels disagree", "answered"),
    ("peer-access", Told(access=BackendError("hipDeviceCanAccessPeer failed")), None, "refused"),
    ("peer-access", Told(access=RuntimeError("CUDA error")), None, "unknown"),
    ("uncached-memory", Told(memory=Uncached("device", True, "extended", 3.1)), "extended device memory", "answered"),
    ("uncached-memory", Told(memory=Uncached("device", True, "coarse", 1.0)), "other device memory", "answered"),
    ("uncached-memory", Told(memory=Uncached("host", None, None, None)), "host memory", "answered"),
    ("uncached-memory", Told(memory=Uncached("device", False, None, None)), "host memory", "answered"),
    ("uncached-memory", Told(memory=Uncached("unknown", None, None, None)), None, "unknown"),
    ("uncached-memory", Told(memory=FULL), None, "refused"),
    ("poll-reliability", Told(flags=[flag()]), "reliable", "answered"),
    ("poll-reliability", Told(flags=[flag(missed=3)]), "unreliable", "answered"),
    ("poll-reliability", Told(flags=[Stale("a poll read an old value")]), "unreliable", "answered"),
    ("poll-reliability", Told(flags=[KernelFault("an address outside every buffer")]), None, "refused"),
    ("poll-reliability", Told(flags=[Rounds(100, ())]), None, "unknown"),
    ("poll-reliability", Told(flags=[Unsupported("no kernel")]), None, "refused"),
    ("remote-store", Told(flags=[flag(round_ns=800), flag(round_ns=990)]), "arrives, within 0.1 us extra", "answered"),
    ("remote-store", Told(flags=[flag(round_ns=800), flag(round_ns=4000)]), "arrives, later than 0.1 us extra",
     "answered"),
    ("remote-store", Told(flags=[flag(), flag()]), "arrives", "answered"),
    ("remote-store", Told(flags=[flag(round_ns=800), flag(missed=7)]), "does not always arrive", "answered"),
    ("remote-store", Told(flags=[flag(), PlacementError("came back in host memory")]), None, "refused"),
    ("vmm-remap", Told(mapping=remapped(0, 1000)), "fresh, device busy", "answered"),
    ("vmm-remap", Told(mapping=remapped(0, 1000, busy=False)), "fresh, device at rest", "answered"),
    ("vmm-remap", Told(mapping=remapped(3, 997)), "stale lines stay", "answered"),
    ("vmm-remap", Told(mapping=remapped(0, 990)), None, "unknown"),
    ("vmm-remap", Told(mapping=remapped(0, 1000, before=900)), None, "unknown"),
    ("vmm-remap", Told(mapping=BackendError("hipMemUnmap failed")), None, "refused"),
    ("launch-cost", Told(), "measured", "answered"),
    ("launch-cost", Told(launch=(-1.0, 10.0)), None, "unknown"),
    ("launch-cost", Told(launch=NotAsked("no clock")), None, "not-asked"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "told", "word", "status"), CASES, ids=[f"{n}-{w or s}" for n, _, w, s in CASES])
def test_what_was_seen_decides_the_answer(base: Machine, name: str, told: Told, word: str | None, status: str) -> None:
    scene = devices.scene_of(replace(base, source="live"), told)
    found = safely(question(name), scene, scene.origin)
    assert (found.word, found.status, found.origin) == (word, status, "measured")
    assert Answer.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_every_word_of_every_device_question_is_provoked() -> None:
    provoked = {(name, word) for name, _, word, _ in CASES if word}
    assert provoked == {(q.id, word) for q in QUESTIONS if q.place == "devices" for word in q.words}
    for one in (q for q in QUESTIONS if q.place == "devices"):
        assert any(status != "answered" for name, _, _, status in CASES if name == one.id), one.id


def test_half_of_what_a_round_grows_by_is_one_way(base: Machine) -> None:
    told = Told(flags=[flag(round_ns=781.0), flag(round_ns=992.0)])  # public figures: +211 ns, about 105 each way
    found = devices.remote_store(devices.scene_of(replace(base, source="live"), told))
    assert found.value["extra_ns"] == pytest.approx(105.5)


class Slowing(Told):
    """Every launch takes 40 ns a round longer than the one before, wherever the writer is."""

    def rounds(self, writer: Any, reader: Any, **_: Any) -> Rounds:
        self.launch = self.launch if isinstance(self.launch, list) else []
        self.launch.append(writer.id)
        return flag(round_ns=800 + 40 * len(self.launch))


def test_a_device_that_slows_down_makes_no_store_late(base: Machine) -> None:
    """Taken one side after the other, seven launches of 40 ns more each would make remote stores 140 ns late."""
    told = Slowing()
    found = devices.remote_store(devices.scene_of(replace(base, source="live"), told))
    order = told.launch
    assert order.count("gpu0/p0") == order.count("gpu0/p1") >= 5 and order[:4] == [
        order[0],
        order[1],
        order[1],
        order[0],
    ]
    assert abs(found.value["extra_ns"]) == 20 and found.word == "arrives, within 0.1 us extra"
    assert (found.value["extra_low_ns"], found.value["extra_high_ns"]) == (-20, 20) and "-20 to 20" in found.said


class Wavering(Told):
    """Remote stores are 50 ns later in some launches and 150 in others."""

    def rounds(self, writer: Any, reader: Any, **_: Any) -> Rounds:
        if writer.id == reader.id:
            return flag(round_ns=800)
        self.wrong += 1
        return flag(round_ns=900 if self.wrong % 2 else 1100)


def test_launches_that_disagree_are_told_and_neither_word_is_taken(base: Machine) -> None:
    found = devices.remote_store(devices.scene_of(replace(base, source="live"), Wavering()))
    assert found.word == "arrives" and "50 to 150" in found.said and "both sides of 100 ns" in found.said


def test_without_a_peer_nothing_is_asked(tmp_path: Path) -> None:
    machine = EmulatedBackend(create(tmp_path / "n", cards=1, mode="SPX/NPS1"), environ={}).snapshot()
    found = safely(question("peer-access"), devices.scene_of(machine, Told()), "emulated")
    assert found.status == "not-asked" and "no single peer" in found.said


# -- an emulated HIP runtime -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build(tmp_path_factory.mktemp("hip")))


def count(words: torch.Tensor, patterns: tuple[int, ...], index: int) -> list[list[int]]:
    return [[int((words == pattern).sum()) for pattern in patterns]] * 2


Scenes = Callable[..., devices.DeviceScene]


@pytest.fixture
def on_stub(base: Machine, stub: Stub, tmp_path: Path) -> Iterator[Scenes]:
    made: list[Any] = []

    def make(counter: Any = count, **options: Any) -> devices.DeviceScene:
        machine = hip_machine(base, stub, tmp_path, total_bytes=DIE_BYTES, pid=os.getpid(), **options)
        machine = replace(machine, source="live")
        made.append(machine)
        return devices.scene_of(machine, TorchHands(machine, count=counter, place=(CPU, 0)))

    yield make
    assert stub.empty(), "something of the runtime was not given back"


@pytest.mark.real_binding
class TestOnTheHipStub:
    def test_peer_access(self, on_stub: Scenes, stub: Stub) -> None:
        found = devices.peer_access(on_stub())
        assert found.word == "yes" and found.value == {
            "runtime_says": True, "runtime_says_backwards": True, "wrong_bytes": 0,
        }  # fmt: skip
        assert stub.log("hipMemCreate")[0].split()[1] == "1"  # the memory was the peer's

    def test_peer_access_denied(self, on_stub: Scenes, stub: Stub) -> None:
        scene = on_stub()
        stub.set("no_peer", 0, 1)
        found = devices.peer_access(scene)
        assert found.word == "no" and found.value["runtime_says_backwards"] is True
        assert not stub.log("hipMemCreate")  # no kernel was tried on memory that it may not touch

    def test_peer_memory_that_cannot_be_mapped(self, on_stub: Scenes, stub: Stub) -> None:
        scene = on_stub()
        stub.fail("hipMemSetAccess", 1, 1)
        assert devices.peer_access(scene).word == "runtime and kernels disagree"

    @pytest.mark.parametrize(("on_host", "with_hsa", "word"), [
        (0, True, "extended device memory"), (1, True, "host memory"), (1, False, "host memory"),
        (0, False, "other device memory"),
    ])  # fmt: skip
    def test_uncached(self, on_stub: Scenes, stub: Stub, on_host: int, with_hsa: bool, word: str) -> None:
        scene = on_stub(with_hsa=with_hsa)
        stub.set("uncached_on_host", on_host)
        found = devices.uncached_memory(scene)
        assert found.word == word
        assert found.value["latency_over_plain"] is None and "clock" in found.value["latency_over_plain_why"]

    def test_uncached_refused(self, on_stub: Scenes, stub: Stub) -> None:
        scene = on_stub()
        stub.fail("hipExtMallocWithFlags", 1, 1)
        found = safely(question("uncached-memory"), scene, "measured")
        assert found.status == "refused" and "hipErrorInvalidValue" in found.said

    def test_a_remap_that_works(self, on_stub: Scenes) -> None:
        found = devices.remap_flushes(on_stub())
        assert found.word == "fresh, device at rest" and found.value["stale_words"] == 0

    def test_a_cache_that_keeps_the_old_lines_is_found(self, on_stub: Scenes) -> None:
        """The planted fault: a reader that answers some words from what it read first."""
        kept: list[torch.Tensor] = []

        def stale(words: torch.Tensor, patterns: tuple[int, ...], index: int) -> list[list[int]]:
            if not kept:
                kept.append(words[:32].clone())
            return count(torch.cat([kept[0], words[32:]]), patterns, index)

        found = devices.remap_flushes(on_stub(stale))
        assert found.word == "stale lines stay" and found.value["stale_words"] == 64  # 32 words, two programs

    def test_a_remap_that_fails_gives_everything_back(self, on_stub: Scenes, stub: Stub) -> None:
        scene = on_stub()
        stub.fail("hipMemMap", 3, 1)
        assert safely(question("vmm-remap"), scene, "measured").status == "refused"

    @pytest.mark.parametrize("ask", [devices.peer_access, devices.remote_store])
    def test_a_second_buffer_that_is_refused_leaves_no_first(self, on_stub: Scenes, stub: Stub, ask: Any) -> None:
        """The fault is in the second allocation; the fixture's end finds what is still held."""
        scene = on_stub()
        hands = scene.hands
        real, calls = hands._allocate, []  # type: ignore[attr-defined]

        def second(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise DomainFull("gpu0/mem0 is full", hint="")
            return real(*args, **options)

        hands._allocate = second  # type: ignore[attr-defined]
        safely(
            replace(question("peer-access"), ask=lambda one: replace(ask(one), question="peer-access")),
            scene,
            "measured",
        )
        assert len(calls) == 2 and stub.empty()

    def test_filling_a_die_ends_at_its_own_size(self, on_stub: Scenes, stub: Stub) -> None:
        found = devices.fill(on_stub())
        assert found.value["got_bytes"] == DIE_BYTES and stub.used(0) == 0

    def test_filling_past_its_size_is_seen(self, on_stub: Scenes, stub: Stub) -> None:
        scene = on_stub()
        small = replace(scene.machine.domain("gpu0/mem0"), total_bytes=100 * GIB)
        domains = tuple(small if d.id == small.id else d for d in scene.machine.domains)
        machine = replace(scene.machine, domains=domains)
        hands = TorchHands(machine, count=count, place=(CPU, 0))
        found = devices.fill(replace(scene, machine=machine, hands=hands))
        assert found.value["got_bytes"] > 1.05 * 100 * GIB

    def test_polls_of_one_die_run_the_real_kernel(self, on_stub: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
        """The amd backend's memory under FlyDSL's own kernel, which the emulator runs where there is no card."""
        monkeypatch.setattr(devices, "READERS", 3)
        monkeypatch.setattr(devices, "POLL_ROUNDS", 4)
        found = devices.poll_reliability(on_stub())
        assert found.word == "reliable" and found.value["rounds"] == 4 and found.value["readers"] == 3


# -- the emulated card -------------------------------------------------------------------------------------------------


def test_answers_of_the_emulated_card(base: Machine) -> None:
    scene = devices.scene_of(base)
    found = {q.id: safely(q, scene, scene.origin) for q in QUESTIONS if q.place == "devices"}
    assert {name: one.word for name, one in found.items() if one.word} == {
        "peer-access": "yes", "poll-reliability": "reliable", "remote-store": "arrives",
    }  # fmt: skip
    rest = {name: one for name, one in found.items() if not one.word}
    assert all(one.status == "not-asked" for one in rest.values())
    assert all(one.origin == "emulated" for one in found.values())


def test_polls_at_too_small_a_scope_are_told_unreliable(base: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent scope does not reach the other die: asked with the flag there, the same question must say no."""
    scene = devices.scene_of(base)
    hands = scene.hands

    class Across:
        def rounds(self, writer: Any, reader: Any, **options: Any) -> Rounds:
            assert scene.peer is not None and options["scope"] == "agent"
            return hands.rounds(scene.peer, replace(reader, domain=scene.peer.domain), **options)

    found = devices.poll_reliability(replace(scene, hands=Across()))  # type: ignore[arg-type]
    assert found.word == "unreliable" and "agent scope" in found.said


def test_the_emulated_die_is_full_at_its_own_size(base: Machine) -> None:
    found = devices.fill(devices.scene_of(base))
    assert found.value["got_bytes"] == base.device("gpu0/p0").memory_limit_bytes // (2 << 20) * (2 << 20)  # type: ignore[operator]


def test_every_program_counts_every_word(tmp_path: Path) -> None:
    """The counting kernel under Triton's interpreter, against torch."""
    code = (
        "import torch\nfrom dieplace.experiments.first_light_count import count\n"
        f"a, b = {MARKS!r}\n"
        "words = torch.tensor([a] * 5000 + [b] * 3000 + [7] * 100, dtype=torch.int32)\n"
        "assert count(words, (a, b), 0, programs=3) == [[5000, 3000]] * 3\n"
    )
    import subprocess
    import sys

    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
