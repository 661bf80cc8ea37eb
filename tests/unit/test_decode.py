"""Tiny GPT-OSS, Qwen3 and Llama models decode as the `transformers` classes do, with one shard and with two.

The models are made and run by `transformers` in float32 from weights that bf16 and MXFP4 hold exactly; ours reads them
from the safetensors file that results. Our activations are bf16, so logits differ by roundings: a dozen of relative
size 2^-9 in each of two layers, four deviations of which are TOLERANCE. Rounding may also turn a near tie, of tokens or
of experts: the seeds are such that no tie is near, which the tests assert.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.decode import DENSE_MXFP4, DecodeModel, Settings
from dieplace.kernels.load import head_is_tied
from dieplace.kernels.models.config import ModelConfig, parse_config, shape_of
from dieplace.kernels.quantize import mxfp4_dequantize, mxfp4_quantize
from dieplace.kernels.step import stages

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


def build(folder: Path, config: ModelConfig, shards: int, **settings: Any) -> DecodeModel:
    model = DecodeModel(config, shards=shards, settings=Settings(capacity=64, **settings))
    model.weights.load(folder)
    return model


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


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", MAKERS)
def test_sixteen_tokens_as_transformers_decodes_them(family: str, shards: int, tmp_path: Path) -> None:
    theirs, config = MAKERS[family](tmp_path)
    with expert_margin(theirs) as margins:
        sequence, wanted = greedy(theirs, first=5)
    assert all(margin > 0.01 for margin in margins) and bool(margins) == bool(config.experts)
    ours = build(tmp_path, config, shards, splits=3, page=4)
    for position, row in enumerate(wanted):
        step = ours.step([sequence[position]])
        allowed = TOLERANCE * float(row.abs().max())
        assert float((step.logits[0] - row).abs().max()) <= allowed
        first, second = row.topk(2).values.tolist()
        assert first - second > allowed
        assert step.tokens == (sequence[position + 1],)
    assert len(set(sequence)) >= 4


def test_the_tolerance_would_catch_a_wrong_window_sink_or_rotation(tmp_path: Path) -> None:
    """Each fault alone pushes some step out of tolerance."""
    from dataclasses import replace

    theirs, config = gpt_oss(tmp_path)
    sequence, wanted = greedy(theirs, first=5)
    faults = {
        "window one token wide": replace(config, window=9),
        "no window": replace(config, layer_types=("full_attention",) * 2),
        "no sinks": replace(config, sinks=False),
        "limit": replace(config, limit=0.5),
        "YaRN forgotten": replace(config, ropes=(replace(config.ropes[0], kind="default"),) * 2),
    }
    for fault, wrong in faults.items():
        ours = DecodeModel(wrong, settings=Settings(capacity=64))
        ours.weights.load(tmp_path)
        worst = max(
            float((ours.step([t]).logits[0] - row).abs().max() / row.abs().max())
            for t, row in zip(sequence, wanted, strict=False)
        )
        assert worst > TOLERANCE, fault


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_pages_splits_and_verify_rounds_change_nothing(family: str, tmp_path: Path) -> None:
    """Several tokens at once give the logits of one by one; a rewind drops the rejected ones."""
    _, config = MAKERS[family](tmp_path)
    tokens = [5, 17, 3, 80, 41, 2, 9, 33, 60, 7]
    one = build(tmp_path, config, 1, splits=1)
    single = torch.cat([one.step([t]).logits for t in tokens])
    many = build(tmp_path, config, 1, splits=7, page=4)
    many.page_tables[0].copy_(torch.randperm(16, generator=torch.Generator().manual_seed(0)).to(torch.int32))
    rounds = [many.step(tokens[:3]).logits, many.step(tokens[3:4]).logits, many.step([1, 2, 3]).logits]
    many.rewind(3)
    rounds[2] = many.step(tokens[4:]).logits
    assert (torch.cat(rounds) - single).abs().max() <= TOLERANCE / 2 * single.abs().max()
    assert many.position == 10


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_bytes_of_a_step_are_those_of_the_shapes(family: str, tmp_path: Path) -> None:
    """Weights of the matrices and KV rows per stage, counted while running, equal the model's shape."""
    _, config = MAKERS[family](tmp_path)
    formats = {"qkv": "bf16", "o_proj": "bf16", "head": "bf16"}
    formats |= {"router": "bf16", "experts": "mxfp4"} if config.experts else {"mlp": "bf16"}
    model = build(tmp_path, config, 1)
    for token in range(11):
        step = model.step([token])
    shape = stages(shape_of(config, "tiny", formats), context_tokens=11)
    matrices = {"weight", "blocks", "scales", "gate", "up"}
    for stage in shape.stages:
        if stage.name == "boundary":
            continue
        counted = next(s for s in step.workload.stages if s.name == stage.name)
        weights = sum(
            o.nbytes for o in counted.operands if o.role == "weights" and o.name.split(".")[1] in matrices
            and not o.name.startswith("rmsnorm")
        )  # fmt: skip
        kv = sum(o.nbytes for o in counted.operands if o.role == "kv_cache" and not o.written)
        assert weights == stage.repeats * sum(o.nbytes for o in stage.operands if o.role == "weights")
        assert kv == stage.repeats * sum(o.nbytes for o in stage.operands if o.role == "kv_cache")


def test_two_shards_read_each_matrix_once_between_them(tmp_path: Path) -> None:
    """Norms, router and their biases are on both shards; everything else divides."""
    _, config = gpt_oss(tmp_path)
    totals = {s: build(tmp_path, config, s).step([3]).ledger.bytes_by_role() for s in (1, 2)}
    replicated = (
        2 * (2 * 64 * 4 + (8 * 64 + 8) * 2) + 64 * 4 + 64 * 2
    )  # norms, router and bias; final norm; embedding row
    assert totals[2]["weights"] - totals[1]["weights"] == replicated
    assert totals[2]["kv_cache"] == totals[1]["kv_cache"]
    assert totals[1]["sync_flag"] == 0 < totals[2]["sync_flag"]


def test_dense_mxfp4_steps_run_from_a_seed(tmp_path: Path) -> None:
    _, config = gpt_oss(tmp_path)
    formats = {**DENSE_MXFP4}
    outputs = []
    for mxfp8 in (False, True):
        model = DecodeModel(config, formats=formats, settings=Settings(capacity=16, mxfp8=mxfp8))
        model.weights.randomise(seed=4)
        outputs.append(model.step([1]).logits)
    assert not torch.equal(*outputs) and torch.isfinite(outputs[0]).all()
    assert torch.nn.functional.cosine_similarity(*outputs).item() > 0.9
    with pytest.raises(Unsupported, match="bf16 checkpoint cannot be loaded"):
        model.weights.load(tmp_path)


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("config_says", "file_has", "tied", "warned"),
    [
        (True, None, True, False),
        (True, "equal", True, False),
        (True, "other", False, True),
        (False, None, True, True),
        (False, "other", False, False),
    ],
)
def test_a_head_is_tied_by_its_file_first(
    config_says: bool, file_has: str | None, tied: bool, warned: bool, tmp_path: Path
) -> None:
    from dataclasses import replace

    from safetensors.torch import load_file

    _, config = dense(tmp_path, "qwen3")
    config = replace(config, tied_head=config_says)
    state = load_file(tmp_path / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    if file_has:
        state[HEAD] = embedding.clone() if file_has == "equal" else embedding.flip(0).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert head_is_tied(config, tmp_path) is tied
    assert len(seen) == warned
    model = DecodeModel(config, tied=tied, settings=Settings(capacity=8))
    model.weights.load(tmp_path)
    step = model.step([3])
    head = next(s for s in step.workload.stages if s.name == "head")
    assert sum(o.nbytes for o in head.operands if o.name == "head_argmax.weight") == embedding.numel() * 2
    allocated = sum(t.numel() for t in model.weights.tensors[0].values() if t.shape == embedding.shape)
    assert allocated == embedding.numel() * (1 if tied else 2)
    used = model.weights.get(0, "head")
    assert used is not None and torch.equal(used, state[HEAD] if file_has == "other" else embedding)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    _, config = gpt_oss(tmp_path)
    with pytest.raises(UsageError, match="KV heads 1 is no multiple of 2"):
        DecodeModel(replace(config, q_heads=1, kv_heads=1), shards=2)
    model = build(tmp_path, config, 1)
    for tokens in ([], [0] * 9, [96], [-1]):
        with pytest.raises(UsageError):
            model.step(tokens)
    with pytest.raises(UsageError, match="do not fit a cache of 64"):
        for _ in range(9):
            model.step([0] * 8)
    with pytest.raises(UsageError, match="the model takes"):
        wider = DecodeModel(replace(config, hidden=96), settings=Settings(capacity=8))
        wider.weights.load(tmp_path)


def test_dequantised_experts_are_refused(tmp_path: Path) -> None:
    """`down_proj` is square in GPT-OSS and stored (in, out) when dequantised: its shape cannot tell."""
    model, config = gpt_oss(tmp_path)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=r"stored dequantised, as \(in, out\)"):
        build(tmp_path, config, 1)


def test_scale_byte_255_is_refused_by_tensor_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, config = gpt_oss(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.experts\.down_proj_scales: 1 scale byte"):
        build(tmp_path, config, 2)
