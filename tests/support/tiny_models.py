"""Tiny GPT-OSS, Qwen3 and Llama models made by the `transformers` classes, with the files that our loader reads.

The models run in float32 from weights that bf16 and MXFP4 hold exactly. Our activations are bf16, so logits differ by
roundings: a dozen of relative size 2^-9 in each of two layers, four deviations of which are TOLERANCE. Rounding may
also turn a near tie, of tokens or of experts: the seeds are such that no tie is near, which the tests assert.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dieplace.kernels.decode import DecodeModel, Settings
from dieplace.kernels.models.config import ModelConfig, parse_config
from dieplace.kernels.placement import Placement
from dieplace.kernels.quantize import mxfp4_dequantize, mxfp4_quantize

TOLERANCE = 0.02  # of the largest logit of a step
SEEDS = {"gpt_oss": 35, "qwen3": 5, "llama": 27}
TOKENS = 16
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}


def _spread(model: Any, seed: int) -> None:
    """Random weights of unit gain; all exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * torch.randn(parameter.shape, generator=generator)
        elif parameter.ndim == 1 or name.endswith("bias"):
            values = 0.2 * torch.randn(parameter.shape, generator=generator)
        else:
            fan_in = parameter.shape[1] if "experts" in name else parameter.shape[-1]
            values = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        # A tied head multiplies by the embedding again: small rows, so that the layers decide and not the last token.
        gain = 0.05 * fan_in**0.5 if "embed" in name else 1.0
        parameter.data = (values * gain).to(torch.bfloat16).float()


def gpt_oss(folder: Path, seed: int = SEEDS["gpt_oss"]) -> tuple[Any, ModelConfig]:
    """The `transformers` model, its experts as their MXFP4 blocks hold them, and a file with those blocks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
    config = GptOssConfig(**TINY, num_local_experts=8, num_experts_per_tok=3, sliding_window=8, rope_parameters=rope)
    config._attn_implementation = "eager"
    model = GptOssForCausalLM(config).eval()
    _spread(model, seed)
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if "experts" not in k}
    for layer, block in enumerate(model.model.layers):
        experts, prefix = block.mlp.experts, f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            blocks, scales = mxfp4_quantize(weight.data.transpose(1, 2))  # (in, out) there, (out, in) in the file
            weight.data = mxfp4_dequantize(blocks, scales, torch.float32).transpose(1, 2).contiguous()
            bias = getattr(experts, f"{name}_bias")
            state |= {f"{prefix}.{name}_blocks": blocks, f"{prefix}.{name}_scales": scales}
            state[f"{prefix}.{name}_bias"] = bias.data.to(torch.bfloat16)
    return model, _save(folder, state, config)


def dense(folder: Path, family: str) -> tuple[Any, ModelConfig]:
    """A Qwen3 (tied head, per-head norm, a window on layer 1) or a Llama with biases."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if family == "qwen3":
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        config: Any = Qwen3Config(**TINY, tie_word_embeddings=True, **window)
        model: Any = Qwen3ForCausalLM(config).eval()
    else:
        config = LlamaConfig(**TINY, attention_bias=True)
        model = LlamaForCausalLM(config).eval()
    _spread(model, SEEDS[family])
    state = {
        k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if k != "lm_head.weight" or family != "qwen3"
    }
    return model, _save(folder, state, config)


def _save(folder: Path, state: dict[str, torch.Tensor], config: Any) -> ModelConfig:
    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors")
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [_architecture(config)]}
    (folder / "config.json").write_text(json.dumps(raw))
    return parse_config(raw)


def _architecture(config: Any) -> str:
    return {"gpt_oss": "GptOss", "qwen3": "Qwen3", "llama": "Llama"}[config.model_type] + "ForCausalLM"


MAKERS: dict[str, Any] = {
    "gpt_oss": gpt_oss,
    "qwen3": lambda folder: dense(folder, "qwen3"),
    "llama": lambda folder: dense(folder, "llama"),
}


def build(
    folder: Path, config: ModelConfig, shards: int, placement: Placement | None = None, **settings: Any
) -> DecodeModel:
    """Our model with the file's weights."""
    model = DecodeModel(config, shards=shards, placement=placement, settings=Settings(capacity=64, **settings))
    model.weights.load(folder)
    return model


def follow(theirs: Any, ours: DecodeModel, steps: int = TOKENS) -> list[Any]:
    """Teacher-forced steps: logits within TOLERANCE, the same greedy token, margins wide enough to compare it."""
    with expert_margin(theirs) as margins:
        sequence, wanted = greedy(theirs, first=5, tokens=steps)
    assert all(margin > 0.01 for margin in margins) and bool(margins) == bool(ours.config.experts)
    results = []
    for position, row in enumerate(wanted):
        step = ours.step([sequence[position]])
        allowed = TOLERANCE * float(row.abs().max())
        assert float((step.logits[0] - row).abs().max()) <= allowed
        first, second = row.topk(2).values.tolist()
        assert first - second > allowed
        assert step.tokens == (sequence[position + 1],)
        results.append(step)
    assert steps < TOKENS or len(set(sequence)) >= 4
    return results


def greedy(model: Any, first: int, tokens: int = TOKENS) -> tuple[list[int], torch.Tensor]:
    """Tokens that `transformers` chooses one by one, and its logits after each."""
    sequence, rows = [first], []
    for _ in range(tokens):
        with torch.no_grad():
            rows.append(model(torch.tensor([sequence])).logits[0, -1])
        sequence.append(int(rows[-1].argmax()))
    return sequence, torch.stack(rows)


@contextmanager
def expert_margin(model: Any) -> Iterator[list[float]]:
    """Differences between the last chosen and the first rejected expert of the last token, collected while it runs."""
    margins: list[float] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        ranked = output[0][-1].sort(descending=True).values
        margins.append(float(ranked[module.top_k - 1] - ranked[module.top_k]))

    routers = [m for n, m in model.named_modules() if n.endswith("mlp.router")]
    handles = [router.register_forward_hook(note) for router in routers]
    yield margins
    for handle in handles:
        handle.remove()
