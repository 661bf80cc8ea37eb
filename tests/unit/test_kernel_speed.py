"""Rows of the speed run: a rate only where bytes move, floors from the run's own ceiling, and what a stage reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dieplace.backends.nvidia import telemetry
from dieplace.backends.readings import Reading
from dieplace.experiments.kernel_speed import _require_rows, conditions, result, table
from dieplace.experiments.layer_speed import Layer, stage_bytes
from dieplace.experiments.timed_cases import NO_BYTES, OTHER_BYTES, Speed, WrongResult, rows
from dieplace.kernels import registry


def speed(name: str, nbytes: int, *samples_ns: float) -> Speed:
    return Speed(name, nbytes, 1, samples_ns)


def test_a_rate_is_bytes_over_the_median_and_none_without_bytes() -> None:
    """Three samples of 1, 2 and 9 us: the median is 2 us, so 8,000 bytes are 4 GB/s."""
    read, norm = rows([speed("read", 8000, 1000.0, 9000.0, 2000.0), speed("norm", 0, 5.0)], speed("top", 8000, 1000.0))
    assert read["gb_per_s"] == 4.0 and read["of_ceiling"] == 0.5 and "gb_per_s_why" not in read
    assert norm["gb_per_s"] is None and norm["of_ceiling"] is None
    assert norm["gb_per_s_why"] == norm["of_ceiling_why"] == NO_BYTES


def test_a_case_that_reads_other_bytes_has_no_rate_and_says_why() -> None:
    """The torch layer multiplies bf16 copies: its time stays, a rate of the packed bytes is no fact about it."""
    (row,) = rows([replace(speed("torch", 8000, 1000.0), no_rate=OTHER_BYTES)], speed("top", 8000, 1000.0))
    assert row["gb_per_s"] is None and row["of_ceiling"] is None and row["median_ns"] == 1000.0
    assert row["gb_per_s_why"] == row["of_ceiling_why"] == OTHER_BYTES and "no_rate" not in row


def test_floors_are_bytes_at_the_faster_of_copy_and_read() -> None:
    speeds = [speed("torch copy_", 4000, 1000.0), speed("streaming read", 8000, 1000.0)]
    stages = [
        {"stage": "qkv", "bytes": 16000, "alone_ns": 5000.0, "in_layer_ns": 3000.0},
        {"stage": "norm", "bytes": 0, "alone_ns": 2000.0, "in_layer_ns": 1000.0},
    ]
    found = result(speeds, stages, {"device": "made up"})
    assert found["ceiling"] == "streaming read" and found["device"] == "made up"
    qkv, norm = found["layer_stages"]
    assert qkv["floor_ns"] == 2000.0
    assert norm["floor_ns"] is None and norm["floor_ns_why"] == "activations only"
    assert any("floor 2.00 us, alone 5.00 us, in the layer 3.00 us" in line for line in table(found))


def test_conditions_say_when_and_on_what_and_why_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading("0000:01:00.0", 1980, 1980, 3201, None, 45, 0)
    monkeypatch.setattr(telemetry, "read_all", lambda: ("580.1", (reading,), None))
    found = conditions()
    assert found["driver_version"] == "580.1" and found["taken_at"].endswith("+00:00")
    assert found["gpus"][0]["sm_clock_mhz"] == 1980 and found["gpus"][0]["power_w_why"]
    monkeypatch.setattr(telemetry, "read_all", lambda: (None, (), "no NVML"))
    assert conditions()["driver_version"] is None and conditions()["driver_version_why"] == "no NVML"


def test_stages_read_every_byte_of_the_layer_once() -> None:
    """By name and by the layer's own sum, of experts the four of 128 that are chosen."""
    small = {"qkv_b": 64, "qkv_s": 4, "o_b": 32, "o_s": 2, "router": 8, "k": 16, "v": 16}
    experts = {"up_b": 128 * 64, "up_s": 128 * 4, "down_b": 128 * 32, "down_s": 128 * 2}
    layer = Layer({name: torch.zeros(size, dtype=torch.uint8) for name, size in (small | experts).items()})
    names = ("norm", "qkv", "attention", "o_proj", "router", "gate_up", "down")
    by_stage = {name: stage_bytes(layer, name) for name in names}
    assert by_stage == {
        "norm": 0, "qkv": 68, "attention": 32, "o_proj": 34, "router": 8, "gate_up": 4 * 68, "down": 4 * 34,
    }  # fmt: skip
    assert sum(by_stage.values()) == layer.read_bytes


@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_one_wrong_row_of_the_wide_product_is_noticed_before_it_is_timed(
    fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference stands in for the kernel, with a fault in row 159 of 1,200: 5 + 77 x (1,200 / 509 rounded down)."""
    reference = registry.run

    def kernel(name: str, operands: dict[str, Any], **_: Any) -> None:
        reference(name, operands)
        operands["out"][0, 5 + 77 * 2] += fault

    monkeypatch.setattr(registry, "run", kernel)
    x, out = torch.randn(1, 64).bfloat16(), torch.empty(1, 1200, dtype=torch.bfloat16)
    blocks = torch.randint(0, 256, (1200, 2, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, (1200, 2), dtype=torch.uint8)
    if not fault:
        _require_rows(x, blocks, scales, out)
        return
    with pytest.raises(WrongResult, match=r"gemv_mxfp4 of 1200 rows: out\[0, 77\] is"):
        _require_rows(x, blocks, scales, out)


def test_without_a_gpu_the_module_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from dieplace.experiments.kernel_speed import main

    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the module would measure it")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 3 and "NVIDIA GPU" in capsys.readouterr().err
