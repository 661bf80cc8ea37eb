"""Triton kernels on a real NVIDIA GPU: paths that the check cases are too small for, and launches that overlap.

Run by hand: python -m pytest tests/device/test_triton_matrix_device.py -rs
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("these kernels run on NVIDIA GPUs from sm_90 on")


@pytest.mark.parametrize("width", [32, 96, 2880, 4096])
@pytest.mark.parametrize(("rows", "biased"), [(65536, True), (66001, False)])
@pytest.mark.parametrize("scales", ["plain", "edges", "nan"])
def test_a_matrix_of_very_many_rows_is_right(width: int, rows: int, biased: bool, scales: str) -> None:
    """Every row, odd counts among them; scale bytes 0, 200 and 255 send a program through the exact form."""
    import torch

    from dieplace.kernels import registry
    from dieplace.kernels.compare import compare
    from dieplace.kernels.triton import mx_launch

    assert rows >= mx_launch.FROM_ROWS
    g = torch.Generator().manual_seed(width)
    operands: dict[str, Any] = {
        "x": torch.randn(1, width, generator=g).bfloat16(),
        "blocks": torch.randint(0, 256, (rows, width // 32, 16), dtype=torch.uint8, generator=g),
        "scales": torch.randint(117, 129, (rows, width // 32), dtype=torch.uint8, generator=g),
        "bias": torch.randn(rows, generator=g).bfloat16() if biased else None,
        "out": torch.full((1, rows), torch.nan, dtype=torch.float32),
    }
    if scales == "edges":
        operands["scales"][::3], operands["scales"][1::997] = 0, 200
    if scales == "nan":
        operands["scales"][rows // 2, 0] = 255
    before = registry.check_call("gemv_mxfp4", operands)
    moved = {name: None if t is None else t.cuda() for name, t in operands.items()}
    registry.run("gemv_mxfp4", moved, backend="triton", strict=True)
    found = {name: t.cpu() for name, t in moved.items() if t is not None}
    assert [str(deviation) for deviation in compare(before, found) if not deviation.ok] == []


def test_an_overlapped_layer_gives_the_bits_of_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launches a hundred times, over two layers in turn, with and without overlap."""
    import torch

    from dieplace.experiments import layer_speed
    from dieplace.experiments.layer_times import in_order
    from dieplace.kernels.triton import attention, experts, gemv, mx_launch, norm, overlap, rope_attention, router

    layers = [layer_speed.make_layer(seed) for seed in range(2)]
    work = layer_speed.workspace()
    stages = [layer_speed.overlapped_stages(layer, work) for layer in layers]

    def outputs() -> list[Any]:
        found = []
        for one in stages * 50:
            in_order(one)()
            found.append(work["y"].clone())
        torch.cuda.synchronize()
        return found

    overlapped = outputs()
    waiting = {"OVERLAP": False}
    for module in (attention, experts, gemv, mx_launch, norm, overlap, rope_attention, router):
        monkeypatch.setattr(module, "overlap_options", lambda asked: waiting)
    for found, wanted in zip(overlapped, outputs(), strict=True):
        assert torch.equal(found, wanted) and bool(torch.isfinite(wanted).all())
