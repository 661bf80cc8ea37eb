"""Hugging Face configurations against the `transformers` classes, and the reported ways to misread them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.models import model_shape
from dieplace.kernels.models.config import FULL, WINDOW, parse_config, read_config, shape_of
from dieplace.kernels.models.rope import Rope, tables

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rope_theta": 500000.0,
}


def test_head_sizes() -> None:
    assert parse_config(QWEN3).head_dim == 128
    assert parse_config({**QWEN3, "head_dim": None}).head_dim == 80
    assert parse_config(GPT_OSS).head_dim == 64
    assert parse_config(LLAMA).head_dim == 64


def test_the_shipped_shape_is_what_the_configuration_gives() -> None:
    shipped = model_shape("gpt-oss-120b")
    found = shape_of(parse_config(GPT_OSS), shipped.name, shipped.precisions["released"])
    for name in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "experts", "intermediate", "vocabulary"):
        assert getattr(found, name) == getattr(shipped, name)
    assert (found.window, found.window_layers) == (shipped.window, shipped.window_layers) == (128, 18)


def test_norm_orders_and_defaults_by_family() -> None:
    gpt, qwen = parse_config(GPT_OSS), parse_config(QWEN3)
    assert (gpt.norm_order, gpt.eps, gpt.attention_bias, gpt.sinks, gpt.qk_norm) == (
        "before_cast",
        1e-5,
        True,
        True,
        False,
    )
    assert (qwen.norm_order, qwen.eps, qwen.attention_bias, qwen.sinks, qwen.qk_norm) == (
        "after_cast", 1e-6, False, False, True,
    )  # fmt: skip


def test_layer_types_are_followed_not_assumed() -> None:
    assert parse_config(GPT_OSS).layer_types[:3] == (WINDOW, FULL, WINDOW)
    reversed_types = [FULL if layer % 2 == 0 else WINDOW for layer in range(36)]
    config = parse_config({**GPT_OSS, "layer_types": reversed_types})
    assert [config.window_of(layer) for layer in range(4)] == [0, 128, 0, 128]
    windowed = parse_config({**QWEN3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 30})
    assert windowed.layer_types.index(WINDOW) == 30 and windowed.window == 64
    assert set(parse_config(QWEN3).layer_types) == {FULL} and parse_config(QWEN3).window == 0


@pytest.mark.parametrize("raw", [GPT_OSS, QWEN3, LLAMA])
def test_optional_fields_may_be_absent_or_null(raw: dict[str, Any]) -> None:
    optional = ("sliding_window", "rope_scaling", "tie_word_embeddings", "layer_types", "attention_bias",
                "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "swiglu_limit")  # fmt: skip
    for key in optional:
        absent = parse_config({k: v for k, v in raw.items() if k != key})
        null = parse_config({**raw, key: None})
        assert absent == null


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, Unsupported, "MixtralForCausalLM"),
        ({"hidden_size": None}, UsageError, "hidden_size is missing"),
        ({"num_hidden_layers": "36"}, UsageError, "num_hidden_layers is '36'"),
        ({"num_key_value_heads": 7}, UsageError, "do not group over 7"),
        ({"layer_types": [FULL]}, UsageError, "layer_types has 1 entries for 36"),
        ({"layer_types": ["chunked_attention"] * 36}, Unsupported, "chunked_attention"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act gelu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, Unsupported, "rope_scaling.rope_type is 'longrope'"),
        ({"rope_scaling": 4}, UsageError, "rope_scaling is 4"),
    ],
)
def test_what_cannot_be_run_is_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_config({**GPT_OSS, **change})


def test_each_layer_type_may_have_its_own_rope() -> None:
    nested = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = parse_config({**GPT_OSS, "rope_scaling": None, "rope_parameters": nested})
    window, full = config.ropes[:2]
    assert (window.kind, window.base, window.rotary_dim) == ("default", 10000.0, 64)
    assert (full.kind, full.base, full.rotary_dim) == ("yarn", 500000.0, 32)
    del nested["sliding_attention"]
    with pytest.raises(UsageError, match=r"rope_parameters\.sliding_attention is missing"):
        parse_config({**GPT_OSS, "rope_scaling": None, "rope_parameters": nested})


def test_phases_keep_their_position() -> None:
    """dim 128, base 1e6: cos of pair 1 at 4095 is 0.3139245; a bf16 frequency gives -0.944, a bf16 position -0.468."""
    cos, sin = tables(Rope("default", 1e6, 128), 131072)
    assert cos[4095, 1].item() == pytest.approx(0.3139245, abs=1e-6)
    inverse = [1e6 ** (-2 * i / 128) for i in range(64)]
    for position in (4095, 131071):
        for pair in (0, 1, 5, 63):
            assert cos[position, pair].item() == pytest.approx(math.cos(position * inverse[pair]), abs=1e-6)
            assert sin[position, pair].item() == pytest.approx(math.sin(position * inverse[pair]), abs=1e-6)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "llama3", "linear"])
def test_tables_are_those_of_transformers(family: str) -> None:
    from transformers import GptOssConfig, LlamaConfig, Qwen3Config
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling: dict[str, Any] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    if family == "llama3":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    if family == "gpt_oss":
        theirs, module = GptOssConfig(num_hidden_layers=2), GptOssRotaryEmbedding
    elif family == "qwen3":
        theirs, module = Qwen3Config(num_hidden_layers=2), LlamaRotaryEmbedding
    else:
        theirs, module = LlamaConfig(num_hidden_layers=2, rope_parameters=scaling), LlamaRotaryEmbedding
    raw = theirs.to_dict()
    raw["architectures"] = [{"gpt_oss": "GptOss", "qwen3": "Qwen3"}.get(family, "Llama") + "ForCausalLM"]
    config = parse_config(json.loads(json.dumps(raw)))
    cos, sin = tables(config.ropes[0], 64)
    half = cos.shape[1]
    wanted_cos, wanted_sin = module(theirs)(torch.zeros(1, 1), torch.arange(64)[None])
    assert torch.allclose(cos, wanted_cos[0, :, :half], atol=2e-5)
    assert torch.allclose(sin, wanted_sin[0, :, :half], atol=2e-5)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is no JSON"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "none.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == parse_config(LLAMA)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([10**400, 1e308, -0.0, 0.5, math.inf, math.nan, "", "default", "yarn", "llama3", FULL, WINDOW]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["rope_type", "factor", "rope_theta", "partial_rotary_factor", "low_freq_factor", FULL, WINDOW]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
_KEYS = [*GPT_OSS, "tie_word_embeddings", "rms_norm_eps", "layer_types", "swiglu_limit", "rope_parameters"]
_KEYS += ["use_sliding_window", "max_window_layers", "mlp_bias", "hidden_act", "partial_rotary_factor"]


@given(
    base=st.sampled_from([GPT_OSS, QWEN3, {**QWEN3, "architectures": ["LlamaForCausalLM"]}]),
    changes=st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1, max_size=3),
)
@settings(max_examples=600, deadline=None)
def test_no_configuration_is_a_traceback(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Whatever is accepted also has tables: finite numbers for every layer."""
    try:
        config = parse_config({**base, **changes}, "fuzz")
    except (UsageError, Unsupported) as problem:
        assert "fuzz" in str(problem) or "rope parameter" in str(problem)
        return
    assert len(config.layer_types) == len(config.ropes) == config.layers
    for rope in set(config.ropes):
        cos, sin = tables(rope, 3)
        assert cos.shape == sin.shape == (3, rope.rotary_dim // 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": True}, r"rope_theta is 1, and yarn divides by its logarithm"),
        ({"rope_scaling": {**GPT_OSS["rope_scaling"], "beta_fast": 0}}, r"beta_fast is 0.0, not a number above 0"),
        ({"rope_scaling": {**GPT_OSS["rope_scaling"], "beta_slow": -1}}, r"beta_slow is -1.0, not a number above 0"),
    ],
)
def test_yarn_that_would_divide_by_zero_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_config({**GPT_OSS, **changes})


def test_a_layer_window_from_the_first_layer_on() -> None:
    """`max_window_layers` 0 is a number of layers like any other, not an absent one."""
    raw = {**QWEN3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    assert set(parse_config(raw).layer_types) == {WINDOW}
