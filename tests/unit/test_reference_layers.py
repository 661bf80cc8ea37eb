"""References of norms, RoPE, experts, router and head against torch, `transformers` modules and published values."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from dieplace.kernels import registry
from dieplace.kernels.quantize import mxfp4_dequantize
from dieplace.kernels.reference import round_bf16

BF16 = torch.bfloat16


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _norm(x: torch.Tensor, weight: torch.Tensor, order: str, eps: float = 1e-5) -> torch.Tensor:
    operands = {"x": x, "residual": None, "weight": weight, "out": torch.empty_like(x), "residual_out": None}
    registry.run("rmsnorm", operands, {"eps": eps, "order": order})
    return operands["out"]  # type: ignore[return-value]


def test_the_order_of_the_norm_weight_matters_and_is_each_model_s() -> None:
    """Element 0 is 0.27148438 for GPT-OSS and 0.2734375 for Llama and Qwen3; the others agree."""
    x = torch.tensor([[0.37695312, -0.39648438, 1.921875, 0.31445312]], dtype=BF16)
    w = torch.tensor([0.73046875, 1.1796875, 1.6484375, 1.4765625])
    before, after = _norm(x, w, "before_cast"), _norm(x, w.to(BF16), "after_cast")
    assert (before[0, 0].item(), after[0, 0].item()) == (0.271484375, 0.2734375)
    assert torch.equal(before[0, 1:], after[0, 1:])


@pytest.mark.parametrize("order", ["before_cast", "after_cast"])
def test_norms_are_the_transformers_modules(order: str) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x = _random(3, 2880)
    module = (GptOssRMSNorm if order == "before_cast" else Qwen3RMSNorm)(2880, eps=1e-5)
    module.weight.data = _random(2880, seed=1).float() if order == "before_cast" else _random(2880, seed=1)
    found, theirs = _norm(x, module.weight.data, order), module(x)
    # float32 against float64 sums: at most a unit of bf16 apart, and seldom.
    assert (found.float() - theirs.float()).abs().max() <= theirs.float().abs().max() * 2**-7
    assert (found != theirs).float().mean() < 0.002


def test_a_padded_row_divides_by_the_true_width() -> None:
    assert _norm(torch.ones(1, 2880, dtype=BF16), torch.ones(2880), "before_cast").unique().tolist() == [1.0]
    exact = torch.ones(2880, dtype=torch.float64) / torch.tensor(1 + 1e-5, dtype=torch.float64).sqrt()
    assert exact[0].item() == pytest.approx(0.999995, abs=1e-7)  # 1.19257 would divide by 4096


def test_rounding_to_bf16_is_torch_s_for_every_float32_tie() -> None:
    x = torch.cat((torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-40, 0.0, -0.0])))
    assert torch.equal(round_bf16(x.double()), x.to(BF16).double())
    just_above = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_bf16(just_above).item() == 1 + 2**-7  # by way of float32 it would become a tie and round down


def _append(slots: list[int], heads: tuple[int, int, int], half: int) -> dict[str, Any]:
    hq, hkv, d = heads
    t = len(slots)
    operands = {
        "qkv": _random(t, (hq + 2 * hkv) * d),
        "cos": torch.rand(9, half),
        "sin": torch.rand(9, half),
        "positions": torch.arange(t, dtype=torch.int32) + 3,
        "slots": torch.tensor(slots, dtype=torch.int32),
        "q_out": torch.empty(t, hq, d, dtype=BF16),
        "k_cache": _random(8, hkv, d, seed=5),
        "v_cache": _random(8, hkv, d, seed=6),
    }
    registry.run("rope_kv_append", operands, {"q_heads": hq, "kv_heads": hkv, "head_dim": d})
    return operands


def test_a_slot_of_minus_one_touches_nothing() -> None:
    after = _append([3, -1], (4, 2, 16), 8)
    untouched = [0, 1, 2, 4, 5, 6, 7]
    for name, seed in (("k_cache", 5), ("v_cache", 6)):
        before = _random(8, 2, 16, seed=seed)
        assert torch.equal(after[name][untouched].view(torch.int16), before[untouched].view(torch.int16))
        assert not torch.equal(after[name][3], before[3])
    with pytest.raises(registry.ContractError, match="slot 8 is not within"):
        _append([8], (4, 2, 16), 8)


def test_rope_is_the_transformers_rotation() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

    after = _append([1, 2], (4, 2, 16), 8)
    heads = after["qkv"].double().unflatten(-1, (-1, 16))
    cos, sin = (after[n].double()[3:5][None] for n in ("cos", "sin"))
    q, k = apply_rotary_pos_emb(heads[None, :, :4].transpose(1, 2), heads[None, :, 4:6].transpose(1, 2), cos, sin)
    assert torch.equal(after["q_out"].double(), round_bf16(q[0].transpose(0, 1)))
    assert torch.equal(after["k_cache"][1:3].double(), round_bf16(k[0].transpose(0, 1)))
    assert torch.equal(after["v_cache"][1:3].double(), heads[:, 6:])


def test_a_partial_rotation_passes_the_rest() -> None:
    after = _append([0], (2, 1, 16), 4)
    assert torch.equal(after["q_out"][0, :, 8:], after["qkv"].unflatten(-1, (-1, 16))[0, :2, 8:])


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((1.0, 2.0, 3.0, 4.0), (2.5373873, 14.9096434)),
        ((10.0, -9.0), (-41.9997188,)),
        ((10.0, 9.0), (55.9996250,)),
        ((-20.0, 3.0), (-1.32e-13,)),
    ],
)
def test_clamped_swiglu(rows: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    """Interleaved gate and up, +1 on up, no lower clamp on the gate."""
    from dieplace.kernels.reference import Expected
    from dieplace.kernels.reference_moe import swiglu

    both = torch.tensor(rows, dtype=torch.float64)
    found = swiglu(Expected(both[0::2], both[0::2]), Expected(both[1::2], both[1::2]), 1.702, 7.0).value
    assert found.tolist() == pytest.approx(list(wanted), rel=1e-3 if wanted[0] == -1.32e-13 else 1e-7)


def test_experts_are_the_transformers_module() -> None:
    """Blocks as the checkpoint stores them, (out, in), against the module's dequantised (in, out) weights."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    e, h, i, t, k = 5, 64, 32, 3, 2
    generator = torch.Generator().manual_seed(2)
    blocks = [
        torch.randint(0, 256, s, dtype=torch.uint8, generator=generator) for s in ((e, 2 * i, 2, 16), (e, h, 1, 16))
    ]
    scales = [torch.randint(121, 126, b.shape[:-1], dtype=torch.uint8, generator=generator) for b in blocks]
    biases = [_random(e, 2 * i, seed=3), _random(e, h, seed=4)]
    module = GptOssExperts(GptOssConfig(hidden_size=h, intermediate_size=i, num_local_experts=e)).double()
    module.gate_up_proj.data, module.down_proj.data = (
        mxfp4_dequantize(b, s).transpose(1, 2).contiguous() for b, s in zip(blocks, scales, strict=True)
    )
    module.gate_up_proj_bias.data, module.down_proj_bias.data = (b.double() for b in biases)
    x = _random(t, h)
    ids = torch.tensor([[0, 4], [1, 0], [3, 2]], dtype=torch.int32)
    shares = torch.softmax(torch.randn(t, k, generator=generator), -1)
    up: dict[str, Any] = {"x": x, "ids": ids, "blocks": blocks[0], "scales": scales[0], "bias": biases[0]}
    up["out"] = torch.empty(t, k, i, dtype=BF16)
    registry.run("expert_gate_up", up)
    down: dict[str, Any] = {"x": up["out"], "ids": ids, "weights": shares, "blocks": blocks[1], "scales": scales[1]}
    down |= {"bias": biases[1], "out": torch.empty(t, h)}
    registry.run("expert_down", down)
    wanted = module(x.double(), ids.long(), shares.double()).detach()
    assert torch.allclose(down["out"].double(), wanted, rtol=2**-6, atol=float(wanted.abs().max()) * 2**-8)


def _top(logits: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    t = logits.shape[0]
    operands = {
        "logits": logits.float(),
        "ids": torch.empty(t, k, dtype=torch.int32),
        "weights": torch.empty(t, k),
        "nonfinite": torch.empty(1, dtype=torch.int32),
    }
    registry.run("router_topk", operands)
    return operands


def test_router_is_torch_s_top_k_and_softmax() -> None:
    logits = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    top = logits.double().topk(4)
    found = _top(logits, 4)
    assert torch.equal(found["ids"].long(), top.indices)
    assert torch.allclose(found["weights"].double(), top.values.softmax(-1), rtol=1e-6)
    assert found["nonfinite"].item() == 0


def test_nan_logits_never_choose_twice_or_outside() -> None:
    found = _top(torch.full((1, 128), torch.nan), 4)
    assert len(set(found["ids"].flatten().tolist())) == 4 and int(found["ids"].max()) < 128
    assert found["nonfinite"].item() == 128 and found["weights"].tolist() == [[0.25] * 4]
    one = torch.zeros(1, 128)
    one[0, 0] = torch.nan
    assert _top(one, 4)["ids"].tolist() == [[1, 2, 3, 4]]
    assert _top(torch.zeros(1, 128), 4)["ids"].tolist() == [[0, 1, 2, 3]]


def test_linear_ops_are_torch_s() -> None:
    x, w, b = _random(3, 2880), _random(17, 2880, seed=1), _random(17, seed=2)
    operands = {"x": x, "weight": w, "bias": b, "out": torch.empty(3, 17)}
    registry.run("gemv_bf16", operands)
    assert torch.allclose(operands["out"].double(), functional.linear(x.double(), w.double(), b.double()), rtol=1e-6)
    mlp = {"x": x, "gate": w, "up": _random(17, 2880, seed=3), "out": torch.empty(3, 17, dtype=BF16)}
    registry.run("mlp_gate_up", mlp)
    wanted = functional.silu(x.double() @ w.double().T) * (x.double() @ mlp["up"].double().T)
    assert torch.allclose(mlp["out"].double(), wanted, rtol=2**-8)


def test_the_head_ignores_rows_beyond_the_vocabulary() -> None:
    """Pad rows may hold anything; ties go to the lowest index; the offset is a shard's first row."""
    x, weight = torch.ones(1, 32, dtype=BF16), torch.zeros(6, 32, dtype=BF16)
    weight[2], weight[3], weight[5] = 1, 1, 9
    operands = {"x": x, "weight": weight, "logits": torch.empty(1, 6)}
    operands |= {"value": torch.empty(1), "token": torch.empty(1, dtype=torch.int32)}
    registry.run("head_argmax", operands, {"vocab": 5, "offset": 100})
    assert (operands["token"].item(), operands["value"].item()) == (102, 32.0)
    weight[0] = torch.nan
    registry.run("head_argmax", operands, {"vocab": 5})
    assert operands["token"].item() == 2


def test_hand_offs_carry_value_and_tag() -> None:
    x = torch.tensor([1.5, -2.25, 3e-39])
    put = {"x": x, "mailbox": torch.zeros(3, dtype=torch.int64)}
    registry.run("handoff_put", put, {"tag": 2**31 - 1})
    assert [hex(int(w)) for w in put["mailbox"][:2]] == ["0x7fffffff3fc00000", "0x7fffffffc0100000"]
    take = {"own": torch.ones(3), "mailbox": put["mailbox"], "residual": None, "out": torch.empty(3)}
    take["status"] = torch.zeros(2, dtype=torch.int32)
    registry.run("handoff_sum", take, {"tag": 2**31 - 1})
    assert take["out"].tolist() == [2.5, -1.25, 1.0] and take["status"].tolist() == [0, 0]
    registry.run("handoff_sum", take, {"tag": 7})
    assert take["status"].tolist() == [3, 2**31 - 1]
