"""Graph timing and code hashes of the NVIDIA backend, on a stand-in for torch.cuda whose clock the test owns."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
from fake_cuda import FakeCuda

from dieplace.backends import torch_timing as timing
from dieplace.backends import triton_binaries as binaries


@pytest.mark.parametrize("flush_ms", [0.0, 1.0, 50.0])
def test_a_slow_flush_changes_no_time(flush_ms: float) -> None:
    """Case h3: what clears the cache is outside the timed region, and nothing is subtracted."""
    cuda = FakeCuda()
    work = timing.capture([cuda.work(2.0)] * 4, 0, cuda=cuda)
    assert timing.time_once(work, flush=cuda.work(flush_ms), cuda=cuda) == pytest.approx(2e6)


def test_devices_are_timed_by_their_own_clocks_at_the_same_time() -> None:
    cuda = FakeCuda()
    works = [timing.capture([cuda.work(ms)], index, cuda=cuda) for index, ms in ((0, 3.0), (1, 5.0))]
    assert timing.time_together(works, cuda=cuda) == pytest.approx([3e6, 5e6])


def test_stage_times_add_up_to_the_total() -> None:
    cuda = FakeCuda()
    total, stages = timing.stage_times([("qkv", cuda.work(1.0)), ("mlp", cuda.work(3.0))], 0, cuda=cuda)
    assert [(s.name, s.value_ns, s.why) for s in stages] == [("qkv", 1e6, None), ("mlp", 3e6, None)]
    assert total == pytest.approx(4e6)


def test_stages_of_graphs_that_wait_for_one_another() -> None:
    """Each device has its own stages; all are held until all have their work, and none is waited for before."""
    cuda, seen = FakeCuda(), []
    works = [
        timing.with_marks([("put", cuda.work(1.0)), ("sum", cuda.work(2.0))], 0, cuda=cuda),
        timing.with_marks([("put", cuda.work(4.0))], 1, cuda=cuda),
    ]
    gate = SimpleNamespace(hold=seen.append, open=lambda: seen.append("open"))
    found = timing.times_of(works, replays=2, gate=gate, cuda=cuda)
    assert seen == [0, 1, "open"] * 2
    assert [total for total, _ in found] == pytest.approx([3e6, 4e6])
    assert [[s.value_ns for s in stages] for _, stages in found] == [[1e6, 2e6], [4e6]]


@pytest.mark.parametrize(("in_graph", "words"), [("raises", "not permitted"), ("silent", "recorded nothing")])
def test_events_that_a_graph_does_not_have_give_null_and_the_total_stays(in_graph: str, words: str) -> None:
    """Case h5 (rocm-systems 2380): an error or nothing where an event is recorded in a captured graph; never 0 us."""
    cuda = FakeCuda(in_graph)
    total, stages = timing.stage_times([("qkv", cuda.work(1.0)), ("mlp", cuda.work(3.0))], 0, cuda=cuda)
    assert total == pytest.approx(4e6)
    assert all(s.value_ns is None and words in str(s.why) for s in stages)


class Hooks(list):
    """Triton's chain of launch hooks, as far as it is used."""

    add = list.append

    def launch(self, function: int, name: str) -> None:
        for hook in self:
            hook(SimpleNamespace(get=lambda: {"function": function, "name": name, "stream": 0}))


def kernel(function: int, code: bytes) -> SimpleNamespace:
    return SimpleNamespace(function=function, asm={"cubin": code})


def test_the_hash_is_of_the_machine_code_that_was_launched() -> None:
    hooks = Hooks()
    held = [kernel(1, b"gemv"), kernel(2, b"norm"), kernel(3, b"never launched")]
    with binaries.watch(hooks) as local:
        hooks.launch(1, "gemv")
        hooks.launch(2, "norm")
        hooks.launch(1, "gemv")
    hooks.launch(3, "after the block")
    with binaries.watch(hooks) as swapped:
        hooks.launch(2, "norm")
        hooks.launch(1, "gemv")
    assert list(local.handles) == [1, 2] and not hooks
    found = local.binaries(held)
    assert found["gemv#0"] == hashlib.sha256(b"gemv").hexdigest()
    same = binaries.code_hash(swapped.binaries(held))
    assert binaries.code_hash(found) == same  # order of launching does not matter
    recompiled = [kernel(1, b"gemv, other tile"), kernel(2, b"norm")]
    assert binaries.code_hash(swapped.binaries(recompiled)) != same
    with pytest.raises(LookupError, match="gemv"):
        local.binaries([kernel(2, b"norm")])


def test_machine_code_is_the_cubin_or_the_code_object() -> None:
    for kind in ("cubin", "hsaco"):
        held = SimpleNamespace(function=1, asm={"ttir": "text", kind: b"code"})
        assert binaries.machine_code(held) == b"code"
    with pytest.raises(LookupError, match="neither"):
        binaries.machine_code(SimpleNamespace(asm={"ttir": "text"}))
