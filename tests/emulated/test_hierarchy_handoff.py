"""Hand-offs as kernels, on two logical devices at once: right ones pass whatever the order, wrong ones are caught."""

from __future__ import annotations

import re
import time
from typing import Any

import handoff_kernels as handoff
import pytest
import torch
from torch import Tensor

from dieplace.codegen.flydsl import compile_launcher
from dieplace.emulator.execution import LaunchRecord, concurrent, run
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.emulator.isa import Livelock, LogicalDevice, NeverWritten
from dieplace.emulator.isa.hierarchy_watch import FlagBeforeData, StaleRead
from dieplace.errors import Unsupported
from dieplace.machine import Domain

ROUNDS = 4
DOMAINS = tuple(Domain(f"gpu0/mem{d}", "gpu0", (d,), 1 << 30) for d in (0, 1))
FAST = {"patience": 100}


class Card:
    """A DPX/NPS2 card with tensors of given home."""

    def __init__(self) -> None:
        self.hbm = EmulatedHBM(DOMAINS)

    def zeros(
        self, *shape: int, dtype: torch.dtype, die: int, memory_class: str = "coarse", role: str = "sync_flag"
    ) -> Tensor:
        domain = DOMAINS[die].id
        return self.hbm.empty(shape, dtype, domain, role=role, memory_class=memory_class).zero_()

    def box(self, die: int, memory_class: str = "coarse") -> Tensor:
        return self.zeros(ROUNDS * 16, dtype=torch.int64, die=die, memory_class=memory_class)

    def out(self, blocks: int, die: int) -> Tensor:
        return self.zeros(blocks, ROUNDS, dtype=torch.int32, die=die, role="activation")


EXPECTED = torch.arange(ROUNDS, dtype=torch.int32) * 3 + 7


def across_dies(
    put: str, poll: str, *, home: int, memory_class: str = "coarse", seed: int | None = 0, limit: int = handoff.FOREVER,
    **options: Any,
) -> tuple[Tensor, LaunchRecord, LaunchRecord]:  # fmt: skip
    """Producer on p0, two polling blocks on p1, the mailbox on die `home`."""
    card = Card()
    box, out = card.box(home, memory_class), card.out(2, 1)
    settings = {"memory": card.hbm, "memory_options": FAST, **options}
    with concurrent(seed=seed):
        first = run(handoff.producer(put), box, ROUNDS, 0, device="gpu0/p0", **settings)
        second = run(handoff.consumer(poll), box, out, ROUNDS, 0, limit, 2, device="gpu0/p1", **settings)
    return out, first, second


@pytest.mark.parametrize("home", [0, 1], ids=["producer's die", "consumer's die"])
@pytest.mark.parametrize("memory_class", ["coarse", "uncached"])
def test_a_system_scope_hand_off_arrives_wherever_the_mailbox_lies(home: int, memory_class: str) -> None:
    out, first, second = across_dies("system", "system", home=home, memory_class=memory_class)
    assert torch.equal(out, EXPECTED.expand(2, ROUNDS))
    assert {r.device for r in (first, second)} == {"gpu0/p0", "gpu0/p1"}
    writer, reader = first.kernels[0].traffic, second.kernels[0].traffic
    assert writer is not None and reader is not None
    assert set(writer.buffer("BOX").written.requested_by_side) == {"local" if home == 0 else "peer"}
    assert set(reader.buffer("BOX").read.requested_by_side) == {"local" if home == 1 else "peer"}


@pytest.mark.parametrize(
    ("put", "poll", "home", "cause", "words"),
    [
        ("workgroup", "workgroup", 0, "workgroup-scope", "workgroup scope (sc0) may be served by the CU's own L1"),
        ("system", "workgroup", 1, "workgroup-scope", "workgroup scope (sc0) may be served by the CU's own L1"),
        ("nt", "nt", 0, "nontemporal", "`nt` is a caching hint and gives no scope"),
        ("system", "agent", 0, "agent-scope-peer", "agent scope (sc1) covers this logical device only"),
    ],
)  # fmt: skip
def test_a_wrong_hand_off_is_caught_at_its_instruction(put: str, poll: str, home: int, cause: str, words: str) -> None:
    # seeds differ in who comes first; a poller that comes second may see what is already there
    for seed in range(8):
        try:
            across_dies(put, poll, home=home, seed=seed)
        except StaleRead as fault:
            assert fault.facts["cause"] == cause, fault
            assert words in fault.message
            assert fault.facts["buffer"] == "BOX" and fault.facts["instruction"].startswith("global_load_dwordx2")
            assert fault.facts["store"].startswith("global_store_dwordx2")
            bits = {"workgroup": "sc0", "agent": "sc1", "nt": "nt", "system": "sc0 sc1"}
            assert fault.facts["instruction"].endswith(bits[poll]) and fault.facts["store"].endswith(bits[put])
            return
    pytest.fail("no seed met the fault")


@pytest.mark.parametrize(
    ("put", "cause", "words"),
    [
        ("workgroup", "workgroup-scope-store", "the store has workgroup scope (sc0)"),
        ("nt", "nontemporal-store", "the store's `nt` is a caching hint"),
    ],
)
def test_a_wrong_store_is_caught_while_its_kernel_lives(put: str, cause: str, words: str) -> None:
    # a kernel's end writes back, so the producer must be a workgroup of a launch that goes on
    box, out = torch.zeros(ROUNDS * 16, dtype=torch.int64), torch.zeros(2, ROUNDS, dtype=torch.int32)
    with pytest.raises(StaleRead) as caught:
        run(handoff.both(put, "system"), box, out, torch.zeros(2, dtype=torch.int32), ROUNDS, 2, memory_options=FAST)
    assert caught.value.facts["cause"] == cause and words in caught.value.message


def test_b5_the_same_kernel_at_agent_scope_is_reported_at_the_polling_instruction() -> None:
    box, out = torch.zeros(ROUNDS * 16, dtype=torch.int64), torch.zeros(2, ROUNDS, dtype=torch.int32)
    isa = compile_launcher(handoff.consumer("agent"), box, out, ROUNDS, 0, 1, 2).isa.splitlines()
    with pytest.raises(StaleRead) as caught:
        for seed in range(8):
            across_dies("system", "agent", home=0, seed=seed)
    assert isa[caught.value.facts["line"] - 1].split(";")[0].strip() == caught.value.facts["instruction"]


@pytest.mark.parametrize(("how", "bits"), [("system", "sc0 sc1"), ("agent", "sc1")])
def test_b5_isa_of_a_cross_die_hand_off_carries_system_scope(how: str, bits: str) -> None:
    box, out = torch.zeros(ROUNDS * 16, dtype=torch.int64), torch.zeros(2, ROUNDS, dtype=torch.int32)
    loads = compile_launcher(handoff.consumer(how), box, out, ROUNDS, 0, 1, 2).isa
    stores = compile_launcher(handoff.producer(how), box, ROUNDS, 0).isa
    found = re.findall(r"global_load_dwordx2 v.*", loads) + re.findall(r"global_store_dwordx2 v.*", stores)
    assert len(found) >= 2
    assert all(line.strip().endswith(bits) for line in found)
    assert all(line.strip().endswith("sc0 sc1") for line in found) is (how == "system")


@pytest.mark.parametrize("how", ["system", "agent"])
def test_inside_one_device_agent_scope_is_enough(how: str) -> None:
    blocks = 8
    box, out = torch.zeros(ROUNDS * 16, dtype=torch.int64), torch.zeros(blocks, ROUNDS, dtype=torch.int32)
    xcc = torch.zeros(blocks, dtype=torch.int32)
    run(handoff.both(how, how), box, out, xcc, ROUNDS, blocks, seed=1)
    assert torch.equal(out[1:], EXPECTED.expand(blocks - 1, ROUNDS))
    assert xcc.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]  # dealt to XCDs round robin


# -- case f7: the payload is a word of its own -------------------------------------------------------------------------


def publish_and_collect(release: str, *, acquire: bool = True, early: int = 0, seed: int = 0, **options: Any) -> Tensor:
    card = Card()
    data = card.zeros(64, dtype=torch.float32, die=0, role="activation")
    flag = card.zeros(32, dtype=torch.int32, die=1)
    out = card.zeros(128, dtype=torch.float32, die=1, role="activation")
    settings = {"memory": card.hbm, "memory_options": FAST, **options}
    with concurrent(seed=seed):
        run(handoff.publish(release), data, flag, 5.0, 1, device="gpu0/p0", **settings)
        run(handoff.collect(acquire=acquire), data, flag, out, 1, early, device="gpu0/p1", **settings)
    return out[:64]


def test_f7_isa_waits_between_write_back_and_flag() -> None:
    data, flag = torch.zeros(64), torch.zeros(32, dtype=torch.int32)
    waited = {}
    for release in handoff.RELEASES:
        isa = compile_launcher(handoff.publish(release), data, flag, 5.0, 1).isa
        between = re.search(r"buffer_wbl2 sc0 sc1(.*?)global_store_dword \S+, \S+ \S+ sc0 sc1", isa, re.S)
        waited[release] = None if between is None else "s_waitcnt vmcnt(0)" in between.group(1)
    assert waited == {"right": True, "no fence": None, "no wait": False}


@pytest.mark.parametrize(
    ("release", "cause"),
    [
        pytest.param("no fence", "no-write-back", marks=pytest.mark.slow),
        ("no wait", "write-back-not-waited"),
    ],
)
def test_f7_a_flag_before_its_data_is_a_fault(release: str, cause: str) -> None:
    with pytest.raises(FlagBeforeData) as caught:
        for seed in range(64):  # the reader must come between the flag and the end of the writer's kernel
            publish_and_collect(release, seed=seed)
    assert caught.value.facts["cause"] == cause
    assert caught.value.facts["buffer"] == "DATA"


def test_f7_the_right_release_brings_the_data() -> None:
    for seed in range(8):
        assert torch.equal(publish_and_collect("right", seed=seed, early=seed % 2), 5.0 + torch.arange(64.0))


def test_a_reader_without_an_acquire_is_caught() -> None:
    with pytest.raises(FlagBeforeData, match="did not invalidate"):
        for seed in range(16):
            publish_and_collect("right", acquire=False, early=1, seed=seed)


# -- group g: persistent kernels, flags and waits ----------------------------------------------------------------------


def one_a_cu(cus: int) -> LogicalDevice:
    return LogicalDevice("gpu0/small", xcds=(0,), cus_per_xcd=cus)


def barrier_tensors(blocks: int, iterations: int = 3) -> tuple[Tensor, ...]:
    x = torch.randn(blocks * 64, generator=torch.Generator().manual_seed(0))
    return (
        x,
        torch.zeros(iterations, -(-blocks // 4) * 4),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(iterations, blocks),
    )


def test_g1_more_blocks_than_can_be_resident_are_refused_with_both_numbers() -> None:
    launcher = handoff.persistent(133, lds_bytes=100 * 1024)  # one block a CU
    tensors = barrier_tensors(133)
    device = LogicalDevice("gpu0/p0", xcds=(0, 1, 2, 3), cus_per_xcd=33)
    with pytest.raises(Unsupported, match=r"133 workgroups .* holds 132"):
        run(launcher, *tensors, device=device, all_resident=True)
    small = handoff.persistent(8, lds_bytes=100 * 1024)
    eight = LogicalDevice("gpu0/p0", xcds=(0, 1, 2, 3), cus_per_xcd=2)
    run(small, *barrier_tensors(8), device=eight, all_resident=True)
    with pytest.raises(Unsupported, match=r"8 workgroups .* holds 8, 1 kept free"):
        run(small, *barrier_tensors(8), device=eight, all_resident=True, keep_free=1)


def test_g1_without_the_check_the_hang_is_a_typed_fault_in_bounded_time() -> None:
    start = time.monotonic()
    with pytest.raises(Livelock, match="COUNT"):
        run(handoff.persistent(3, lds_bytes=100 * 1024), *barrier_tensors(3), device=one_a_cu(2), step_limit=50_000)
    assert time.monotonic() - start < 20


def test_g3_repeated_launches_follow_their_input() -> None:
    card = Card()
    data, out = (card.zeros(n, dtype=torch.float32, die=0, role="activation") for n in (64, 128))
    flag = card.zeros(32, dtype=torch.int32, die=1)
    for launch in (1, 2, 3):
        settings = {"memory": card.hbm, "poison": ("DATA",)}  # what the last launch left must never be read
        with concurrent(seed=launch):
            run(handoff.publish("right"), data, flag, float(launch), launch, device="gpu0/p0", **settings)
            run(handoff.collect(), data, flag, out, launch, 0, device="gpu0/p1", **settings)
        assert torch.equal(out[:64], launch + torch.arange(64.0))


def test_g3_a_baked_tag_reads_the_last_launch_and_is_caught() -> None:
    card = Card()
    data, out = (card.zeros(n, dtype=torch.float32, die=0, role="activation") for n in (64, 128))
    flag = card.zeros(32, dtype=torch.int32, die=1)

    def launch(value: float, seed: int) -> None:
        settings = {"memory": card.hbm, "poison": ("DATA",)}
        with concurrent(seed=seed):
            run(handoff.publish("right"), data, flag, value, 1, device="gpu0/p0", **settings)
            run(handoff.collect(baked_tag=1), data, flag, out, 1, 0, device="gpu0/p1", **settings)

    launch(1.0, 0)
    with pytest.raises(NeverWritten, match="DATA"):
        for seed in range(16):
            launch(2.0, seed)


@pytest.mark.parametrize("delay", [0, 1000])
def test_g5_a_fenced_barrier_gives_the_same_sums_whatever_the_delays(delay: int) -> None:
    blocks = 8
    x, part, count, y = barrier_tensors(blocks)
    run(handoff.persistent(blocks), x, part, count, y, seed=delay, delay_turns=delay)
    total = x.double().sum()
    for i in range(3):
        torch.testing.assert_close(y[i].double(), (total * (i + 1)).expand(blocks), rtol=1e-5, atol=1e-5)


def test_g5_arriving_before_the_writes_are_visible_is_caught() -> None:
    blocks = 8
    with pytest.raises(FlagBeforeData) as caught:
        for seed in range(8):
            run(handoff.persistent(blocks, fenced=False), *barrier_tensors(blocks), seed=seed, delay_turns=1000)
    assert caught.value.facts["buffer"] == "PART"


def test_g9_a_wait_that_expires_names_flag_expected_value_and_waiter() -> None:
    card = Card()
    box, out = card.box(1), card.out(2, 1)
    start = time.monotonic()
    with pytest.raises(Livelock) as caught:
        run(
            handoff.consumer(),
            box,
            out,
            ROUNDS,
            0,
            handoff.FOREVER,
            2,
            device="gpu0/p1",
            memory=card.hbm,
            step_limit=30_000,
        )
    assert time.monotonic() - start < 20
    assert "BOX" in caught.value.message and "workgroups 0, 1" in caught.value.message
    assert "last read 0x0" in caught.value.message
    # a wait with a limit of its own ends the kernel by itself, and the flags can be used afterwards
    run(handoff.consumer(), box, out, ROUNDS, 0, 50, 2, device="gpu0/p1", memory=card.hbm)
    assert (out == -1).all()
    run(handoff.producer(), box, ROUNDS, 0, device="gpu0/p0", memory=card.hbm)
    run(handoff.consumer(), box, out, ROUNDS, 0, 50, 2, device="gpu0/p1", memory=card.hbm)
    assert torch.equal(out, EXPECTED.expand(2, ROUNDS))
