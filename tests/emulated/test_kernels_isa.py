"""What the compiled kernels look like: loads, cache bits, registers, instruction budgets, reductions over lanes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_runs import BF16, F32, I32, U8, run_op
from torch import Tensor

from dieplace.codegen import flydsl_names as fn
from dieplace.codegen.cache_bits import TABLE
from dieplace.codegen.flydsl import Compiled, compile_launcher
from dieplace.codegen.flydsl_names import STREAM, flyc, fx
from dieplace.emulator.execution import Session, run
from dieplace.kernels import registry
from dieplace.kernels.flydsl import OPS
from dieplace.kernels.flydsl.table import Sample, measure, page, samples
from dieplace.kernels.flydsl.tiles import bounded, gather_sums, load_items, pointer

SAMPLES = list(samples())
NAMES = [f"{s.op} {s.what}" for s in SAMPLES]
FOUR_WAVES = {
    "gemv_bf16",
    "gemv_mxfp4",
    "gemv_mxfp4_mxfp8",
    "expert_gate_up",
    "expert_down",
    "head_argmax",
    "router_topk",
}
FOUR_WAVES |= {"rmsnorm", "qk_norm", "rope_kv_append", "handoff_put", "handoff_sum", "flag_set", "flag_wait"}
# Operands whose bytes are weights: blocks are read in 16 bytes, the one scale byte of a block next to them.
STREAMED = ("gemv", "mlp", "expert", "head")


@cache
def launches(index: int) -> list[Compiled]:
    sample = SAMPLES[index]
    call = registry.check_call(sample.op, sample.operands, sample.attrs)
    kernel: Any = registry.implementation(sample.op, "flydsl")
    return [compile_launcher(launch.launcher, *launch.args) for launch in kernel.plan(call.operands, call.attrs)]


def body(isa: str) -> list[str]:
    """The instructions of the only kernel of an assembly text, without comments."""
    text = isa[: isa.index(".Lfunc_end0")]
    return [line.split(";")[0].strip() for line in text.splitlines() if re.match(r"\s+[a-z]+\d*_\w+", line)]


def test_every_op_has_a_sample() -> None:
    assert {s.op for s in SAMPLES} == set(OPS)


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=NAMES)
def test_no_spills_no_scratch_no_flat_access_and_few_enough_registers(index: int) -> None:
    sample = SAMPLES[index]
    for compiled in launches(index):
        resources, lines = compiled.kernels[0], body(compiled.isa)
        assert not any(line.startswith(("flat_", "scratch_")) for line in lines)
        assert (resources.vgpr_spills, resources.sgpr_spills, resources.scratch_bytes, resources.agpr) == (0, 0, 0, 0)
        assert resources.vgpr <= 256
        if sample.op in FOUR_WAVES and not sample.what.startswith(("4 x", "8 x")):
            assert resources.vgpr <= 128


STREAMING = [i for i, s in enumerate(SAMPLES) if s.op.startswith(STREAMED)]


@pytest.mark.parametrize("index", STREAMING, ids=[NAMES[i] for i in STREAMING])
def test_weights_are_read_in_16_bytes_and_not_kept(index: int) -> None:
    lines = body(launches(index)[0].isa)
    streamed = [line for line in lines if line.endswith(" nt")]
    assert any(line.startswith("buffer_load_dwordx4") for line in streamed)
    assert all(line.startswith(("buffer_load_dwordx4", "buffer_load_ubyte")) for line in streamed)
    # whatever else is read through a descriptor is an activation, and stays in the caches
    assert any(line.startswith("buffer_load_dwordx4") and " nt" not in line for line in lines)


def loops_over_descriptors(isa: str) -> bool:
    """Whether a descriptor may differ between lanes: LLVM then compares it and takes one round a value."""
    text = "\n".join(body(isa))
    return bool(re.search(r"v_cmp_eq_u64.*\n(.*\n){0,6}s_and_saveexec_b64.*\n(.*\n){0,4}buffer_", text))


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=NAMES)
def test_descriptors_are_the_same_on_all_lanes(index: int) -> None:
    assert not any(loops_over_descriptors(compiled.isa) for compiled in launches(index))


def test_a_descriptor_that_differs_between_lanes_is_noticed() -> None:
    @flyc.kernel
    def divergent_kernel(x: fx.Tensor, out: fx.Tensor):
        lane = fx.thread_idx.x
        (pointer(out) + lane).store(load_items(bounded(pointer(x, offset=lane), 64, 1), 0, fx.Int32, 1)[0])

    @flyc.jit
    def divergent(x: fx.Tensor, out: fx.Tensor, stream: fx.Stream = STREAM):
        divergent_kernel(x, out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    assert loops_over_descriptors(
        compile_launcher(divergent, torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I32)).isa
    )


@pytest.mark.parametrize(
    ("op", "what", "most"),
    [
        ("gemv_mxfp4", "1 x 2048", 0.14),
        ("gemv_bf16", "1 x 2560", 0.042),  # 220 thousand for 1024 x 2560: the first trial kernel
        ("gemv_mxfp4", "1 x 2880", 0.14),
        ("expert_gate_up", "1 x 2880", 0.14),
        ("expert_down", "1 x 2880", 0.14),
    ],
)
def test_instructions_per_weight_byte(op: str, what: str, most: float) -> None:
    sample: Sample = next(s for s in SAMPLES if (s.op, s.what) == (op, what))
    per_byte = measure(sample)[0].per_byte
    assert per_byte is not None and 0 < per_byte <= most


MATRICES = ("weight", "blocks", "scales", "gate", "up", "gate_blocks", "gate_scales", "up_blocks", "up_scales")


@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("gemv_bf16", "1 x 2880"),
        ("gemv_bf16", "8 x 2880"),
        ("gemv_mxfp4", "1 x 2880"),
        ("gemv_mxfp4", "8 x 2880"),
        ("gemv_mxfp4_mxfp8", "8 x 2880"),
        ("mlp_gate_up", "1 x 5120"),
        ("mlp_gate_up_mxfp4", "1 x 5120"),
        ("head_argmax", "1 x 2880"),
    ],
)
def test_every_weight_byte_is_asked_for_once(op: str, what: str) -> None:
    """Distinct bytes are the whole matrix, and no byte is requested a second time, whatever the number of tokens."""
    sample: Sample = next(s for s in SAMPLES if (s.op, s.what) == (op, what))
    with Session() as session:
        registry.run(op, sample.operands, sample.attrs, backend="flydsl", strict=True)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None
    for name in MATRICES:
        tensor = sample.operands.get(name)
        if tensor is not None and name in {b.name for b in traffic.buffers}:
            read = traffic.buffer(name).read
            assert (read.distinct, read.requested) == (tensor.numel() * tensor.element_size(),) * 2, name


@pytest.mark.slow
def test_the_page_is_what_the_kernels_give() -> None:
    assert (Path(__file__).parents[2] / "docs" / "kernels.md").read_text() == page()


@pytest.mark.parametrize("name", list(TABLE))
def test_cache_names_print_their_bits(name: str) -> None:
    """triton pull request 5838 had a table like this wrong for gfx950: every entry is compiled and read back."""
    bits = TABLE[name]

    @flyc.kernel
    def both_kernel(x: fx.Tensor, out: fx.Tensor):
        lane = fx.thread_idx.x
        value = load_items(bounded(pointer(x), 4096, 1), lane, fx.Int32, 1, name)[0]
        address = pointer(x) + lane
        if fx.const_expr(bits.scope is None):
            other = fx.generic_load(address, nontemporal=name == "stream_once")
        else:
            other = fx.generic_load(address, memory_order=fn.AtomicOrdering.Monotonic, syncscope=bits.scope or None)
        (pointer(out) + lane).store(value + other)

    @flyc.jit
    def both(x: fx.Tensor, out: fx.Tensor, stream: fx.Stream = STREAM):
        both_kernel(x, out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    x, out = torch.arange(1024, dtype=I32), torch.zeros(64, dtype=I32)
    lines = body(compile_launcher(both, x, out).isa)
    for kind in ("buffer_load_dword ", "global_load_dword "):
        (load,) = [line for line in lines if line.startswith(kind)]
        suffixes = tuple(word for word in load.split() if word in ("sc0", "sc1", "nt"))
        assert suffixes == bits.isa, load


def lane_kernel(build: Any) -> Any:
    """A launcher (x, out) with one wave a row of x (rows, 64): out[row, lane] = build(x[row, lane])."""

    @flyc.kernel
    def lanes_kernel(x: fx.Tensor, out: fx.Tensor):
        place = fx.block_idx.x * 64 + fx.thread_idx.x
        (pointer(out) + place).store(build((pointer(x) + place).load()))

    @flyc.jit
    def lanes(x: fx.Tensor, out: fx.Tensor, rows: fx.Int32, stream: fx.Stream = STREAM):
        lanes_kernel(x, out).launch(grid=(rows, 1, 1), block=(64, 1, 1), stream=stream)

    return lanes


def each_lane(build: Any, x: Tensor) -> Tensor:
    out = torch.full_like(x, -7)
    run(lane_kernel(build), x, out, x.shape[0], two_die=False)
    return out


@pytest.mark.parametrize("width", [64, 32, 16, 8])
def test_reductions_reach_every_lane(width: int) -> None:
    """llvm-project pull request 141825: only the last lanes held the sum. One lane is set, for all 64 of them."""
    sums = each_lane(lambda v: fn.coop.warp_sum(v, width=width), torch.eye(64))
    groups = torch.eye(64 // width).repeat_interleave(width, 0).repeat_interleave(width, 1)
    assert torch.equal(sums, groups)
    tops = each_lane(lambda v: fn.coop.warp_max(v, width=width), torch.eye(64) * 4 - 5)
    assert torch.equal(tops, groups * 4 - 5)


@pytest.mark.parametrize("lanes", [64, 32, 16])
@pytest.mark.parametrize("count", [1, 3, 4, 16, 32])
def test_gathered_sums_name_their_index(lanes: int, count: int) -> None:
    """Partial i of a lane is (i + 1) times its value: each finished sum must be that multiple of its group's sum."""

    def build(value: Any) -> Any:
        batches, group = gather_sums([value * float(i + 1) for i in range(count)], lanes)
        total, index = batches[0]
        # (sum, index, group) in one number that float32 holds exactly
        return total * 4096.0 + (index * 4 + group).to(fx.Float32)

    packed = each_lane(build, torch.eye(64)).long()
    totals, index, group = packed // 4096, packed % 4096 // 4, packed % 4
    for hot in range(64):
        for lane in range(64):
            if index[hot, lane] < count:
                assert totals[hot, lane] == (index[hot, lane] + 1) * (group[hot, lane] == hot // lanes)
    found = {(int(g), int(i)) for g, i in zip(group[0].tolist(), index[0].tolist(), strict=True) if i < count}
    assert found == {(g, i) for g in range(64 // lanes) for i in range(min(count, lanes))}


def test_lane_masks_have_64_bits() -> None:
    """cupy pull request 9977: masks cut to 32 bits. One bit set, each of the 64 in turn."""
    found = each_lane(lambda v: fn.first_bit(fn.ballot(v != 0)), torch.eye(64, dtype=I32))
    assert torch.equal(found, torch.arange(64, dtype=I32)[:, None].expand(64, 64))
    counts = each_lane(lambda v: fn.bit_count(fn.ballot(v != 0)), torch.tril(torch.ones(64, 64, dtype=I32)))
    assert torch.equal(counts, torch.arange(1, 65, dtype=I32)[:, None].expand(64, 64))


def spikes(items: int) -> Iterator[int]:
    """Items whose lane is first or last in a wave, and the last item."""
    yield from sorted({i for wave in range(0, items, 64) for i in (wave, min(wave + 63, items - 1))})


@pytest.mark.parametrize("items", [64, 96, 128, 256, 1000])
def test_workgroup_sums_miss_no_lane(items: int) -> None:
    """One value is not zero, at the edges of each wave: a lane that is left out makes the norm explode."""
    hidden = items * 8
    places = list(spikes(items))
    for first in range(0, len(places), 8):
        some = places[first : first + 8]
        x = torch.zeros(len(some), hidden, dtype=BF16)
        for row, item in enumerate(some):
            x[row, item * 8 + 7] = 1.0
        out = torch.zeros_like(x)
        weight = torch.ones(hidden)
        run_op("rmsnorm", {"x": x, "residual": None, "weight": weight, "out": out}, eps=1e-12, order="before_cast")
        assert torch.allclose(out.to(F32), x.to(F32) * hidden**0.5, rtol=2.0**-8)


def test_unsigned_bytes_stay_unsigned() -> None:
    """FlyDSL hands out a signed byte for a torch.uint8: 200 would arrive as -56."""

    @flyc.kernel
    def widen_kernel(x: fx.Tensor, out: fx.Tensor):
        lane = fx.thread_idx.x
        value = load_items(bounded(pointer(x, fx.Uint8), 256, 1), lane, fx.Uint8, 1)[0]
        (pointer(out) + lane).store(fn.u8(value))

    @flyc.jit
    def widen(x: fx.Tensor, out: fx.Tensor, stream: fx.Stream = STREAM):
        widen_kernel(x, out).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)

    out = torch.zeros(256, dtype=I32)
    run(widen, torch.arange(256).to(U8), out, two_die=False)
    assert torch.equal(out, torch.arange(256, dtype=I32))
