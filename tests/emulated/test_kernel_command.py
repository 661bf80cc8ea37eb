"""`dieplace kernel list`, `build` and `check`: answers, exit codes, and faults that the check must find."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dieplace.cli.main import main
from dieplace.kernels import registry
from dieplace.kernels.building import waves_per_simd


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code and the one JSON value."""
    code = main(["kernel", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_names_every_op_with_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, "list")
    assert code == 0 and answer["schema"] == "dieplace/kernel-list/1"
    rows = {row["op"]: row for row in answer["ops"]}
    assert list(rows) == list(registry.op_names())
    assert {"probe_stream", "probe_chase", "probe_ping_pong", "attention_split"} <= set(rows)
    assert {name for name, row in rows.items() if not row["flydsl"]} == {"rope_attention", "norm_router"}
    assert rows["gemv_mxfp4"]["weights"] == ["blocks", "scales", "bias"] and rows["gemv_mxfp4"]["tolerance_reason"]


def test_list_needs_no_torch() -> None:
    code = (
        "import sys; from dieplace.cli.main import main; sys.exit(main(['kernel', 'list']) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "rmsnorm" in done.stdout


def test_build_shows_what_a_kernel_takes(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, "build", "rmsnorm", "head_argmax")
    assert code == 0 and answer["arch"] == "gfx950" and not answer["failed"]
    assert [row["op"] for row in answer["kernels"]] == ["rmsnorm", "head_argmax", "head_argmax"]
    for row in answer["kernels"]:
        assert 0 < row["vgprs"] <= 512 and row["instructions"] > 10 and len(row["code_hash"]) == 64


@pytest.mark.parametrize(
    ("vgprs", "waves"), [(1, 8), (64, 8), (65, 7), (72, 7), (128, 4), (129, 3), (256, 2), (257, 1), (512, 1)]
)
def test_waves_by_registers(vgprs: int, waves: int) -> None:
    """512 registers a SIMD in granules of 8: 128 is the last count with four waves, 256 with two."""
    assert waves_per_simd(vgprs) == waves


def test_check_says_yes_with_the_worst_deviation(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, "check", "rmsnorm", "--limit", "3")
    assert code == 0 and answer["ok"] and answer["source"] == "emulated" and answer["cases"] == 3
    assert answer["results"][0]["worst_ratio"] <= 1


def _fault(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    """The reference as a kernel, then `change` on what it wrote."""

    def kernel(operands: dict[str, torch.Tensor], attrs: dict[str, Any], *, stream: object = None) -> None:
        for call in [registry.check_call(kernel.op, operands, attrs)]:  # type: ignore[attr-defined]
            registry.run_reference(call)
        change(operands)

    return kernel


def _one_ulp_more(operands: dict[str, torch.Tensor]) -> None:
    operands["out"].view(torch.int16)[..., -1] += 2


def _unwritten(operands: dict[str, torch.Tensor]) -> None:
    operands["out"][..., -1] = torch.nan


def _swapped_choice(operands: dict[str, torch.Tensor]) -> None:
    operands["ids"].copy_(operands["ids"].flip(-1))


def _last_slot(operands: dict[str, torch.Tensor]) -> None:
    operands["k_cache"][-1] = 0


def _nan_of_empty_splits(operands: dict[str, torch.Tensor]) -> None:
    empty = torch.isneginf(operands["partial_lse"])
    operands["partial"][empty] = torch.nan


def _sink_lost(operands: dict[str, torch.Tensor]) -> None:
    if operands["sinks"] is not None:
        operands["out"].mul_(1.05)


def _other_tie(operands: dict[str, torch.Tensor]) -> None:
    operands["token"].add_(1)


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("rmsnorm", _one_ulp_more),
        ("rmsnorm", _unwritten),
        ("router_topk", _swapped_choice),
        ("rope_kv_append", _last_slot),
        ("attention_split", _nan_of_empty_splits),
        ("attention_merge", _sink_lost),
        ("head_argmax", _other_tie),
    ],
)
def test_check_finds_a_planted_fault(
    op: str, fault: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _fault(fault)
    kernel.op = op  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "implementation", lambda name, backend: kernel)
    code, answer = ask(capsys, "check", op)
    assert code == 1 and not answer["ok"] and answer["results"][0]["failed"] > 0
    assert answer["results"][0]["failures"][0]["reason"]


def test_a_kernel_that_faults_is_a_failed_case_not_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dieplace.errors import KernelFault

    def kernel(operands: object, attrs: object, *, stream: object = None) -> None:
        raise KernelFault("out of bounds at s_endpgm")

    monkeypatch.setattr(registry, "implementation", lambda name, backend: kernel)
    code, answer = ask(capsys, "check", "gemv_bf16", "--limit", "1")
    assert code == 1 and "out of bounds" in answer["results"][0]["failures"][0]["reason"]
    assert answer["results"][0]["worst_ratio"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "gemv_bf17"],
        ["check", "rmsnorm", "--all"],
        ["check", "rmsnorm", "--limit", "0"],
        ["build", "rmsnorm", "--case", "999"],
        ["check", "quantize_mxfp8", "--kernels", "triton"],
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, *words)
    assert code == 2 and not answer["ok"]


@pytest.mark.slow
def test_every_kernel_is_right_on_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    """At least 20 shapes of every op; under three minutes on two cores when nothing else runs."""
    code, answer = ask(capsys, "check", "--all")
    assert code == 0, [r["failures"] for r in answer["results"] if not r["ok"]]
    assert [r["op"] for r in answer["results"]] == [n for n in registry.op_names() if n in registry.offered("flydsl")]
    assert all(r["cases"] >= 20 for r in answer["results"])


@pytest.mark.parametrize("backend", ["flydsl", "triton"])
def test_a_package_that_is_absent_is_told_and_runs_the_reference(backend: str) -> None:
    """Strictly an error with exit 3; else the reference with one warning. Never a traceback."""
    code = (
        "import sys, os, warnings\n"
        f"sys.modules[{backend!r}] = None\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from dieplace.cli.main import main\n"
        "from dieplace.kernels import registry\n"
        "from dieplace.kernels.cases import cases\n"
        "case = cases('rmsnorm', 1)[0]\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        f"    ran = registry.run('rmsnorm', case.operands, case.attrs, backend={backend!r})\n"
        "assert ran == 'reference' and 'is not installed' in str(seen[-1].message), seen\n"
        f"sys.exit(main(['kernel', 'check', 'rmsnorm', '--limit', '1', '--kernels', {backend!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert f"{backend} is not installed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--kernels", "triton"], 3, "sees no GPU"),
        (["--kernels", "triton", "--device", "cpu"], 3, "--device is cpu"),
        (["--device", "cuda"], 3, "sees no GPU"),
        (["--device", "cuda:1"], 3, "sees no GPU"),
        (["--device", "nonsense"], 2, "torch knows no device 'nonsense'"),
        (["--device", "meta"], 2, "not checked on 'meta'"),
    ],
)
def test_check_refuses_a_device_before_the_first_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    """As on a machine without a GPU, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["kernel", "check", "gemv_mxfp4", "--limit", "1", *words]) == code
    seen = capsys.readouterr()
    assert told in seen.err and "checking" not in seen.err and seen.out == ""


def test_check_counts_the_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["kernel", "check", "gemv_mxfp4", "--limit", "1", "--device", "cuda:1"]) == 3
    assert "sees 1 GPU here" in capsys.readouterr().err


def test_build_looks_at_the_case_before_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", "build", "rmsnorm", "--case", "999"]) == 2
    assert "compiling" not in capsys.readouterr().err


def test_trace_says_what_its_columns_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", "trace", "rmsnorm"]) == 0
    seen = " ".join(capsys.readouterr().out.split())
    assert "all in bytes" in seen and "asked: the loads of every lane" in seen


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be compiled"
)


@needs_triton
def test_triton_kernels_on_the_emulated_card(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(
        capsys, "check", "gemv_mxfp4", "router_topk", "--kernels", "triton", "--device", "emulated", "--limit", "2"
    )
    assert code == 0 and answer["ok"] and answer["source"] == "emulated" and answer["kernels"] == "triton"
    assert [(row["op"], row["cases"]) for row in answer["results"]] == [("gemv_mxfp4", 2), ("router_topk", 2)]


@needs_triton
def test_triton_kernels_are_built_for_gfx950(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, "build", "head_argmax", "attention_split", "--kernels", "triton")
    assert code == 0 and (answer["arch"], answer["language"]) == ("gfx950", "triton") and not answer["failed"]
    assert [row["kernel"] for row in answer["kernels"]] == ["_attention_split", "_gemv_bf16", "_argmax"]
    assert all(0 < row["vgprs"] <= 512 and row["instructions"] > 10 for row in answer["kernels"])
    assert answer["kernels"][0]["lds_bytes"] > 0  # asked for at launch: the code object's own figure is 0


def test_the_reference_runs_on_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", "check", "rmsnorm", "--kernels", "reference", "--device", "emulated"]) == 2
    assert "runs on no card" in capsys.readouterr().err
