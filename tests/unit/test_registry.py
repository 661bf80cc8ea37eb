"""The registry refuses what a contract does not say before anything runs, and falls back loudly."""

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels import registry
from dieplace.kernels.cases import cases
from dieplace.kernels.layout import prepare


def _gemv(t: int = 2, n: int = 3, k: int = 64) -> dict[str, torch.Tensor | None]:
    return {
        "x": torch.ones(t, k, dtype=torch.bfloat16),
        "weight": torch.ones(n, k, dtype=torch.bfloat16),
        "bias": None,
        "out": torch.zeros(t, n, dtype=torch.float32),
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.ones(2, 65, dtype=torch.bfloat16)}, "axis 1 of weight is 64"),
        ({"x": torch.ones(2, 64)}, "x is float32, the contract says bfloat16"),
        ({"x": None}, "operand x is missing"),
        ({"x": torch.ones(9, 64, dtype=torch.bfloat16), "out": torch.zeros(9, 3)}, "T <= 8"),
        ({"weight": torch.ones(64, 3, dtype=torch.bfloat16).T}, "weight is not contiguous"),
        ({"out": torch.zeros(2, 3, 1)}, r"shape \(2, 3, 1\), the contract says \(T, N\)"),
        ({"wait": torch.zeros(1)}, r"unknown operand\(s\) \['wait'\]"),
    ],
)
def test_calls_outside_the_contract_name_what_is_wrong(change: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(registry.ContractError, match=text) as caught:
        registry.run("gemv_bf16", {**_gemv(), **change})
    assert isinstance(caught.value, ValueError) and caught.value.exit_code == 2


def test_attributes_are_checked() -> None:
    case = cases("rmsnorm")[0]
    with pytest.raises(registry.ContractError, match=r"\['eps', 'order'\] not given"):
        registry.run("rmsnorm", case.operands)
    with pytest.raises(registry.ContractError, match=r"unknown attribute\(s\) \['epsilon'\]"):
        registry.run("rmsnorm", case.operands, {**case.attrs, "epsilon": 1e-5})


@pytest.mark.parametrize("heads", [(33, 2), (3, 2)])
def test_heads_that_do_not_group_are_a_value_error(heads: tuple[int, int]) -> None:
    hq, hkv = heads
    cache = torch.zeros(1, 4, hkv, 16, dtype=torch.bfloat16)
    operands = {
        "q": torch.zeros(1, hq, 16, dtype=torch.bfloat16),
        "k_cache": cache,
        "v_cache": cache,
        "page_table": torch.zeros(1, dtype=torch.int32),
        "lengths": torch.ones(1, dtype=torch.int32),
        "partial": torch.zeros(1, hq, 1, 16),
        "partial_lse": torch.zeros(1, hq, 1),
    }
    with pytest.raises(ValueError, match="HQ % HKV == 0 does not hold"):
        registry.run("attention_split", operands, {"scale": 1.0, "splits": 1})


def test_a_prepared_tensor_is_refused_by_a_checkpoint_kernel() -> None:
    case = cases("expert_gate_up")[0]
    blocks = case.operands["blocks"]
    assert blocks is not None
    with pytest.raises(UsageError, match="blocks is laid out as split_gate_up, the kernel takes checkpoint"):
        registry.run("expert_gate_up", {**case.operands, "blocks": prepare(blocks, "split_gate_up")}, case.attrs)
    registry.run("expert_gate_up", {**case.operands, "blocks": prepare(blocks, "checkpoint")}, case.attrs)


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A `triton` folder with one kernel that refuses three rows and otherwise writes 7."""
    module = types.ModuleType("dieplace.kernels.triton")

    def kernel(operands: dict[str, torch.Tensor], attrs: object, *, stream: object = None) -> None:
        operands["out"].fill_(7)

    kernel.supports = lambda operands, attrs: "three rows" if operands["out"].shape[1] == 3 else None  # type: ignore[attr-defined]
    module.kernel = kernel  # type: ignore[attr-defined]
    module.OPS = {"gemv_bf16": "dieplace.kernels.triton:kernel"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dieplace.kernels.triton", module)
    monkeypatch.setattr(registry, "_warned", set())
    yield module


def test_a_supported_shape_runs_the_kernel(fake_backend: types.ModuleType) -> None:
    operands = _gemv(n=4)
    assert registry.run("gemv_bf16", operands, backend="triton", strict=True) == "triton"
    assert operands["out"] is not None and operands["out"].unique().tolist() == [7]


def test_an_unsupported_shape_falls_back_with_one_warning(fake_backend: types.ModuleType) -> None:
    operands = _gemv()
    with pytest.warns(RuntimeWarning, match="gemv_bf16: three rows; the torch reference runs instead"):
        assert registry.run("gemv_bf16", operands, backend="triton") == "reference"
    assert operands["out"] is not None and operands["out"].unique().tolist() == [64]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.run("gemv_bf16", operands, backend="triton")
    with pytest.raises(Unsupported, match="three rows"):
        registry.run("gemv_bf16", operands, backend="triton", strict=True)


def test_an_operand_beyond_the_largest_extent_is_refused_before_launch(fake_backend: types.ModuleType) -> None:
    """201,088 x 2,880 fp32 is 2,316,533,760 bytes and fits a descriptor; twice that does not."""
    fits = torch.empty(201_088, 2_880, dtype=torch.float32, device="meta")
    assert fits.numel() * 4 == 2_316_533_760 <= registry.MAX_EXTENT_BYTES
    weight = torch.empty(2 * 402_176, 2_880, dtype=torch.bfloat16, device="meta")
    x, out = torch.empty(1, 2_880, dtype=torch.bfloat16), torch.zeros(1, 2 * 402_176)
    operands = {"x": x, "weight": weight, "bias": None, "out": out}
    with pytest.raises(Unsupported, match=r"weight spans 4633067520 bytes, .* at most 4294967295"):
        registry.run("gemv_bf16", operands, backend="triton", strict=True)
    assert not out.any()


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(UsageError, match="gemv_bf17"):
        registry.op("gemv_bf17")
    with pytest.raises(UsageError, match="reference, flydsl, triton"):
        registry.offered("cuda")


def test_bytes_of_partly_read_operands() -> None:
    """Distinct experts, visible positions and appended rows, by hand."""
    case = cases("expert_gate_up")[4]  # two tokens, four of eight experts each
    ids, blocks, scales, bias = (case.operands[n] for n in ("ids", "blocks", "scales", "bias"))
    assert ids is not None and blocks is not None and scales is not None and bias is not None
    distinct = ids.unique().numel()
    found = registry.bytes_by_role(registry.check_call("expert_gate_up", case.operands, case.attrs))
    assert distinct < ids.numel()
    assert found["weights"] == distinct * (blocks[0].numel() + scales[0].numel() + 2 * bias[0].numel())
    cache = torch.zeros(4, 16, 2, 8, dtype=torch.bfloat16)
    operands = {
        "q": torch.zeros(2, 2, 8, dtype=torch.bfloat16),
        "k_cache": cache,
        "v_cache": cache,
        "page_table": torch.arange(4, dtype=torch.int32),
        "lengths": torch.tensor([40, 41], dtype=torch.int32),
        "partial": torch.zeros(2, 2, 1, 8),
        "partial_lse": torch.zeros(2, 2, 1),
    }
    call = registry.check_call("attention_split", operands, {"scale": 1.0, "splits": 1, "window": 16})
    assert registry.bytes_by_role(call)["kv_cache"] == 17 * 2 * (2 * 8 * 2)  # positions 24..40


def test_contracts_need_no_torch() -> None:
    code = "import sys; from dieplace.kernels import registry; registry.op_names(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", registry.op_names())
def test_every_op_has_twenty_cases_and_a_reason_for_its_tolerance(name: str) -> None:
    op = registry.op(name)
    labels = [case.label for case in cases(name)]
    assert len(labels) >= 20 and len(set(labels)) == len(labels)
    assert len(op.tolerance.reason) > 10 and op.outputs and callable(registry.resolve(op.reference))


@pytest.mark.parametrize("value", [torch.zeros(1, 2, 8, 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)])
def test_a_kernel_that_takes_a_layout_refuses_a_plain_tensor(value: torch.Tensor) -> None:
    """Whatever its values: a tensor that is all zeros is none the less in checkpoint order."""
    spec = registry.OperandSpec("blocks", "weights", ("uint8",), ("N",), layout="padded_blocks")
    contract = registry.Op("made_up", "", (spec,), "none:none", registry.Tolerance(0, 0, ""))
    with pytest.raises(UsageError, match="operand blocks is laid out as checkpoint, the kernel takes padded_blocks"):
        registry._tensors(contract, {"blocks": value})
    laid = prepare(torch.zeros(1, 2, 5, 16, dtype=torch.uint8), "padded_blocks")
    assert registry._tensors(contract, {"blocks": laid})["blocks"] is laid.tensor
