"""The two-die memory, rule by rule, driven without a kernel: expected values are LLVM's GFX942 memory model, not ours.

AMDGPUUsage, "Memory Model GFX942": L1s are not coherent; RW lines local to an L2 are kept coherent by probes; NC lines
are not; agent scope over several L2s needs sc1, system scope sc0 sc1; `buffer_wbl2` counts in vmcnt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dieplace.emulator.isa.hierarchy import TwoDieMemory
from dieplace.emulator.isa.hierarchy_map import CC, NC, PAGE_BYTES, RW, TYPE_NAMES, UC, LineMap, MappedBuffer
from dieplace.emulator.isa.hierarchy_watch import FlagBeforeData, StaleRead

NO, WORKGROUP, AGENT, SYSTEM, NT = "", "sc0", "sc1", "sc0 sc1", "nt"


@dataclass
class Inst:
    text: str
    line: int

    def __getattr__(self, name: str) -> bool:
        return name in self.text.split()


@dataclass
class FakeLaunch:
    """Two waves on each XCD of one device: workgroup 2x on CU 0 and workgroup 2x + 1 on CU 1 of the x-th XCD."""

    index: int
    xcds: tuple[int, ...]
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.device = self
        self.xcd = np.repeat(self.xcds, 2)
        self.cu = np.tile([0, 1], len(self.xcds))
        self.workgroup = np.arange(2 * len(self.xcds))
        self.wave_in_workgroup = np.zeros(2 * len(self.xcds), int)


@dataclass
class FakeRequest:
    launch: FakeLaunch
    inst: Inst
    address: np.ndarray
    size: int
    waves: np.ndarray
    scalar: bool = False
    every_lane: bool = False

    def place(self, element: int) -> dict[str, int]:
        return {}


class Card:
    """Memory of 8 KiB: page 0 on die 0, page 1 on die 1; p0 has XCDs 0-3, p1 has XCDs 4-7."""

    def __init__(self, memory_class: str = "coarse", **options: Any) -> None:
        self.bytes = np.zeros(3 * PAGE_BYTES, np.uint8)
        start = -(-self.bytes.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        self.words = self.bytes[start - self.bytes.ctypes.data :][: 2 * PAGE_BYTES].view(np.uint32)
        self.start = start
        self.memory = TwoDieMemory(
            [MappedBuffer("near", start, PAGE_BYTES, "sync_flag", memory_class),
             MappedBuffer("far", start + PAGE_BYTES, PAGE_BYTES, "weights", memory_class)],
            lambda a: ((a - start) // PAGE_BYTES).astype(np.int8),
            **options,
        )  # fmt: skip
        self.p0, self.p1 = FakeLaunch(0, (0, 1, 2, 3)), FakeLaunch(1, (4, 5, 6, 7))

    def wave(self, xcd: int, cu: int = 0) -> tuple[FakeLaunch, int]:
        launch = self.p0 if xcd < 4 else self.p1
        return launch, 2 * (xcd % 4) + cu

    def request(self, at: tuple[FakeLaunch, int], text: str, word: int | None, size: int = 4) -> FakeRequest:
        address = np.array([] if word is None else [self.start + 4 * word], np.int64)
        line = abs(hash(text)) % 1000
        return FakeRequest(at[0], Inst(text, line), address, size, np.array([at[1]]))

    def load(self, at: tuple[FakeLaunch, int], word: int, bits: str = NO) -> int:
        return int(self.memory.load(self.request(at, f"global_load_dword {bits}", word))[0][0, 0])

    def store(self, at: tuple[FakeLaunch, int], word: int, value: int, bits: str = NO) -> None:
        request = self.request(at, f"global_store_dword {bits}", word)
        self.memory.store(request, np.array([[value]], np.uint32))

    def add(self, at: tuple[FakeLaunch, int], word: int, bits: str = NO) -> int:
        request = self.request(at, f"global_atomic_add {bits}", word)
        return int(self.memory.atomic(request, "add", np.array([[1]], np.uint32), True)[0][0, 0])

    def writeback(self, at: tuple[FakeLaunch, int], bits: str = SYSTEM) -> None:
        self.memory.writeback(self.request(at, f"buffer_wbl2 {bits}", None))

    def wait(self, at: tuple[FakeLaunch, int], vmcnt: int = 0) -> None:
        self.memory.wait(self.request(at, "s_waitcnt", None), vmcnt, None)

    def invalidate(self, at: tuple[FakeLaunch, int], bits: str = SYSTEM) -> None:
        self.memory.invalidate(self.request(at, f"buffer_inv {bits}", None))


NEAR, FAR = 0, PAGE_BYTES // 4  # a word on die 0, one on die 1


@pytest.mark.parametrize(
    ("memory_class", "local", "peer"),
    # kfd_svm.c, cases 9.5.0: (class, local die, peer die)
    [("coarse", RW, NC), ("fine", RW, NC), ("uncached", CC, UC), ("kfd-uncached", UC, UC), ("host", NC, NC)],
)
def test_cache_types_follow_the_driver(memory_class: str, local: int, peer: int) -> None:
    card = Card(memory_class)
    lines = np.array([0, 32])
    for die in (0, 1):
        expected = [local, peer] if die == 0 else [peer, local]
        assert card.memory.map.type_for(die, lines).tolist() == expected
    # the codes are those of the page-table entries, gmc_v9_0.c
    assert [TYPE_NAMES[i] for i in (0, 1, 2, 3)] == ["NC", "RW", "CC", "UC"]


def test_mtype_local_changes_the_local_entry_only() -> None:
    card = Card(mtype_local=NC)
    assert card.memory.map.type_for(0, np.array([0, 32])).tolist() == [NC, NC]


@pytest.mark.parametrize("bits", [NO, WORKGROUP, NT])
def test_a_cu_may_go_on_using_its_l1_line(bits: str) -> None:
    card = Card()
    reader, writer = card.wave(0, cu=0), card.wave(0, cu=1)
    assert card.load(reader, NEAR, bits) == 0
    card.store(writer, NEAR, 7, SYSTEM)
    assert card.load(reader, NEAR, bits) == 0
    assert card.load(reader, NEAR, AGENT) == 7
    assert card.load(reader, NEAR, bits) == 7  # the scoped load dropped the line


def test_buffer_inv_sc0_drops_the_l1_of_that_cu_alone() -> None:
    card = Card()
    first, second, writer = card.wave(0, 0), card.wave(0, 1), card.wave(1)
    for reader in (first, second):
        assert card.load(reader, NEAR) == 0
    card.store(writer, NEAR, 7, SYSTEM)
    card.invalidate(first, WORKGROUP)
    assert (card.load(first, NEAR), card.load(second, NEAR)) == (7, 0)


@pytest.mark.parametrize("bits", [NO, WORKGROUP, NT])
def test_a_store_below_agent_scope_stays_in_its_xcd(bits: str) -> None:
    card = Card()
    card.store(card.wave(0), NEAR, 7, bits)
    assert card.load(card.wave(0, 1), NEAR, AGENT) == 7  # same L2
    for other in (1, 4):
        assert card.load(card.wave(other), NEAR, SYSTEM) == 0


@pytest.mark.parametrize("bits", [AGENT, SYSTEM])
def test_a_scoped_store_reaches_memory_and_probes_local_l2s(bits: str) -> None:
    card = Card()
    assert card.load(card.wave(1), NEAR, AGENT) == 0  # RW copy in XCD 1
    card.store(card.wave(0), NEAR, 7, bits)
    assert card.load(card.wave(1), NEAR, AGENT) == 7
    card.store(card.wave(4), NEAR, 8, SYSTEM)  # a writer on the other die invalidates local sharers
    assert card.load(card.wave(1), NEAR, AGENT) == 8


def test_an_agent_scope_poll_across_dies_never_sees_the_update_and_a_system_scope_one_does() -> None:
    card = Card()
    assert card.load(card.wave(4), NEAR, AGENT) == 0  # NC copy in XCD 4
    card.store(card.wave(0), NEAR, 7, SYSTEM)
    assert [card.load(card.wave(4), NEAR, AGENT) for _ in range(3)] == [0, 0, 0]
    assert card.load(card.wave(4), NEAR, SYSTEM) == 7


def test_agent_scope_holds_inside_a_device_for_non_local_lines() -> None:
    card = Card()
    assert card.load(card.wave(5), NEAR, AGENT) == 0
    card.store(card.wave(4), NEAR, 7, AGENT)  # another XCD of the same device
    assert card.load(card.wave(5), NEAR, AGENT) == 7


def test_uncached_memory_has_no_l2_copies_on_the_peer_die() -> None:
    card = Card("uncached")
    assert card.load(card.wave(4), NEAR, AGENT) == 0
    card.store(card.wave(0), NEAR, 7)  # CC: written through whatever the scope
    assert card.load(card.wave(4), NEAR, AGENT) == 7
    card.store(card.wave(4), NEAR, 8)  # UC: no L2 at all
    assert card.load(card.wave(0), NEAR, AGENT) == 8


@pytest.mark.parametrize(("bits", "seen"), [(WORKGROUP, 0), (AGENT, 7), (SYSTEM, 7)])
def test_buffer_inv_drops_non_local_lines_from_agent_scope_on(bits: str, seen: int) -> None:
    card = Card()
    card.load(card.wave(4), NEAR)
    card.store(card.wave(0), NEAR, 7, SYSTEM)
    card.invalidate(card.wave(4), bits)
    assert card.load(card.wave(4), NEAR) == seen


def test_a_write_back_is_done_at_the_wait_and_not_before() -> None:
    card = Card()
    writer, reader = card.wave(0), card.wave(4)
    card.store(writer, FAR, 7)
    card.writeback(writer)
    assert card.load(reader, FAR, SYSTEM) == 0
    card.wait(writer, vmcnt=1)  # one operation may be outstanding: the write-back itself
    assert card.load(reader, FAR, SYSTEM) == 0
    card.wait(writer)
    assert card.load(reader, FAR, SYSTEM) == 7


def test_vmcnt_counts_younger_operations() -> None:
    card = Card()
    writer, reader = card.wave(0), card.wave(4)
    card.store(writer, FAR, 7)
    card.writeback(writer)
    card.load(writer, NEAR)
    card.wait(writer, vmcnt=1)  # the load may be outstanding, the older write-back must be done
    assert card.load(reader, FAR, SYSTEM) == 7


def test_two_xcds_write_different_bytes_of_one_line() -> None:
    card = Card()
    card.store(card.wave(0), NEAR, 7)
    card.store(card.wave(1), NEAR + 1, 8)
    assert [card.load(card.wave(x), NEAR + i, AGENT) for x in (0, 1) for i in (0, 1)] == [7, 0, 0, 8]
    card.memory.finished(card.p0)
    assert [card.load(card.wave(x), NEAR + i, AGENT) for x in (0, 1, 4) for i in (0, 1)] == [7, 8] * 3
    assert card.words[NEAR : NEAR + 2].tolist() == [7, 8]


def test_read_modify_writes_act_at_memory_and_see_each_other() -> None:
    card = Card()
    seen = [card.add(card.wave(x), FAR, AGENT) for x in (0, 4, 1, 5, 0)]
    assert seen == [0, 1, 2, 3, 4]
    assert card.load(card.wave(7), FAR, SYSTEM) == 5


def test_a_kernel_starts_with_clean_caches_and_ends_with_a_write_back() -> None:
    card = Card()
    card.load(card.wave(4), NEAR)
    card.store(card.wave(0), NEAR, 7)
    card.memory.finished(card.p0)
    assert card.load(card.wave(4), NEAR) == 0
    card.memory.started(card.p1)
    assert card.load(card.wave(4), NEAR) == 7


def test_sub_word_and_straddling_accesses_meet_the_right_bytes() -> None:
    card = Card()
    writer, reader = card.wave(0), card.wave(1)
    four = card.request(writer, "global_store_dwordx4", 30, size=16)  # bytes 120-135: two lines
    card.memory.store(four, np.array([[1, 2, 3, 4]], np.uint32))
    byte = card.request(writer, "global_store_byte", 33, size=1)
    byte.address += 2
    card.memory.store(byte, np.array([[0xAB]], np.uint32))
    wide = card.request(reader, "global_load_dwordx4 sc1", 30, size=16)
    assert card.memory.load(wide)[0].tolist() == [[0, 0, 0, 0]]
    card.memory.finished(card.p0)
    assert card.memory.load(wide)[0].tolist() == [[1, 2, 3, 0x00AB0004]]


def test_never_written_bytes_are_told_apart_behind_a_dirty_line() -> None:
    card = Card()
    card.memory.poison("near")
    card.store(card.wave(0), NEAR, 7)
    own = card.memory.load(card.request(card.wave(0), "global_load_dword sc1", NEAR))
    other = card.memory.load(card.request(card.wave(1), "global_load_dword sc1", NEAR))
    assert own[1] is None and own[0][0, 0] == 7
    assert other[1] is not None and other[1][0, 0] == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("store", "poll", "reader", "cause", "words"),
    [
        (SYSTEM, WORKGROUP, 1, "workgroup-scope", "workgroup scope (sc0) may be served by the CU's own L1"),
        (SYSTEM, NT, 1, "nontemporal", "`nt` is a caching hint"),
        (SYSTEM, AGENT, 4, "agent-scope-peer", "agent scope (sc1) covers this logical device only"),
        (SYSTEM, NO, 1, "unscoped", "a load without scope bits"),
        (WORKGROUP, SYSTEM, 4, "workgroup-scope-store", "the store has workgroup scope"),
        (NT, SYSTEM, 4, "nontemporal-store", "the store's `nt`"),
        (NO, SYSTEM, 4, "no-write-back", "nothing wrote it back"),
    ],
)
def test_a_poll_that_can_never_end_is_a_fault_with_its_own_words(
    store: str, poll: str, reader: int, cause: str, words: str
) -> None:
    card = Card(patience=10)
    card.load(card.wave(reader), NEAR, poll)
    card.store(card.wave(0), NEAR, 7, store)
    with pytest.raises(StaleRead) as caught:
        for _ in range(20):
            assert card.load(card.wave(reader), NEAR, poll) == 0
    assert caught.value.facts["cause"] == cause
    assert words in caught.value.message
    assert "`global_store_dword" in caught.value.message and "0x00000007" in caught.value.message
    assert caught.value.facts["buffer"] == "near"


def test_the_right_poll_is_no_fault() -> None:
    card = Card(patience=10)
    for value in range(1, 50):
        card.store(card.wave(0), FAR, value, SYSTEM)
        assert card.load(card.wave(4), FAR, SYSTEM) == value
    assert card.memory.old_loads == ()


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        (("data", "flag"), "no-write-back"),
        (("data", "writeback", "flag"), "write-back-not-waited"),
        (("data", "writeback", "wait", "flag"), None),
    ],
)
def test_f7_a_flag_seen_before_its_data_is_a_fault(steps: tuple[str, ...], cause: str | None) -> None:
    card = Card()
    writer, reader = card.wave(0), card.wave(4)
    act = {
        "data": lambda: card.store(writer, FAR + 64, 7),
        "writeback": lambda: card.writeback(writer),
        "wait": lambda: card.wait(writer),
        "flag": lambda: card.store(writer, FAR, 1, SYSTEM),
    }
    for step in steps:
        act[step]()
    assert card.load(reader, FAR, SYSTEM) == 1
    if cause is None:
        assert card.load(reader, FAR + 64) == 7
        return
    with pytest.raises(FlagBeforeData) as caught:
        card.load(reader, FAR + 64)
    assert caught.value.facts["cause"] == cause


def test_a_reader_that_does_not_invalidate_after_the_flag_is_a_fault() -> None:
    card = Card()
    writer, reader = card.wave(0), card.wave(4)
    card.load(reader, NEAR + 64)
    card.store(writer, NEAR + 64, 7, SYSTEM)
    card.store(writer, NEAR, 1, SYSTEM)
    assert card.load(reader, NEAR, SYSTEM) == 1
    with pytest.raises(FlagBeforeData, match="did not invalidate"):
        card.load(reader, NEAR + 64)
    card.invalidate(reader)
    assert card.load(reader, NEAR + 64) == 7


def test_g5_delayed_stores_arrive_in_time_or_when_waited_for() -> None:
    card = Card(delay_turns=1000, seed=3)
    writer, reader = card.wave(0), card.wave(4)
    for i in range(8):
        card.store(writer, FAR + i, 7, SYSTEM)
    early = [card.load(reader, FAR + i, SYSTEM) for i in range(8)]
    assert early.count(0) > 4  # 1,000 turns have not passed
    card.store(writer, FAR + 32, 1)  # plain: a wait does not push it out of the L2
    card.wait(writer)
    assert [card.load(reader, FAR + i, SYSTEM) for i in range(8)] == [7] * 8
    assert card.load(reader, FAR + 32, SYSTEM) == 0
    for clock in range(1001):
        card.memory.turn(clock)
    assert card.load(reader, FAR + 32, SYSTEM) == 1


def test_traffic_counts_distinct_and_requested_bytes_by_side_and_type() -> None:
    card = Card()
    for _ in range(3):
        card.load(card.wave(0), NEAR)
        card.load(card.wave(0), FAR + 1)
    card.load(card.wave(4), FAR)
    card.store(card.wave(4), NEAR, 1, SYSTEM)
    near, far = card.memory.traffic.result(0).buffers
    assert (near.name, near.read.distinct, near.read.requested) == ("near", 4, 12)
    assert (near.read.distinct_local, near.read.distinct_peer, near.read.requested_by_type) == (4, 0, {"RW": 12})
    assert (far.read.distinct_local, far.read.distinct_peer) == (0, 4)
    assert (far.read.requested_by_side, far.read.requested_by_type) == ({"peer": 12}, {"NC": 12})
    other = card.memory.traffic.result(1)
    assert other.by_role()["sync_flag"][1].requested_by_side == {"peer": 4}
    assert other.by_role()["weights"][0].distinct_local == 4


def test_an_address_table_with_unaligned_neighbours() -> None:
    line_map = LineMap([MappedBuffer("a", 4096 + 60, 100), MappedBuffer("b", 4096 + 160, 9000)], None)
    addresses = np.array([4156, 4255, 4256, 4096 + 160 + 8996], np.int64)
    place = line_map.locate(addresses, 1)
    assert place is not None
    assert place.buffer.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert (line_map.address_of(place.lines) == addresses // 128 * 128).all()
    assert line_map.locate(np.array([4155]), 1) is None and line_map.locate(np.array([13252]), 8) is None
