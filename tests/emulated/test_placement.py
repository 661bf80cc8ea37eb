"""Policies, buffers, contexts and audit on the emulated node, in the modes an MI355X offers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import DomainFull, Misplaced, PlacementError, Unsupported, UsageError
from dieplace.machine import Device, Machine
from dieplace.policy import OBJECT_BYTES, Policy, expected_bytes, resolve
from dieplace.residency import audit

MIB = 1 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, EmulatedBackend]]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield {
            mode: EmulatedBackend(create(Path(folder) / mode.replace("/", "-"), cards=1, mode=mode))
            for mode in ("DPX/NPS2", "SPX/NPS1", "CPX/NPS2")
        }


@pytest.fixture
def dpx(nodes: dict[str, EmulatedBackend]) -> Machine:
    return nodes["DPX/NPS2"].snapshot()


def used(machine: Machine) -> dict[str, int]:
    """Held bytes by domain; without a collection first: buffers and tensors are given back by reference count alone."""
    hbm = machine.require_session("look").memory.hbm  # type: ignore[attr-defined]
    return {d.id: hbm.used_bytes(d.id) for d in hbm.domains}


# -- policies ----------------------------------------------------------------------------------------------------------


def test_local_and_peer_are_relative_to_the_device(dpx: Machine) -> None:
    die0, die1 = dpx.device("gpu0/p0"), dpx.device("gpu0/p1")
    assert resolve(Policy.local(), dpx, die0).pattern == ("gpu0/mem0",)
    assert resolve(Policy.local(), dpx, die1).pattern == ("gpu0/mem1",)
    assert resolve(Policy.peer(), dpx, die0).pattern == ("gpu0/mem1",)
    assert resolve(Policy.peer(), dpx, die1).pattern == ("gpu0/mem0",)
    assert resolve(Policy.local(strict=True), dpx, die0).local_guaranteed
    assert not resolve(Policy.peer(), dpx, die0).local_guaranteed
    assert resolve(Policy.on("gpu0/die1"), dpx, die1).local_guaranteed


def test_nps1_is_local_without_a_guarantee_and_strict_refuses(nodes: dict[str, EmulatedBackend]) -> None:
    spx = nodes["SPX/NPS1"].snapshot()
    whole = spx.device("gpu0")
    found = resolve(Policy.local(), spx, whole)
    assert found.pattern == ("gpu0/mem0",) and not found.local_guaranteed
    assert "0 and 1" in found.note
    with pytest.raises(PlacementError, match="DPX/NPS2"):
        resolve(Policy.local(strict=True), spx, whole)
    with pytest.raises(PlacementError, match="no single peer of gpu0/mem0: it is the only memory domain of the card"):
        resolve(Policy.peer(), spx, whole)


def test_cpx_devices_share_a_domain_and_have_one_peer(nodes: dict[str, EmulatedBackend]) -> None:
    cpx = nodes["CPX/NPS2"].snapshot()
    homes = [resolve(Policy.local(), cpx, d).pattern[0] for d in cpx.devices]
    assert homes == ["gpu0/mem0"] * 4 + ["gpu0/mem1"] * 4
    assert [resolve(Policy.peer(), cpx, d).pattern[0] for d in cpx.devices] == ["gpu0/mem1"] * 4 + ["gpu0/mem0"] * 4


def test_four_domains_have_no_single_peer(tmp_path: Path) -> None:
    machine = EmulatedBackend(create(tmp_path / "n", part="MI300X", cards=1, mode="CPX/NPS4")).snapshot()
    with pytest.raises(PlacementError, match=r"on\(DOMAIN\)") as caught:
        resolve(Policy.peer(), machine, machine.device("gpu0/p0"))
    assert caught.value.facts["others"] == ["gpu0/mem1", "gpu0/mem2", "gpu0/mem3"]


@pytest.mark.parametrize("eighths", range(9))
def test_share_puts_k_of_every_eight_consecutive_objects_on_the_peer(dpx: Machine, eighths: int) -> None:
    pattern = resolve(Policy.peer_share(eighths), dpx, dpx.device("gpu0/p0")).pattern
    long = pattern * 3
    for start in range(16):
        assert long[start : start + 8].count("gpu0/mem1") == eighths


@pytest.mark.parametrize(
    "text", ["local", "peer", "on:gpu0/mem1", "preferred:gpu0/mem0", "interleave:gpu0/mem0,gpu0/mem1", "interleave-3/8"]
)
def test_policy_words_round_trip(text: str) -> None:
    assert str(Policy.parse(text)) == text


@pytest.mark.parametrize("text", ["", "near", "on:", "interleave-9/8", "interleave:gpu0/mem0", "local:gpu0"])
def test_unknown_policy_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Policy.parse(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(1, 50 * OBJECT_BYTES))
def test_expected_bytes_follow_the_objects(pattern: list[str], nbytes: int) -> None:
    """Against a walk over the objects, one by one."""
    walked: dict[str, int] = {}
    for index, start in enumerate(range(0, nbytes, OBJECT_BYTES)):
        home = pattern[index % len(pattern)]
        walked[home] = walked.get(home, 0) + min(OBJECT_BYTES, nbytes - start)
    assert expected_bytes(tuple(pattern), nbytes) == walked


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_buffer_lands_moves_and_frees(dpx: Machine) -> None:
    before = used(dpx)
    with dpx.allocate(
        (3, MIB), dtype="float32", device="gpu0/p0", policy=Policy.local(), role="weights", name="w"
    ) as w:
        w.tensor.fill_(2.5)
        address = w.address
        assert audit(w).bytes_by_domain() == {"gpu0/mem0": 12 * MIB}
        assert w.bytes_by_die() == {0: 12 * MIB}
        w.move(Policy.peer())
        assert w.address == address and w.tensor.data_ptr() == address
        assert audit(w).bytes_by_domain() == {"gpu0/mem1": 12 * MIB}
        assert float(w.tensor.sum()) == 2.5 * 3 * MIB
        assert not audit(w).misplaced  # on the peer because that was asked
    assert used(dpx) == before
    with pytest.raises(UsageError, match="was freed"):
        _ = w.tensor
    w.free()


def test_flags_get_the_class_a_cross_die_poller_can_trust(dpx: Machine) -> None:
    with dpx.allocate(64 * 128, device="gpu0/p0", policy=Policy.local(), role="sync_flag") as flags:
        assert flags.memory_class == "uncached"
    with dpx.allocate(64, device="gpu0/p0", policy=Policy.local(), role="kv_cache") as kv:
        assert kv.memory_class == "coarse"


def test_full_domain_is_an_error_and_spill_is_on_request_only(dpx: Machine) -> None:
    limit = dpx.device("gpu0/p0").memory_limit_bytes
    assert limit is not None
    room = dpx.domain("gpu0/mem0").total_bytes
    assert room is not None
    filler = dpx.allocate(room - 100 * MIB, device="gpu0/p1", policy=Policy.on("gpu0/mem0"), role="weights")
    before = used(dpx)
    with pytest.raises(DomainFull) as caught:
        dpx.allocate(200 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights")
    assert caught.value.facts["domain"] == "gpu0/mem0" and caught.value.facts["asked_bytes"] == 200 * MIB
    assert used(dpx) == before
    free = room // OBJECT_BYTES * OBJECT_BYTES - before["gpu0/mem0"]
    spilled = dpx.allocate(200 * MIB, device="gpu0/p0", policy=Policy.local(spill="peer"), role="weights")
    found = audit(spilled)
    assert found.bytes_by_domain() == {"gpu0/mem0": free, "gpu0/mem1": 200 * MIB - free}
    assert [item.misplaced_bytes for item in found.misplaced] == [200 * MIB - free]
    with pytest.raises(Misplaced):
        found.require_placed()
    spilled.free()
    filler.free()


def test_an_allocator_that_spills_and_says_nothing_is_caught(dpx: Machine) -> None:
    """Case b7: of 93 GiB, 40 land on the neighbour, and the call succeeds."""
    gib = 1 << 30
    hbm = dpx.require_session("break").memory.hbm  # type: ignore[attr-defined]
    before = used(dpx)
    hbm.divert_next(40 * gib, "gpu0/mem1")
    with pytest.raises(DomainFull, match=f"{40 * gib:,} of them in gpu0/mem1"):
        dpx.allocate(93 * gib, device="gpu0/p0", policy=Policy.local(), role="weights")
    assert used(dpx) == before
    hbm.divert_next(40 * gib, "gpu0/mem1")
    with dpx.allocate(93 * gib, device="gpu0/p0", policy=Policy.local(spill="peer"), role="weights") as spilled:
        found = audit(spilled)
        assert found.bytes_by_domain() == {"gpu0/mem0": 53 * gib, "gpu0/mem1": 40 * gib}
        assert [item.misplaced_bytes for item in found.misplaced] == [40 * gib]
    assert used(dpx) == before


def test_dropped_buffer_is_given_back(dpx: Machine) -> None:
    before = used(dpx)
    buffer = dpx.allocate(8 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights")
    assert used(dpx) != before
    del buffer
    assert used(dpx) == before


def test_a_loaded_machine_has_no_memory(dpx: Machine) -> None:
    loaded = Machine.from_json(dpx.to_json())
    with pytest.raises(Unsupported, match="loaded from a file"):
        loaded.allocate(1, device="gpu0/p0", policy=Policy.local(), role="weights")
    with pytest.raises(UsageError, match="no role"):
        dpx.allocate(1, device="gpu0/p0", policy=Policy.local(), role="weight")


def test_an_unbound_device_says_where_to_get_one() -> None:
    lone = Device("gpu0/p0", "gpu0", 0, "0000:05:00.0", 4, 128, None, "gpu0/mem0", False, True)
    with pytest.raises(UsageError, match=r"machine\.device"):
        lone.local(role="weights")


def test_buffers_outlive_a_mode_change_and_the_node_itself(tmp_path: Path) -> None:
    """What was allocated before stays readable and frees cleanly; it never touches the accounts of the new mode."""
    from dieplace.errors import StaleMachine
    from dieplace.partition import apply, plan

    node = create(tmp_path / "n", cards=1, mode="SPX/NPS1")
    machine = EmulatedBackend(node).snapshot()
    old = machine.allocate(3 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights")
    old.tensor.fill_(9)
    later = apply(plan(machine, "DPX/NPS2"))
    with pytest.raises(StaleMachine):
        machine.allocate(1, device="gpu0/p0", policy=Policy.local(), role="weights")
    new = later.allocate(5 * MIB, device="gpu0/p0", policy=Policy.local(), role="weights")
    assert int(old.tensor[-1]) == 9
    old.free()
    assert sum(used(later).values()) == 6 * MIB
    shutil.rmtree(tmp_path / "n")
    assert set(audit(new, torch.zeros(2)).bytes_by_domain()) == {"gpu0/mem0", "host/node0"}
    new.free()


# -- contexts ----------------------------------------------------------------------------------------------------------


def test_model_built_inside_local_lies_on_that_die_and_computes_the_same(dpx: Machine) -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.LayerNorm(700), torch.nn.Linear(700, 5))
    torch.manual_seed(3)
    with dpx.device("gpu0/p1").local(role="weights"):
        placed = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.LayerNorm(700), torch.nn.Linear(700, 5))
    found = audit(placed)
    total = sum(p.numel() * p.element_size() for p in plain.parameters())
    assert found.bytes_by_domain() == {"gpu0/mem1": total}
    assert found.evidence == "accounted" and not found.misplaced
    assert {item.role for item in found.items} == {"weights"}
    x = torch.randn(4, 600)
    assert torch.equal(plain(x), placed(x))


def test_peer_keeps_the_device_and_moves_the_backing(dpx: Machine) -> None:
    with dpx.device("gpu0/p0").peer(role="weights"):
        far = torch.full((1000,), 7.0)
    item = audit(far).items[0]
    assert item.bytes_by_domain == {"gpu0/mem1": 4000}
    assert item.device == "gpu0/p0" and item.misplaced_bytes == 0
    assert audit(far).peer_share("weights", {"gpu0/p0": "gpu0/mem0"}) == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(10),
        lambda: torch.zeros(3, 4),
        lambda: torch.tensor([1, 2, 3]),
        lambda: torch.asarray([1.0, 2.0]),
        lambda: torch.arange(7),
        lambda: torch.randn(5, 5).t().contiguous(),
        lambda: torch.ones(4, dtype=torch.bfloat16) + 1,
        lambda: torch.eye(3)[1:],
        lambda: torch.cat([torch.ones(2), torch.ones(3)]),
    ],
)
def test_every_factory_lands(dpx: Machine, make) -> None:
    with dpx.device("gpu0/p0").local(role="activation"):
        inside = make()
    outside = make()
    assert inside.shape == outside.shape and inside.stride() == outside.stride()
    assert set(audit(inside).bytes_by_domain()) == {"gpu0/mem0"}
    assert audit(outside).bytes_by_domain() == {"host/node0": outside.untyped_storage().nbytes()}


def test_safetensors_loaded_inside_local_land_there(dpx: Machine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "w.safetensors")
    with dpx.device("gpu0/p1").local(role="weights"):
        loaded = load_file(tmp_path / "w.safetensors")
    assert set(audit(loaded).bytes_by_domain()) == {"gpu0/mem1"}
    assert torch.equal(loaded["a"], torch.arange(1000.0))


def test_views_in_place_and_ties_do_not_break_or_count_twice(dpx: Machine) -> None:
    with dpx.device("gpu0/p0").local(role="weights"):
        base = torch.zeros(100)
        view = base[10:20]
        view += 3
        linear = torch.nn.Linear(10, 10, bias=False)
        tied = torch.nn.Linear(10, 10, bias=False)
        tied.weight = linear.weight
    assert float(base.sum()) == 30.0
    assert audit(base, view, linear, tied).bytes_by_domain() == {"gpu0/mem0": 400 + 400}


def test_other_threads_fall_out_and_the_audit_names_them(dpx: Machine) -> None:
    """A pool routes the thread that entered it (pytorch 152861, 188205): never count the rest as local."""
    made: list[torch.Tensor] = []
    with dpx.device("gpu0/p0").local(role="weights"):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(64 * MIB, dtype=torch.uint8)))
        thread.start()
        thread.join()
        mine = torch.zeros(64 * MIB, dtype=torch.uint8)
    found = audit({"mine": mine, "theirs": made[0]})
    assert found.bytes_by_domain() == {"gpu0/mem0": 64 * MIB, "host/node0": 64 * MIB}
    assert [item.name for item in found.misplaced] == ["theirs"]
    assert found.evidence == "declared"
    with pytest.raises(Misplaced, match="theirs"):
        found.require_placed()


def test_nested_contexts_and_nothing_left_behind(dpx: Machine) -> None:
    before = used(dpx)
    with dpx.device("gpu0/p0").local(role="weights"):
        a = torch.ones(10)
        with dpx.device("gpu0/p1").local(role="kv_cache"):
            b = torch.ones(10)
        c = torch.ones(10)
    assert [next(iter(audit(t).bytes_by_domain())) for t in (a, b, c)] == ["gpu0/mem0", "gpu0/mem1", "gpu0/mem0"]
    with pytest.raises(ValueError, match="on purpose"), dpx.device("gpu0/p0").local(role="weights"):
        torch.ones(10)
        raise ValueError("on purpose")
    del a, b, c
    assert used(dpx) == before


def test_interleaved_weights_are_audited_object_by_object(dpx: Machine) -> None:
    with dpx.allocate(17 * OBJECT_BYTES, device="gpu0/p0", policy=Policy.peer_share(3), role="weights") as w:
        found = audit(w)
        assert found.bytes_by_domain()["gpu0/mem1"] in (6 * OBJECT_BYTES, 7 * OBJECT_BYTES)
        assert not found.misplaced
        # moved behind the audit's back to where nobody asked: caught, although the domain is one of those asked for
        memory = dpx.require_session("move").memory  # type: ignore[attr-defined]
        memory.hbm.move(w._allocation.token, "gpu0/mem1")
        wrong = audit(w).misplaced[0].misplaced_bytes
        assert wrong == found.bytes_by_domain()["gpu0/mem0"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "free", "move", "drop"]),
            st.sampled_from(["local", "peer", "interleave-3/8", "preferred:gpu0/mem1"]),
            st.integers(1, 60 << 30),
            st.integers(0, 99),
        ),
        max_size=25,
    )
)
def test_accounting_equals_the_sum_of_live_buffers(nodes: dict[str, EmulatedBackend], actions) -> None:
    machine = nodes["DPX/NPS2"].snapshot()
    start = used(machine)
    live = []
    for action, policy, nbytes, pick in actions:
        if action == "allocate":
            with contextlib.suppress(DomainFull):
                live.append(machine.allocate(nbytes, device="gpu0/p0", policy=Policy.parse(policy), role="weights"))
        elif live and action == "move":
            with contextlib.suppress(DomainFull):
                live[pick % len(live)].move(Policy.parse(policy))
        elif live:
            buffer = live.pop(pick % len(live))
            if action == "free":
                buffer.free()
            del buffer
        now = used(machine)
        placed = audit(*live)
        whole = sum(-(-b.nbytes // OBJECT_BYTES) * OBJECT_BYTES for b in live)
        assert sum(now.values()) - sum(start.values()) == whole
        assert sum(placed.bytes_by_domain().values()) == sum(b.nbytes for b in live)
    live.clear()
    assert used(machine) == start
