"""Hand-offs, flags and probes: what they print, and what they do on two dies at once."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch
from kernel_runs import BF16, F32, I32, compiled, run_op
from torch import Tensor

from dieplace.codegen.flydsl import compile_launcher
from dieplace.emulator.execution import concurrent, run
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.emulator.isa.hierarchy_watch import StaleRead
from dieplace.errors import KernelFault
from dieplace.kernels.flydsl import flags, handoff
from dieplace.kernels.flydsl.gemv import build_gemv_bf16
from dieplace.kernels.flydsl.norm import build_rmsnorm
from dieplace.kernels.flydsl.visibility import build_flag_visibility
from dieplace.machine import Domain
from dieplace.probes import chase, ping_pong, stream

DOMAINS = tuple(Domain(f"gpu0/mem{d}", "gpu0", (d,), 1 << 30) for d in (0, 1))
INT64 = torch.int64


def lines(isa: str) -> list[str]:
    text = isa[: isa.index(".Lfunc_end0")]
    return [line.split(";")[0].strip() for line in text.splitlines() if re.match(r"\s+[a-z]+\d*_\w+", line)]


def isa_of(op: str) -> list[str]:
    status = torch.zeros(2, dtype=I32)
    calls = {
        "handoff_put": ({"x": torch.zeros(8), "mailbox": torch.zeros(8, dtype=INT64)}, {"tag": 1}),
        "handoff_sum": (
            {"own": torch.zeros(8), "mailbox": torch.zeros(8, dtype=INT64), "out": torch.zeros(8), "status": status},
            {"tag": 1},
        ),
        "flag_set": ({"flag": torch.zeros(2, 32, dtype=I32)[:, 0]}, {"value": 1}),
        "flag_wait": ({"flag": torch.zeros(2, 32, dtype=I32)[:, 0], "status": status}, {"value": 1}),
    }
    operands, attrs = calls[op]
    return lines(compiled(op, operands, **attrs)[0].isa)


def test_a_packed_word_is_one_system_scope_store_without_write_back() -> None:
    """aiter pull request 4786: a flag stored at device scope is not seen by the other device."""
    text = isa_of("handoff_put")
    (store,) = [line for line in text if line.startswith("global_store")]
    assert re.fullmatch(r"global_store_dwordx2 .* sc0 sc1", store)
    assert not any(line.startswith("buffer_wbl2") for line in text)


def test_polls_are_system_scope_and_rest_between_tries() -> None:
    for op, width in (("handoff_sum", "dwordx2"), ("flag_wait", "dword")):
        text = isa_of(op)
        polls = [line for line in text if re.match(rf"global_load_{width} .*sc0 sc1$", line)]
        assert len(polls) == 1 and any(line.startswith("s_sleep") for line in text)
        assert not any(line.startswith("buffer_wbl2") for line in text)


def test_a_flag_is_stored_after_the_write_back_has_finished() -> None:
    """llvm-project pull request 178316: the wait between write-back and flag had been optimised away."""
    text = isa_of("flag_set")
    back = next(i for i, line in enumerate(text) if line == "buffer_wbl2 sc0 sc1")
    store = next(i for i, line in enumerate(text) if re.fullmatch(r"global_store_dword .* sc0 sc1", line))
    assert back < store and any(re.match(r"s_waitcnt.*vmcnt\(0\)", line) for line in text[back + 1 : store])


def test_what_a_flag_publishes_is_read_after_an_invalidate() -> None:
    text = isa_of("flag_wait")
    poll = next(i for i, line in enumerate(text) if re.match(r"global_load_dword .*sc0 sc1$", line))
    assert any(line == "buffer_inv sc0 sc1" for line in text[poll:])


def on_die(memory: EmulatedHBM, die: int, *shape: int, dtype: torch.dtype, role: str = "sync_flag") -> Tensor:
    return memory.empty(shape, dtype, DOMAINS[die].id, role=role).zero_()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("residual", [False, True])
def test_halves_meet_across_the_dies(seed: int, residual: bool) -> None:
    """Die 0 puts its half into a mailbox on die 1, where a kernel that may have started earlier waits and adds."""
    memory, n = EmulatedHBM(DOMAINS), 300
    generator = torch.Generator().manual_seed(seed)
    halves = [torch.randn(n, generator=generator) for _ in range(2)]
    rest = torch.randn(n, generator=generator).to(BF16)
    mailbox = on_die(memory, 1, n, dtype=INT64)
    sent, own = (on_die(memory, d, n, dtype=F32, role="activation").copy_(halves[d]) for d in (0, 1))
    out = on_die(memory, 1, n, dtype=F32, role="activation")
    status = on_die(memory, 1, 2, dtype=I32)
    launcher = handoff.build_handoff_sum(residual="bf16" if residual else "", fp32=True)
    with concurrent(seed=seed):
        run(launcher, own, mailbox, rest, out, status, status, status, n, 5, 10_000, device="gpu0/p1", memory=memory)
        run(handoff.build_handoff_put(), sent, mailbox, sent, n, 5, device="gpu0/p0", memory=memory)
    want = halves[0].double() + halves[1].double() + (rest.double() if residual else 0)
    assert torch.allclose(out.double(), want, atol=1e-6)
    assert status.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_flag_publishes_what_was_written_before_it(seed: int) -> None:
    """Die 0 computes a row and raises a flag on die 1; die 1 waits and normalises the row that lies on die 0."""
    memory, hidden = EmulatedHBM(DOMAINS), 64
    flag, status = on_die(memory, 1, 32, dtype=I32), on_die(memory, 1, 2, dtype=I32)
    x, row = (on_die(memory, 0, 1, hidden, dtype=BF16, role="activation") for _ in range(2))
    weight = on_die(memory, 0, hidden, hidden, dtype=BF16, role="weights").copy_(torch.eye(hidden) * 3)
    x.copy_(torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)))
    gain = on_die(memory, 1, hidden, dtype=F32, role="weights").fill_(1)
    out = on_die(memory, 1, 1, hidden, dtype=BF16, role="activation")
    produce = build_gemv_bf16(hidden, 1, bias=False, fp32=False)
    consume = build_rmsnorm(hidden, "before_cast", 1e-6, residual=False, fp32_weight=True)
    with concurrent(seed=seed):
        run(flags.build_flag_wait(), flag, status, status, status, 1, 1, 9, 100_000, device="gpu0/p1", memory=memory)
        run(consume, row, row, gain, out, out, 1, device="gpu0/p1", memory=memory)
        run(produce, weight, x, x, row, hidden, device="gpu0/p0", memory=memory)
        run(flags.build_flag_set(), flag, flag, 1, 1, 9, device="gpu0/p0", memory=memory)
    assert status.tolist() == [0, 0]
    want = (x.double() * 3).to(BF16).double()
    want = want / (want.pow(2).mean() + 1e-6).sqrt()
    assert torch.allclose(out.double(), want, rtol=2.0**-7)


def test_a_wait_gives_up_and_says_what_it_saw() -> None:
    """tt-umd issue 3111: a poll without a limit hung four hosts, and the value it read was never printed."""
    mailbox = torch.full((70,), 3 << 32, dtype=INT64)
    mailbox[:60] = (4 << 32) | 0x3F800000
    status, out = torch.zeros(2, dtype=I32), torch.zeros(70)
    began = time.monotonic()
    operands = {"own": torch.ones(70), "mailbox": mailbox, "residual": None, "out": out, "status": status}
    run_op("handoff_sum", operands, tag=4, spin_limit=50)
    assert time.monotonic() - began < 60
    assert status.tolist() == [10, 3] and torch.equal(out[:60], torch.full((60,), 2.0))
    with pytest.raises(KernelFault, match=r"p1 waited for mailbox to hold 4: 10 never did, the last one held 3"):
        handoff.require_arrival(status, flag="mailbox", expected=4, waiter="p1")
    mailbox[60:] = (5 << 32) | 0x3F800000
    mailbox[:60] = (5 << 32) | 0x3F800000
    status.zero_()
    run_op("handoff_sum", operands, tag=5, spin_limit=50)  # usable afterwards
    handoff.require_arrival(status, flag="mailbox", expected=5, waiter="p1")
    assert torch.equal(out, torch.full((70,), 2.0))


@pytest.mark.parametrize("seed", range(3))
def test_ping_pong_across_the_dies(seed: int) -> None:
    memory, rounds = EmulatedHBM(DOMAINS), 10
    ping, pong = on_die(memory, 1, 32, dtype=I32), on_die(memory, 0, 32, dtype=I32)
    outs = [on_die(memory, d, 1, 4, dtype=INT64, role="activation") for d in (0, 1)]
    launcher = ping_pong.build_ping_pong("system")
    with concurrent(seed=seed):
        for party, out in enumerate(outs):
            run(launcher, ping, pong, out, 1, rounds, 100_000, party, 1, device=f"gpu0/p{party}", memory=memory)
    assert [o[0, 0].item() for o in outs] == [rounds, rounds]
    assert [o[0, 2].item() for o in outs] == [rounds, rounds]
    assert all(o[0, 1] > 0 for o in outs)


def test_agent_scope_does_not_reach_the_other_die() -> None:
    memory = EmulatedHBM(DOMAINS)
    ping, pong = on_die(memory, 0, 32, dtype=I32), on_die(memory, 1, 32, dtype=I32)  # each polled across the dies
    outs = [on_die(memory, d, 1, 4, dtype=INT64, role="activation") for d in (0, 1)]
    launcher = ping_pong.build_ping_pong("agent")
    options = {"memory": memory, "memory_options": {"patience": 100}}
    with pytest.raises(StaleRead, match="agent scope"), concurrent(seed=0):
        for party, out in enumerate(outs):
            run(launcher, ping, pong, out, 1, 20, 100_000, party, 1, device=f"gpu0/p{party}", **options)


def test_a_party_without_a_partner_ends() -> None:
    ping, pong, out = torch.zeros(32, dtype=I32), torch.zeros(32, dtype=I32), torch.zeros(1, 4, dtype=INT64)
    run(ping_pong.build_ping_pong(), ping, pong, out, 7, 5, 40, 0, 1, two_die=False)
    assert out[0, 0] == 0 and ping[0] == 7


def test_every_reader_stamps_a_flag_after_its_writer() -> None:
    """One writer on die 0, three readers on die 1: each round is seen by each reader after it was raised."""
    memory, readers, rounds = EmulatedHBM(DOMAINS), 3, 5
    flag, acks = on_die(memory, 1, 32, dtype=I32), on_die(memory, 0, readers * 32, dtype=I32)
    stamps = on_die(memory, 0, 1 + readers, rounds, dtype=INT64, role="activation")
    xcc = on_die(memory, 0, 1 + readers, dtype=I32, role="activation").fill_(-1)
    common = (flag, acks, stamps, xcc, 40, rounds, readers, 1_000_000)
    with concurrent(seed=1):
        run(build_flag_visibility(), *common, 1, readers, device="gpu0/p1", memory=memory)
        run(build_flag_visibility(), *common, 0, 1, device="gpu0/p0", memory=memory)
    assert (stamps[1:] > stamps[0]).all() and (stamps[0, 1:] > stamps[1:, :-1].amax(0)).all()
    assert acks.view(readers, 32)[:, 0].tolist() == [44] * readers and flag[0] == 44
    assert ((xcc >= 0) & (xcc < 8)).all()


@pytest.mark.parametrize("items", [1, 511, 512, 2048, 5003])
@pytest.mark.parametrize("passes", [1, 2])
def test_streaming_reads_every_byte(items: int, passes: int) -> None:
    src = torch.randint(-(2**31), 2**31, (items * 4,), dtype=INT64, generator=torch.Generator().manual_seed(items)).to(
        I32
    )
    out = torch.zeros(512, dtype=I32)
    stream.probe_stream({"src": src, "out": out}, {"passes": passes})
    want = int(np.bitwise_xor.reduce(src.numpy())) if passes % 2 else 0
    assert int(np.bitwise_xor.reduce(out.numpy())) == want


def test_streaming_keeps_four_loads_in_flight() -> None:
    src, out = torch.zeros(64, dtype=I32), torch.zeros(512, dtype=I32)
    text = lines(compile_launcher(stream.build_stream(2), src, out, 16, 1).isa)
    loads = [i for i, line in enumerate(text) if line.startswith("global_load_dwordx4")]
    assert all(text[i].endswith(" nt") for i in loads)
    waits = [i for i, line in enumerate(text) if re.match(r"s_waitcnt.*vmcnt", line)]
    between = [sum(a < i < b for i in loads) for a, b in zip([-1, *waits], waits, strict=False)]
    assert max(between) == 4


@pytest.mark.parametrize("name", ["keep", "agent", "system"])
def test_a_chase_follows_the_chain(name: str) -> None:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    following = torch.empty(200, dtype=I32)
    following[order] = order.roll(-1).to(I32)
    out = torch.zeros(4, dtype=INT64)
    chase.probe_chase({"following": following, "out": out}, {"hops": 77, "start": 5, "cache": name})
    index = 5
    for _ in range(77):
        index = int(following[index])
    assert out[0] == index and out[1] > 0 and out[2] > 0


def test_a_chase_times_only_loads_that_it_waits_for() -> None:
    """One load in the loop, a full wait behind it, and no load under way when a clock is read."""
    out = torch.zeros(4, dtype=INT64)
    text = lines(compile_launcher(chase.build_chase("keep"), torch.zeros(8, dtype=I32), out, 0, 9).isa)
    loads = [i for i, line in enumerate(text) if line.startswith("global_load_dword ")]
    before, after = (i for i, line in enumerate(text) if line.startswith("s_memtime"))
    (hop,) = [i for i in loads if before < i < after]
    assert any(re.match(r"s_waitcnt.*vmcnt\(0\)", line) for line in text[hop:after])
    assert any(re.match(r"s_waitcnt.*vmcnt\(0\)", line) for line in text[:before])
    assert any("HW_REG_XCC_ID" in line for line in text)
