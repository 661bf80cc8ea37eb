"""Triton kernels compiled for gfx950 without a GPU: their instructions, and their code run on the emulated card."""

from __future__ import annotations

import functools
import importlib.util
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dpx_machine import dpx_machine

from dieplace.codegen.cache_bits import TABLE
from dieplace.errors import CompileError, Unsupported
from dieplace.kernels import registry
from dieplace.kernels.cases import cases
from dieplace.kernels.triton import OPS
from dieplace.machine import Machine

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed, so its kernels cannot be compiled", allow_module_level=True)

import triton
import triton.language as tl

from dieplace.codegen import triton_host
from dieplace.codegen.host_runtime import HostLaunch
from dieplace.emulator.execution import Session
from dieplace.emulator.triton_launch import triton_kernels
from dieplace.kernels.check import check_op
from dieplace.probes import triton_chase, triton_stream

MIB = 1 << 20
BITS = ("sc0", "sc1", "nt")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with dpx_machine() as switched:
        yield switched


def launches_of(call: Callable[[], object]) -> list[HostLaunch]:
    """What a host function launches, compiled and not run."""
    found: list[HostLaunch] = []
    with triton_host.launching(lambda tensors, launch: found.append(launch)):
        call()
    return found


def body(launch: HostLaunch) -> list[str]:
    """The instructions and labels of a kernel."""
    name = re.escape(launch.resources.name)
    found = re.search(rf"^{name}:.*?$(.*?)^\.Lfunc_end", launch.isa, re.M | re.S)
    assert found is not None
    lines = (line.split(";")[0].strip() for line in found.group(1).splitlines())
    return [line for line in lines if line and (not line.startswith(".") or re.fullmatch(r"\.LBB\w+:", line))]


def chase_lines(name: str) -> list[str]:
    following, out = triton_chase.chain(64 * 128, "cpu", seed=1), torch.zeros(3, dtype=torch.int64)
    words = torch.zeros(2 * MIB // 4, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "chase": lambda: triton_chase.chase(following, out, start=0, hops=9, device=None),
        "walk": lambda: triton_chase.walk(words, out.view(1, 3), window_bytes=2 * MIB, hops=9, device=None),
        "read": lambda: triton_stream.read(words, torch.zeros(64, dtype=torch.int32), device=None),
        "copy": lambda: triton_stream.copy(words, words.clone(), device=None),
    }
    (launch,) = launches_of(calls[name])
    return body(launch)


# ---- instructions


def unwaited_loads(lines: list[str]) -> list[str]:
    """Vector loads that begin while an earlier one is under way."""
    under_way, found = False, []
    for line in lines:
        if re.match(r"(global|buffer|flat)_load", line):
            found += [line] if under_way else []
            under_way = True
        elif re.match(r"s_waitcnt.*vmcnt\(0\)", line):
            under_way = False
    return found


@pytest.mark.parametrize("name", ["chase", "walk"])
def test_every_hop_waits_for_the_one_before_it(name: str) -> None:
    lines = chase_lines(name)
    assert sum("global_load" in line for line in lines) >= 2
    assert unwaited_loads(lines) == []
    assert len(unwaited_loads(chase_lines("read"))) >= 3  # a stream keeps several under way: the check can tell


@pytest.mark.parametrize("name", ["chase", "walk"])
def test_clocks_stand_around_the_hops_with_nothing_under_way(name: str) -> None:
    lines = chase_lines(name)
    clocks = [i for i, line in enumerate(lines) if line.startswith("s_memtime")]
    assert len(clocks) == 2 and sum(line.startswith("s_memrealtime") for line in lines) == 2
    for at in clocks:
        assert lines[at - 1] == "s_waitcnt vmcnt(0)"
        assert lines[at + 1].startswith("s_memrealtime") and lines[at + 2] == "s_waitcnt lgkmcnt(0)"
    loads = [i for i, line in enumerate(lines) if "global_load" in line]
    assert any(clocks[0] < i < clocks[1] for i in loads)


def test_streams_take_sixteen_bytes_a_lane_and_keep_nothing() -> None:
    for name, kinds in (("read", ("load",)), ("copy", ("load", "store"))):
        lines = chase_lines(name)
        for kind in kinds:
            found = [line for line in lines if line.startswith(f"buffer_{kind}")]
            assert found and all("dwordx4" in line and line.endswith("sc0 nt") for line in found), found


@triton.jit
def _modifiers(source, target, first, LOAD: tl.constexpr, STORE: tl.constexpr):
    lane = tl.arange(0, 64)
    found = tl.load(source + lane, cache_modifier=LOAD)
    tl.store(target + lane, found, cache_modifier=STORE)
    tl.store(target + 64 + first, first, cache_modifier=STORE)  # one address for all lanes: no buffer instruction


@pytest.mark.parametrize("name", [name for name, bits in TABLE.items() if bits.triton is not None])
def test_cache_names_print_their_bits_through_triton(name: str) -> None:
    """Case f9 (triton pull request 5838): a table like this was wrong for gfx942 and gfx950."""
    bits = TABLE[name].triton
    assert bits is not None
    source, target = torch.zeros(64, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    (launch,) = launches_of(lambda: _modifiers[(1,)](source, target, 7, LOAD=bits.load, STORE=bits.store, num_warps=1))
    lines = body(launch)

    def suffixes(kind: str) -> set[tuple[str, ...]]:
        return {tuple(w for w in line.split() if w in BITS) for line in lines if line.startswith(kind)}

    assert suffixes("buffer_load") == suffixes("buffer_store") == {bits.buffer_isa}
    assert suffixes("global_store") == {bits.global_isa}
    # What FlyDSL prints for the same name is there too; Triton adds sc0 to non-temporal buffer accesses.
    assert set(TABLE[name].isa) <= set(bits.buffer_isa) and set(TABLE[name].isa) == set(bits.global_isa)


@triton.jit
def _ptx(out):
    clock = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l,r", [tl.program_id(0)], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out, clock)


@triton.jit
def _ptx_without_result(out):
    tl.store(out, 1)
    tl.inline_asm_elementwise(
        "st.global.u64 [$1], 1;", "=r,l", [out.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@pytest.mark.parametrize("kernel", [_ptx, _ptx_without_result])
def test_assembly_of_another_target_is_refused(kernel: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """LLVM says so on the standard error alone and leaves the block out, which once gave an empty kernel."""
    with pytest.raises(CompileError, match=r"inline assembly for another target|cannot compile for gfx950"):
        launches_of(lambda: kernel[(1,)](torch.zeros(1, dtype=torch.int64)))
    capfd.readouterr()


def test_a_launch_outside_is_told() -> None:
    words, out = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launches_of(lambda: triton_stream.read(words, out, device=None))
    with pytest.raises(Unsupported, match="launched with no GPU"):
        triton_stream.read(words, out, device=None)


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET"), triton_kernels():
        pass


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_fits_a_compute_unit_and_knows_where_its_memory_is(op: str) -> None:
    """No spills, LDS within 160 KiB, and no flat access: that would mean the compiler lost track of an address."""
    chosen = cases(op, 1)[0]
    call = registry.check_call(op, chosen.operands, chosen.attrs)
    kernel = registry.implementation(op, "triton")
    assert kernel is not None
    made = launches_of(lambda: kernel(call.operands, call.attrs))
    assert made
    for launch in made:
        needs = launch.resources
        assert (needs.vgpr_spills, needs.sgpr_spills, needs.scratch_bytes) == (0, 0, 0)
        assert needs.vgpr <= 512 and launch.dynamic_lds_bytes <= 160 << 10
        assert not [line for line in body(launch) if line.startswith(("flat_", "scratch_"))]


# ---- executed on the emulated card


def far_and_near(machine: Machine, nbytes: int) -> tuple[Any, Any, Any]:
    """(device p0, int32 words at home, int32 words on the peer die)."""
    die = machine.device("gpu0/p0")
    with die.local(role="weights"):
        near = torch.empty(nbytes // 4, dtype=torch.int32)
    with die.peer(role="weights"):
        far = torch.empty(nbytes // 4, dtype=torch.int32)
    return die, near, far


def session_on(machine: Machine, die: Any) -> Session:
    return Session(device=die, memory=machine.session.memory.hbm)  # type: ignore[union-attr]


def test_a_chase_follows_the_chain_in_far_memory(machine: Machine) -> None:
    die, near, far = far_and_near(machine, 64 * 128)
    chain = triton_chase.chain(64 * 128, "cpu", seed=3)
    hops, at = 23, 5 * 32
    for _ in range(hops):
        at = int(chain[at])
    for words, side in ((near, "distinct_local"), (far, "distinct_peer")):
        words.copy_(chain)
        out = torch.zeros(3, dtype=torch.int64)
        with triton_kernels(), session_on(machine, die) as session:
            triton_chase.chase(words, out, start=5 * 32, hops=hops, device=None)
        index, cycles, nanoseconds = out.tolist()
        assert index == at and cycles > 0 and nanoseconds > 0 and nanoseconds % 10 == 0
        traffic = session.records[0].kernels[0].traffic
        assert traffic is not None
        read = traffic.buffer("following").read
        assert (read.distinct, getattr(read, side)) == (4 * hops, 4 * hops)


def test_a_walk_visits_one_line_a_hop_and_changes_nothing(machine: Machine) -> None:
    die, _, far = far_and_near(machine, 3 * 4096)
    far.random_()
    kept, out = far.clone(), torch.zeros(3, 3, dtype=torch.int64)
    with triton_kernels(), session_on(machine, die) as session:
        assert triton_chase.walk(far, out, window_bytes=4096, hops=32, device=None) == 3
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None and torch.equal(far, kept)
    assert traffic.buffer("words").read.distinct == 3 * 32 * 4  # 32 lines a window, no line twice


def test_streams_move_every_byte_once(machine: Machine) -> None:
    die, near, far = far_and_near(machine, 65536 + 4096)
    far.random_(-(2**31), 2**31 - 1)
    near.zero_()
    out = torch.zeros(triton_stream.programs_for(far.numel()), dtype=torch.int32)
    with triton_kernels(), session_on(machine, die) as session:
        triton_stream.read(far, out, device=None)
        triton_stream.copy(far, near, device=None)
    xor = functools.partial(functools.reduce, operator.xor)
    assert xor(out.tolist()) == xor(far.tolist()) and torch.equal(near, far)
    read, copy = (record.kernels[0].traffic for record in session.records)
    assert read is not None and copy is not None
    assert read.buffer("words").read.distinct_peer == read.buffer("words").read.requested == far.nbytes
    assert copy.buffer("target").written.distinct_local == far.nbytes


def test_a_gemv_against_float64(machine: Machine) -> None:
    from dieplace.kernels.triton import gemv

    die, rows, width = machine.device("gpu0/p1"), 96, 1024
    with die.local(role="weights"):
        weight = torch.empty(rows, width, dtype=torch.bfloat16)
    weight.copy_(torch.randn(rows, width) / 32)
    x, out = torch.randn(1, width).bfloat16(), torch.zeros(1, rows)
    with triton_kernels(), session_on(machine, die) as session:
        gemv.gemv_bf16({"x": x, "weight": weight, "bias": None, "out": out}, {})
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-6)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None and traffic.by_role()["weights"][0].distinct_local == weight.nbytes


@pytest.mark.parametrize("op", list(OPS))
def test_a_few_cases_of_every_op_are_right(op: str) -> None:
    with triton_kernels(), Session(two_die=False):
        result = check_op(op, "triton", limit=2)
    assert result.cases == 2 and result.ok, result.failures


@pytest.mark.slow
@pytest.mark.parametrize("op", list(OPS))
def test_many_cases_of_every_op_are_right(op: str) -> None:
    with triton_kernels(), Session(two_die=False):
        result = check_op(op, "triton", limit=10)
    assert result.ok, result.failures


def test_a_wrong_instruction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the reciprocal where the root belongs."""
    right = triton_host.host_launch

    def faulty(isa: str, *rest: Any) -> HostLaunch:
        assert "v_sqrt_f32" in isa
        return right(isa.replace("v_sqrt_f32", "v_rcp_f32"), *rest)

    monkeypatch.setattr(triton_host, "host_launch", faulty)
    with triton_kernels(), Session(two_die=False):
        assert not check_op("rmsnorm", "triton", limit=2).ok


def test_an_unknown_instruction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_host.host_launch
    monkeypatch.setattr(
        triton_host, "host_launch", lambda isa, *rest: right(isa.replace("v_sqrt_f32", "v_new_f32"), *rest)
    )
    with triton_kernels(), Session(two_die=False):
        result = check_op("rmsnorm", "triton", limit=1)
    assert not result.ok and "v_new_f32" in result.failures[0].reason


def test_arguments_are_packed_where_the_metadata_says() -> None:
    """Two pointers, a 32-bit number, then two pointers for scratch memory that stay zero."""
    (launch,) = launches_of(
        lambda: triton_stream.read(torch.zeros(9000, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), device=None)
    )
    assert [a.size for a in launch.resources.args[:3]] == [8, 8, 4]
    assert launch.grid == (2, 1, 1) and launch.block == (256, 1, 1)
    assert int.from_bytes(launch.kernarg[16:20], "little") == 9000 and not any(launch.kernarg[24:])
