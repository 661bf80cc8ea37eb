"""KV caches and sync flags on a chosen die; expected contents from plain torch lists, never from the cache itself."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dieplace.backends.emulated import EmulatedBackend
from dieplace.emulator.node import create
from dieplace.errors import DomainFull, PlacementError, UsageError
from dieplace.kvcache import KVCache
from dieplace.machine import Machine
from dieplace.memory import place
from dieplace.policy import Policy
from dieplace.residency import audit
from dieplace.syncflags import LINE_BYTES, SyncFlags, release_words


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="dieplace-test-") as folder:
        yield EmulatedBackend(create(Path(folder) / "n", cards=1, mode="DPX/NPS2")).snapshot()


def held(machine: Machine) -> int:
    hbm = machine.require_session("look").memory.hbm  # type: ignore[attr-defined]
    return sum(hbm.used_bytes(d.id) for d in hbm.domains)


def rows(count: int, seed: int, heads: int = 2, size: int = 4) -> torch.Tensor:
    return torch.randn(count, heads, size, generator=torch.Generator().manual_seed(seed))


def test_cache_of_the_sketch_lies_on_its_die(machine: Machine) -> None:
    before = held(machine)
    kv = machine.device("gpu0/p1").kv_cache(layers=36, kv_heads=8, head_dim=64, tokens=8192, dtype="bf16")
    assert kv.nbytes == 36 * 8192 * 2048  # 2 KB a position and layer
    assert audit(kv).bytes_by_domain() == {"gpu0/mem1": kv.nbytes}
    assert audit(kv).bytes_by_role() == {"kv_cache": kv.nbytes}
    assert kv.keys(0).dtype == torch.bfloat16 and tuple(kv.keys(35).shape) == (1, 8192, 8, 64)
    kv.move(Policy.peer())
    assert audit(kv).bytes_by_domain() == {"gpu0/mem0": kv.nbytes}
    kv.free()
    del kv
    assert held(machine) == before


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("page", [None, 16])
def test_appended_rows_come_back_in_order(machine: Machine, length: int, page: int | None) -> None:
    kv = KVCache(machine, "gpu0/p0", layers=2, kv_heads=2, head_dim=4, tokens=64, dtype="fp32", page_tokens=page)
    keys, values = rows(length, 1), rows(length, 2)
    for start in range(0, length, 5):
        slots = kv.reserve(min(5, length - start))
        for layer in (0, 1):
            kv.write(layer, slots, keys[start : start + 5] + layer, values[start : start + 5])
    for layer in (0, 1):
        got_keys, got_values = kv.gather(layer)
        assert torch.equal(got_keys, keys + layer) and torch.equal(got_values, values)
    if page:
        used = kv.page_table[kv.page_table >= 0]
        assert len(used) == -(-length // page) == len(set(used.tolist()))


def test_slot_minus_one_writes_nothing(machine: Machine) -> None:
    """Case e17: a cache filled to its end, slots (3, -1): slot 3 changed, the last slot byte-equal to before."""
    kv = KVCache(machine, "gpu0/p0", layers=1, kv_heads=2, head_dim=4, tokens=16, dtype="fp32")
    kv.write(0, kv.reserve(16), rows(16, 1), rows(16, 2))
    before = (kv.keys(0).clone(), kv.values(0).clone())
    kv.write(0, torch.tensor([3, -1], dtype=torch.int32), rows(2, 3), rows(2, 4))
    for seed, old, new in zip((3, 4), before, (kv.keys(0), kv.values(0)), strict=True):
        assert torch.equal(new[0, 3], rows(2, seed)[0])
        assert (new != old).flatten(2).any(-1)[0].nonzero().flatten().tolist() == [3]
        assert new[0, -1].numpy().tobytes() == old[0, -1].numpy().tobytes() != bytes(32)


def test_slots_of_positions_that_are_not_stored(machine: Machine) -> None:
    kv = KVCache(machine, "gpu0/p0", layers=1, kv_heads=1, head_dim=1, tokens=8, page_tokens=4)
    kv.reserve(3)
    assert kv.slots(torch.tensor([0, 2, 3, -1, 99])).tolist() == [0, 2, -1, -1, -1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "truncate"]), st.integers(0, 12)), max_size=30), st.integers(1, 7))
def test_a_random_life_equals_a_plain_list(machine: Machine, steps: list[tuple[str, int]], page: int) -> None:
    kv = KVCache(machine, "gpu0/p0", layers=1, kv_heads=1, head_dim=1, tokens=40, dtype="fp32", page_tokens=page)
    plain: list[float] = []
    stamp = 0.0
    for what, count in steps:
        if what == "append":
            if len(plain) + count > 40:
                with pytest.raises(PlacementError, match="do not fit"):
                    kv.reserve(count)
                continue
            new = [stamp + i + 1 for i in range(count)]
            stamp += count
            rows_ = torch.tensor(new).reshape(-1, 1, 1)
            kv.write(0, kv.reserve(count), rows_, -rows_)
            plain += new
        elif count <= len(plain):
            kv.truncate(count)
            plain = plain[:count]
        keys, values = kv.gather(0)
        assert keys.flatten().tolist() == plain and values.flatten().tolist() == [-x for x in plain]
    kv.free()


def test_full_die_leaves_no_layer_behind(machine: Machine) -> None:
    before = held(machine)
    with pytest.raises(DomainFull):
        KVCache(machine, "gpu0/p0", layers=4, kv_heads=1024, head_dim=1024, tokens=10_000, dtype="bf16")
    assert held(machine) == before


def test_wrong_sizes_are_told(machine: Machine) -> None:
    with pytest.raises(UsageError, match="0 layers"):
        KVCache(machine, "gpu0/p0", layers=0, kv_heads=1, head_dim=1, tokens=1)
    with pytest.raises(UsageError, match="no torch dtype"):
        KVCache(machine, "gpu0/p0", layers=1, kv_heads=1, head_dim=1, tokens=1, dtype="bf17")
    kv = KVCache(machine, "gpu0/p0", layers=1, kv_heads=2, head_dim=4, tokens=8)
    with pytest.raises(UsageError, match="rows of shape"):
        kv.write(0, kv.reserve(1), torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))
    with pytest.raises(UsageError, match="beyond the cache"):
        kv.write(0, torch.tensor([8]), rows(1, 0), rows(1, 0))


def test_flags_have_a_line_each_and_the_trusted_class(machine: Machine) -> None:
    flags = machine.device("gpu0/p0").sync_flags(64)
    assert flags.memory_class == "uncached"
    assert flags.words.stride(0) * 8 == LINE_BYTES and tuple(flags.words.shape) == (64,)
    assert flags.lines.data_ptr() % (2 << 20) == 0  # an object of its own
    assert audit(flags).bytes_by_domain() == {"gpu0/mem0": 64 * 128}
    assert audit(flags).bytes_by_role() == {"sync_flag": 64 * 128}


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=False), st.integers(1, (1 << 31) - 1))
def test_a_word_is_value_and_tag_in_one(machine: Machine, value: float, tag: int) -> None:
    flags = SyncFlags(machine, "gpu0/p0", 2)
    flags.put(1, value, tag)
    raw = flags.lines[1].numpy().tobytes()
    assert struct.unpack("<fI", raw[:8]) == (value, tag) and not any(raw[8:])
    assert flags.read(1) == (value, tag) and flags.read(0) == (0.0, 0)


def test_tags_only_grow_and_reset_starts_anew(machine: Machine) -> None:
    flags = SyncFlags(machine, "gpu0/p0", 1)
    assert [flags.next_tag() for _ in range(3)] == [1, 2, 3]
    flags.put(0, 1.0, 3)
    flags.reset()
    assert flags.read(0) == (0.0, 0) and flags.next_tag() == 1
    with pytest.raises(UsageError, match="between 1"):
        flags.put(0, 1.0, 0)
    with pytest.raises(UsageError, match="0 flags"):
        SyncFlags(machine, "gpu0/p0", 0)


def test_release_words_are_one_line_per_xcd_coarse(machine: Machine) -> None:
    words = release_words(machine, machine.device("gpu0/p1"))
    assert words.count == 4 and words.memory_class == "coarse"
    assert audit(words).bytes_by_domain() == {"gpu0/mem1": 4 * 128}


def test_flags_that_come_back_in_host_memory_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dieplace.backends.base import Location
    from dieplace.memory import Buffer

    before = held(machine)
    monkeypatch.setattr(Buffer, "locate", lambda self: Location({"host/node0": self.nbytes}, "accounted"))
    with pytest.raises(PlacementError, match="came back in host memory"):
        SyncFlags(machine, "gpu0/p0", 8)
    monkeypatch.undo()
    assert held(machine) == before


def test_place_moves_an_existing_module_and_keeps_it_whole(machine: Machine) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.norm = torch.nn.BatchNorm1d(8)
            self.turned = torch.nn.Parameter(torch.randn(4, 6).t())

    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    device = machine.device("gpu0/p0")
    assert place(model, device=device, policy=Policy.peer()) is model
    found = audit(model)
    assert set(found.bytes_by_domain()) == {"gpu0/mem1"} and not found.misplaced
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert model.turned.stride() == (1, 6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    model.head(model.norm(model.embedding(torch.tensor([1, 2, 3])))).sum().backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize(
    ("word", "home"), [("local", "gpu0/mem0"), ("peer", "gpu0/mem1"), ("on:gpu0/mem1", "gpu0/mem1")]
)
def test_policies_may_be_given_as_their_words(machine: Machine, word: str, home: str) -> None:
    device = machine.device("gpu0/p0")
    buffer = machine.allocate((4, 4), dtype="bfloat16", device=device, policy=word, role="weights")
    cache = device.kv_cache(layers=1, kv_heads=1, head_dim=8, tokens=4, policy=word)
    with device.placing(word, role="weights"):
        made = torch.ones(4)
    assert audit(buffer, cache, made).require_placed().bytes_by_domain().keys() == {home}
    assert buffer.move("local").requested == ("gpu0/mem0",)
    assert audit(place(torch.nn.Linear(2, 2), device=device, policy=word)).bytes_by_domain().keys() == {home}


@pytest.mark.parametrize("wrong", ["locl", "on:", "", 3, None])
def test_a_word_that_is_no_policy_is_a_usage_error(machine: Machine, wrong: object) -> None:
    with pytest.raises(UsageError):
        machine.allocate(4, device="gpu0/p0", policy=wrong, role="weights")  # type: ignore[arg-type]


def test_local_is_the_policy_where_none_is_given(machine: Machine) -> None:
    assert machine.allocate(4, device="gpu0/p1", role="weights").requested == ("gpu0/mem1",)


def test_caches_and_flags_print_what_they_are(machine: Machine) -> None:
    device = machine.device("gpu0/p1")
    kv = device.kv_cache(layers=36, kv_heads=8, head_dim=64, tokens=8192, page_tokens=16)
    kv.reserve(5)
    want = f"KVCache(36 layers, 5 of 8192 tokens, 512 pages of 16 tokens, {36 * 8192 * 2048:,} bytes, gpu0/mem1)"
    assert repr(kv) == want
    assert repr(device.sync_flags(64, policy="peer")) == "SyncFlags(64 flags, uncached, gpu0/mem0)"
