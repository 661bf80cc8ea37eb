"""Router, experts, dense MLP and head on their real ISA."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import BF16, F32, I32, U8, mostly_slow, mxfp4_values, random_mxfp4, run_op
from torch import Tensor

from dieplace.emulator.execution import Session
from dieplace.emulator.hbm import EmulatedHBM
from dieplace.kernels import registry
from dieplace.kernels.flydsl.gemv import build_gemv_bf16
from dieplace.machine import Domain


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    tokens = logits.shape[0]
    ids, weights = torch.full((tokens, k), -7, dtype=I32), torch.full((tokens, k), torch.nan)
    nonfinite = torch.full((1,), -7, dtype=I32)
    run_op("router_topk", {"logits": logits, "ids": ids, "weights": weights, "nonfinite": nonfinite})
    return ids, weights, int(nonfinite)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 128, 4), (8, 128, 8), (3, 64, 1), (2, 5, 5), (4, 100, 4), (1, 1, 1), (5, 32, 2)]
)
def test_the_largest_logits_win_and_share_by_softmax(tokens: int, experts: int, k: int) -> None:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 3
    ids, weights, nonfinite = route(logits, k)
    top = torch.topk(logits.double(), k)
    assert torch.equal(ids.long(), top.indices) and nonfinite == 0
    assert torch.allclose(weights.double(), top.values.softmax(-1), rtol=2.0**-18)


def test_rows_of_nan_and_ties() -> None:
    """vllm pull request 39391: a NaN row named one expert four times, or expert 128 of 128."""
    logits = torch.zeros(6, 128)
    logits[0] = torch.nan
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3] = 2.5
    logits[4] = torch.arange(128).float()
    logits[4, 100] = torch.nan
    logits[5, [70, 3, 90, 64]] = torch.inf
    ids, weights, nonfinite = route(logits, 4)
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= e < 128 for e in row)
    assert 7 not in ids[1].tolist() and 100 not in ids[4].tolist()
    assert ids[3].tolist() == [0, 1, 2, 3] and ids[1].tolist() == [0, 1, 2, 3]  # ties to the lowest number
    assert ids[4].tolist() == [127, 126, 125, 124]
    assert ids[5].tolist() == [3, 64, 70, 90]
    assert torch.allclose(weights[[2, 3, 5]], torch.full((3, 4), 0.25))
    assert nonfinite == 128 + 1 + 128 + 1 + 4


def swiglu(gate: Tensor, up: Tensor, limit: float = 7.0) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ((1, 2, 3, 4), (2.5373873, 14.9096434)),
        ((10, -9, 10, 9), (-41.9997188, 55.9996250)),
        ((-20, 3, 0, 0), (-1.32e-13, 0.0)),
    ],
)
def test_gate_and_up_are_interleaved_and_clamped(rows: tuple[int, ...], values: tuple[float, float]) -> None:
    """vllm pull request 29273. 3.3831831 would be gate and up split in halves, -48.9996717 up without its 1."""
    blocks, scales = torch.zeros(1, 4, 1, 16, dtype=U8), torch.full((1, 4, 1), 127, dtype=U8)
    bias = torch.tensor([rows], dtype=F32).to(BF16)
    out = torch.full((1, 1, 2), torch.nan, dtype=BF16)
    operands = {"x": torch.ones(1, 32, dtype=BF16), "ids": torch.zeros(1, 1, dtype=I32), "bias": bias, "out": out}
    run_op("expert_gate_up", {**operands, "blocks": blocks, "scales": scales})
    for found, want in zip(out.flatten().tolist(), values, strict=True):
        assert found == pytest.approx(want, rel=1e-2 if abs(want) < 1e-9 else 2.0**-8)


SHARED = torch.tensor([[2, 5], [5, 2], [2, 0], [2, 5], [1, 2], [3, 2], [5, 4], [2, 3]], dtype=I32)
EXPERT_CASES = [  # ids, hidden, inner; in the second an expert is named twice by one token, which no router does
    (SHARED[:3], 96, 32), (torch.tensor([[2, 2, 2, 0], [2, 2, 1, 2]], dtype=I32), 64, 32),
    (torch.tensor([[3, 0, 5, 1]], dtype=I32), 96, 64), (torch.tensor([[1, 0, 2, 3]], dtype=I32), 2880, 32),
    (SHARED, 64, 48), (SHARED[:2], 128, 33 * 2), (SHARED[:5], 1440, 16),
    (torch.tensor([[0]] * 8, dtype=I32), 64, 32), (torch.tensor([[6], [1], [6], [2]], dtype=I32), 160, 40),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "hidden", "inner"), mostly_slow(EXPERT_CASES, 4))
def test_gate_up_of_several_tokens(ids: Tensor, hidden: int, inner: int) -> None:
    tokens, k = ids.shape
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(hidden)).to(BF16)
    blocks, scales = random_mxfp4((7, 2 * inner), hidden, seed=inner)
    scales -= 6
    bias = torch.randn(7, 2 * inner, generator=torch.Generator().manual_seed(inner)).to(BF16)
    out = torch.full((tokens, k, inner), torch.nan, dtype=BF16)
    run_op("expert_gate_up", {"x": x, "ids": ids, "blocks": blocks, "scales": scales, "bias": bias, "out": out})
    rows = mxfp4_values(blocks, scales)[ids.long()]  # tokens, k, 2 inner, hidden
    sums = torch.einsum("tkrh,th->tkr", rows, x.double()) + bias.double()[ids.long()]
    want = swiglu(sums[..., 0::2], sums[..., 1::2])
    slack = 2.0**-15 * (torch.einsum("tkrh,th->tkr", rows.abs(), x.double().abs()).amax() + 1)
    assert ((out.double() - want).abs() <= want.abs() * 2.0**-8 + slack).all()


@pytest.mark.parametrize(("ids", "inner", "hidden"), mostly_slow(EXPERT_CASES, 4))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_down_sums_by_the_routers_weights(ids: Tensor, inner: int, hidden: int, dtype: torch.dtype) -> None:
    tokens, k = ids.shape
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(tokens, k, inner, generator=generator).to(BF16)
    weights = torch.rand(tokens, k, generator=generator)
    blocks, scales = random_mxfp4((7, hidden), inner, seed=hidden)
    bias = torch.randn(7, hidden, generator=generator).to(BF16)
    out = torch.full((tokens, hidden), torch.nan, dtype=dtype)
    operands = {"x": x, "ids": ids, "weights": weights, "blocks": blocks, "scales": scales, "bias": bias, "out": out}
    run_op("expert_down", operands)
    rows = mxfp4_values(blocks, scales)[ids.long()]
    each = torch.einsum("tkri,tki->tkr", rows, x.double()) + bias.double()[ids.long()]
    want = (weights.double()[..., None] * each).sum(1)
    size = (weights.double()[..., None] * torch.einsum("tkri,tki->tkr", rows.abs(), x.double().abs())).sum(1)
    unit = 2.0**-8 if dtype == BF16 else 2.0**-24
    assert ((out.double() - want).abs() <= want.abs() * unit + 2.0**-18 * (size + 10)).all()


@pytest.mark.parametrize("op", ["expert_gate_up", "expert_down"])
def test_each_distinct_expert_is_read_once(op: str) -> None:
    """Distinct bytes are those of the union of experts; requested bytes show that nothing is read a second time."""
    ids, hidden, inner = SHARED, 64, 64
    blocks, scales = random_mxfp4((8, 2 * inner if op == "expert_gate_up" else hidden), hidden)
    rows = blocks.shape[1]
    operands = {"ids": ids, "blocks": blocks, "scales": scales, "bias": torch.zeros(8, rows, dtype=BF16)}
    if op == "expert_gate_up":
        operands |= {"x": torch.ones(8, hidden, dtype=BF16), "out": torch.zeros(8, 2, inner, dtype=BF16)}
    else:
        operands |= {"x": torch.ones(8, 2, inner, dtype=BF16), "weights": torch.ones(8, 2)}
        operands |= {"out": torch.zeros(8, hidden, dtype=BF16)}
    with Session() as session:
        registry.run(op, operands, {}, backend="flydsl", strict=True)
    traffic = session.records[0].kernels[0].traffic
    assert traffic is not None
    distinct = len(set(ids.flatten().tolist()))
    assert distinct == 6
    for name, unit in (("blocks", 16), ("scales", 1)):
        read = traffic.buffer(name).read
        assert read.distinct == distinct * rows * (hidden // 32) * unit
        assert read.requested == read.distinct


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    mostly_slow([(1, 64, 5), (1, 1024, 33), (8, 128, 70), (2, 96, 40), (4, 520, 17), (3, 5120, 9)], 3),
)
@pytest.mark.parametrize("op", ["mlp_gate_up", "mlp_gate_up_mxfp4"])
def test_dense_gate_up(op: str, tokens: int, hidden: int, inner: int) -> None:
    if op == "mlp_gate_up_mxfp4":
        hidden = hidden // 32 * 32
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    out = torch.full((tokens, inner), torch.nan, dtype=BF16)
    if op == "mlp_gate_up":
        gate, up = ((torch.randn(inner, hidden, generator=generator) / hidden**0.5).to(BF16) for _ in range(2))
        run_op(op, {"x": x, "gate": gate, "up": up, "out": out})
        gate, up = gate.double(), up.double()
    else:
        gates, ups = random_mxfp4((inner,), hidden, 1), random_mxfp4((inner,), hidden, 2)
        names = ("gate_blocks", "gate_scales", "up_blocks", "up_scales")
        run_op(op, {"x": x, **dict(zip(names, (*gates, *ups), strict=True)), "out": out})
        gate, up = mxfp4_values(*gates), mxfp4_values(*ups)
    g, u = x.double() @ gate.T, x.double() @ up.T
    want = g * torch.sigmoid(g) * u
    slack = 2.0**-16 * ((x.double().abs() @ gate.abs().T) * (u.abs() + 1) + (x.double().abs() @ up.abs().T) * g.abs())
    assert ((out.double() - want).abs() <= want.abs() * 2.0**-8 + slack).all()


def head(x: Tensor, weight: Tensor, vocab: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rows = x.shape[0], weight.shape[0]
    logits, value = torch.full((tokens, rows), torch.nan), torch.full((tokens,), torch.nan)
    token = torch.full((tokens,), -7, dtype=I32)
    operands = {"x": x, "weight": weight, "logits": logits, "value": value, "token": token}
    run_op("head_argmax", operands, vocab=vocab, offset=offset)
    return logits, value, token


@pytest.mark.parametrize(
    ("tokens", "hidden", "rows"),
    mostly_slow([(1, 2880, 67), (3, 96, 1000), (1, 64, 100), (8, 128, 300), (2, 1024, 5)], 2),
)
def test_the_head_chooses_the_largest_logit(tokens: int, hidden: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    weight = (torch.randn(rows, hidden, generator=generator) / hidden**0.5).to(BF16)
    vocab = rows - 3
    logits, value, token = head(x, weight, vocab, offset=10)
    want = x.double() @ weight.double().T
    assert torch.allclose(logits.double(), want, atol=1e-5)
    assert torch.equal(token.long(), want[:, :vocab].argmax(-1) + 10)
    assert torch.equal(value, logits[torch.arange(tokens), (token - 10).long()])


def test_padding_ties_and_nan_of_the_head() -> None:
    weight = torch.zeros(40, 64, dtype=BF16)
    weight[:, 0] = 1.0
    weight[12, 0] = torch.nan
    weight[[30, 33], 0] = 9.0  # rows beyond the vocabulary
    weight[[5, 17, 29], 0] = 2.0
    x = torch.zeros(2, 64, dtype=BF16)
    x[0, 0], x[1, 0] = 1.0, -1.0
    logits, value, token = head(x, weight, vocab=30)
    assert token.tolist() == [5, 0] and value.tolist() == [2.0, -1.0]
    assert logits[0, 33] == 9.0 and logits[0, 12].isnan()


def test_an_expert_beyond_four_gigabytes() -> None:
    """ROCm/triton issues 830 and 944: 32-bit offsets wrapped. One expert of a sparse 4.7 GB tensor holds anything."""
    domain = Domain("gpu0/mem0", "gpu0", (0,), 16 << 30)
    memory = EmulatedHBM([domain])
    experts, rows, hidden = 51_000, 64, 2880
    blocks = memory.empty((experts, rows, hidden // 32, 16), U8, domain.id, role="weights")
    assert blocks.numel() > 2**32
    scales = memory.empty((experts, rows, hidden // 32), U8, domain.id, role="weights")
    blocks[-1], scales[-1] = 0x22, 127
    out = torch.full((1, 1, rows // 2), torch.nan, dtype=BF16)
    operands = {"x": torch.full((1, hidden), 2.0**-12).to(BF16), "ids": torch.tensor([[experts - 1]], dtype=I32)}
    operands |= {"blocks": blocks, "scales": scales, "bias": torch.zeros(experts, rows, dtype=BF16), "out": out}
    run_op("expert_gate_up", operands)
    total = torch.tensor(hidden * 2.0**-12, dtype=torch.float64)
    assert torch.allclose(out.double(), swiglu(total, total).expand(1, 1, rows // 2), rtol=2.0**-8)


def test_rows_beyond_four_gigabytes() -> None:
    """The same for rows: 150 of them, 32 MB apart."""
    domain = Domain("gpu0/mem0", "gpu0", (0,), 16 << 30)
    n, k, stride = 150, 64, 16 << 20
    weight = EmulatedHBM([domain]).empty((n, stride), BF16, domain.id, role="weights")
    weight[:, 0] = torch.arange(n).to(BF16)
    x, out = torch.ones(1, k, dtype=BF16), torch.full((1, n), torch.nan)
    with Session(two_die=False):
        build_gemv_bf16(k, 1, bias=False, fp32=True, stride=stride)(weight, x, x, out, n)
    assert torch.equal(out[0], torch.arange(n).float())
