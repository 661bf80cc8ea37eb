"""Layouts carry their name; wrong, twice and back (public reports of weights prepared for another kernel)."""

import pytest
import torch

from dieplace.errors import UsageError
from dieplace.kernels.layout import LAYOUTS, Laid, prepare, require_layout, restore


def _tensor(layout: str) -> torch.Tensor:
    shape = (3, 10, 5, 16) if layout != "padded_scales" else (3, 10, 5)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_back_is_byte_equal(layout: str) -> None:
    original = _tensor(layout)
    laid = prepare(original, layout)
    assert laid.layout == layout and not torch.equal(laid.tensor, original)
    assert torch.equal(restore(laid), original)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preparing_twice_is_an_error(layout: str) -> None:
    with pytest.raises(UsageError, match=f"already laid out as {layout}"):
        prepare(prepare(_tensor(layout), layout), layout)


def test_a_kernel_refuses_another_layout() -> None:
    split = prepare(_tensor("split_gate_up"), "split_gate_up")
    with pytest.raises(UsageError, match="blocks is laid out as split_gate_up, the kernel takes checkpoint"):
        require_layout("blocks", split, "checkpoint")
    with pytest.raises(UsageError, match="blocks is laid out as checkpoint, the kernel takes split_gate_up"):
        require_layout("blocks", restore(split), "split_gate_up")
    assert require_layout("blocks", split, "split_gate_up") is split.tensor


def test_split_order_by_hand() -> None:
    rows = torch.arange(6).reshape(1, 6, 1)
    assert prepare(rows, "split_gate_up").tensor.flatten().tolist() == [0, 2, 4, 1, 3, 5]


def test_pads_are_harmless() -> None:
    assert prepare(torch.full((2, 5), 9, dtype=torch.uint8), "padded_scales").tensor[:, 5:].unique().tolist() == [127]
    assert prepare(_tensor("padded_blocks"), "padded_blocks").tensor[:, :, 5:].unique().tolist() == [0]


def test_unknown_layout_and_odd_rows() -> None:
    with pytest.raises(UsageError, match="shuffeled"):
        prepare(torch.zeros(2, 2), "shuffeled")
    with pytest.raises(UsageError, match="even number"):
        prepare(Laid(torch.zeros(1, 3)), "split_gate_up")
