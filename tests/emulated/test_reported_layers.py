"""Reported faults of MXFP4, norms, RoPE, experts, router and head, on the reference and on the kernels.

Each has its input and right value; sources: public issue threads and the OCP MX specification. Triton's kernels are
compiled for gfx950 and run on the emulated card, as FlyDSL's are.
"""

import contextlib
import importlib.util
import math
from typing import Any

import pytest
import torch

from dieplace.kernels import registry
from dieplace.kernels.layout import prepare

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be compiled"
)
pytestmark = pytest.mark.parametrize("backend", ["reference", "flydsl", pytest.param("triton", marks=needs_triton)])
BF16 = torch.bfloat16


def run(backend: str, op: str, operands: dict[str, Any], attrs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run strictly; the operands themselves are returned, outputs written."""
    with _emulated() if backend == "triton" else contextlib.nullcontext():
        registry.run(op, operands, attrs, backend=backend, strict=True)
    return operands


def _emulated() -> contextlib.AbstractContextManager[None]:
    from dieplace.emulator.triton_launch import triton_kernels

    return triton_kernels()


def mxfp4(backend: str, block: bytes, scale: int, x: list[float], rows: int = 1) -> float:
    """One row of 32 weights times x (padded with zeros)."""
    given = torch.zeros(1, 32, dtype=BF16)
    given[0, : len(x)] = torch.tensor(x, dtype=torch.float64).to(BF16)
    operands = {
        "x": given,
        "blocks": torch.tensor(list(block.ljust(16, b"\0")), dtype=torch.uint8).reshape(1, 1, 16).repeat(rows, 1, 1),
        "scales": torch.full((rows, 1), scale, dtype=torch.uint8),
        "bias": None,
        "out": torch.full((1, rows), math.nan),
    }
    return float(run(backend, "gemv_mxfp4", operands)["out"][0, -1])


def test_pairs_are_neighbours_low_nibble_first(backend: str) -> None:
    """0.5, 1, 6, -6 times 1, 10, 100, 1000; the GGML order would give 60.5."""
    assert mxfp4(backend, b"\x21\xf7", 127, [1, 10, 100, 1000]) == -5389.5


def test_scale_bytes_at_their_edges(backend: str) -> None:
    """Byte 0 is 2^-127 and not zero, 254 is 2^127, 127 is 1, 125 a quarter, 255 NaN."""
    sixes, halves = b"\x77" * 16, b"\x11" * 16
    assert mxfp4(backend, sixes, 0, [2.0**100] * 32) == pytest.approx(1.4305115e-06, rel=1e-6)
    assert mxfp4(backend, halves, 254, [2.0**-100] * 32) == 2147483648.0
    assert mxfp4(backend, halves, 127, [2.0]) == 1.0
    assert mxfp4(backend, halves, 125, [2.0]) == 0.25
    assert math.isnan(mxfp4(backend, halves, 255, [1.0] * 32))


def test_a_nan_scale_stays_in_its_row(backend: str) -> None:
    scales = torch.full((3, 2), 127, dtype=torch.uint8)
    scales[1, 1] = 255
    operands = {
        "x": torch.ones(1, 64, dtype=BF16),
        "blocks": torch.full((3, 2, 16), 0x11, dtype=torch.uint8),
        "scales": scales,
        "bias": None,
        "out": torch.zeros(1, 3),
    }
    out = run(backend, "gemv_mxfp4", operands)["out"][0].tolist()
    assert (out[0], out[2]) == (32.0, 32.0) and math.isnan(out[1])


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
    [
        (1.0, 2.0, 2.5373873),
        (3.0, 4.0, 14.9096434),
        (10.0, -9.0, -41.9997188),
        (10.0, 9.0, 55.9996250),
        (-20.0, 3.0, -1.32e-13),
    ],
)
def test_clamped_swiglu_of_interleaved_rows(gate: float, up: float, wanted: float, backend: str) -> None:
    """Gate clamped from above only, +1 on up. 3.3831831 for the first would be halves, -48.9996717 no +1."""
    operands = {
        "x": torch.zeros(1, 32, dtype=BF16),
        "ids": torch.zeros(1, 1, dtype=torch.int32),
        "blocks": torch.zeros(1, 4, 1, 16, dtype=torch.uint8),
        "scales": torch.full((1, 4, 1), 127, dtype=torch.uint8),
        "bias": torch.tensor([[gate, up, 1.0, 2.0]], dtype=BF16),
        "out": torch.full((1, 1, 2), math.nan, dtype=BF16),
    }
    out = run(backend, "expert_gate_up", operands, {"alpha": 1.702, "limit": 7.0})["out"].flatten().tolist()
    assert out == pytest.approx([wanted, 2.5373873], rel=2**-8)


def test_experts_chosen_twice_are_read_for_both_tokens(backend: str) -> None:
    """Two tokens share expert 2; each gets its own product, in its own slot."""
    generator = torch.Generator().manual_seed(3)
    operands = {
        "x": torch.stack((torch.ones(32), -torch.ones(32))).to(BF16),
        "ids": torch.tensor([[2, 0], [1, 2]], dtype=torch.int32),
        "blocks": torch.randint(0, 256, (3, 4, 1, 16), dtype=torch.uint8, generator=generator),
        "scales": torch.full((3, 4, 1), 124, dtype=torch.uint8),
        "bias": torch.zeros(3, 4, dtype=BF16),
        "out": torch.full((2, 2, 2), math.nan, dtype=BF16),
    }
    found = run(backend, "expert_gate_up", operands)["out"]
    alone = {}
    for token, slot in ((0, 0), (1, 1)):
        single = {**operands, "x": operands["x"][token : token + 1].contiguous()}
        single |= {"ids": torch.tensor([[2]], dtype=torch.int32), "out": torch.empty(1, 1, 2, dtype=BF16)}
        alone[token] = run("reference", "expert_gate_up", single)["out"][0, 0]
        assert torch.allclose(found[token, slot].float(), alone[token].float(), rtol=2**-7)
    assert not torch.equal(alone[0], alone[1])


def test_nan_logits_choose_distinct_experts_within_range(backend: str) -> None:
    def top(logits: torch.Tensor) -> dict[str, Any]:
        outputs = {"ids": torch.full((1, 4), -1, dtype=torch.int32), "weights": torch.full((1, 4), math.nan)}
        outputs["nonfinite"] = torch.full((1,), -1, dtype=torch.int32)
        return run(backend, "router_topk", {"logits": logits, **outputs})

    found = top(torch.full((1, 128), math.nan))
    assert len(set(found["ids"].flatten().tolist())) == 4
    assert int(found["ids"].min()) >= 0 and int(found["ids"].max()) < 128
    assert found["weights"].flatten().tolist() == [0.25] * 4 and int(found["nonfinite"]) == 128
    one = torch.zeros(1, 128)
    one[0, 0] = math.nan
    found = top(one)
    assert found["ids"].flatten().tolist() == [1, 2, 3, 4] and int(found["nonfinite"]) == 1


@pytest.mark.parametrize(("order", "wanted"), [("before_cast", 0.27148438), ("after_cast", 0.2734375)])
def test_where_the_norm_weight_multiplies(order: str, wanted: float, backend: str) -> None:
    """Before the cast for GPT-OSS, after it for Llama and Qwen3; only element 0 differs."""
    x = torch.tensor([[0.37695312, -0.39648438, 1.921875, 0.31445312]], dtype=BF16)
    weight = torch.tensor([0.73046875, 1.1796875, 1.6484375, 1.4765625]).repeat(2)
    operands = {
        "x": x.repeat(1, 2),  # twice the same four: the mean stays, and the kernels get whole 16-byte items
        "residual": None,
        "weight": weight if order == "before_cast" else weight.to(BF16),
        "out": torch.full((1, 8), math.nan, dtype=BF16),
        "residual_out": None,
    }
    out = run(backend, "rmsnorm", operands, {"eps": 1e-5, "order": order})["out"]
    assert out[0, [0, 4]].tolist() == pytest.approx([wanted] * 2, rel=1e-7)


def test_the_mean_is_over_the_true_width(backend: str) -> None:
    """2880 ones give 1; dividing by a padded 4096 would give 1.19257."""
    operands = {
        "x": torch.ones(1, 2880, dtype=BF16),
        "residual": None,
        "weight": torch.ones(2880),
        "out": torch.full((1, 2880), math.nan, dtype=BF16),
        "residual_out": None,
    }
    assert run(backend, "rmsnorm", operands, {"eps": 1e-5, "order": "before_cast"})["out"].unique().tolist() == [1.0]


def test_a_slot_of_minus_one_touches_nothing(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    caches = {n: torch.randn(6, 2, 64, generator=generator).to(BF16) for n in ("k_cache", "v_cache")}
    before = {n: c.clone() for n, c in caches.items()}
    operands = {
        "qkv": torch.randn(2, 8 * 64, generator=generator).to(BF16),
        "cos": torch.ones(4, 32),
        "sin": torch.zeros(4, 32),
        "positions": torch.tensor([0, 1], dtype=torch.int32),
        "slots": torch.tensor([3, -1], dtype=torch.int32),
        "q_out": torch.empty(2, 4, 64, dtype=BF16),
        **caches,
    }
    run(backend, "rope_kv_append", operands, {"q_heads": 4, "kv_heads": 2, "head_dim": 64})
    kept = [0, 1, 2, 4, 5]
    for name, cache in caches.items():
        assert torch.equal(cache[kept].view(torch.int16), before[name][kept].view(torch.int16))
    heads = operands["qkv"][0].view(8, 64)
    assert torch.equal(caches["k_cache"][3], heads[4:6]) and torch.equal(caches["v_cache"][3], heads[6:])


def test_rows_beyond_the_vocabulary_never_win(backend: str) -> None:
    """Pad rows may hold anything; ties go to the lowest index, across whatever blocks divide the rows."""
    weight = torch.zeros(3000, 64, dtype=BF16)
    weight[17], weight[2500], weight[2999] = 1, 1, 9
    outputs = {"logits": torch.empty(1, 3000), "value": torch.empty(1), "token": torch.empty(1, dtype=torch.int32)}
    operands = {"x": torch.ones(1, 64, dtype=BF16), "weight": weight, **outputs}
    out = run(backend, "head_argmax", operands, {"vocab": 2999, "offset": 100})
    assert (out["token"].item(), out["value"].item()) == (117, 64.0)


def test_widths_with_an_odd_number_of_groups(backend: str) -> None:
    """2880 and its half are 90 and 45 groups of 32; what lies after the row must change nothing."""
    generator = torch.Generator().manual_seed(2)
    for k in (2880, 1440):
        blocks = torch.randint(0, 256, (5, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.full((5, k // 32), 120, dtype=torch.uint8)
        x = torch.randn(1, k, generator=generator).to(BF16)
        outs = []
        for after in (0.0, math.nan):
            room = torch.full((1, k + 512), after, dtype=BF16)
            room[0, :k] = x[0]
            operands = {"x": room[:, :k], "blocks": blocks, "scales": scales, "bias": None, "out": torch.empty(1, 5)}
            outs.append(run(backend, "gemv_mxfp4", operands)["out"])
        assert torch.equal(*outs) and torch.isfinite(outs[0]).all()


@pytest.mark.parametrize("padded", [2944, 3072])
def test_padded_weights_give_the_bits_of_unpadded_ones(padded: int, backend: str) -> None:
    """Pad nibble 0, pad scale 127, pad activations 0: contract and result stay those of 2880 columns."""
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (7, 90, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (7, 90), dtype=torch.uint8, generator=generator)
    x = torch.randn(2, 2880, generator=generator).to(BF16)
    more = (padded - 2880) // 32
    wide_blocks = torch.cat((blocks, torch.zeros(7, more, 16, dtype=torch.uint8)), 1)
    wide_scales = torch.cat((scales, torch.full((7, more), 127, dtype=torch.uint8)), 1)
    if padded == 3072:
        assert torch.equal(prepare(blocks, "padded_blocks").tensor, wide_blocks)
        assert torch.equal(prepare(scales, "padded_scales").tensor, wide_scales)
    wide_x = torch.cat((x, torch.zeros(2, padded - 2880, dtype=BF16)), 1)
    outs = []
    for given, b, s in ((x, blocks, scales), (wide_x, wide_blocks, wide_scales)):
        operands = {"x": given, "blocks": b, "scales": s, "bias": None, "out": torch.full((2, 7), math.nan)}
        outs.append(run(backend, "gemv_mxfp4", operands)["out"])
    assert torch.equal(*outs)
