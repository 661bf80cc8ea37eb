"""Hugging Face `config.json` of GPT-OSS, Qwen3 dense and Llama-style models, read into what a decode step needs.

Every optional field may be absent or null and then has the default that `transformers` documents for that family. What
this code cannot run is refused by the name of its key, never guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.models import ModelShape
from dieplace.kernels.models.rope import Rope, positive, ropes_of

FULL, WINDOW = "full_attention", "sliding_attention"
_ARCHITECTURES = {"GptOssForCausalLM": "gpt_oss", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}

_MOST, _MOST_LAYERS = 2**31 - 1, 10_000  # beyond them a file is damaged, and a list a layer would eat the memory

# Defaults of the `transformers` configuration classes where a field is absent or null (5.24; they differ by family).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
    },
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 10000.0},
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class ModelConfig:
    """What a decode step must know of a model; `layer_types` and `ropes` have one entry per layer.

    `norm_order` is where the norm weight multiplies: `before_cast` (GPT-OSS) or `after_cast`. `window` counts the
    current token. `experts` is 0 for a dense MLP.
    """

    family: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_head: bool
    eps: float
    norm_order: str
    layer_types: tuple[str, ...]
    window: int
    ropes: tuple[Rope, ...]
    attention_bias: bool
    qk_norm: bool
    sinks: bool
    max_positions: int
    experts: int = 0
    experts_per_token: int = 0
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused Q, K and V projection."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def window_of(self, layer: int) -> int:
        """Window of a layer in tokens, 0 for full attention."""
        return self.window if self.layer_types[layer] == WINDOW else 0


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The configuration in a `config.json` or in a folder that holds one."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"{file} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{file} is no JSON: {problem}") from None
    return parse_config(raw, str(file))


def parse_config(raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """A checked ModelConfig; UsageError or Unsupported names the key that is missing, wrong or not supported."""
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where}: a model configuration is a JSON object")
    family = _family(raw, where)
    field = _Fields(raw, family, where)
    q_heads, hidden = field.count("num_attention_heads"), field.count("hidden_size")
    layers = field.count("num_hidden_layers")
    config = ModelConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=field.count("num_key_value_heads", q_heads),
        head_dim=_head_dim(raw, field, hidden, q_heads),
        intermediate=field.count("intermediate_size"),
        vocabulary=field.count("vocab_size"),
        tied_head=field.switch("tie_word_embeddings"),
        eps=field.number("rms_norm_eps", 1e-6),
        norm_order="before_cast" if family == "gpt_oss" else "after_cast",
        layer_types=_layer_types(field, layers),
        window=_window(field),
        ropes=(),
        attention_bias=field.switch("attention_bias"),
        qk_norm=family == "qwen3",
        sinks=family == "gpt_oss",
        max_positions=field.count("max_position_embeddings"),
        experts=field.count("num_local_experts") if family == "gpt_oss" else 0,
        experts_per_token=field.count("num_experts_per_tok") if family == "gpt_oss" else 0,
        alpha=field.number("swiglu_alpha", 1.702),
        limit=field.number("swiglu_limit", 7.0),
    )
    _check(config, field)
    ropes = ropes_of(raw, config.layer_types, config.head_dim, field.number("rope_theta", 10000.0), where)
    return ModelConfig(**{**vars(config), "ropes": ropes})


def shape_of(config: ModelConfig, name: str, formats: Mapping[str, str]) -> ModelShape:
    """The ModelShape of a configuration under one set of weight formats, for the clock and byte tables."""
    return ModelShape(
        name=name,
        family=config.family,
        source="config.json",
        layers=config.layers,
        hidden=config.hidden,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocabulary=config.vocabulary,
        tied_head=config.tied_head,
        kv_format="bf16",
        precisions={"released": formats},
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        window=config.window,
        window_layers=config.layer_types.count(WINDOW),
    )


class _Fields:
    """Fields with the family's defaults; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], family: str, where: str) -> None:
        self.raw, self.defaults, self.where, self.family = raw, _DEFAULTS[family], where, family

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return self.defaults.get(key, default) if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise UsageError(f"{self.where}: {key} is missing")
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"{self.where}: {key} is {str(value)[:40]!r}, not a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        return positive(self.get(key, default), f"{self.where}: {key}")

    def switch(self, key: str) -> bool:
        """Yes or no; no where nothing is said."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: {key} is {value!r}, not true or false")
        return value


def _family(raw: Mapping[str, Any], where: str) -> str:
    names, model_type = raw.get("architectures") or [], raw.get("model_type")
    texts = [*names, *([] if model_type is None else [model_type])] if isinstance(names, list) else [names]
    if not isinstance(names, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: architectures is a list of names, and model_type a name")
    known = [_ARCHITECTURES[n] for n in names if n in _ARCHITECTURES]
    family = known[0] if known else model_type
    if family in _DEFAULTS:
        return str(family)
    found = ", ".join(map(str, names)) or model_type or "nothing"
    raise Unsupported(f"{where}: architecture {found} is not supported", hint=f"supported: {', '.join(_ARCHITECTURES)}")


def _head_dim(raw: Mapping[str, Any], field: _Fields, hidden: int, q_heads: int) -> int:
    """Absent: the family's default; null: hidden / heads, as `transformers` reads it."""
    if raw.get("head_dim") is None and ("head_dim" in raw or "head_dim" not in field.defaults):
        if hidden % q_heads:
            raise UsageError(f"{field.where}: hidden_size {hidden} is no multiple of {q_heads} heads, and no head_dim")
        return hidden // q_heads
    return field.count("head_dim")


def _layer_types(field: _Fields, layers: int) -> tuple[str, ...]:
    types = field.get("layer_types")
    if types is None:
        return _default_layer_types(field, layers)
    if not isinstance(types, list):
        raise UsageError(f"{field.where}: layer_types is {types!r}, not a list")
    if len(types) != layers:
        raise UsageError(f"{field.where}: layer_types has {len(types)} entries for {layers} layers")
    unknown = sorted({str(t) for t in types} - {FULL, WINDOW})
    if unknown:
        raise Unsupported(f"{field.where}: layer_types holds {', '.join(unknown)}", hint=f"supported: {FULL}, {WINDOW}")
    return tuple(types)


def _default_layer_types(field: _Fields, layers: int) -> tuple[str, ...]:
    if field.family == "gpt_oss":
        return tuple(WINDOW if layer % 2 == 0 else FULL for layer in range(layers))
    if field.family == "qwen3" and field.switch("use_sliding_window"):
        # The shipped code puts the window on layers at and above max_window_layers, whatever the documentation says.
        first = field.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UsageError(f"{field.where}: max_window_layers is {first!r}, not a number of layers")
        return tuple(WINDOW if layer >= first else FULL for layer in range(layers))
    return (FULL,) * layers


def _window(field: _Fields) -> int:
    if field.family == "qwen3" and not field.switch("use_sliding_window"):
        return 0
    return field.count("sliding_window", 0) if field.family != "llama" and field.get("sliding_window") else 0


def _check(config: ModelConfig, field: _Fields) -> None:
    if config.q_heads % config.kv_heads:
        raise UsageError(f"{field.where}: {config.q_heads} query heads do not group over {config.kv_heads} KV heads")
    if WINDOW in config.layer_types and not config.window:
        raise UsageError(f"{field.where}: layer_types has {WINDOW} but sliding_window is not set")
    if field.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"{field.where}: hidden_act {field.get('hidden_act')} is not supported", hint="silu is")
    if field.switch("mlp_bias"):
        raise Unsupported(f"{field.where}: mlp_bias is not supported for dense models")
    if config.experts and config.experts_per_token > config.experts:
        raise UsageError(f"{field.where}: num_experts_per_tok {config.experts_per_token} of {config.experts} experts")
