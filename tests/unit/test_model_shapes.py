"""Model shapes and the stages made of them, against the published byte tables (decimal, to their printed digits)."""

import subprocess
import sys

import pytest

from dieplace.errors import UsageError
from dieplace.kernels.models import ModelShape, model_names, model_shape, shape_from_table, weight_bytes
from dieplace.kernels.step import stages
from dieplace.workload import Workload


def _weights(workload: Workload, stage: str) -> int:
    found = next(s for s in workload.stages if s.name == stage)
    return sum(o.nbytes for o in found.operands if o.role == "weights")


def _last_digit_agrees(nbytes: int, printed_gb: str) -> bool:
    """Printed sums of a token include biases and norms (5.0033 + 0.0425 GB is printed 5.05); shapes do not."""
    return abs(nbytes / 1e9 - float(printed_gb)) <= 0.0100001


# Megabytes per layer (head: per token), then gigabytes of all weights per token.
GPT_OSS_TABLE = {
    "released": ("29.49", "23.59", "0.74", "52.88", "1158", "5.00"),
    "fp8": ("14.75", "11.80", "0.74", "52.88", "579", "3.47"),
    "mxfp4": ("7.83", "6.27", "0.74", "52.88", "308", "2.75"),
}


@pytest.mark.parametrize("precision", GPT_OSS_TABLE)
def test_gpt_oss_weight_bytes_are_the_published_ones(precision: str) -> None:
    workload = stages("gpt-oss-120b", precision=precision)
    per_layer = [f"{_weights(workload, s) / 1e6:.2f}" for s in ("qkv", "o_proj", "router", "experts")]
    head = f"{_weights(workload, 'head') / 1e6:.0f}"
    assert (*per_layer, head) == GPT_OSS_TABLE[precision][:-1]
    assert _last_digit_agrees(workload.bytes_by_role()["weights"], GPT_OSS_TABLE[precision][-1])


@pytest.mark.parametrize(
    ("context", "kv", "released", "mxfp4"),
    [
        (1024, "0.042467328", "5.05", "2.79"),
        (8192, "0.30670848", "5.31", "3.06"),
        (32768, "1.212678144", "6.22", "3.96"),
    ],
)
def test_gpt_oss_kv_bytes(context: int, kv: str, released: str, mxfp4: str) -> None:
    """KV by hand: 18 layers of 2 x 8 x 64 x 2 bytes at every position, and 18 at 128 positions."""
    for precision, total in (("released", released), ("mxfp4", mxfp4)):
        roles = stages("gpt-oss-120b", precision=precision, context_tokens=context).bytes_by_role()
        assert roles["kv_cache"] == round(float(kv) * 1e9) == 18 * 2048 * (context + 128)
        assert _last_digit_agrees(roles["kv_cache"] + roles["weights"], total)


@pytest.mark.parametrize(
    ("name", "precision", "layer", "totals"),
    [
        ("qwen3-32b", "mxfp4", ("27.9", "22.3", "208.9"), ("18.40", "20.28", "26.72")),
        ("qwen3-0.6b", "released", ("8.4", "4.2", "18.9"), ("1.31", "2.13", "4.95")),
        ("qwen3-0.6b", "mxfp4", ("2.2", "1.1", "5.0"), ("0.66", "1.49", "4.30")),
    ],
)
def test_qwen3_bytes(name: str, precision: str, layer: tuple[str, ...], totals: tuple[str, ...]) -> None:
    workload = stages(name, precision=precision)
    assert tuple(f"{_weights(workload, s) / 1e6:.1f}" for s in ("qkv", "o_proj", "mlp")) == layer
    for context, total in zip((1024, 8192, 32768), totals, strict=True):
        roles = stages(name, precision=precision, context_tokens=context).bytes_by_role()
        assert _last_digit_agrees(roles["kv_cache"] + roles["weights"], total)


def test_hand_offs_of_a_layer_and_their_payloads() -> None:
    """Six a layer, two with a release word; payloads 10 KB, 8 KB, 5.8 KB, 32 B, 23 KB."""
    workload = stages("gpt-oss-120b")
    layer = [s for s in workload.stages if s.handoff and s.name != "attention_window"]
    assert [(s.handoff.name, s.handoff.kind, s.handoff.payload_bytes) for s in layer if s.handoff] == [
        ("qkv", "packed", 10240),
        ("attention", "release", 8192),
        ("merge", "packed", 5760),
        ("top_k", "packed", 32),
        ("w13_w2", "packed", 23040),
        ("boundary", "release", 5760),
    ]
    assert sum(s.repeats for s in workload.stages if s.handoff) == 6 * 36


def test_dense_models_have_no_router_and_no_window() -> None:
    names = [s.name for s in stages("qwen3-32b").stages]
    assert names == ["qkv", "attention", "o_proj", "mlp", "boundary", "head"]


def test_verify_rounds_read_the_union_of_experts() -> None:
    """7.9 and 15.3 distinct experts for 2 and 4 tokens under independent uniform routing (published figures)."""
    one = _weights(stages("gpt-oss-120b"), "experts") / 4
    for tokens, printed in ((2, "7.9"), (4, "15.3")):
        assert f"{_weights(stages('gpt-oss-120b', tokens=tokens), 'experts') / one:.1f}" == printed
    assert _weights(stages("gpt-oss-120b", tokens=2, distinct_experts=7), "experts") == 7 * one


def test_bad_requests_are_usage_errors() -> None:
    for call in (
        lambda: stages("gpt-oss-121b"),
        lambda: stages("gpt-oss-120b", precision="int3"),
        lambda: stages("gpt-oss-120b", tokens=0),
        lambda: stages("gpt-oss-120b", tokens=9),
        lambda: stages("gpt-oss-120b", context_tokens=0),
        lambda: stages("gpt-oss-120b", shards=3),
        lambda: stages("gpt-oss-120b", tokens=2, distinct_experts=9),
        lambda: weight_bytes(33, "mxfp4"),
    ):
        with pytest.raises(UsageError):
            call()


def test_a_shape_with_a_wrong_table_is_refused() -> None:
    good = vars(model_shape("qwen3-0.6b"))
    assert isinstance(shape_from_table(good), ModelShape)
    for change in ({"kv_heads": 3}, {"window_layers": 2}, {"hiden": 1}, {"precisions": {"released": {"qkv": "bf16"}}}):
        with pytest.raises(UsageError):
            shape_from_table({**good, **change})


def test_shapes_need_no_torch() -> None:
    code = "import sys, dieplace.kernels.step as s; s.stages('gpt-oss-120b'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_shape_ships_with_a_source() -> None:
    assert model_names() == ("gpt-oss-120b", "qwen3-0.6b", "qwen3-32b")
    for name in model_names():
        assert "config.json" in model_shape(name).source
