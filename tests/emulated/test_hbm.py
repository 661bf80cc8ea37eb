"""Emulated HBM: capacities, homes, lifetimes; the expected figures come from arithmetic on sizes, not from the code."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dieplace.emulator.hbm import NOT_HBM, OBJECT_BYTES, EmulatedHBM
from dieplace.errors import DomainFull, NoSuchDevice, PlacementError, UsageError
from dieplace.machine import Domain

GIB = 1 << 30
NPS2 = (
    Domain("gpu0/mem0", "gpu0", (0,), 144 * GIB, aliases=("gpu0/die0",)),
    Domain("gpu0/mem1", "gpu0", (1,), 144 * GIB, aliases=("gpu0/die1",)),
)
NPS1 = (Domain("gpu0/mem0", "gpu0", (0, 1), 288 * GIB),)


def pages(block) -> np.ndarray:
    return np.uint64(block.address) + np.arange(0, block.nbytes, 4096, dtype=np.uint64)


def test_one_die_domain_holds_every_page() -> None:
    hbm = EmulatedHBM(NPS2)
    block = hbm.allocate("gpu0/die1", 64 << 20, role="weights")
    assert set(hbm.die_of(pages(block)).tolist()) == {1}
    assert block.homes == ("gpu0/mem1",)
    assert hbm.bytes_by_domain(block) == {"gpu0/mem1": 64 << 20}


def test_interleaved_domain_spreads_pages_evenly_and_stably() -> None:
    homes = []
    for _ in range(2):
        hbm = EmulatedHBM(NPS1)
        block = hbm.allocate("gpu0/mem0", 256 << 20, role="weights")
        homes.append(hbm.die_of(pages(block)))
    # 65,536 pages: six standard deviations of a fair coin are 768 pages.
    assert abs(int(homes[0].sum()) - 32768) < 768
    assert np.array_equal(homes[0], homes[1])
    # not a stripe: neighbouring pages agree about as often as they differ
    agree = int((homes[0][1:] == homes[0][:-1]).sum())
    assert abs(agree - 32768) < 768


def test_every_address_of_a_page_has_one_home() -> None:
    hbm = EmulatedHBM(NPS1)
    block = hbm.allocate("gpu0/mem0", 4 << 20, role="weights")
    inside = np.uint64(block.address + 7 * 4096) + np.arange(4096, dtype=np.uint64)
    assert len(set(hbm.die_of(inside).tolist())) == 1


def test_foreign_addresses_are_not_hbm() -> None:
    hbm = EmulatedHBM(NPS2)
    block = hbm.allocate("gpu0/mem0", 100, role="weights")
    host = torch.zeros(8)
    asked = np.array([host.data_ptr(), block.address - 1, block.address + 100, 0], dtype=np.uint64)
    assert hbm.die_of(asked).tolist() == [NOT_HBM] * 4
    assert hbm.domain_of(asked).tolist() == [NOT_HBM] * 4
    assert hbm.block_at(block.address + 99) == block
    assert hbm.block_at(block.address + 100) is None


def test_one_byte_too_many_changes_nothing() -> None:
    hbm = EmulatedHBM(NPS2)
    hbm.allocate("gpu0/mem0", 100 * GIB, role="weights")
    with pytest.raises(DomainFull) as caught:
        hbm.allocate("gpu0/mem0", 44 * GIB + 1, role="weights")
    assert caught.value.facts == {
        "asked_bytes": 44 * GIB + OBJECT_BYTES,
        "free_bytes": 44 * GIB,
        "total_bytes": 144 * GIB,
        "domain": "gpu0/mem0",
    }
    assert hbm.free_bytes("gpu0/mem0") == 44 * GIB
    hbm.allocate("gpu0/mem0", 44 * GIB, role="weights")
    assert hbm.free_bytes("gpu0/mem0") == 0
    assert hbm.used_bytes("gpu0/mem1") == 0


def test_pattern_that_does_not_fit_leaves_both_domains_alone() -> None:
    hbm = EmulatedHBM(NPS2)
    hbm.allocate("gpu0/mem1", 143 * GIB, role="weights")
    with pytest.raises(DomainFull) as caught:
        hbm.allocate(["gpu0/mem0", "gpu0/mem1"], 8 * GIB, role="weights")
    assert caught.value.facts["domain"] == "gpu0/mem1"
    assert hbm.used_bytes("gpu0/mem0") == 0
    assert hbm.used_bytes("gpu0/mem1") == 143 * GIB


def test_interleave_pattern_repeats_over_objects() -> None:
    hbm = EmulatedHBM(NPS2)
    pattern = ["gpu0/mem1", "gpu0/mem1", "gpu0/mem1"] + ["gpu0/mem0"] * 5
    block = hbm.allocate(pattern, 16 * OBJECT_BYTES + 10, role="weights")
    first_bytes = np.uint64(block.address) + np.arange(17, dtype=np.uint64) * OBJECT_BYTES
    assert hbm.die_of(first_bytes).tolist() == ([1, 1, 1, 0, 0, 0, 0, 0] * 3)[:17]
    assert hbm.bytes_by_domain(block) == {"gpu0/mem0": 10 * OBJECT_BYTES, "gpu0/mem1": 6 * OBJECT_BYTES + 10}
    assert hbm.bytes_by_die(block) == {0: 10 * OBJECT_BYTES, 1: 6 * OBJECT_BYTES + 10}


def test_device_limit_is_charged_apart_from_the_pool() -> None:
    hbm = EmulatedHBM(NPS1, device_limits={"gpu0/p0": 144 * GIB, "gpu0/p1": 144 * GIB})
    block = hbm.allocate("gpu0/mem0", 144 * GIB, role="weights", device="gpu0/p0")
    with pytest.raises(DomainFull, match="memory limit of gpu0/p0"):
        hbm.allocate("gpu0/mem0", 1, role="weights", device="gpu0/p0")
    hbm.allocate("gpu0/mem0", GIB, role="weights", device="gpu0/p1")
    hbm.free(block)
    assert hbm.charged_bytes("gpu0/p0") == 0
    assert hbm.charged_bytes("gpu0/p1") == GIB


def test_move_keeps_address_and_contents() -> None:
    hbm = EmulatedHBM(NPS2)
    block = hbm.allocate("gpu0/mem0", 10 << 20, role="weights")
    tensor = hbm.tensor(block, torch.float32)
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32))
    moved = hbm.move(block, "gpu0/mem1")
    assert moved.address == block.address == tensor.data_ptr()
    assert set(hbm.die_of(pages(moved)).tolist()) == {1}
    assert torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float32))
    assert hbm.used_bytes("gpu0/mem0") == 0


def test_tensor_outlives_free_and_returns_the_bytes_when_it_dies() -> None:
    hbm = EmulatedHBM(NPS2)
    block = hbm.allocate("gpu0/mem0", 8 << 20, role="weights")
    tensor = hbm.tensor(block, torch.int32)[5:]
    tensor.fill_(7)
    hbm.free(block)
    assert hbm.used_bytes("gpu0/mem0") == 8 << 20  # not before the view is gone
    gc.collect()
    assert int(tensor.sum()) == 7 * tensor.numel()
    del tensor
    gc.collect()
    assert hbm.used_bytes("gpu0/mem0") == 0
    with pytest.raises(UsageError, match="already free"):
        hbm.free(block)
    with pytest.raises(PlacementError, match="is free"):
        hbm.tensor(block)


def test_tensor_survives_the_hbm_object() -> None:
    hbm = EmulatedHBM(NPS2)
    tensor = hbm.empty((1000,), torch.float64, "gpu0/mem0", role="kv_cache")
    tensor.fill_(3.0)
    del hbm
    gc.collect()
    assert float(tensor.sum()) == 3000.0


def test_wrong_words_are_told() -> None:
    hbm = EmulatedHBM(NPS2)
    with pytest.raises(NoSuchDevice, match="gpu0/mem0, gpu0/mem1"):
        hbm.allocate("gpu9/mem0", 1, role="weights")
    with pytest.raises(UsageError, match="at least 1"):
        hbm.allocate("gpu0/mem0", 0, role="weights")
    with pytest.raises(UsageError, match="coarse, fine, uncached"):
        hbm.allocate("gpu0/mem0", 1, role="weights", memory_class="wc")
    block = hbm.allocate("gpu0/mem0", 100, role="weights")
    with pytest.raises(UsageError, match="does not fit"):
        hbm.tensor(block, torch.float32, (26,))


def test_hundreds_of_gigabytes_cost_no_ram() -> None:
    code = """
        import resource
        from dieplace.emulator.hbm import EmulatedHBM
        from dieplace.machine import Domain
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hbm = EmulatedHBM([Domain("gpu0/mem0", "gpu0", (0,), 288 << 30)])
        block = hbm.allocate("gpu0/mem0", 280 << 30, role="weights")
        view = hbm.array(block)
        view[:: 8 << 30] = 1   # 35 pages touched over the whole range
        assert int(view[:: 8 << 30].sum()) == 35
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 1024  # KiB


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "free", "move", "view", "drop"]),
        st.integers(0, 2),
        st.integers(1, 40 << 20),
        st.integers(0, 1 << 16),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_accounting_is_the_sum_of_live_blocks(actions) -> None:
    """Against a model that knows only sizes in objects: totals per domain after every step, nothing left at the end."""
    capacity = 32
    hbm = EmulatedHBM([Domain(f"gpu0/mem{i}", "gpu0", (i,), capacity * OBJECT_BYTES) for i in (0, 1)])
    places = (["gpu0/mem0"], ["gpu0/mem1"], ["gpu0/mem0", "gpu0/mem1"])
    live: dict[int, tuple] = {}  # id -> (block, place number)
    views: list[tuple[int, object]] = []
    zombies: dict[int, tuple] = {}

    def needs(objects: int, place: int) -> list[int]:
        return [(objects, 0), (0, objects), (-(-objects // 2), objects // 2)][place]

    def used(domain: int) -> int:
        held = [*live.values(), *zombies.values()]
        return sum(needs(b.reserved_bytes // OBJECT_BYTES, place)[domain] for b, place in held)

    def fits(objects: int, place: int) -> bool:
        return all(used(d) + needs(objects, place)[d] <= capacity for d in (0, 1))

    for action, place, nbytes, pick in actions:
        chosen = list(live.values())[pick % len(live)] if live else None
        if action == "allocate":
            objects = -(-nbytes // OBJECT_BYTES)
            if fits(objects, place):
                block = hbm.allocate(places[place], nbytes, role="weights")
                live[block.id] = (block, place)
            else:
                with pytest.raises(DomainFull):
                    hbm.allocate(places[place], nbytes, role="weights")
        elif action == "free" and chosen:
            hbm.free(chosen[0])
            del live[chosen[0].id]
            if any(block_id == chosen[0].id for block_id, _ in views):
                zombies[chosen[0].id] = chosen
        elif action == "move" and chosen:
            block = chosen[0]
            if fits(block.reserved_bytes // OBJECT_BYTES, place):
                live[block.id] = (hbm.move(block, places[place]), place)
            else:
                with pytest.raises(DomainFull):
                    hbm.move(block, places[place])
        elif action == "view" and chosen:
            views.append((chosen[0].id, hbm.array(chosen[0])))
        elif action == "drop" and views:
            block_id, _ = views.pop(pick % len(views))
            del _
            if not any(other == block_id for other, _ in views):
                zombies.pop(block_id, None)
        for domain in (0, 1):
            assert hbm.used_bytes(f"gpu0/mem{domain}") == used(domain) * OBJECT_BYTES
    for block, _place in live.values():
        hbm.free(block)
    views.clear()
    assert hbm.used_bytes("gpu0/mem0") == hbm.used_bytes("gpu0/mem1") == 0
    assert hbm.blocks() == ()


def test_address_space_limit_is_a_clear_error() -> None:
    code = """
        import resource
        from dieplace.emulator.hbm import EmulatedHBM
        from dieplace.errors import PlacementError
        from dieplace.machine import Domain
        hbm = EmulatedHBM([Domain("gpu0/mem0", "gpu0", (0,), 288 << 30)])
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        try:
            hbm.allocate("gpu0/mem0", 100 << 30, role="weights")
        except PlacementError as error:
            print(hbm.used_bytes("gpu0/mem0"), error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("0 the host refused a sparse mapping"), done.stderr
    assert "ulimit -v" in done.stdout


def test_threads_keep_the_accounts_right() -> None:
    hbm = EmulatedHBM(NPS2)
    failures: list[BaseException] = []

    def work(domain: str) -> None:
        try:
            for _ in range(60):
                block = hbm.allocate(domain, 3 << 20, role="weights")
                view = hbm.array(block)
                hbm.move(block, "gpu0/mem1")
                hbm.free(block)
                del view
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"gpu0/mem{i % 2}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert hbm.used_bytes("gpu0/mem0") == hbm.used_bytes("gpu0/mem1") == 0


@pytest.mark.parametrize("ending", ["", "import os; os._exit(0)", "raise SystemExit(0)", "hbm = None"])
def test_interpreter_exit_with_live_memory_is_quiet(ending: str) -> None:
    code = f"""
        import torch
        from dieplace.emulator.hbm import EmulatedHBM
        from dieplace.machine import Domain
        hbm = EmulatedHBM([Domain("gpu0/mem0", "gpu0", (0,), 1 << 34)])
        block = hbm.allocate("gpu0/mem0", 5 << 20, role="weights")
        tensor = hbm.empty((1000,), torch.float32, "gpu0/mem0", role="weights")
        cycle = [hbm, tensor]
        cycle.append(cycle)
        {ending}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_has_its_own_accounts() -> None:
    code = """
        import os
        from dieplace.emulator.hbm import EmulatedHBM
        from dieplace.machine import Domain
        hbm = EmulatedHBM([Domain("gpu0/mem0", "gpu0", (0,), 1 << 34)])
        block = hbm.allocate("gpu0/mem0", 4 << 20, role="weights")
        view = hbm.array(block)
        view[0] = 7
        pid = os.fork()
        if pid == 0:
            view[0] = 9
            del view
            hbm.free(block)
            os._exit(0 if hbm.used_bytes("gpu0/mem0") == 0 else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, int(view[0]), hbm.used_bytes("gpu0/mem0"))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"0 7 {4 << 20}\n", done.stderr
