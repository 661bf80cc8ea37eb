"""Attention references against torch's own attention, and a window's mean to full precision."""

import pytest
import torch
from attention_calls import attend, normal
from torch.nn import functional


@pytest.mark.parametrize(("hq", "hkv", "d", "n"), [(64, 8, 64, 33), (12, 2, 64, 200), (6, 3, 32, 1), (5, 1, 16, 129)])
def test_attention_is_torch_s_own(hq: int, hkv: int, d: int, n: int) -> None:
    q, k, v = normal(hq, d), normal(n, hkv, d, seed=1), normal(n, hkv, d, seed=2)
    wanted = functional.scaled_dot_product_attention(
        q.double()[None, :, None],
        k.double().transpose(0, 1)[None],
        v.double().transpose(0, 1)[None],
        enable_gqa=True,
    )[0, :, 0]
    for splits in (1, 3, 32):
        out, _, _ = attend(q, k, v, splits=splits)
        assert torch.allclose(out, wanted, rtol=2**-8, atol=1e-6)


def test_the_window_mean_exactly() -> None:
    """bf16 cannot tell 136.5 from 136.0 apart, float64 partials can."""
    from dieplace.kernels.reference_attention import attend as exact
    from dieplace.kernels.reference_attention import visible

    for position, mean in ((200, 136.5), (127, 63.5), (128, 64.5)):
        seen = visible(position + 1, 128)
        v = torch.tensor([float(j) for j in seen], dtype=torch.float64)[:, None, None]
        out, _, _ = exact(torch.zeros(1, 1, dtype=torch.float64), torch.zeros_like(v), v, 1.0)
        assert float(out) == pytest.approx(mean, rel=1e-12)
